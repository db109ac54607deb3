"""Figure 4 and Appendix E: learning rates, momentum and weight decay of a WRN-16-1 over 50 epochs of CIFAR-10, by FDS.

Shows: schedules, hypergradients and γ by outer step, from zero; test accuracy of what was learnt, trained from scratch
    on training and validation data.
Command: python experiments/figure4.py --data-root DATA [--seed 1]     writes experiments/results/figure4[-seed1].json
    It goes on where it stopped, also inside a training run; on another machine, without --work, from the outer steps
    that are in the result.
Time:    in the result file. The paper: about 10 hours on an RTX 2080 Ti.
Ours:
    FDS, test accuracy: not run yet
Paper:   ten outer steps reach the best known hyperparameters of the setting (89.2 ± 0.2 % in Appendix F; the similar
    run of Figure 1 has 89.4 ± 0.3 %), far above hypergradient descent (80.6 ± 1.0 %). Learning rates rise to the middle
    of the run and fall after it. Hypergradients stay in a reasonable range but do not all go to zero (Appendix E).

Settings (section 5.3, Appendix C): 5 learning rates, 1 momentum, 1 weight decay, 50 epochs, 10 outer steps of Algorithm
2 with γ = 0.1, 0.15 and 4e-4, batches of 256, 5 % held out anew for each outer step, H·Z clipped at ±10. The published
script differs: γ of momentum 0.3, H·Z at ±100, gradients of batches at ±3, Xavier initialisation, validation with
BatchNorm in training mode; `--momentum-step`, `--clip`, `--grad-clip`, `--init` and `--val-mode` try these.
`--precision tf32` tunes with rougher and faster products; tests are always in float32.
Hypergradient descent, the greedy rival, is run by figure1.py (`--methods hd`); plot.py and the table show it too.
"""

import json
from pathlib import Path
from typing import Any

import record
from record import say

import longhorizon as lh
from longhorizon import data

USUAL = {
    "clip": 10.0,
    "grad_clip": None,
    "momentum_step": 0.15,
    "init": None,
    "val_mode": "eval",
    "epochs": 50.0,
    "precision": "float32",
}


