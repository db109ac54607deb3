"""Traced steps: the same numbers, fewer operations, and the plain step where tracing cannot be trusted."""

from collections import Counter, OrderedDict, deque
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

import longhorizon as lh
from longhorizon import compile, swaps, tree
from longhorizon.engines import adjoint
from longhorizon.engines.entry import compute
from longhorizon.engines.forward import tangent_step
from longhorizon.problem import Problem, environment, make_problem
from longhorizon.simplify import simplify
from longhorizon.traces import KEPT
from problems import Case, classify, draw, held_out, images, mlp, pairs, problem, stream, task_of

aten = torch.ops.aten

RULE = lh.sgd(momentum=0.5)


def traced_step(case: Case):
    """A step with two random tangents, which meet every path: as `make_fx` sees it, its arguments, and its result."""
    with environment():
        p = make_problem(case.task, lh.sgd(), {"lr": lh.Hyper(0.1, windows=2)}, case.steps, 0)
        tangents = [draw(i, 2, *leaf.shape) for i, leaf in enumerate(tree.split(p.start)[0])]
        args = (p.start, p.batch(0), p.hypers_at(0), tangents, {"lr": torch.tensor([1.0, 0.0], dtype=torch.float64)})

        def step(*args):
            torch.manual_seed(0)
            return tangent_step(p.inner, *args)

        return make_fx(torch.func.functionalize(step))(*args), args, step(*args)


def operations(graph):
    return Counter(node.target for node in graph.graph.nodes if node.op == "call_function")


def convnet():
    """Two convolutions; the first one's input is data and carries no tangent."""
    layers = [nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Tanh()]
    return nn.Sequential(*layers, nn.AvgPool2d(3), nn.Flatten(), nn.Linear(4, 3)).double()


def test_what_zeros_do_is_taken_out():
    graph, args, expected = traced_step(Case(task_of(convnet, images)))
    before = operations(graph)
    simplify(graph)
    after = operations(graph)
    # Two convolutions are the step itself; for each, one has the tangent of its weight and one that of its input. The
    # sixth of these, with the tangent of the data, is a convolution of zeros.
    assert before[aten.convolution.default] == 6
    assert after[aten.convolution.default] == 5
    assert after[aten.convolution_backward.default] < before[aten.convolution_backward.default]
    assert before[aten._efficientzerotensor.default] > 10
    assert after[aten._efficientzerotensor.default] == 0
    assert sum(after.values()) < sum(before.values()) / 2
    assert compile.difference(expected, graph(*args)) is None


def test_no_convolution_computes_a_gradient_that_nobody_reads():
    graph, _, _ = traced_step(Case(task_of(convnet, images)))
    simplify(graph)
    backward = [node for node in graph.graph.nodes if node.target is aten.convolution_backward.default]
    assert backward
    for node in backward:
        assert {i for i, wanted in enumerate(node.args[10]) if wanted} <= {user.args[1] for user in node.users}


@pytest.mark.parametrize(("kernel", "padding", "stride"), [(3, 1, 1), (5, 2, 1), (1, 0, 1), (3, 0, 1), (3, 1, 2)])
def test_the_gradient_of_an_input_is_a_convolution_turned_round(monkeypatch, kernel, padding, stride):
    monkeypatch.setattr(swaps, "TURNS", {("cpu", torch.float32)})

    def gradients(x, w):
        return torch.func.grad(lambda x, w: F.conv2d(x, w, None, stride, padding).square().sum(), (0, 1))(x, w)

    args = torch.randn(2, 3, 6, 6), torch.randn(4, 3, kernel, kernel)
    graph = make_fx(gradients)(*args)
    before = operations(graph)
    simplify(graph)
    after = operations(graph)
    keeps_size = stride == 1 and padding == kernel // 2
    assert after[aten.convolution.default] - before[aten.convolution.default] == int(keeps_size)
    assert after[aten.convolution_backward.default] == 1  # for the weight
    assert compile.difference(gradients(*args), graph(*args)) is None


