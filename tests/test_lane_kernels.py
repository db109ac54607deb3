"""Training runs side by side in bfloat16: what is put into their graph, on a CPU, by torch's own convolutions."""

import dataclasses
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import longhorizon as lh
from longhorizon import compile, convolution, cuda, kernels, lane_kernels, lanes
from longhorizon.problem import environment, make_problem
from longhorizon.simplify import simplify

HYPERS = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}
LANES, IMAGES = 3, 16
WRN = [(3, 16, 32), (16, 16, 32), (16, 32, 16), (32, 32, 16), (32, 64, 8), (64, 64, 8)]  # sizes of WRN-16-1


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
        args = tuple(lanes.stacked(part) for part in parts)
        flat = compile._Flat(lanes.batched(problems[0]), args)
        tensors = flat.tensors(pytree.tree_leaves(args))
        with cuda.half():
            graph = make_fx(torch.func.functionalize(flat), tracing_mode="fake")(*tensors)
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
    """Where torch's own mixed precision is off by 2 % of the gradient."""
    flat, graph, tensors = traced(task())
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


class Sums(nn.Module):
    """Sums that a convolution must not make: with something of another shape or type."""

    def __init__(self, kind):
        super().__init__()
        self.a, self.b = (nn.Conv2d(i, 16, 3, padding=1, bias=False) for i in (3, 16))
        self.last = nn.Linear(16, 3)
        self.register_buffer("image", torch.randn(1, 16, 16, 16))
        self.register_buffer("whole", torch.arange(IMAGES * 16 * 256).reshape(IMAGES, 16, 16, 16) * 16777)
        self.kind = kind

    def forward(self, x):
        h = self.a(x)
        if self.kind == "one image":
            h = 2 * h + self.b(self.image)
        elif self.kind == "a mask":
            mask = h > 0
            h = torch.where(mask, self.b(F.relu(h)) + mask, h)
        else:
            h = 1e-9 * (self.b(F.relu(h)) + self.whole) + h
        return self.last(h.mean((2, 3)))


@pytest.mark.parametrize("kind", ["one image", "a mask", "whole numbers"])
def test_sums_with_another_shape_or_type_are_left_alone(kind):
    flat, graph, tensors = traced(task(lambda: Sums(kind)))
    made, _ = used(graph)
    assert made
    assert all(node.args[2] is None for node in made)
    for a, b in zip(flat(*tensors), graph(*tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kind", range(len(kernels.KINDS)))
@pytest.mark.parametrize("most", [160 * 1024, 99 * 1024])
def test_plans_fit_the_kernels(kind, most):
    """Numbers that kernels_bf16.cu divides by, the bits in which it remembers what to read, and shared memory."""
    stride = kernels.KINDS[kind][2]
    for channels, outputs, side, count in product(
        convolution.CHANNELS, convolution.OUTPUTS, convolution.SIDES, (5, 256)
    ):
        if side * stride > 32:
            continue
        size = lane_kernels.Size(8, count, channels, outputs, side, kind)
        plans = [lane_kernels.convolve(size, False, False, most), lane_kernels.weigh(size, most)]
        plans += [lane_kernels.convolve(size, True, True, most)] if channels >= 16 else []
        if (channels, outputs, side) in WRN:
            assert all(4 * plan.floats <= most for plan in plans), size  # others may be too large, and are not taken
        for plan in plans:
            m = dict(plan.macros)
            margin, spread = m["TAPS"] // 2, plan.name == "spread"
            step = 1 if spread or m["TAPS"] == 1 else m["STRIDE"]
            lines = m["ROWS"] + margin if spread else (m["ROWS"] - 1) * step + m["TAPS"]
            width = m["SIDE"] * step + margin * (1 if spread else 2)
            assert m["SIDE"] % m["ROWS"] == 0
            assert m["IMAGES"] == 1 or (m["ROWS"] == m["SIDE"] and count % m["IMAGES"] == 0)
            assert m["IMAGES"] * lines * width * m["C"] / 8 / plan.threads <= 32, plan
            assert plan.threads % (m["C"] // 8) == 0
            assert 32 <= plan.threads <= 1024
            deep = 2 if m["SIDE"] == 8 and m["IMAGES"] % 2 else 1  # rows of a tile of 16 pixels
            columns = m["IMAGES"] * m["SIDE"] * deep // 16
            if plan.name == "weigh":
                walk = m["ROWS"] if columns >= m["SHARES"] else m["ROWS"] * columns // m["SHARES"]
                assert walk > 0, plan
                assert (walk % deep, m["ROWS"] % walk, m["O"] // 16 % m["T"]) == (0, 0, 0), plan
            else:
                assert m["ROWS"] // deep % m["T"] == 0, plan
                across = m["O"] // 8 // m["G"]
                assert plan.threads == 32 * across * columns * (m["ROWS"] // deep // m["T"]), plan
            assert plan.parts * plan.per_part >= count // m["IMAGES"] * (m["SIDE"] // m["ROWS"])


@pytest.mark.parametrize("wrong", ["nothing", "zero", "turned"])
def test_a_wrong_gradient_is_found_in_spite_of_the_rounding(wrong):
    """The comparison of a traced step with the plain one, with what eight bits leave of a gradient."""
    flat, graph, tensors = traced(task())
    plain, half = flat(*tensors), graph(*tensors)
    places = [i for i, x in enumerate(plain[: len(tensors)]) if x.shape == (LANES, 16, 16, 3, 3)]
    assert len(places) == 2  # a weight, and its memory
    start = tensors[places[0]]
    for i in places if wrong != "nothing" else []:
        before = start if i == places[0] else torch.zeros_like(start)
        half[i] = before if wrong == "zero" else 2 * before - half[i]
    with cuda.half():
        differs = compile.difference(plain, half)
    assert (differs is None) == (wrong == "nothing")


def test_on_a_cpu_nothing_changes():
    def flat():
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 3))

    short, steps = task(flat), 30
    given = dataclasses.replace(short, train=lambda seed: short.train(seed) * 15)
    with environment():
        assert lanes.at_once(make_problem(given, lh.sgd(), HYPERS, steps, 0), 8) > 1
    found = [
        lh.hypergradient(given, lh.sgd(), HYPERS, steps=steps, engine=lh.Factorial(pairs=4), precision=precision)
        for precision in ("float32", "bf16")
    ]
    assert torch.equal(found[0].grad["lr"], found[1].grad["lr"])


def test_a_model_in_float64_is_refused():
    def double():
        return Residual().double()

    with pytest.raises(ValueError, match="precision='bf16' with a model in float64"):
        lh.hypergradient(task(double), lh.sgd(), HYPERS, steps=2, precision="bf16")
