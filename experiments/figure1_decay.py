"""Why FDS stays below the paper's accuracy in Figure 1: what it has learnt, with other weight decays.

Shows: test accuracy of the schedule that an entrant of figure1.py ended with, after 50 epochs, as its weight decay is
    replaced. Outer steps of 10 epochs see less use for weight decay than a run of 50 has; this is what that costs.
Command: python experiments/figure1.py --data-root DATA --methods fds --engine forward      first
         python experiments/figure1_decay.py --data-root DATA
Time:    in the result file; three trainings of 50 epochs per weight decay, side by side.
Ours:
    with weight decay 0.0004, 0.0008: 89.2 ± 0.0 %; 89.5 ± 0.4 % (fds-forward-clip10 has 0); 232 s, NVIDIA H200
Paper:   nothing of the kind; its best known setting has 5e-4.
"""

import contest
import record
from figure1 import numbers
from record import say

import longhorizon as lh


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure1_decay")
    contest.options(parser)
    parser.add_argument("--label", default="fds-forward-clip10", help="which entrant of figure1.py")
    parser.add_argument("--seed", type=int, default=0, help="of that entrant")
    parser.add_argument("--decays", default="0,2e-4,4e-4,8e-4", help="with commas between them")
    args = record.parse(parser)
    decays = numbers("--decays", args.decays, float)
    one = contest.Contest(args, "figure1", windows=7)
    one.smoke_first([args.label], [args.seed])
    last = one.outer_steps_of(args.label, args.seed)[-1]
    seeds = 2 if args.smoke else args.test_seeds
    settings = one.settings | {"label": args.label, "seed": args.seed, "test_seeds": seeds}
    work = record.Work(args, f"figure1_decay-{args.label}-{args.seed}", settings)
    traces, rows = lh.Traces(), {}
    for decay in decays:
        values = last.values | {"weight_decay": [decay]}
        name = f"{decay:g}"
        rows[name] = record.tested(work, name, one.task, one.rule, one.hypers, values, one.steps, seeds, traces)
        say(f"weight decay {name}: {100 * rows[name]['mean']:.2f} ± {100 * rows[name]['deviation']:.2f} %")
    content = {"settings": settings, "learnt": last.values, "seconds": work.seconds(), "rows": rows}
    record.finish(args, "figure1_decay", content)


if __name__ == "__main__":
    record.run(main)
