"""Kill a tuning run at random moments, resume it each time, and compare with one that was left alone.

    python tests/kill_driver.py ENGINE KILLS SEED

Every life of the run is a forked child that ends itself with SIGKILL, at an inner step, before or after a rename,
half way through writing a checkpoint, or half way through a journal line. Prints the moments and exits with 0 if the
disturbed run ended with the same journal and schedule, bit for bit.
"""

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon import rundir, tuning

ENGINES = {
    "forward": lh.Forward(clip=10.0, compile=False),
    "traced": lh.Forward(compile=True),
    "adjoint": lh.Adjoint(store="all"),
    "replay": lh.Adjoint(store="sqrt"),
    "greedy": lh.Greedy(horizon=5),
}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def batches(seed: int, count: int = 25) -> list:
    generator = torch.Generator().manual_seed(seed)
    make = lambda: (torch.randn(16, 6, generator=generator), torch.randint(3, (16,), generator=generator))  # noqa: E731
    return [make() for _ in range(count)]


def run(directory: Path, engine: str) -> None:
    task = lh.Task(
        make_model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), batches, lambda seed: batches(seed + 1, 2)
    )
    hypers = {"lr": lh.Hyper(0.05, windows=3, step=0.05), "momentum": lh.Hyper(0.0), "weight_decay": lh.Hyper(0.0)}
    lh.tune(
        task,
        lh.sgd(),
        hypers,
        steps=[15, 25],
        outer_steps=4,
        engine=ENGINES[engine],
        seed=3,
        seeds=2,
        dir=directory,
        checkpoint_seconds=0.0,  # after every inner step: the most chances to be caught writing
    )


def arm(kind: str, count: int) -> None:
    """Let this process die at the count-th event of a kind."""
    left = count

    def due() -> bool:
        nonlocal left
        left -= 1
        return left == 0

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if kind == "step":
        advance = tuning.Tuning.advance

        def step(self):
            if due():
                die()
            return advance(self)

        tuning.Tuning.advance = step
    elif kind in ("before rename", "after rename"):
        rename = os.replace

        def replace(*names):
            now = due()
            if now and kind == "before rename":
                die()
            rename(*names)
            if now:
                die()

        os.replace = replace
    elif kind == "half a checkpoint":
        save = torch.save

        def half(payload, file):
            save(payload, file)
            if due():
                file.flush()
                os.truncate(file.name, os.path.getsize(file.name) // 2)
                die()

        rundir.torch.save = half
    elif kind == "half a line":
        drop = rundir._drop_torn_line

        def torn(journal):
            drop(journal)
            if due():
                journal.write(b'{"index": 1, "val')
                journal.flush()
                die()

        rundir._drop_torn_line = torn


def life(directory: Path, engine: str, kind: str | None = None, count: int = 0) -> bool:
    """One life in a child process; whether it came to its natural end."""
    child = os.fork()
    if child == 0:
        if kind:
            arm(kind, count)
        run(directory, engine)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.WEXITSTATUS(status) == 0, "the run failed"
    return True


def outcome(directory: Path) -> list:
    """What must not differ: the schedule, and every line of the journal but its clock."""
    lines = [json.loads(line) for line in (directory / "journal.jsonl").read_text().splitlines()]
    return [
        json.loads((directory / "schedule.json").read_text()),
        json.loads((directory / "best.json").read_text()),
        [{k: v for k, v in line.items() if k != "seconds"} for line in lines],
    ]


def main(engine: str, kills: int, seed: int) -> int:
    torch.set_num_threads(1)
    chance = random.Random(seed)
    kinds = ["step", "step", "step", "before rename", "after rename", "half a checkpoint", "half a line"]
    scratch = Path(tempfile.mkdtemp())
    try:
        assert life(scratch / "calm", engine)
        died, over = [], False
        while len(died) < kills and not over:
            kind = chance.choice(kinds)
            # Few steps are left per life, so that the run dies often before it is over.
            count = chance.randint(1, {"step": 16, "half a line": 1}.get(kind, 12))
            over = life(scratch / "killed", engine, kind, count)
            if not over:
                died.append(f"{kind} {count}")
        if not over:
            assert life(scratch / "killed", engine)
        print(f"{engine}: died {len(died)} times ({', '.join(died)})")
        same = outcome(scratch / "calm") == outcome(scratch / "killed")
        print("same outcome" if same else "DIFFERENT OUTCOME")
        return 0 if same and died else 1
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
