"""End to end: what better hypergradients are worth to `tune`, against the paper's settings.

    python experiments/trust_tune.py                digits and MNIST, ten tuning seeds of each method
    python experiments/trust_tune.py --set digits   one of them; mnist-epoch is what figure1.py --data mnist tunes

"last" is what a run ends with, "best" what its best outer step was at, and "kept" what `tune` keeps of the two: three
plain training runs of each decide (`lh.confirm`), which is done for rows of the result that have none yet, too.
All methods start from zero and take at most as many outer steps as the paper's settings (forward, H·Z clipped at 10,
sign steps). Every result is trained from scratch on all training data and tested, five times. Cost: inner steps of any
kind; and the processor time of the tuning run over that of a plain training run, measured right before it.

Result: experiments/results/trust_tune-SET.json.
"""

import math
import statistics
import time
from typing import Any, NamedTuple

import torch
from estimators import plain_seconds
from record import Work, arguments, finish, known, parse, rounded, run, say

import longhorizon as lh
from longhorizon import data


class Setting(NamedTuple):
    """What is tuned."""

    steps: int
    outer_steps: int
    val_fraction: float
    data: str
    model: str = "mlp-64"
    batch: int = 64
    windows: int = 5  # of the learning rate


SETS = {
    "digits": Setting(200, 12, 0.2, "digits"),
    "mnist": Setting(100, 12, 1 / 30, "mnist"),
    "mnist-epoch": Setting(445, 10, 0.05, "mnist", "mlp-32", 128, 7),
}
METHODS: dict[str, dict[str, Any]] = {
    "paper": {"engine": lh.Forward(clip=10.0)},
    "hybrid": {"engine": lh.Hybrid()},
    "hybrid, two seeds": {"engine": lh.Hybrid(), "seeds": 2},
    "hybrid, wait": {"engine": lh.Hybrid(), "gate": "wait"},
    "hybrid, not clipped": {"engine": lh.Hybrid(clip=None)},
    "hybrid, not clipped, two seeds": {"engine": lh.Hybrid(clip=None), "seeds": 2},
    "smoothed": {"engine": lh.Factorial()},
    "paper, γ grows": {"engine": lh.Forward(clip=10.0), "outer": lh.SignDescent(growth=1.5)},
    "hybrid, γ grows": {"engine": lh.Hybrid(), "outer": lh.SignDescent(growth=1.5)},
    "smoothed, γ grows": {"engine": lh.Factorial(), "outer": lh.SignDescent(growth=1.5)},
    "hybrid, wait, γ grows": {"engine": lh.Hybrid(), "gate": "wait", "outer": lh.SignDescent(growth=1.5)},
}
METHODS |= {  # the same on runs that are short at first: three outer steps on an eighth, a quarter, a half, then all
    f"{name}, short first": METHODS[name] | {"lengths": [1 / 8] * 3 + [1 / 4] * 3 + [1 / 2] * 3 + [1]}
    for name in ("hybrid", "smoothed")
}

CONFIRM = 3  # plain training runs with the last values, and with the best
CONFIRMS = 10**6  # the first of their seeds


def learnt(windows: int) -> dict[str, lh.Hyper]:
    """The paper's values, all from zero."""
    return {
        "lr": lh.Hyper(0.0, windows=windows, step=0.1, low=-1.0, high=1.0),
        "momentum": lh.Hyper(0.0, step=0.15, low=-1.5, high=1.5),
        "weight_decay": lh.Hyper(0.0, step=4e-4, low=-4e-3, high=4e-3),
    }


def tuned(task: lh.Task, setting: Setting, method: dict[str, Any], seed: int, test_seeds: int) -> dict[str, Any]:
    """One tuning run and what its schedules are worth."""
    hypers = learnt(setting.windows)
    plain = plain_seconds(task, hypers, setting.steps)
    advanced = 0
    method = dict(method)
    lengths = [max(setting.windows, round(share * setting.steps)) for share in method.pop("lengths", [1])]

    def count(_: lh.Tuning) -> None:
        nonlocal advanced
        advanced += 1

    began = time.process_time()
    found = lh.tune(
        task,
        lh.sgd(),
        hypers,
        steps=lengths,
        outer_steps=setting.outer_steps,
        seed=seed,
        progress=count,
        confirm=0,  # that is done afterwards, for results that were made before, too
        **method,
    )
    took = time.process_time() - began
    row: dict[str, Any] = {
        "outer_steps": len(found.history),
        "inner_steps": advanced - 1 + len(found.history),  # told once before the first, and not of an outer step's last
        "plain_runs": rounded(took / plain, 4),
        "engines": [record.engine for record in found.history],
        "val_loss": [rounded(record.val_loss) for record in found.history],
        "doubted": [sum(bool(d) for r in record.doubts.values() for d in r) for record in found.history],
        "held": [sum(map(len, record.held.values())) for record in found.history],
    }
    for name, schedule in (("learnt", found.schedule), ("best", found.best)):
        tested = lh.retrain(task, lh.sgd(), hypers, schedule, steps=setting.steps, seeds=test_seeds)
        row[name] = {
            "schedule": {key: rounded(v) for key, v in schedule.values.items()},
            "loss": rounded(tested.test_loss),
            "accuracy": rounded(tested.metrics["accuracy"]),
        }
    return row


