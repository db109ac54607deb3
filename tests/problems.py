"""The two tables of the suite: PROBLEMS (what is trained) and RULES (how, and what is learnt).

A row of either buys every test that runs over it. Everything is float64, smooth (central differences must not meet a
kink) and tiny.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import longhorizon as lh
from longhorizon import tree

Hypers = dict[str, lh.Hyper]


@dataclass(frozen=True)
class Case:
    """A task, how long it runs, and what it learns besides (or instead of) the rule's hyperparameters."""

    task: lh.Task
    steps: int = 9  # not divisible by 2: windows of unequal length
    extra: Hypers = field(default_factory=dict)  # learnt next to the rule's own
    replace: Hypers | None = None  # learnt instead, under sgd only


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def whole(seed: int, high: int, *shape: int) -> Tensor:
    return torch.randint(high, shape, generator=torch.Generator().manual_seed(seed))


def stream(make: Callable[[int], Any], n: int = 40) -> Callable[[int], list[Any]]:
    """`train(seed)`: a list of batches, batch t made from the number 1000 seed + t."""
    return lambda seed: [make(1000 * seed + t) for t in range(n)]


def held_out(make: Callable[[int], Any], n: int = 2) -> Callable[[int], list[Any]]:
    return lambda seed: [make(900_000 + t) for t in range(n)]


def pairs(t: int) -> tuple[Tensor, Tensor]:
    return draw(t, 6, 5), whole(t + 1, 3, 6)


def images(t: int) -> tuple[Tensor, Tensor]:
    return draw(t, 4, 2, 5, 5), whole(t + 1, 3, 4)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def task_of(model: Callable[[], nn.Module], make: Callable[[int], Any] = pairs, loss: Any = classify, **options: Any):
    return lh.Task(model, loss, stream(make), held_out(make), **options)


# --- quadratic: closed form in oracles.py ---


class Point(nn.Module):
    """Two coordinates of different curvature."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, -0.7], dtype=torch.float64))


CURVATURE = torch.tensor([1.0, 3.0], dtype=torch.float64)
TARGET = torch.tensor([0.3, 0.2], dtype=torch.float64)


def parabola(model: Any, batch: Any) -> Tensor:
    return (CURVATURE * (model.w - TARGET) ** 2).sum() / 2


def quadratic() -> Case:
    return Case(lh.Task(Point, parabola, lambda seed: [0] * 32, lambda seed: [0]))


# --- ordinary networks ---


def mlp_case() -> Case:
    return Case(task_of(mlp))


def convnet(momentum: float | None = 0.1) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1, bias=False),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Softplus(),
        nn.AvgPool2d(2),
        nn.Conv2d(3, 3, 2),
        nn.BatchNorm2d(3, momentum=momentum),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(3, 3),
    ).double()


def batchnorm_eval() -> Case:
    return Case(task_of(convnet, images), steps=8)


def batchnorm_train() -> Case:
    return Case(task_of(convnet, images, val_mode="train"), steps=8)


def batchnorm_average() -> Case:
    return Case(task_of(lambda: convnet(momentum=None), images), steps=8)


def dropout_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Dropout(0.4), nn.Linear(8, 3), nn.Dropout(0.1)).double()


def dropout() -> Case:
    return Case(task_of(dropout_net))


def dropout_everywhere() -> Case:
    """Dropout in the judgement too, masks of its own."""
    return Case(task_of(dropout_net, val_mode="train"))


class Block(nn.Module):
    """A pre-norm transformer block over tokens."""

    def __init__(self, width: int = 6, heads: int = 2, tied: bool = False):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(5, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, d))
        x = x + self.down(F.gelu(self.up(self.norm2(x))))
        return self.head(x)


def sentences(t: int) -> dict[str, Any]:
    """A nested batch, with a number that is no tensor in it."""
    tokens = whole(t, 5, 3, 5)
    return {"text": {"in": tokens[:, :-1], "out": (tokens[:, 1:],)}, "scale": 1.0}


def predict(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    logits = model(batch["text"]["in"])
    return batch["scale"] * F.cross_entropy(logits.flatten(0, 1), batch["text"]["out"][0].flatten())


def transformer() -> Case:
    return Case(task_of(Block, sentences, predict), steps=6)


def tied() -> Case:
    return Case(task_of(lambda: Block(tied=True), sentences, predict), steps=6)


# --- hyperparameters beyond the optimizer ---


def learnt_loss(model: Any, batch: tuple[Tensor, Tensor], hypers: Any) -> Tensor:
    """Label smoothing, a per-layer L2 coefficient and an auxiliary loss; all three are in the judgement as well."""
    x, y = batch
    logits = model(x)
    hard, soft = F.cross_entropy(logits, y), -F.log_softmax(logits, 1).mean()
    smoothing = hypers["smoothing"]
    penalty = hypers["l2/first"] * (model[0].weight ** 2).sum() + hypers["l2/last"] * (model[2].weight ** 2).sum()
    return (1 - smoothing) * hard + smoothing * soft + penalty + hypers["aux"] * (logits**2).mean()


def learnt() -> Case:
    extra = {
        "smoothing": lh.Hyper([0.1, 0.2], windows=2),
        "l2/first": lh.Hyper(0.01),
        "l2/last": lh.Hyper(0.02),
        "aux": lh.Hyper(0.0, step=0.1),
    }
    return Case(task_of(mlp, loss=learnt_loss), extra=extra)


def groups() -> Case:
    """Its own rate for the head, no decay on vectors, and a fixed schedule nobody learns."""
    return Case(
        task_of(mlp),
        replace={
            "lr": lh.Hyper([0.3, 0.2], windows=2),
            "lr/head": lh.Hyper([0.1, 0.05, 0.2], windows=3, params="2.*"),
            "weight_decay/matrices": lh.Hyper(0.02, params="ndim>=2"),
            "momentum": lh.Hyper(0.6),
            "dampening": lh.Hyper([0.3, 0.1], windows=2, learn=False),
        },
    )


class Ema(nn.Module):
    """Centres its input by a running mean that it writes in place, and has a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5)
        self.frozen.requires_grad_(False)
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.frozen(x)))
        if self.training:
            self.centre.mul_(0.7).add_(0.3 * h.mean(0))
            self.calls += 1
        return self.last(h - self.centre)