@pytest.mark.parametrize("name", ["batchnorm-eval", "dropout", "transformer", "learnt-loss", "buffers"])
def test_simplifying_changes_no_number(name):
    case = problem(name)
    if case.extra:
        case = Case(
            task_of(mlp, loss=lambda model, batch: classify(model, batch) + 0.1 * model(batch[0]).square().mean())
        )
    graph, args, expected = traced_step(case)
    before = sum(operations(graph).values())
    simplify(graph)
    assert sum(operations(graph).values()) < before
    torch.manual_seed(0)
    assert compile.difference(expected, graph(*args)) is None


def test_a_difference_is_noticed():
    """What decides between the traced step and the plain one can tell them apart."""
    a = {"x": torch.tensor([1.0, torch.inf, torch.nan], dtype=torch.float64), "n": torch.tensor(3)}
    assert compile.difference(a, {"x": a["x"].clone(), "n": a["n"].clone()}) is None
    assert "by 1.0e-06" in compile.difference({"x": torch.ones(1).double()}, {"x": torch.ones(1).double() + 1e-6})
    assert "became" in compile.difference(a, a | {"x": a["x"].float()})
    assert "became" in compile.difference(a, a | {"x": a["x"][:2]})
    assert "whole number" in compile.difference(a, a | {"n": torch.tensor(4)})
    assert compile.difference(a, a | {"x": torch.tensor([1.0, 2.0, torch.nan], dtype=torch.float64)})
    assert compile.difference(a, a | {"x": torch.tensor([1.0, torch.inf, 0.0], dtype=torch.float64)})


@pytest.mark.parametrize("name", ["mlp", "batchnorm-eval", "batchnorm-train", "learnt-loss", "dropout-everywhere"])
def test_greedy_traced_is_greedy(name):
    """With the validation of every stretch traced too."""
    case = problem(name)
    hypers = {"lr": lh.Hyper(0.1, windows=2)} | case.extra
    settings = {"steps": 6, "seed": 3}
    plain = lh.hypergradient(case.task, RULE, hypers, engine=lh.Greedy(compile=False), **settings)
    shared = lh.Traces()
    traced = lh.hypergradient(case.task, RULE, hypers, engine=lh.Greedy(compile=True), traces=shared, **settings)
    for key in hypers:
        assert torch.allclose(traced.grad[key], plain.grad[key], rtol=1e-9, atol=1e-12)
    assert plain.grad["lr"].abs().min() > 0


# --- when tracing happens ---


def run(task, engine, steps=8, windows=1, shared=None):
    """A result, and the problem with its cache of traced steps."""
    with environment():
        p = make_problem(task, RULE, {"lr": lh.Hyper(0.2, windows=windows)}, steps, 0, traces=shared)
        return compute(p, engine).grad["lr"], p


def traces(p):
    return list(p.inner.cache.values())


def test_one_trace_per_number_of_columns():
    plain, p = run(task_of(mlp), lh.Forward(compile=False), windows=3)
    assert traces(p) == []
    traced, p = run(task_of(mlp), lh.Forward(compile=True), windows=3)
    assert len(traces(p)) == 3
    assert all(graph is not None for graph in traces(p))
    assert torch.allclose(traced, plain, rtol=1e-12)


def test_auto_traces_what_is_long_enough():
    enough = compile.WORTH_TRACING
    task = task_of(mlp)
    assert traces(run(task, lh.Forward(), steps=enough - 1)[1]) == []
    assert len(traces(run(task, lh.Forward(), steps=enough)[1])) == 1
    assert traces(run(task, lh.Forward(), steps=enough, windows=2)[1]) == []  # neither half is


def test_a_trace_is_used_again_by_a_run_like_it():
    task = task_of(mlp)
    shared = lh.Traces()
    first, p = run(task, lh.Forward(compile=True), shared=shared)
    again, q = run(replace(task, val=lambda seed: task.val(seed)), lh.Forward(compile=True), shared=shared)
    assert q.inner is p.inner
    assert len(shared) == 1
    assert len(traces(q)) == 1
    assert torch.equal(first, again)