def confirmed(task: lh.Task, setting: Setting, row: dict[str, Any], seed: int) -> dict[str, str]:
    """Which of the last values and the best ones `tune` would have kept in the end."""
    schedules = {name: row[name]["schedule"] for name in ("learnt", "best")}
    fresh = [CONFIRMS + CONFIRM * seed + i for i in range(CONFIRM)]
    found = lh.confirm(task, lh.sgd(), learnt(setting.windows), schedules, steps=setting.steps, seeds=fresh)
    return {"kept": found.chosen}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over tuning seeds, and the standard error of the accuracy over them."""
    said: dict[str, Any] = {}
    for name in ("learnt", "best", "kept"):
        chosen = [row[row["kept"] if name == "kept" else name] for row in rows]
        accuracy = [statistics.fmean(one["accuracy"]) for one in chosen]
        said[name] = {
            "accuracy": rounded(statistics.fmean(accuracy)),
            "error": rounded(statistics.stdev(accuracy) / len(accuracy) ** 0.5) if len(accuracy) > 1 else None,
            "worst": rounded(min(accuracy)),
            "loss": rounded(statistics.fmean(math.nan if v is None else v for one in chosen for v in one["loss"])),
        }
    for name in ("outer_steps", "inner_steps", "plain_runs"):
        said[name] = rounded(statistics.fmean(row[name] for row in rows), 4)
    return said


def one(args: Any, name: str) -> None:
    setting, seeds, test_seeds = SETS[name], args.seeds, 5
    if args.smoke:
        setting, seeds, test_seeds = setting._replace(steps=20, outer_steps=2), 2, 1
    torch.set_num_threads(1)
    where, root = ("digits", {}) if args.smoke else (setting.data, {"root": args.data_root})
    task = data.image_data(where, setting.batch, setting.val_fraction, **root).task(setting.model)
    lengths = {"steps": setting.steps, "outer_steps": setting.outer_steps, "val_fraction": setting.val_fraction}
    if (setting.batch, setting.windows) != (64, 5):  # the usual ones are in no result
        lengths |= {"batch": setting.batch, "windows": setting.windows}
    work = Work(args, f"trust_tune-{name}", {"set": name, **lengths, "test_seeds": test_seeds})
    rows: dict[str, list[dict[str, Any]]] = {}
    settings = {"data": setting.data, "model": setting.model, **lengths, "seeds": seeds}
    kept = known(f"trust_tune-{name}", args, settings) if args.method or args.keep else None
    before = kept["seconds"] - work.seconds() if kept else 0.0
    for label, method in METHODS.items():
        asked = not args.method or label in args.method
        if kept and label in kept["runs"] and (args.keep or not asked):  # what was made before stays in the result
            rows[label] = kept["runs"][label]
            continue
        if not asked:
            continue
        rows[label] = []
        for seed in range(seeds):
            rows[label].append(
                work.unit(f"{label}-{seed}", lambda m=method, s=seed: tuned(task, setting, m, s, test_seeds))
            )
        say(f"{name}: {label}: tuned")
    for label, found in rows.items():
        for seed, row in enumerate(found):
            if "kept" not in row:
                row |= work.unit(f"kept-{label}-{seed}", lambda r=row, s=seed: confirmed(task, setting, r, s))
        said = summary(found)
        text = ", ".join(f"{kind} {100 * said[kind]['accuracy']:.2f}" for kind in ("learnt", "best", "kept"))
        say(f"{name}: {label}: {text} %, {said['plain_runs']:.0f} plain runs")
    finish(
        args,
        f"trust_tune-{name}",
        {
            "settings": settings,
            "table": {label: summary(found) for label, found in rows.items()},
            "runs": rows,
            "seconds": before + work.seconds(),
        },
        kept,
    )


def main() -> None:
    parser = arguments(__doc__, "trust_tune")
    parser.add_argument("--set", choices=SETS, help="one of them; without it all")
    parser.add_argument("--method", action="append", choices=METHODS, help="only these")
    parser.add_argument("--keep", action="store_true", help="do not tune again what is in the result already")
    parser.add_argument("--seeds", type=int, default=10, help="tuning seeds")
    args = parse(parser)
    for name in [args.set] if args.set else SETS:
        one(args, name)


if __name__ == "__main__":
    run(main)
