"""BatchNorm of training runs side by side: one operation, its derivative, and what is put in their place."""

import dataclasses
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon import cuda, lane_norm, lanes, models, norm_kernels
from longhorizon.functional import Functional
from longhorizon.problem import environment, make_problem
from test_lane_kernels import HYPERS, IMAGES, LANES, Residual, task, traced

EPS = 1e-5


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("affine", [True, False])
def test_side_by_side_it_is_what_autograd_makes_of_each_run(affine):
    x, grad = 3 + drawn(LANES, 6, 8, 4, 4), drawn(LANES, 6, 8, 4, 4, seed=1)
    weight, bias = (drawn(LANES, 8, seed=2), drawn(LANES, 8, seed=3)) if affine else (None, None)

    def loss(norm, x, weight, bias, grad):
        return (norm(x, weight, bias).relu() * grad).sum()

    def ours(x, weight, bias):
        return lane_norm.lane_norm(x, weight, bias, EPS)[0]

    def torchs(x, weight, bias):
        return F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)

    which = (1, 2, 3) if affine else (1,)
    found = torch.vmap(torch.func.grad(loss, which), (None, 0, *([0, 0] if affine else [None, None]), 0))(
        ours, x, weight, bias, grad
    )
    for i in range(LANES):
        own = (weight[i], bias[i]) if affine else (None, None)
        expected = torch.func.grad(loss, which)(torchs, x[i], *own, grad[i])
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one[i], other)


def test_a_run_alone_has_it_too():
    x, weight, bias = drawn(6, 8, 4, 4), drawn(8, seed=1), drawn(8, seed=2)
    made, mean, var = lane_norm.lane_norm(x, weight, bias, EPS)
    torch.testing.assert_close(made, F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS))
    torch.testing.assert_close(mean, x.mean((0, 2, 3)))
    torch.testing.assert_close(var, x.var((0, 2, 3), correction=0))
    slopes = torch.func.grad(lambda x: lane_norm.lane_norm(x, weight, bias, EPS)[0].square().sum())(x)
    expected = torch.func.grad(lambda x: F.batch_norm(x, None, None, weight, bias, True, eps=EPS).square().sum())(x)
    torch.testing.assert_close(slopes, expected)


def test_what_all_runs_share_is_repeated():
    x, weight, bias = drawn(LANES, 6, 8, 4, 4), drawn(8, seed=1), drawn(8, seed=2)
    found = torch.vmap(lambda x: lane_norm.lane_norm(x, weight, bias, EPS)[0])(x)
    expected = torch.stack([F.batch_norm(one, None, None, weight, bias, training=True, eps=EPS) for one in x])
    torch.testing.assert_close(found, expected)


def test_which_batches_it_takes():
    fine = [c for c in range(1, 600) if lane_norm.takes(c)]
    assert fine == [8, 16, 32, 64, 128, 256]
    assert lane_norm.suits(torch.zeros(2, 16, 4, 4))
    assert not lane_norm.suits(torch.zeros(2, 16))
    assert not lane_norm.suits(torch.zeros(2, 16, 4, 4, dtype=torch.float64))


def test_running_statistics_are_the_same():
    module = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16))
    functional = Functional(dataclasses.replace(task(), loss=lambda m, b: m(b[0]).square().mean()), module)
    (params, buffers), batch = functional.initial(), task().train(0)[0]
    _, expected = functional.loss(params, buffers, batch, {})
    with cuda.half():
        _, found = functional.loss(params, buffers, batch, {})
    assert not torch.equal(found["1.running_mean"], buffers["1.running_mean"])
    for name in buffers:
        torch.testing.assert_close(found[name], expected[name])


def test_what_it_cannot_differentiate_is_an_error_and_no_zero():
    x, weight, bias = drawn(6, 8, 4, 4), drawn(8, seed=1), drawn(8, seed=2)
    norm = partial(lane_norm.lane_norm, weight=weight, bias=bias, eps=EPS)

    def penalty(x):
        slope = torch.func.grad(lambda x: norm(x)[0].tanh().sum())(x)
        return slope.square().sum()

    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.func.grad(penalty)(x)
    for which in (1, 2):
        with pytest.raises(NotImplementedError, match="depends on the statistics of a batch"):
            torch.func.grad(lambda x, i=which: norm(x)[i].square().sum())(x)