def test_a_trace_is_not_used_again_where_weights_are_baked_in():
    """Frozen parameters are constants of a trace; the next run's may be others."""
    task = problem("buffers").task
    shared = lh.Traces()
    made = [make_problem(task, RULE, {"lr": lh.Hyper(0.2)}, 8, seed, traces=shared).inner for seed in (0, 1)]
    assert made[0] is not made[1]


KINDS = [
    "list",
    "dict",
    "array",
    "float",
    "lambda",
    "hidden module",
    "partial",
    "method",
    "numpy float",
    "slots",
    "keyword",
]


class Slotted:
    """An attribute that `vars` does not show."""

    __slots__ = ("scale",)

    def __init__(self, scale):
        self.scale = scale

    def times(self, x):
        return x * self.scale


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_not_used_again_where_its_constants_differ(kind):
    """Also without a trace: the earlier run's module would bring its own."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, drawn = nn.Linear(4, 1), torch.randn(4)
            hidden = nn.Linear(4, 4)
            kept = {"list": [drawn], "dict": {"a": (drawn,)}, "array": drawn.numpy(), "float": float(drawn[0])}
            kept |= {"partial": partial(torch.mul, drawn), "method": Slotted(drawn).times, "slots": Slotted(drawn)}
            kept |= {"numpy float": np.float32(drawn[0]), "keyword": lambda x, *, scale=drawn: x * scale}
            self.kept = (kept | {"lambda": lambda: drawn, "hidden module": [hidden]})[kind]

        def forward(self, x):
            if kind == "hidden module":
                return self.layer(self.kept[0](x))
            if kind in ("partial", "method", "slots", "keyword"):
                return self.layer((self.kept.times if kind == "slots" else self.kept)(x))
            found = {"list": lambda: self.kept[0], "dict": lambda: self.kept["a"][0], "lambda": self.kept}
            found |= {"array": lambda: torch.from_numpy(self.kept), "float": lambda: self.kept}
            found |= {"numpy float": lambda: float(self.kept)}
            return self.layer(x * found[kind]())

    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    task = lh.Task(Net, lambda m, b: m(b).square().mean(), lambda s: [x] * 4, lambda s: [x])
    hypers = {"lr": lh.Hyper(0.1)}
    record = lh.tune(task, lh.sgd(), hypers, steps=4, outer_steps=2, engine=lh.Adjoint()).history[1]
    alone = lh.hypergradient(
        task, lh.sgd(), hypers, steps=4, values=record.values, seed=record.seeds[0], engine=lh.Adjoint()
    )
    assert torch.equal(record.grad["lr"], alone.grad["lr"])


def test_a_model_is_used_again_where_its_constants_are_equal():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.scale, self.act = nn.Linear(4, 1), [torch.ones(4), 2.0], lambda x: x.tanh()
            self.me = [self]  # holds itself
            self.others = [
                Slotted(2.0),
                partial(torch.mul, torch.ones(4)),
                self.forward,
                range(3),
                np.float32(2),
                nn.ReLU,
            ]

        def forward(self, x):
            return self.act(self.layer(x * self.scale[0]))

    x = torch.ones(8, 4)
    task = lh.Task(Net, lambda m, b: m(b).square().mean(), lambda s: [x] * 4, lambda s: [x])
    shared = lh.Traces()
    made = [make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 4, seed, None, shared) for seed in (0, 1)]
    assert made[0].inner is made[1].inner


def test_a_trace_is_not_used_again_by_another_loss():
    task, shared = task_of(mlp), lh.Traces()
    first, p = run(task, lh.Forward(compile=True), shared=shared)
    other, q = run(
        replace(task, loss=lambda model, batch: 2 * task.loss(model, batch)), lh.Forward(compile=True), shared=shared
    )
    assert q.inner is not p.inner
    assert not torch.allclose(first, other, rtol=0.1)


def test_calls_that_share_traces_give_what_they_give_alone():
    task, shared = task_of(mlp), lh.Traces()
    settings = {"steps": 8, "engine": lh.Adjoint(compile=True)}
    hypers = {"lr": lh.Hyper(0.2)}
    for seed in range(3):
        alone = lh.hypergradient(task, RULE, hypers, seed=seed, **settings)
        found = lh.hypergradient(task, RULE, hypers, seed=seed, traces=shared, **settings)
        assert torch.equal(found.grad["lr"], alone.grad["lr"])
        assert len(shared) == 2  # a step and a step back, whatever the number of runs


def test_tuning_and_tests_of_what_was_learnt_share_one_step(monkeypatch):
    """As figure3.py does: three traces in all, however many outer steps, schedules and seeds."""
    monkeypatch.setattr(Problem, "stepper", lambda self, steps: self.compiled_step)
    task, shared = task_of(mlp), lh.Traces()
    task = replace(task, test=lambda: task.val(0))
    for windows in (1, 8):
        hypers = {"lr": lh.Hyper(0.1, windows=windows)}
        for engine in (lh.Greedy(compile=True), lh.Adjoint(compile=True)):
            tuned = lh.tune(task, RULE, hypers, steps=8, outer_steps=3, engine=engine, traces=shared, confirm=0)
            for seed in range(3):
                lh.retrain(task, RULE, hypers, tuned.schedule, steps=8, seeds=[seed], traces=shared)
    assert len(shared) == 3  # the step, the step back, and greedy's validation


def test_a_batch_of_another_size_is_traced_anew():
    def train(seed):
        return [tuple(part[: 6 if t < 4 else 4] for part in pairs(t)) for t in range(8)]

    task = lh.Task(mlp, classify, train, held_out(pairs))
    plain, _ = run(task, lh.Forward(compile=False))
    traced, p = run(task, lh.Forward(compile=True))
    assert len(traces(p)) == 2
    assert torch.allclose(traced, plain, rtol=1e-12)


def test_a_number_in_the_batch_is_part_of_the_trace():
    def train(seed):
        return [(*pairs(t), 1.0 + t % 2) for t in range(8)]

    def loss(model, batch):
        return batch[2] * classify(model, batch[:2])

    task = lh.Task(mlp, loss, train, lambda seed: train(seed)[:1])
    plain, _ = run(task, lh.Forward(compile=False))
    traced, p = run(task, lh.Forward(compile=True))
    assert len(traces(p)) == 2
    assert torch.allclose(traced, plain, rtol=1e-12)


def test_a_batch_that_cannot_be_a_key_is_not_traced():
    def train(seed):
        return [(*pairs(t), np.ones(3)) for t in range(8)]

    task = lh.Task(mlp, lambda model, batch: classify(model, batch[:2]), train, train)
    traced, p = run(task, lh.Forward(compile=True))
    assert traces(p) == []
    assert torch.equal(traced, run(task, lh.Forward(compile=False))[0])


# --- what tracing cannot follow ---


class Forked(nn.Module):
    """Python decides by the data."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3).double()

    def forward(self, x):
        y = self.linear(x)
        return 2 * y if y.sum() > 0 else torch.tanh(y)


