"""Runs that never ran: records and directories for what only reads them."""

import math
from pathlib import Path

import torch

import longhorizon as lh
from longhorizon.outer_step import OuterStep

SPEC = {"lr": lh.Hyper(0.0, windows=5, step=0.1), "momentum": lh.Hyper(0.0, step=0.15, high=0.99)}


def make_records(hypers=SPEC, count=4, diverged=(), steps=200, growth=0.5, metrics=("accuracy",)):
    """Values that climb by γ, hypergradients that shrink (or grow), a loss that falls; NaN where a step diverged."""
    records = []
    values = {key: hyper.values() for key, hyper in hypers.items()}
    keys = [key for key, hyper in hypers.items() if hyper.learn]
    for index in range(count):
        bad = index in diverged
        loss = math.nan if bad else 2.0 / (index + 1)
        slope = {k: torch.linspace(-1, 0.5, len(values[k]), dtype=torch.float64) * growth**index for k in keys}
        if bad:
            slope = {k: torch.full_like(v, math.nan) for k, v in slope.items()}
        gamma = {k: torch.full_like(values[k], 0.1 / 2**index) for k in keys}
        moved = values if bad else {k: v + gamma.get(k, 0.0) for k, v in values.items()}
        records.append(
            OuterStep(
                index=index,
                seeds=[100 + index],
                steps=steps,
                values=values,
                grad={k: v * steps for k, v in slope.items()},
                mean=slope,
                val_loss=loss,
                metrics={} if bad else {name: 1 - 0.5 / (index + 1) for name in metrics},
                status="non-finite loss at step 7: lower `lr` or shorten the run." if bad else "ok",
                next=moved,
                outer={"gamma": gamma, "first": gamma, "sign": gamma},
                engine="forward",
                seconds=1.5,
            )
        )
        values = moved
    return records


def make_run(path: Path, hypers=SPEC, recipe=None, **more) -> list[OuterStep]:
    """A run directory as `tune` leaves it; `more` goes to `make_records`."""
    tuning = lh.tuning.Tuning(
        lh.Task(model=torch.nn.Identity, loss=lambda m, b: m(b), train=lambda s: [], val=lambda s: []),
        lh.sgd(),
        hypers,
        steps=more.get("steps", 200),
    )
    records = make_records(hypers, **more)
    with lh.RunDirectory(path) as directory:
        directory.begin(lh.run.settings_of(tuning), recipe)
        for record in records:
            directory.append(record)
    return records
