"""Figure 1 and its table: FDS against hypergradient descent, random search, BO, Hyperband and BOHB on CIFAR-10.

Shows: test accuracy of what each method chose, and its regret over time against the best setting of Appendix F's grid
    (against the best of all where appendix_f.py was not run). 7 learning rates, 1 momentum, 1 weight decay, from zero;
    WRN-16-1, 50 epochs; every choice is trained from scratch on training and validation data and tested.
Command: python experiments/figure1.py --data-root DATA --methods fds --seeds 0,1,2
         python experiments/figure1.py --data-root DATA --methods bohb --budget 2h         and so on, in any order
    One call does the methods and seeds that it names and goes on where they stopped; a larger --budget goes further.
    Every call keeps what the entrants in --work have done in experiments/results/figure1-entrants/ and writes
    figure1.json from all that is kept; `--gather` does only that.
Time:    in the result file, per method. The paper: FDS 3 hours, BOHB 55 to 60 hours on an RTX 2080 Ti.
Ours:
    the paper's FDS (forward mode, clipped), growth=1.5: 89.11 ± 0.28 % (3 seeds); 521 s (seed 0; the others on a shared
        device), NVIDIA H200
    the paper's FDS (forward mode, clipped): 88.09 ± 0.21 % (1 seed); 448 s a seed, NVIDIA H200
    smoothed differences (what tune takes in bf16), growth=1.5: 89.59 ± 0.31 % (3 seeds); 311 s a seed, NVIDIA H200
    hybrid (what tune takes otherwise): not run yet
    hybrid, not bounded, growth=1.5: 89.22 ± 0.48 % (1 seed); 461 s a seed, NVIDIA H200
    exact derivatives alone: 86.29 ± 0.54 % (1 seed); 210 s a seed, NVIDIA H200
    hypergradient descent: 64.00 ± 0.96 % (3 seeds); 69 s a seed, device shared, NVIDIA H200
    BOHB: not run yet
    Hyperband: not run yet
    Bayesian optimization: not run yet
    random search: not run yet
    MNIST, the paper's FDS (forward mode, clipped): 95.48 ± 0.29 % (5 seeds); 12 s a seed, AMD EPYC, 1 threads
    MNIST, smoothed differences for all values: 95.58 ± 0.27 % (5 seeds); 34 s a seed, AMD EPYC, 1 threads
    MNIST, hybrid (what tune takes): 95.52 ± 0.34 % (5 seeds); 16 s a seed, AMD EPYC, 1 threads
    MNIST, hypergradient descent: 92.10 ± 0.97 % (1 seed); 11 min a seed, AMD EPYC, 1 threads
    MNIST, BOHB: 95.02 ± 0.66 % (2 seeds); 11 min a seed, AMD EPYC, 1 threads
    MNIST, Hyperband: 69.56 ± 24.47 % (2 seeds); 11 min a seed, AMD EPYC, 1 threads
    MNIST, Bayesian optimization: 57.53 ± 40.41 % (2 seeds); 11 min a seed, AMD EPYC, 1 threads
    MNIST, random search: 69.56 ± 24.47 % (2 seeds); 11 min a seed, AMD EPYC, 1 threads
    MNIST, a grid around common practice (Appendix F): 95.22 ± 0.21 % (1 seed); 31 s a seed, AMD EPYC, 1 threads
    hypergradient descent from zero, test accuracy: 64.0 ± 1.0 % (3 seeds); 69 s a seed, device shared, NVIDIA H200
Paper:   FDS 89.4 ± 0.3 %, BOHB 89.1 ± 0.5 %, BO 84.5 ± 5.2 %, Hyperband 84.1 ± 4.1 %, random search 80.8 ± 4.9 %,
    hypergradient descent 80.6 ± 1.0 %; zero regret after 3 hours (FDS) and 60 (BOHB), the others not in 100.

Settings. FDS takes ten outer steps of Algorithm 2, the first on 1 epoch and the others on 10 (`--horizons`): the paper
says "10 epochs for some outer steps" and not which. What it ends with is trained once for 50 epochs, on its clock, and
is its choice. `--engine forward` is the paper's: forward mode, H·Z clipped at ±10. `--engine adjoint` takes exact
hypergradients of the same runs by walking back, at a cost that does not depend on the number of values. `--clip` bounds
H·Z or H·q (0: not at all). `--engine hybrid` takes exact ones, and smoothed differences for the values that its meter
doubts (docs/trust.md); `--engine bounded` is the same with an adjoint that is bounded on its way back, this library's
default; `--engine smoothed` takes smoothed differences for all values, its default in bf16. `--gate wait`
keeps those that are doubted even so where they are. `--growth 1.5` lets γ grow again while signs stay the same.
`--precision bf16` makes the plain training runs of smoothed differences, of searches and of tests in mixed precision
(figure1_bf16.py). `--from-kept` lets searches and grids go on from what was kept of them. `--test-kept --test all`
tests what entrants that were kept had chosen on their way, which makes FDS a curve over time.
All can stand side by side in the figure. `--shared` notes that other work was on the device, and that seconds are too
long. Hypergradient descent is run again and again, from zero and then from random points of the range; its first run,
from zero, is Figure 4's rival (`--methods hd --budget "1 runs" --seeds 0,1,2` is enough for that): it has no windows,
so it is the same there. Learning rate, momentum and weight decay move after every step, by 0.2 times the one-step
hypergradient, clipped at ±1; the value of every step (means of windows, beyond 1,000) is trained from scratch and
tested, as FDS's schedules are. The searches are Optuna's, not HpBandSter's (docs/compare.md); Hyperband and BOHB judge
first after 50/27 epochs, the shortest rung of at least one. A test has as many steps as a training run, on 5 % more
images.
"""