class Small(nn.Module):
    """A convolution and BatchNorm, and a loss that may do more with it than a plain step does."""

    def __init__(self, kind, track):
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8, track_running_stats=track)
        self.last = nn.Linear(8, 3)

    def features(self, x):
        if self.kind == "own vmap":
            return torch.vmap(lambda k: F.relu(self.norm(k * self.conv(x))))(torch.arange(1.0, 4.0)).sum(0)
        return torch.tanh(self.norm(self.conv(x)))

    def loss(self, batch):
        x, y = batch

        def plain(x):
            return F.cross_entropy(self.last(self.features(x).mean((2, 3))), y)

        if self.kind == "penalty":
            return plain(x) + 100 * torch.func.grad(plain)(x).square().sum()
        return plain(x) + (10 * self.norm.running_var.sum() if self.kind == "statistics" else 0)


@pytest.mark.parametrize(
    ("kind", "track", "fine"),
    [("plain", True, True), ("penalty", False, False), ("statistics", True, False), ("own vmap", False, False)],
)
def test_runs_that_do_more_with_batch_norm_are_not_made_side_by_side_in_bfloat16(monkeypatch, kind, track, fine):
    given = task(lambda: Small(kind, track), side=8)
    given = dataclasses.replace(given, loss=lambda m, b: m.loss(b))
    with environment():
        problem = make_problem(given, lh.sgd(), HYPERS, 2, 0)
        for rough, expected in ((False, True), (True, fine)):
            monkeypatch.setattr(lanes, "in_half", lambda device, rough=rough: rough)
            assert lanes._works(problem, problem.batch(0)) is expected


def nodes(graph, *names):
    ops = norm_kernels.operations()
    return [[node for node in graph.graph.nodes if node.target is getattr(ops, name)] for name in names]


def test_nothing_else_reads_all_pixels():
    """WRN-16-1: each BatchNorm with its ReLU, and where two ways meet again in the sum of their gradients."""
    _, graph, _ = traced(task(lambda: models.make("wrn-16-1", classes=3, channels=3, size=32), side=32))
    moments, scaled, slopes, unscaled = nodes(graph, "moments", "scaled", "slopes", "unscaled")
    assert [len(x) for x in (moments, scaled, slopes, unscaled)] == [13] * 4
    assert all(node.args[-1] is True for node in (*scaled, *slopes, *unscaled))
    assert sum(node.args[2] is not None for node in unscaled) == 4  # blocks without a convolution in their shortcut
    names = [str(node.target) for node in graph.graph.nodes]
    assert not any("relu" in name or "threshold" in name or "lane_norm" in name for name in names)
    assert sum("clone" in name for name in names) == 2  # of the images that come in, and of the last gradient


class Plain(nn.Module):
    """BatchNorm before a sum, before something that is no ReLU, of images that come in, and one that nobody reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(c, affine=c == 16) for c in (8, 16, 16, 16))
        self.last = nn.Linear(16, 3)

    def forward(self, x):
        x = self.first(self.norms[0](torch.cat((x, x, x[:, :2]), 1)))
        self.norms[3](x)
        h = self.norms[1](x)
        h = F.relu(h) + h
        return self.last(torch.tanh(self.norms[2](h) + x).mean((2, 3)))


@pytest.mark.parametrize("model", [Plain, Residual])
def test_the_step_is_that_of_plain_operations(model):
    flat, graph, tensors = traced(task(model))
    with torch.no_grad():
        plain, half = flat(*tensors), graph(*tensors)
    moved = [(a - x, b - x) for a, b, x in zip(plain, half, tensors, strict=False) if a.shape == x.shape]
    moved = [(a, b) for a, b in moved if a.is_floating_point()]
    off = sum(float((a - b).square().sum()) for a, b in moved) ** 0.5
    size = sum(float(a.square().sum()) for a, _ in moved) ** 0.5
    assert off < 0.02 * size
    for a, b in moved:  # weights and biases of BatchNorm, and its running statistics
        assert float((a - b).norm()) <= 0.1 * float(a.norm()) + 1e-3 * size
    assert not any("lane_norm" in str(node.target) for node in graph.graph.nodes)


def test_plans_take_every_pixel_once():
    for count, pixels, channels in ((1, 1, 8), (25, 256 * 1024, 16), (3, 5 * 77, 256), (500, IMAGES * 64, 64)):
        size = norm_kernels.Size(count, pixels, channels)
        for sums in (True, False):
            plan = norm_kernels.over_pixels("moments", size, sums)
            assert plan.grid == (plan.parts, count, 1)
            assert (plan.parts - 1) * plan.per_part < pixels <= plan.parts * plan.per_part
    assert norm_kernels.over_pixels("moments", norm_kernels.Size(25, 256 * 1024, 16), True).parts == 21
