"""Convolutions of columns in a traced step: recognised, joined, the same as without. The kernels: test_gpu.py."""

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import column_products
import longhorizon as lh
from longhorizon import compile, convolution, kernels, swaps
from longhorizon.lanes import Lanes
from longhorizon.problem import environment, make_problem

MEANINGS = {
    "column_convolution": lambda *args: column_products.convolved(args[:4], *args[4:]),
    "column_input_gradient": lambda *args: column_products.spread(args[:4], *args[4:]),
    "column_weight_gradient": lambda *args: column_products.weighed(args[:4], *args[4:]),
    "precise_convolution": column_products.precise,
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The kernels' meaning in their place, for every size and device; counts operations of the graphs that are made."""
    found: Counter[str] = Counter()
    monkeypatch.setattr(convolution, "suits", lambda kind, count, channels, outputs, sides, like: True)
    for name, meaning in MEANINGS.items():
        operation = convolution.OPERATIONS[name]
        monkeypatch.setitem(convolution.OPERATIONS, name, dataclasses.replace(operation, compute=meaning))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(swaps, "TURNS", {("cpu", torch.float64)})
    simplify = compile.simplify

    def counting(graph: torch.fx.GraphModule) -> None:
        simplify(graph)
        found.update(str(node.target) for node in graph.graph.nodes if "conv" in str(node.target))
        for node in graph.graph.nodes:
            if "column" in str(node.target):
                pairs = "both" if all(x is not None for x in node.args[:4]) else "one"
                found[f"{str(node.target).split('.')[1]}, {pairs}"] += 1

    monkeypatch.setattr(compile, "simplify", counting)
    return found


class Blocks(nn.Module):
    """Two convolutions that keep the size, a residual sum, and a block with a stride and its shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.third = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.short = nn.Conv2d(width, 2 * width, 1, stride=2, bias=False)
        self.last = nn.Linear(2 * width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.softplus(self.first(x))
        x = x + F.softplus(self.second(x))
        return self.last(F.softplus(self.third(x) + self.short(x)).mean((2, 3)))  # type: ignore[no-any-return]


def _task(steps: int, width: int, side: int) -> lh.Task:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(steps, 5, 3, side, side, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (steps, 5), generator=generator)
    batches = list(zip(images, labels, strict=True))
    return lh.Task(
        lambda: Blocks(width).double(),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        lambda seed: batches,
        lambda seed: batches[:1],
    )


HYPERS = {"lr": lh.Hyper([0.1, 0.2], windows=2), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(0.01)}


def _found(engine: Any, width: int = 4, side: int = 8) -> Tensor:
    steps = 6
    return torch.cat(
        list(lh.hypergradient(_task(steps, width, side), lh.sgd(), HYPERS, steps=steps, engine=engine).grad.values())
    )


def test_forward_gives_every_tangent_of_a_convolution_to_one_operation(counted: Counter[str]) -> None:
    plain = _found(lh.Forward(compile=False))
    assert not counted
    traced = _found(lh.Forward(compile=True))
    torch.testing.assert_close(traced, plain, rtol=1e-9, atol=0)
    # The step is traced for two shapes: the first window's column alone, and both. The input has no tangent: of the
    # first convolution one product is left, and none of its input's gradient.
    seen = {name: number / 2 for name, number in counted.items()}
    assert (
        seen["column_convolution, both"] == 2 + 2
    )  # forth and back through the second; forth through third and shortcut
    assert seen["column_convolution, one"] == 1 + 1  # the first's tangents; the plain gradient of the second's input
    assert seen["column_input_gradient, both"] == 2
    assert seen["column_input_gradient, one"] == 2
    assert seen["column_weight_gradient, both"] == 3
    assert seen["column_weight_gradient, one"] == 1 + 4
    assert seen["longhorizon.precise_convolution.default"] == 4  # the model's own, which decide what a ReLU does
    assert not any(name.startswith("aten") for name in seen)


@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(compile=True)], ids=repr)
def test_every_kernel_of_a_graph_is_begun_before_it_is_used(
    counted: Counter[str], engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[kernels.Plan] = []
    monkeypatch.setattr(convolution, "available", lambda: True)
    monkeypatch.setattr(kernels, "prepare", lambda plan, device: begun.append(plan))
    _found(engine, width=16, side=16)
    columns = sum(number for name, number in counted.items() if ", " in name)
    assert len(begun) == columns + counted["longhorizon.precise_convolution.default"]
    assert {plan.name for plan in begun} == {"convolve", "spread", "weigh", "precise"}


def test_adjoint_joins_the_two_products_of_a_single_column(counted: Counter[str]) -> None:
    plain = _found(lh.Adjoint(compile=False))
    assert not counted
    traced = _found(lh.Adjoint(compile=True))
    torch.testing.assert_close(traced, plain, rtol=1e-9, atol=0)
    assert counted["column_convolution, both"] == 4
    assert counted["column_input_gradient, both"] == 2
    assert counted["column_weight_gradient, both"] == 3


def test_training_runs_side_by_side_are_columns_with_weights_of_their_own(counted: Counter[str]) -> None:
    steps = 4
    with environment():
        task, traces = _task(steps, 4, 8), lh.Traces()
        made = [make_problem(task, lh.sgd(), HYPERS, steps, seed, traces=traces) for seed in range(3)]
        lanes = Lanes(made, steps=1000)
        losses = torch.stack([lanes.step(t) for t in range(steps)])
        for i, one in enumerate(made):
            state = one.start
            for t in range(steps):
                state, loss = one.train_step(state, t)
                torch.testing.assert_close(losses[t, i], loss.detach(), rtol=1e-10, atol=0)
    assert counted["column_convolution, one"] == 4 + 1  # forth, and back through the second
    assert counted["column_input_gradient, one"] == 2
    assert counted["column_weight_gradient, one"] == 4
    assert not any(name.startswith("aten") for name in counted)


LINEAR = {
    "two in a row": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
    ),
    "stride after a stem": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.Conv2d(4, 8, 1, stride=2, bias=False)
    ),
    "groups of its own": lambda: nn.Sequential(nn.Conv2d(3, 6, 3, padding=1, groups=3, bias=False), nn.Softplus()),
    "odd sides": lambda: nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1, bias=False), nn.Softplus()),
}


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(compile=True)], ids=repr)
def test_other_shapes_of_networks(counted: Counter[str], name: str, engine: Any) -> None:
    """Traced without a warning, and the same."""
    side = 7 if name == "odd sides" else 8
    generator = torch.Generator().manual_seed(3)
    batches = [
        (torch.randn(5, 3, side, side, generator=generator).double(), torch.randint(4, (5,), generator=generator))
        for _ in range(4)
    ]
    task = lh.Task(
        lambda: LINEAR[name]().double(),
        lambda model, batch: F.cross_entropy(model(batch[0]).mean((2, 3)), batch[1] % 4),
        lambda seed: batches,
        lambda seed: batches[:1],
    )
    found, plain = (
        lh.hypergradient(task, lh.sgd(), HYPERS, steps=4, engine=dataclasses.replace(engine, compile=traced))
        for traced in (True, False)
    )
    for key, g in plain.grad.items():
        torch.testing.assert_close(found.grad[key], g, rtol=1e-9, atol=1e-12)
    assert name != "odd sides" or not any("longhorizon" in op for op in counted)


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("channels", [3, 16])
def test_weights_are_arranged_as_a_tensor_core_wants_them(columns: tuple[int, ...], channels: int) -> None:
    """[shift][channels / 8][outputs / 16][lane][register]; registers: rows g and g + 8, columns t and t + 4."""
    weight = torch.randn(*columns, 32, channels, 3, 3)
    found = convolution.arranged(weight).flatten(len(columns)).view(*columns, 9, -(-channels // 8), 2, 32, 4)
    for shift, step, tile, lane, register in [(0, 0, 0, 0, 0), (5, 0, 1, 9, 1), (8, 0, 0, 30, 2), (4, -1, 1, 31, 3)]:
        output = tile * 16 + lane // 4 + register % 2 * 8
        channel = step % -(-channels // 8) * 8 + lane % 4 + register // 2 * 4
        expected = (
            weight[..., output, channel, shift // 3, shift % 3] if channel < channels else weight.new_zeros(columns)
        )
        torch.testing.assert_close(found[..., shift, step, tile, lane, register], expected, rtol=0, atol=0)
