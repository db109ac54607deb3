"""A small task for the tests of `compare`: three classes, a network of 83 numbers, a run of 18 steps, epochs of 2."""

import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh

STEPS, EPOCH = 18, 2
HYPERS = {
    "lr": lh.Hyper(0.1, windows=3, step=0.1, low=-1.0, high=2.0),
    "momentum": lh.Hyper(0.0, step=0.1),
    "weight_decay": lh.Hyper(0.0, step=1e-3),
}
CONSTANT = {**HYPERS, "lr": lh.Hyper(0.1, step=0.1, low=-1.0, high=2.0)}  # nothing changes along a run
GENERATOR = torch.Generator().manual_seed(5)
X = torch.randn(400, 6, generator=GENERATOR)
Y = (X @ torch.randn(6, 3, generator=GENERATOR)).argmax(1)


def batches(seed: int, low: int, high: int, count: int) -> list:
    generator = torch.Generator().manual_seed(seed)
    picks = [torch.randint(low, high, (16,), generator=generator) for _ in range(count)]
    return [(X[i], Y[i]) for i in picks]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def accuracy(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).float().mean()}


def make_task(**changes) -> lh.Task:
    parts = {
        "model": make_model,
        "loss": loss,
        "train": lambda seed: batches(seed, 0, 200, STEPS),
        "val": lambda seed: batches(seed + 1, 200, 300, 2),
        "full": lambda seed: batches(seed, 0, 300, STEPS),
        "test": lambda: [(X[300:], Y[300:])],
        "metrics": accuracy,
    }
    return lh.Task(**{**parts, **changes})


class Counted(list):
    """Batches that remember which were read."""

    def __init__(self, items):
        super().__init__(items)
        self.read = set()

    def __getitem__(self, step):
        self.read.add(step)
        return super().__getitem__(step)


def counted_task(streams: list) -> lh.Task:
    """The same task, whose training batches are counted at the door, stream by stream."""

    def train(seed):
        streams.append(Counted(batches(seed, 0, 200, STEPS)))
        return streams[-1]

    return make_task(train=train)


def trained_on(streams: list) -> int:
    """How many batches; not those of the first stream, which is what a comparison looks at before."""
    return sum(len(stream.read) for stream in streams[1:])


def compare(dir=None, task=None, hypers=HYPERS, **changes):
    """A comparison that takes a second or two."""
    settings = {
        "steps": STEPS,
        "outer_steps": 3,
        "budget": "4 runs",
        "epoch": EPOCH,
        "test_seeds": 2,
        "engine": lh.Forward(compile=False),
        "methods": ["random"],
    }
    return lh.compare(task or make_task(), lh.sgd(), hypers, dir=dir, **{**settings, **changes})


def without_clock(evaluations) -> list:
    """What must not differ between a comparison and its disturbed twin."""
    clock = ("seconds", "total_seconds")
    return [{k: v for k, v in e.to_dict().items() if k not in clock} for e in evaluations]