from typing import Any

import contest
import record
from record import rounded, say

from longhorizon.outer_step import plain
from longhorizon.rivals.budget import parse_budget
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.regret import curves, scores, table

GRIDS = ("grid", "grid-halving")  # where the best known setting comes from
ENDLESS = ("fds", *GRIDS)  # they end by themselves


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure1")
    contest.options(parser)
    parser.add_argument("--data", choices=list(contest.PROTOCOLS), default="cifar10", help="mnist is a size for a CPU")
    parser.add_argument("--methods", default="fds", help="names, with commas between them")
    parser.add_argument("--seeds", default="0", help="whole numbers, with commas between them")
    parser.add_argument("--budget", help="of each search and of hd, with each seed: '2h' (without it), '30 runs'")
    parser.add_argument("--engine", choices=contest.ENGINES, default="adjoint", help="of fds")
    parser.add_argument("--clip", type=float, help="of fds; 10 for forward and none for adjoint without it")
    parser.add_argument("--horizons", help="epochs of FDS's outer steps, the last one repeating; on CIFAR-10 1,10")
    parser.add_argument("--gate", choices=["off", "wait", "shrink"], default="off", help="of fds (docs/trust.md)")
    parser.add_argument("--growth", type=float, default=1.0, help="of fds: of γ, while signs stay the same")
    parser.add_argument("--gather", action="store_true", help="only write the result from what is there")
    parser.add_argument("--test-kept", action="store_true", help="only test what kept entrants have chosen")
    args = record.parse(parser)
    seeds = numbers("--seeds", args.seeds, int)
    horizons = contest.USUAL if args.data == "cifar10" else ()  # none: whole runs
    if args.horizons is not None:
        horizons = tuple(numbers("--horizons", args.horizons, float))
    names = [name.strip() for name in args.methods.split(",") if name.strip()]
    wanted = contest.entrants(names, horizons, args, args.data)
    budget = args.budget or ("12 runs" if args.smoke else "2h")  # of runs, many diverge
    try:
        parse_budget(budget, 1)
    except ValueError as error:
        raise SystemExit(f"--{error}") from None
    name = "figure1" if args.data == "cifar10" else f"figure1-{args.data}"
    one = contest.Contest(args, name, 7, args.data)
    try:
        if not args.gather:
            for seed in seeds:
                for entrant in wanted:
                    if args.test_kept:
                        one.test_kept(entrant, seed)
                        continue
                    one.run(entrant, seed, contest.PLAIN if entrant.method in ENDLESS else budget)
    finally:  # also when it is stopped: the result is of what is there
        write(args, one)


