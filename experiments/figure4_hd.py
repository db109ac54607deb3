"""Figure 4's rival: hypergradient descent on the setting of figure4.py.

Shows: test accuracy of what hypergradient descent (Baydin et al. 2018) finds for a WRN-16-1 over 50 epochs of CIFAR-10,
    and the values it went through.
Command: python experiments/figure4_hd.py --data-root DATA [--seeds 3]     writes experiments/results/figure4-hd.json
    It goes on where it stopped. plot.py and the table show it beside figure4.py's FDS.
Time:    in the result file; a training run per seed, and the tests.
Paper:   80.6 ± 1.0 % (Figure 1; Figure 4 says "significantly outperform" and has no number).

Appendix C: learning rate, momentum and weight decay start at zero and move after every step, by 0.2 times the one-step
hypergradient, clipped at ±1. What it found, the value of every step (means of windows, beyond 1,000), is trained from
scratch on training and validation data and tested, as FDS's schedules are.
"""

from statistics import mean

import contest
import record
from record import rounded, say

from longhorizon.tuning import plain


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure4_hd")
    contest.options(parser)
    parser.add_argument("--seeds", type=int, default=3, help="how many; may grow from one call to the next")
    parser.set_defaults(test="last")
    args = record.parse(parser)
    if args.seeds < 1 or args.test == "none":
        raise SystemExit(f"--seeds {args.seeds} --test {args.test}: expected at least one seed, and a test.")
    seeds = min(args.seeds, 2) if args.smoke else args.seeds
    one = contest.Contest(args, "figure4-hd", windows=5)
    entrant = contest.Entrant("hd", precision=args.precision)
    for seed in range(seeds):
        one.run(entrant, seed, "1 runs")  # the first run starts where FDS does, and only later ones at random
    found = one.gathered()
    runs = {e.seed: e for e in found.evaluations if e.method == entrant.label and e.seed < seeds}
    tested = {t.seed: [float(v or 0.0) for v in t.scores["accuracy"]] for t in found.tests if t.seed in runs}
    lost = [seed for seed in range(seeds) if seed not in tested]
    if lost:
        raise SystemExit(f"seeds {lost} diverged and have nothing to test: {one.folder} has their journals.")
    content = {
        "settings": one.settings,
        "entrants": found.cards,
        "seconds": sum(e.seconds for e in runs.values()),
        "accuracy": [v for seed in range(seeds) for v in tested[seed]],
        "by_seed": [mean(tested[seed]) for seed in range(seeds)],
        "val_loss": [runs[seed].val_loss for seed in range(seeds)],
        "val_accuracy": [runs[seed].metrics.get("accuracy") for seed in range(seeds)],
        "values": [{key: rounded(v, 4) for key, v in runs[seed].values.items()} for seed in range(seeds)],
    }
    record.finish(args, "figure4-hd", plain(content))
    say(f"test accuracy {100 * mean(content['accuracy']):.2f} % over {seeds} seeds")


if __name__ == "__main__":
    record.run(main)
