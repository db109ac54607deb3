"""Time that a tuning run spends outside the engines: journal, checkpoints, schedules, progress.

    python benchmarks/overhead.py            writes benchmarks/results/overhead.json

Runs the embedded digits example as the command line does, into a directory, with the live display drawn to nowhere,
and compares the wall clock with the time inside the engines. The first outer step, which traces the step, is left out
of both.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from environment import RESULTS, environment

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon.console import LiveDisplay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    recipe = recipes.Recipe()
    task, _ = recipes.task_of(recipe)
    torch.set_num_threads(recipes.threads_of(recipe, task))
    display = LiveDisplay()
    display.console.file = open(os.devnull, "w")  # noqa: SIM115 - open as long as the process
    marks: list[tuple[float, float]] = []
    started = False

    def inner(tuning: lh.Tuning) -> None:
        nonlocal started
        if not started:
            display.start(tuning)
            started = True
        display.inner(tuning)

    def outer(record: lh.OuterStep) -> None:
        display.outer(record)
        marks.append((time.perf_counter(), record.seconds))

    with tempfile.TemporaryDirectory() as directory:
        lh.tune(
            task,
            recipes.rule_of(recipe),
            recipes.hypers_of(recipe),
            steps=recipe.steps,
            outer_steps=4 if args.quick else recipe.outer_steps,
            engine=recipes.engine_of(recipe),
            dir=Path(directory) / "run",
            confirm=0,
            on_step=outer,
            progress=inner,
        )
    display.stop()
    wall = marks[-1][0] - marks[0][0]
    inside = sum(seconds for _, seconds in marks[1:])
    share = (wall - inside) / wall
    content = {"environment": environment(), "wall_s": wall, "in_engines_s": inside, "outside_share": share}
    print(f"{100 * share:.2f} % of {wall:.1f} s outside the engines")
    if not args.quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "overhead.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