def write(args: Any, one: contest.Contest) -> None:
    """The result, of all entrants with at least one tested choice."""
    found = one.gathered()
    if not found.cards:
        say("nothing has been tested yet: no result")
        return
    against = next((card["label"] for grid in GRIDS for card in found.cards if card["method"] == grid), None)
    known = scores(found.evaluations, found.tests, against)
    assert known is not None
    rows = table(found.evaluations, found.tests, against)
    of = {t.key: t for t in found.tests}
    finals = {(e.method, e.seed): e for e in found.evaluations if e.best}
    content = {
        "settings": one.settings,
        "seconds": sum(e.seconds for e in found.evaluations),
        "against": against,
        "score": known.name,
        "best_known": known.best,
        "tolerance": known.tolerance,
        "entrants": found.cards,
        "untested": found.untested,
        "waiting": found.waiting,
        "table": [plain(vars(row)) for row in rows],
        "curves": {
            clock: [plain(vars(curve)) for curve in curves(found.evaluations, found.tests, clock, against)]
            for clock in ("seconds", "steps")
        },
        "choices": [
            {
                "method": label,
                "seed": seed,
                "trial": e.trial,
                "steps": e.steps,
                "total_seconds": e.total_seconds,
                "val_loss": e.val_loss,
                "test": of[e.key].scores,
                "values": {key: rounded(v) for key, v in e.values.items()},
            }
            for (label, seed), e in finals.items()
        ],
        "outer_steps": [
            {
                "method": e.method,
                "seed": e.seed,
                "index": e.trial,
                "steps": e.steps,
                "seconds": e.seconds,
                "val_loss": e.val_loss,
                "metrics": e.metrics,
                "values": e.values,
                "status": e.status,
                **seen(found, e),
            }
            for e in found.evaluations
            if e.method.startswith("fds")
        ],
        "hd_from_zero": [
            {
                "seed": e.seed,
                "seconds": e.seconds,
                "val_loss": e.val_loss,
                "metrics": e.metrics,
                "test": of[e.key].scores,
                "values": {key: rounded(v, 4) for key, v in e.values.items()},
            }
            for e in found.evaluations
            if e.method.startswith("hd") and e.trial == 0 and e.key in of
        ],
    }
    record.finish(args, one.name, plain(content))
    for row in rows:
        spread = "" if row.deviation is None else f" ± {100 * row.deviation:.2f}"
        accuracy = "no score" if row.score is None else f"{100 * row.score:.2f}{spread} %"
        say(f"{row.method:<16} {accuracy} ({row.seeds} seeds, {row.seconds:.0f} s each)")


def seen(found: contest.Gathered, e: Evaluation) -> dict[str, Any]:
    """What the outer step of an evaluation saw: hypergradients per inner step, and what speaks against them."""
    steps = found.outer_steps.get((e.method, e.seed), [])
    seen = next((s for s in steps if (s["index"], s["steps"]) == (e.trial, e.steps)), None)
    if seen is None:  # trained with what FDS had ended with
        return {}
    return {name: seen[name] for name in ("mean", "doubts", "held", "engine")}


def numbers(name: str, text: str, kind: Any) -> list[Any]:
    """Numbers from a list with commas."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 0:
        raise SystemExit(f"{name} {text}: expected numbers with commas between them, none below zero.")
    return found


if __name__ == "__main__":
    record.run(main)