def main() -> None:
    parser = record.arguments(__doc__ or "", "figure4")
    parser.add_argument("--seed", type=int, default=0, help="of the tuning run")
    parser.add_argument("--epochs", type=float, default=USUAL["epochs"])
    parser.add_argument("--clip", type=float, default=USUAL["clip"], help="of H·Z")
    parser.add_argument("--grad-clip", type=float, help="of the gradient of every batch")
    parser.add_argument("--momentum-step", type=float, default=USUAL["momentum_step"])
    parser.add_argument("--init", choices=["he", "xavier"], help="the network's own (he) without it")
    parser.add_argument("--val-mode", choices=["eval", "train"], default=USUAL["val_mode"], help="of BatchNorm")
    parser.add_argument("--precision", choices=["float32", "tf32"], default=USUAL["precision"], help="on a GPU")
    parser.add_argument("--test-seeds", type=int, default=5)
    args = record.parse(parser)
    settings: dict[str, Any] = {
        "model": "wrn-16-1",
        "batch_size": 256,
        "val_fraction": 0.05,
        "outer_steps": 10,
        "steps_of": {"lr": 0.1, "momentum": args.momentum_step, "weight_decay": 4e-4},
        "windows": {"lr": 5, "momentum": 1, "weight_decay": 1},
        "seed": args.seed,
        **{key: getattr(args, key) for key in USUAL if key != "momentum_step"},
    }
    images = record.images("cifar10", args)
    if args.smoke:
        settings |= {"batch_size": 32, "outer_steps": 2, "epochs": 0.12}
    made = data.image_data(images, settings["batch_size"], settings["val_fraction"], device=args.device)
    task = made.task(settings["model"], settings["val_mode"], settings["init"])
    rule = lh.sgd() if args.grad_clip is None else lh.clipped(lh.sgd(), args.grad_clip)
    steps = max(5, round(settings["epochs"] * made.steps_per_epoch))
    full = max(5, round(settings["epochs"] * (len(made.train_set) // made.batch_size)))
    settings |= {"steps": steps, "test_steps": full, "data": record.title(images, args)}
    hypers = {
        key: lh.Hyper(0.0, windows=settings["windows"][key], step=step) for key, step in settings["steps_of"].items()
    }

    variant = "".join(
        f"-{key.replace('_', '-')}-{getattr(args, key)}" for key, usual in USUAL.items() if getattr(args, key) != usual
    ) + (f"-seed{args.seed}" if args.seed else "")
    name = f"figure4{variant}"
    work = record.Work(args, name, settings)
    kept = record.known(name, args, settings)
    going_on = kept if kept and "test" not in kept else None
    folder = work.folder / "tune"
    if going_on and not folder.exists():
        lay_out(going_on, folder)
    try:
        tuned = lh.tune(
            task,
            rule,
            hypers,
            steps=steps,
            outer_steps=settings["outer_steps"],
            outer=lh.SignDescent(),
            engine=lh.Forward(clip=settings["clip"]),
            seed=args.seed,
            precision=args.precision,
            dir=folder,
            confirm=0,  # both are tested
            on_step=lambda step: say(told(step, settings["outer_steps"])),
            progress=ticks(steps),
        )
    except BaseException:
        there = begun(folder)
        if there["outer_steps"] and (kept is None or going_on):  # never in the place of a whole result
            record.finish(args, name, {"settings": settings} | there, going_on)
        raise
    history = tuned.history
    seeds, traces = 2 if args.smoke else args.test_seeds, lh.Traces()
    tests = {
        which: record.tested(work, which, task, rule, hypers, schedule, full, seeds, traces)
        for which, schedule in (("learnt", tuned.schedule), ("best", tuned.best))
    }
    tuning = sum(step.seconds for step in history)
    content = {
        "settings": settings,
        "seconds": tuning + work.seconds(),
        "tuning_seconds": tuning,
        "converged": tuned.converged,
        "engine": history[0].engine,
        "outer_steps": [step.to_dict() for step in history],  # as lines of the journal
        "learnt": {key: list(values) for key, values in tuned.schedule.values.items()},
        "best": {key: list(values) for key, values in tuned.best.values.items()},
        "test": tests,
    }
    record.finish(args, name, content, going_on)
    for which, test in tests.items():
        say(f"{which}: test accuracy {100 * test['mean']:.2f} ± {100 * test['deviation']:.2f} % ({seeds} trainings)")
    say(f"tuning took {tuning / 60:.1f} minutes")


def begun(folder: Path) -> dict[str, Any]:
    """What there is of a run that was stopped: all that it goes on from, but for the training run in hand."""
    directory = lh.RunDirectory(folder)
    steps = directory.journal()
    return {
        "seconds": sum(step.seconds for step in steps),
        "run": directory.describe() if steps else None,
        "outer_steps": [step.to_dict() for step in steps],
    }


def lay_out(kept: dict[str, Any], folder: Path) -> None:
    """The directory of a run that was stopped on another machine."""
    say(f"goes on from {len(kept['outer_steps'])} outer steps of {kept['environment']['date']}")
    aside = folder.with_name(f"{folder.name}.part")
    record.write(aside / "run.json", kept["run"])
    (aside / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept["outer_steps"]))
    aside.rename(folder)


def told(step: lh.OuterStep, count: int) -> str:
    values = ", ".join(f"{key} {' '.join(f'{v:.3g}' for v in value.tolist())}" for key, value in step.values.items())
    accuracy = 100 * step.metrics.get("accuracy", float("nan"))
    return (
        f"outer step {step.index + 1} of {count}: {values}; val loss {step.val_loss:.4f}, accuracy {accuracy:.2f} %, "
        f"{step.status}, {step.seconds:.0f} s"
    )


def ticks(steps: int) -> Any:
    """A line now and then inside a long training run."""
    seen = {"outer": -1, "part": 0}

    def progress(tuning: lh.Tuning) -> None:
        if tuning.run is None:
            return
        part = tuning.run.progress.done * 4 // max(1, tuning.run.progress.total)
        if steps >= 1000 and (tuning.index, part) != (seen["outer"], seen["part"]):
            seen.update(outer=tuning.index, part=part)
            say(f"  outer step {tuning.index + 1}: {25 * part} % of its training, {tuning.seconds:.0f} s")

    return progress


if __name__ == "__main__":
    record.run(main)