class Counting(nn.Module):
    """Python counts, so that no call is like the one that was traced."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(5, 3).double(), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1 + self.calls % 2)


class Own(nn.Module):
    """A generator of its own, which a trace would freeze."""

    def __init__(self):
        super().__init__()
        self.linear, self.generator = nn.Linear(5, 3).double(), np.random.default_rng(0)

    def forward(self, x):
        return self.linear(x) * self.generator.random()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Forked, r"could not be traced and runs as it is \(RuntimeError: .*data-dependent control flow"),
        (Counting, r"differs from the plain one \(by .*\); the plain one is used"),
        (Own, r"differs from the plain one"),
    ],
)
def test_what_cannot_be_traced_runs_as_it_is(model, words):
    with pytest.warns(compile.TraceMismatch, match=words):
        traced, p = run(task_of(model), lh.Forward(compile=True))
    assert traces(p) == [None]
    if model is Forked:  # the others do not even repeat themselves
        assert torch.equal(traced, run(task_of(model), lh.Forward(compile=False))[0])


@pytest.mark.parametrize(
    "size", [lambda y: len(y[y > 0]), lambda y: (y > 0).nonzero().size(0), lambda y: len(y.unique())]
)
def test_a_size_that_depends_on_the_data_is_not_traced(size):
    """A trace would fix that of its first batch, which is the only one that is compared."""
    x = torch.randn(30, 16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = torch.randint(3, (30, 16), generator=torch.Generator().manual_seed(1))
    batches = list(zip(x, y, strict=True))
    task = lh.Task(
        lambda: nn.Linear(5, 3).double(),
        lambda model, b: F.cross_entropy(model(b[0]), b[1], reduction="sum") / size(b[1]),
        lambda seed: batches,
        lambda seed: batches[:2],
    )
    plain = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=30, engine=lh.Forward(compile=False))
    with pytest.warns(compile.TraceMismatch, match="depends on the data"):
        found = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=30, engine=lh.Forward())
    assert torch.equal(found.grad["lr"], plain.grad["lr"])


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.01])
@pytest.mark.parametrize("rule", [lh.sgd(momentum=0.5), lh.adamw()], ids=lambda rule: rule.name)
def test_a_wrong_tangent_is_noticed_though_the_first_step_has_none(rule, factor, monkeypatch):
    """Every column is zero in step 0, so a Hessian product that is wrong would not show there."""
    simple = compile.simplify

    def broken(graph):
        simple(graph)
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        count = {"sgd": 8, "adamw": 12}[rule.name]  # of four parameters and of what the rule remembers of each
        for node in nodes[-3 - count : -3]:  # the last three are the ones of the three values
            with graph.graph.inserting_after(node):
                scaled = graph.graph.call_function(aten.mul.Tensor, (node, factor))
            node.replace_all_uses_with(scaled, delete_user_cb=lambda user, own=scaled: user is not own)
        graph.recompile()

    x = torch.randn(30, 16, 5, generator=torch.Generator().manual_seed(0)).float()
    task = lh.Task(
        lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).float(),
        lambda model, b: model(b).square().mean(),
        lambda seed: list(x),
        lambda seed: [x[0]],
    )
    hypers = {
        "lr": lh.Hyper(0.01),
        "weight_decay": lh.Hyper(0.1),
        "eps" if rule.name == "adamw" else "momentum": lh.Hyper(0.1),
    }
    right = lh.hypergradient(task, rule, hypers, steps=30, engine=lh.Forward(compile=True)).grad
    monkeypatch.setattr(compile, "simplify", broken)
    with pytest.warns(compile.TraceMismatch, match="differs from the plain one"):
        found = lh.hypergradient(task, rule, hypers, steps=30, engine=lh.Forward(compile=True)).grad
    for key, g in right.items():
        assert torch.allclose(found[key], g, rtol=1e-3), key


def test_a_difference_that_rounding_makes_is_none():
    """sin(1e4 x) in float32: another last digit of x moves it by more than the tolerance."""

    def plain(x):
        return (1e4 * x).sin()

    x = torch.linspace(1, 2, 50).float()
    made = plain(x) + 1e-3 * (-1.0) ** torch.arange(50).float()
    assert compile.difference(plain(x), made) is not None
    assert compile._checked(lambda leaves: made, plain, plain(x), (x,), lambda: None) is not None
    with pytest.warns(compile.TraceMismatch):
        assert compile._checked(lambda leaves: 1.5 * made, plain, plain(x), (x,), lambda: None) is None


@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(compile=True)], ids=str)
def test_every_run_compares_what_it_shares(engine):
    task, shared = task_of(mlp), lh.Traces()
    run(task, engine, shared=shared)
    for known in (inner for _, inner in shared._known):
        for key, made in known.cache.items():
            known.cache[key] = lambda leaves, made=made: tree.map(
                lambda x: 1.01 * x if tree.is_real(x) else x, made(leaves)
            )
    with pytest.warns(compile.TraceMismatch, match="differs from the plain one"):
        found, _ = run(task, engine, shared=shared)
    assert torch.allclose(found, run(task, engine)[0], rtol=1e-9)


@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(compile=True)], ids=str)
def test_numbers_that_change_with_every_batch_are_not_traced_again_and_again(engine):
    x = torch.randn(12, 16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = lh.Task(
        lambda: nn.Linear(5, 3).double(),
        lambda model, b: model(b["x"]).square().mean() * (1 + 0.1 * b["step"]),
        lambda seed: [{"x": x[t], "step": t} for t in range(12)],
        lambda seed: [{"x": x[0], "step": 0}],
    )
    plain = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=12, engine=replace(engine, compile=False))
    with environment():
        p = make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 12, 0)
        with pytest.warns(compile.TraceMismatch, match="plain values that change"):
            found = compute(p, engine)
    assert sum(made is not None for made in traces(p)) <= 2 * compile.CONSTANTS
    assert torch.allclose(found.grad["lr"], plain.grad["lr"], rtol=1e-10)


def test_an_index_by_numbers_is_traced():
    x, places = torch.randn(30, 4, 5, dtype=torch.float64), torch.tensor([2, 0])
    task = lh.Task(
        lambda: nn.Linear(5, 3).double(), lambda m, b: m(b)[places].square().mean(), lambda s: list(x), lambda s: [x[0]]
    )
    _, p = run(task, lh.Forward(compile=True))
    assert len(traces(p)) == 1
    assert traces(p)[0] is not None


def test_inputs_that_are_one_object_at_first_are_two_later():
    """As the clean and the augmented images are, where the first batch is not augmented."""
    x = list(torch.randn(30, 16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    batches = [(b, b if t == 0 else b + 0.5) for t, b in enumerate(x)]
    task = lh.Task(
        lambda: nn.Linear(5, 3).double(),
        lambda model, b: (model(b[0]) - model(b[1]).tanh()).square().mean() + model(b[1]).square().mean(),
        lambda seed: batches,
        lambda seed: batches[1:3],
    )
    slopes = [
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=30, engine=engine).grad["lr"]
        for engine in (lh.Forward(compile=True), lh.Adjoint(compile=True), lh.Forward(compile=False))
    ]
    assert torch.allclose(slopes[0], slopes[2], rtol=1e-10)
    assert torch.allclose(slopes[1], slopes[2], rtol=1e-10)


def test_both_ways_of_a_fork_were_taken():
    """Else the test above would prove little."""
    model = Forked()
    with environment():
        p = make_problem(task_of(Forked), lh.sgd(lr=0.2, momentum=0.5), {"lr": lh.Hyper(0.2)}, 8, 0)
    signs = {
        bool(F.linear(x, p.start.params["linear.weight"], p.start.params["linear.bias"]).sum() > 0)
        for x, _ in stream(pairs)(0)
    }
    assert signs == {True, False}
    assert {name for name, _ in model.named_parameters()} == p.start.params.keys()


def test_a_long_run_on_the_cpu_traces_its_steps_back(monkeypatch):
    monkeypatch.setattr(adjoint, "WORTH_TRACING_BACK", 9)
    case, engine = problem("batchnorm-eval"), lh.Adjoint()
    with environment():
        p = make_problem(case.task, lh.sgd(), {"lr": lh.Hyper(0.1, windows=2)}, 9, 0)
        found = compute(p, engine)
        assert [key for key, *_ in p.inner.cache] == [("back", None)]
        plain = compute(make_problem(case.task, lh.sgd(), p.hypers, 9, 0), lh.Adjoint(compile=False))
    torch.testing.assert_close(found.grad["lr"], plain.grad["lr"], rtol=1e-10, atol=0)


def test_a_step_back_that_draws_random_numbers_is_not_traced():
    with environment():
        p = make_problem(problem("dropout").task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 9, 0)
        assert p.draws
        compute(p, lh.Adjoint(compile=True))
        assert "back" not in str([key for key, *_ in p.inner.cache])


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "tree",
    [
        (torch.ones(2), {"b": torch.zeros(3), "a": [1, None]}, Pair(torch.ones(1), ())),
        Pair({"x": torch.ones(2)}, OrderedDict(b=torch.ones(2), a=3.0)),
        {"deep": [{"er": (torch.ones(1), "text")}, []]},
        nn.Parameter(torch.ones(2)),
    ],
    ids=["usual", "left to pytree", "deep", "a leaf"],
)
def test_leaves_come_in_the_order_of_pytree(tree):
    leaves, form = compile.leaves_and_form(tree)
    expected = pytree.tree_leaves(tree)
    assert len(leaves) == len(expected)
    assert all(a is b for a, b in zip(leaves, expected, strict=True))
    assert hash(form) == hash(compile.leaves_and_form(tree)[1])


def test_what_a_trace_depends_on():
    """Two trees share a trace only if containers, names, shapes and constants are the same."""
    x, y = torch.ones(2), torch.ones(3)
    trees = [(x, y), [x, y], (y, x), {"x": x, "y": y}, {"y": x, "x": y}, Pair(x, y), (x, (y,)), ((x, y),), (x, y, 1)]
    trees += [(x, y, True), (x, y, 1.0), (x, y, "1"), (x, y, None), (x, y.double()), (x, y, ()), (x, y, {}), (x, y, [])]
    assert len({compile.leaves_and_form(tree)[1] for tree in trees}) == len(trees)
    assert compile.leaves_and_form((x, y))[1] == compile.leaves_and_form((x + 1, y + 1))[1]


class Content(float):
    """A number with attributes: what it is made of is not all in `vars`."""


class Drawn(nn.Module):
    """Constants of one kind in a row, of which only the last differs from model to model."""

    def __init__(self, kind):
        super().__init__()
        self.layer, last = nn.Linear(5, 3).double(), float(torch.rand(()))
        make = {"slots": Slotted, "lambda": lambda v: lambda: v, "float": Content}[kind]
        self.a, self.b, self.c, self.d = make(2.5), make(2.5), make(2.5), make(last)
        self.kind = kind

    def forward(self, x):
        scale = {"slots": lambda: self.d.scale, "lambda": lambda: self.d(), "float": lambda: float(self.d)}[self.kind]()
        return self.layer(x) * scale


@pytest.mark.parametrize("kind", ["slots", "lambda", "float"])
def test_a_difference_is_found_behind_others_that_are_equal(kind):
    task, shared = task_of(partial(Drawn, kind)), lh.Traces()
    made = [make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 4, seed, None, shared).inner for seed in (0, 1)]
    assert made[0] is not made[1]


def test_models_that_always_differ_are_not_all_kept():
    task, shared = task_of(partial(Drawn, "slots")), lh.Traces()
    for seed in range(KEPT + 3):
        newest = make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 4, seed, None, shared).inner
    assert len(shared._known) == KEPT
    assert shared._known[-1][1] is newest


class Recurrent(nn.Module):
    """With references to its own weights, and things that say nothing when they are compared."""

    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.GRU(5, 4, batch_first=True).double(), nn.Linear(4, 3).double()
        self.recent, self.generator, self.nothing = deque([torch.ones(2)]), torch.Generator(), float("nan")

    def forward(self, x):
        return self.out(self.rnn(x[:, None])[0][:, -1])


def test_recurrent_networks_share_a_trace():
    task, shared = task_of(Recurrent), lh.Traces()
    lh.tune(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, outer_steps=3, engine=lh.Adjoint(), traces=shared)
    assert len(shared._known) == 1


def test_frozen_weights_that_are_equal_share_a_trace():
    def model():
        made = mlp()
        first = next(made.parameters())
        first.data.fill_(0.1)
        first.requires_grad_(False)
        return made

    shared = lh.Traces()
    lh.tune(
        task_of(model),
        RULE,
        {"lr": lh.Hyper(0.1)},
        steps=8,
        outer_steps=3,
        engine=lh.Forward(compile=True),
        traces=shared,
    )
    assert len(shared) == 1
