"""Training runs side by side in bfloat16: what is put into their graph, on a CPU, by torch's own convolutions."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import longhorizon as lh
from longhorizon import compile, cuda, kernels, lane_kernels, lanes
from longhorizon.problem import environment, make_problem
from longhorizon.simplify import simplify

HYPERS = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}
LANES, IMAGES = 3, 16


class Residual(nn.Module):
    """Convolutions of every kind that there are kernels for, and sums with and without one in the shortcut."""

    def __init__(self, channels=16):
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.same = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.strided = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False)
        self.short = nn.Conv2d(channels, 2 * channels, 1, stride=2, bias=False)
        self.last = nn.Linear(2 * channels, 3)

    def forward(self, x):
        x = self.first(x)
        x = x + self.same(F.relu(self.norm(x)))
        h = F.relu(x)
        x = self.strided(h) + self.short(h)
        return self.last(F.relu(x).mean((2, 3)))


def task(model=Residual, side=16):
    def batches(seed, count=2):
        generator = torch.Generator().manual_seed(seed)
        return [
            (torch.randn(IMAGES, 3, side, side, generator=generator), torch.randint(3, (IMAGES,), generator=generator))
            for _ in range(count)
        ]

    return lh.Task(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), batches, batches)


def traced(given):
    """A step of several runs, its graph in bfloat16, and the arguments of both."""
    with environment():
        traces = lh.Traces()
        problems = [make_problem(given, lh.sgd(), HYPERS, 2, seed, traces=traces) for seed in range(LANES)]
        parts = zip(*((p.start, p.batch(0), p.hypers_at(0)) for p in problems), strict=True)
        args = tuple(lanes._stacked(part) for part in parts)
        flat = compile._Flat(lanes.batched(problems[0]), args)
        tensors = flat.tensors(pytree.tree_leaves(args))
        graph = make_fx(torch.func.functionalize(flat), tracing_mode="fake")(*tensors)
        with cuda.half():
            simplify(graph)
        return flat, graph, tensors


def used(graph):
    convolve, weigh = lane_kernels.operations()
    return (
        [node for node in graph.graph.nodes if node.target is convolve],
        [node for node in graph.graph.nodes if node.target is weigh],
    )


def test_every_convolution_is_put_and_every_sum_is_made_within_one():
    _, graph, _ = traced(task())
    made, weighed = used(graph)
    assert len(weighed) == 4
    assert len([node for node in made if node.args[4]]) == 3  # the gradient of the first image is nobody's
    assert len([node for node in made if node.args[2] is not None]) == 3  # two forward, and where both ways meet again
    assert not any("aten.convolution" in str(node.target) for node in graph.graph.nodes)


def test_the_step_is_as_near_as_eight_bits_are():
    """Held to what torch's own mixed precision does to the same gradients."""
    given = task()
    flat, graph, tensors = traced(given)
    with environment(), torch.no_grad():
        plain, half = flat(*tensors), graph(*tensors)
    moved = [(a - x, b - x) for a, b, x in zip(plain, half, tensors, strict=False) if a.shape == x.shape and a.ndim > 2]
    assert len(moved) >= 4
    off = sum(float((a - b).square().sum()) for a, b in moved) ** 0.5
    size = sum(float(a.square().sum()) for a, _ in moved) ** 0.5
    assert 1e-4 * size < off < 0.05 * size  # not zero: then it would not have been in bfloat16


def test_what_the_kernels_do_not_take_stays():
    def odd():
        return nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.Flatten(), nn.Linear(12 * 256, 3))

    flat, graph, tensors = traced(task(odd))
    assert used(graph) == ([], [])
    torch.testing.assert_close(graph(*tensors), flat(*tensors))


@pytest.mark.parametrize("kind", range(len(kernels.KINDS)))
@pytest.mark.parametrize(("channels", "outputs"), [(3, 16), (16, 16), (16, 32)])
def test_plans_fit_the_kernels(channels, outputs, kind):
    """Numbers that kernels_bf16.cu divides by, and the 32 bits in which it remembers what to read."""
    stride = kernels.KINDS[kind][2]
    for side in (8, 16, 32 // stride):
        for count in (5, 256):
            size = lane_kernels.Size(8, count, channels, outputs, side, kind)
            plans = [lane_kernels.convolve(size, False, False), lane_kernels.weigh(size)]
            plans += [lane_kernels.convolve(size, True, True)] if channels >= 16 else []
            for plan in plans:
                m = dict(plan.macros)
                lines, width = (m["ROWS"] - 1) * m["STRIDE"] + m["TAPS"], m["SIDE"] * m["STRIDE"] + m["TAPS"] - 1
                assert m["SIDE"] % m["ROWS"] == 0
                assert m["IMAGES"] == 1 or (m["ROWS"] == m["SIDE"] and count % m["IMAGES"] == 0)
                assert m["IMAGES"] * lines * width * m["C"] / 8 / plan.threads <= 32
                assert plan.threads % (m["C"] // 8) == 0
                assert plan.threads <= 1024
                tiles = m["IMAGES"] * m["ROWS"] * m["SIDE"] // 16
                assert tiles % m["T"] == 0 if plan.name == "convolve" else m["O"] // 16 % m["T"] == 0
                assert plan.parts * plan.per_part >= count // m["IMAGES"] * (m["SIDE"] // m["ROWS"])


def test_on_a_cpu_nothing_changes():
    found = [
        lh.hypergradient(task(), lh.sgd(), HYPERS, steps=2, engine=lh.Factorial(pairs=4), precision=precision)
        for precision in ("float32", "bf16")
    ]
    assert torch.equal(found[0].grad["lr"], found[1].grad["lr"])


def test_a_model_in_float64_is_refused():
    def double():
        return Residual().double()

    with pytest.raises(ValueError, match="precision='bf16' with a model in float64"):
        lh.hypergradient(task(double), lh.sgd(), HYPERS, steps=2, precision="bf16")
