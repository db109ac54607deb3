"""What bfloat16 does to a test of Figure 1: the same schedules and seeds, once in float32 and once in mixed precision.

Shows: test accuracy of what entrants of figure1.py ended with, trained again side by side with `precision="bf16"`,
    beside what was tested in float32. Tests in bfloat16 take less time; this is what they are worth.
Command: python experiments/figure1.py --data-root DATA --methods fds --engine forward      first, or what is kept
         python experiments/figure1_bf16.py --data-root DATA --labels fds-forward-clip10 --seeds 0
Time:    in the result file; as many trainings of 50 epochs as each entrant's test has.
Ours:
    tests in bfloat16 instead of float32: accuracy changes by +0.09 ± 0.25 points (3 trainings); 44 s, NVIDIA H200
Paper:   nothing of the kind.
"""

from statistics import mean, stdev

import contest
import record
from figure1 import numbers
from record import say

import longhorizon as lh


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure1_bf16")
    contest.options(parser)
    parser.add_argument("--labels", default="fds-forward-clip10-growth1.5", help="entrants, with commas between them")
    parser.add_argument("--seeds", default="0,1,2", help="of these entrants; one that is not there is left out")
    args = record.parse(parser)
    seeds, labels = numbers("--seeds", args.seeds, int), args.labels.split(",")
    one = contest.Contest(args, "figure1", windows=7)
    one.smoke_first(labels, seeds[:1])
    found = one.gathered()
    cards = [card for card in found.cards if card["label"] in labels and card["seed"] in seeds]
    if not cards:
        known = sorted(f"{card['label']} (seed {card['seed']})" for card in found.cards)
        raise SystemExit(
            f"--labels {args.labels} --seeds {args.seeds}: none is there; there is {', '.join(known) or 'nothing'}."
        )
    if rough := [card["label"] for card in cards if card["precision"] != "float32"]:
        raise SystemExit(f"--labels {rough[0]}: was not tested in float32; name others, such as the default.")
    settings = one.settings | {"labels": labels, "seeds": seeds}
    work = record.Work(args, "figure1_bf16", one.settings)
    traces, rows = lh.Traces(), []
    for card in cards:
        label, seed = card["label"], card["seed"]
        before = [t for t in found.tests if (t.method, t.seed) == (label, seed)][-1]
        last = next(e for e in found.evaluations if e.key == before.key)
        count, name = len(before.scores["accuracy"]), f"{label}-{seed}"
        parts = (one.task, one.rule, one.hypers, last.values, one.steps, count, traces)
        now = record.tested(work, name, *parts, precision="bf16")
        row = {"label": label, "seed": seed, "float32": before.scores["accuracy"], "bf16": now["accuracy"]}
        row |= {"loss_float32": before.scores["loss"], "loss_bf16": now["loss"]}
        rows.append(row)
        say(f"{name}: {100 * mean(row['float32']):.2f} % in float32, {100 * now['mean']:.2f} % in bfloat16")
    change = [b - a for row in rows for a, b in zip(row["float32"], row["bf16"], strict=True)]
    error = stdev(change) / len(change) ** 0.5 if len(change) > 1 else 0.0
    content = {"settings": settings, "rows": rows, "change": mean(change), "error": error, "trainings": len(change)}
    record.finish(args, "figure1_bf16", content | {"seconds": work.seconds()})
    say(f"accuracy changes by {100 * mean(change):+.2f} ± {100 * error:.2f} points over {len(change)} trainings")


if __name__ == "__main__":
    record.run(main)