def buffers() -> Case:
    return Case(task_of(Ema))


def generator() -> Case:
    """A stream that can only be read in order, and draws from the generators that the library seeds."""

    def train(seed: int):
        while True:
            yield torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))

    return Case(lh.Task(mlp, classify, train, held_out(pairs)))


PROBLEMS: dict[str, Callable[[], Case]] = {
    "quadratic": quadratic,
    "mlp": mlp_case,
    "batchnorm-eval": batchnorm_eval,
    "batchnorm-train": batchnorm_train,
    "batchnorm-average": batchnorm_average,
    "dropout": dropout,
    "dropout-everywhere": dropout_everywhere,
    "transformer": transformer,
    "tied": tied,
    "learnt-loss": learnt,
    "groups": groups,
    "buffers": buffers,
    "generator": generator,
}


@cache
def problem(name: str) -> Case:
    return PROBLEMS[name]()


@dataclass(frozen=True)
class Setting:
    """A rule and the hyperparameters that are learnt with it: every float argument it has."""

    rule: lh.Rule
    hypers: Hypers


def _windows(*values: float) -> lh.Hyper:
    return lh.Hyper(list(values), windows=len(values))


RULES: dict[str, Setting] = {
    "sgd": Setting(
        lh.sgd(),
        {
            "lr": _windows(0.3, 0.5, 0.2),
            "momentum": _windows(0.5, 0.8),
            "dampening": _windows(0.1),
            "weight_decay": _windows(0.01),
        },
    ),
    # where the tuning of the paper begins: nothing has an effect yet, and everything has a derivative
    "sgd-from-zero": Setting(
        lh.sgd(lr=0.2),
        {"momentum": _windows(0.0, 0.0), "weight_decay": lh.Hyper(0.0, step=0.1), "dampening": _windows(0.0)},
    ),
    "sgd-negative": Setting(
        lh.sgd(), {"lr": _windows(-0.1, 0.2), "momentum": _windows(-0.4), "weight_decay": _windows(-0.02)}
    ),
    "nesterov": Setting(
        lh.sgd(nesterov=True),
        {"lr": _windows(0.1, 0.2), "momentum": _windows(0.7, 0.9), "weight_decay": _windows(0.01)},
    ),
    "adam": Setting(
        lh.adam(),
        {
            "lr": _windows(0.05, 0.02),
            "beta1": _windows(0.7, 0.9),
            "beta2": _windows(0.9),
            "eps": _windows(0.1),
            "weight_decay": _windows(0.02),
        },
    ),
    "adam-negative": Setting(
        lh.adam(lr=0.05, eps=0.1), {"beta1": _windows(-0.3, 0.0), "weight_decay": _windows(-0.01)}
    ),
    "adamw": Setting(
        lh.adamw(),
        {
            "lr": _windows(0.05, 0.02),
            "beta1": _windows(0.8),
            "beta2": _windows(0.8, 0.9),
            "eps": _windows(0.1),
            "weight_decay": _windows(0.1),
        },
    ),
    "clipped": Setting(
        lh.clipped(lh.sgd(momentum=0.8), grad_clip=0.05),
        {"lr": _windows(0.2, 0.3), "grad_clip": lh.Hyper([0.03, 0.06], windows=2, step=0.01)},
    ),
    "clipped-norm": Setting(
        lh.clipped(lh.sgd(momentum=0.8), grad_clip=0.3, by="norm"),
        {"lr": _windows(0.2, 0.3), "grad_clip": lh.Hyper([0.2, 0.4], windows=2, step=0.01)},
    ),
}


def hypers_for(case: Case, setting: Setting) -> Hypers:
    return setting.hypers | case.extra if case.replace is None else case.replace


def compute(case: Case, setting: Setting, engine: Any, **options: Any) -> lh.Hypergradient:
    options = {"steps": case.steps, "seed": 3} | options
    return lh.hypergradient(case.task, setting.rule, hypers_for(case, setting), engine=engine, **options)


def relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest error of any key, in units of that key's largest value.

    Per key, because keys have different units; by the largest value of a key, because a window whose true value
    happens to be near zero says nothing about accuracy.
    """
    assert got.keys() == expected.keys()
    worst = 0.0
    for key, truth in expected.items():
        assert truth.isfinite().all(), key
        error, scale = (got[key] - truth).abs().max(), truth.abs().max()
        assert scale > 0, f"{key} has no derivative here: the test would prove nothing"
        worst = max(worst, float(error / scale))
    return worst


def assert_identical(one: lh.Hypergradient, other: lh.Hypergradient) -> None:
    """Bit for bit, NaN included."""
    assert one.status == other.status
    assert one.engine == other.engine
    assert one.val_loss == other.val_loss or (one.val_loss != one.val_loss and other.val_loss != other.val_loss)
    for name in ("grad", "mean", "params", "buffers", "train_loss", "per_step"):
        assert tree.equal(getattr(one, name), getattr(other, name)), name


def through_a_file(saved: Any) -> Any:
    """What a checkpoint does to a saved run."""
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)
