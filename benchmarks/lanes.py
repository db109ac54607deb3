"""What several training runs at once gain over one after the other (longhorizon.lanes), on a CPU.

    python benchmarks/lanes.py          two minutes on one core

Milliseconds for one step of one run: plain, one run after the other, and as one of 24 lanes; medians, taken in turns.
Batches are made in both. Result: benchmarks/results/lanes.json.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from environment import RESULTS, environment, folder

import longhorizon as lh
from longhorizon import data
from longhorizon.lanes import Lanes
from longhorizon.problem import environment as around
from longhorizon.problem import make_problem

LANES, STEPS, TURNS = 24, 20, 9
SETTINGS = [("mlp-16", 32), ("mlp-64", 64), ("mlp-256", 128)]
HYPERS = {"lr": lh.Hyper(0.1, windows=5), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}


def seconds(fn: Callable[[], Any]) -> float:
    began = time.perf_counter()
    fn()
    return time.perf_counter() - began


def measure(model: str, batch: int) -> dict[str, Any]:
    task = data.image_task("digits", model, batch_size=batch, val_fraction=0.2, device="cpu")
    traces = lh.Traces()
    problems = [make_problem(task, lh.sgd(), HYPERS, STEPS, seed, traces=traces) for seed in range(LANES)]

    def one() -> None:
        state = problems[0].start
        for t in range(STEPS):
            state, _ = problems[0].train_step(state, t)

    def together() -> None:
        lanes = Lanes(problems, steps=1000)
        for t in range(STEPS):
            lanes.step(t)

    one()
    together()  # traces
    turns = [(seconds(one) / STEPS, seconds(together) / STEPS / LANES) for _ in range(TURNS)]
    plain, lane = (statistics.median(times) * 1e3 for times in zip(*turns, strict=True))
    ratios = sorted(a / b for a, b in turns)
    row = {"model": model, "batch": batch, "plain_ms": round(plain, 4), "lane_ms": round(lane, 4)}
    return row | {"ratio": round(plain / lane, 2), "ratio_min_max": [round(ratios[0], 2), round(ratios[-1], 2)]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=folder, default=RESULTS, help="folder of the result")
    args = parser.parse_args()
    torch.set_num_threads(1)
    content: dict[str, Any] = {"environment": environment("cpu"), "settings": {"lanes": LANES, "data": "digits"}}
    with around():
        content["rows"] = [measure(*setting) for setting in SETTINGS]
    for row in content["rows"]:
        print(row)
    (args.to / "lanes.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
