"""Appendix F: the best known setting, from a grid around common practice.

Shows: which of the 135 settings (first learning rate, its decay at 30, 60 and 80 % of the run, momentum, weight decay)
    is the best by validation loss, and its test accuracy, trained from scratch on training and validation data.
Command: python experiments/appendix_f.py --data-root DATA [--whole]      writes experiments/results/appendix-f.json
    It goes on where it stopped. Its work is figure1.py's too, which measures regret against it.
Time:    in the result file; about 20 training runs of 50 epochs, `--whole` 135, and three to test.
Ours:
    best of the grid around common practice: 88.4 ± 0.3 % with lr 0.4, decay 0.4, momentum 0.45, weight decay 0.001
        (grid-halving, 200 trainings); 182 s, NVIDIA H200
Paper:   89.2 ± 0.2 % (all 135 settings three times each, picked by validation).

A named shortcut, `grid-halving`, unless `--whole` is given: all 135 for 1/27 of the run, the best third for 1/9, then
1/3, then the whole, each time from scratch with the whole schedule squeezed into it (docs/compare.md). `--whole` trains
every setting for 50 epochs, once.
"""

from statistics import mean, stdev

import contest
import record
from record import say

from longhorizon.outer_step import plain
from longhorizon.rivals.fixed import appendix_f


def main() -> None:
    parser = record.arguments(__doc__ or "", "appendix_f")
    contest.options(parser)
    parser.add_argument("--whole", action="store_true", help="all settings for all epochs")
    parser.add_argument("--seed", type=int, default=0, help="of the order, the splits and the trainings")
    parser.set_defaults(test="last")
    args = record.parse(parser)
    entrant = contest.Entrant("grid" if args.whole else "grid-halving", precision=args.precision)
    one = contest.Contest(args, "figure1", windows=7)
    one.run(entrant, args.seed)
    found = one.gathered()
    own = [e for e in found.evaluations if e.method == entrant.label and e.seed == args.seed]
    winner = [e for e in own if e.best][-1]
    accuracy = [float(v or 0.0) for t in found.tests if t.key == winner.key for v in t.scores["accuracy"]]
    lengths = sorted({e.steps for e in own})
    longest = sorted((e for e in own if e.steps == lengths[-1]), key=lambda e: e.val_loss)
    card = next(card for card in found.cards if (card["label"], card["seed"]) == (entrant.label, args.seed))
    content = {
        "settings": one.settings,
        "method": entrant.method,
        "entrant": card,
        "seconds": sum(e.seconds for e in own),
        "trainings": {str(steps): sum(e.steps == steps for e in own) for steps in lengths},
        "validation": {str(n): [e.metrics.get("accuracy") for e in own if e.steps == n] for n in lengths},
        "winner": words(winner.values),
        "finalists": [words(e.values) | {"val_loss": e.val_loss, **e.metrics} for e in longest[:5]],
        "accuracy": accuracy,
        "mean": mean(accuracy),
        "deviation": stdev(accuracy) if len(accuracy) > 1 else 0.0,
    }
    record.finish(args, "appendix-f", plain(content))
    say(f"best of {len(appendix_f())}: {content['winner']}")
    say(f"test accuracy {100 * content['mean']:.2f} ± {100 * content['deviation']:.2f} % ({len(accuracy)} trainings)")


def words(values: dict[str, list[float]]) -> dict[str, float]:
    """A setting of the grid by its four numbers."""
    lr = values["lr"]
    return {
        "lr": lr[0],
        "decay": round(lr[len(lr) // 2] / lr[0], 6),
        "momentum": values["momentum"][0],
        "weight_decay": values["weight_decay"][0],
    }


if __name__ == "__main__":
    record.run(main)
