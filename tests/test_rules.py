"""Every rule against its `torch.optim` twin, and the properties that all rules share."""

import math

import pytest
import torch
from torch import Tensor

import longhorizon as lh
from longhorizon import tree
from longhorizon.inner import Inner, in_one
from longhorizon.problem import environment, make_problem
from problems import RULES, draw, hypers_for, problem

SMALLEST = math.ulp(0.0)  # stands for momentum 0 in torch, which would freeze its buffer there (see `lh.sgd`)


def cycle(*values: float):
    """A schedule that is another value at every step."""
    return lambda t: values[t % len(values)] * (1 + 0.01 * t)


# Every hyperparameter moves at every step, through zero and negative values. beta2 stays in [0, 1): below zero the
# second moment goes negative and its root, in torch as here, is NaN. eps stays away from −√ŝ, where both divide by 0.
SCHEDULES = {
    "lr": cycle(0.1, 0.03, 0.0, -0.02, 0.05),
    "momentum": cycle(0.5, 0.9, 0.0, -0.4, 0.3, 0.1, 0.0),
    "dampening": cycle(0.3, 0.0, -0.2, 0.5),
    "weight_decay": cycle(0.1, 0.0, -0.05),
    "beta1": cycle(0.6, 0.0, -0.3, 0.55, 0.1),
    "beta2": cycle(0.6, 0.0, 0.5, 0.3),
    "eps": cycle(1e-2, 0.5, 1e-8, -1e-9),
    "grad_clip": cycle(0.5, 0.1, 2.0),
}


class Adam(torch.optim.Adam):
    """torch's Adam under our names."""

    def set(self, values: dict[str, float]) -> None:
        self.param_groups[0].update({k: v for k, v in values.items() if k not in ("beta1", "beta2")})
        self.param_groups[0]["betas"] = values["beta1"], values["beta2"]


class AdamW(torch.optim.AdamW):
    set = Adam.set


class Sgd(torch.optim.SGD):
    freezes = False  # hand torch an exact zero momentum?

    def set(self, values: dict[str, float]) -> None:
        self.param_groups[0].update(values)
        if not self.freezes:
            self.param_groups[0]["momentum"] = values["momentum"] or SMALLEST


TWINS = {
    "sgd": (lh.sgd(), lambda p: Sgd(p, lr=0.1)),
    "nesterov": (lh.sgd(nesterov=True), lambda p: Sgd(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": (lh.adam(), Adam),
    "adamw": (lh.adamw(), AdamW),
    "clipped": (lh.clipped(lh.sgd(), 1.0), lambda p: Sgd(p, lr=0.1)),
    "clipped-norm": (lh.clipped(lh.sgd(), 1.0, by="norm"), lambda p: Sgd(p, lr=0.1)),
}


def gradient(params: dict[str, Tensor], t: int) -> dict[str, Tensor]:
    """Of a quadratic, with noise; both runs see the same function of their own weights."""
    return {name: 0.8 * p + draw(100 * t + i, *p.shape) for i, (name, p) in enumerate(params.items())}


def weights(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    return {"matrix": draw(1, 3, 2).to(dtype), "vector": draw(2, 4).to(dtype), "scalar": draw(3).to(dtype)}


def update(rule, params, grads, state, hypers):
    grads = grads if rule.together is None else rule.together.change(grads, hypers)
    return rule.update(params, grads, state, hypers)


def run_both(rule, twin, schedules, as_tensors, steps=50):
    ours, theirs = weights(), [torch.nn.Parameter(p.clone()) for p in weights().values()]
    optimizer, state = twin(theirs), rule.init(ours)
    for t in range(steps):
        values = {name: schedules[name](t) for name in rule.defaults}
        given = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()} if as_tensors else values
        ours, state = update(rule, ours, gradient(ours, t), state, given)
        for p, g in zip(
            theirs, gradient(dict(zip(ours, (p.detach() for p in theirs), strict=True)), t).values(), strict=True
        ):
            p.grad = g
        if "grad_clip" in values:
            by_norm = rule.options.get("clip_by") == "norm"
            clip = torch.nn.utils.clip_grad_norm_ if by_norm else torch.nn.utils.clip_grad_value_
            clip(theirs, values.pop("grad_clip"))
        optimizer.set(values)
        optimizer.step()
        for (name, p), q in zip(ours.items(), theirs, strict=True):
            assert (p - q).abs().max() <= 1e-12 * q.abs().max().clamp(min=1.0), f"{name} at step {t}"


@pytest.mark.parametrize("as_tensors", [True, False], ids=["learnt", "fixed"])
@pytest.mark.parametrize("name", TWINS)
def test_equal_to_torch_while_everything_changes(name, as_tensors):
    rule, twin = TWINS[name]
    schedules = SCHEDULES | ({"dampening": lambda t: 0.0} if name == "nesterov" else {})
    run_both(rule, twin, schedules, as_tensors)


@pytest.mark.parametrize("as_tensors", [True, False], ids=["learnt", "fixed"])
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_equal_to_torch_at_the_usual_betas(name, as_tensors):
    """β₂ = 0.999 makes 1 − β₂ᵗ small, where a bias correction in float32 would show."""
    rule, twin = TWINS[name]
    run_both(rule, twin, {k: lambda t, v=v: v for k, v in rule.defaults.items()}, as_tensors)


def test_momentum_exactly_zero_throughout_is_torch_without_momentum():
    rule, twin = TWINS["sgd"]

    def frozen(params):
        optimizer = twin(params)
        optimizer.freezes = True
        return optimizer

    # dampening only scales what enters the buffer, and torch without a buffer applies none
    run_both(rule, frozen, SCHEDULES | {"momentum": lambda t: 0.0, "dampening": lambda t: 0.0}, True)


def test_torch_freezes_its_buffer_at_zero_momentum_and_ours_does_not():
    """The documented difference: without the stand-in for zero the two part."""
    rule, twin = TWINS["sgd"]

    def freezing(params):
        optimizer = twin(params)
        optimizer.freezes = True
        return optimizer

    with pytest.raises(AssertionError, match="at step"):
        run_both(rule, freezing, SCHEDULES | {"dampening": lambda t: 0.0}, True)


# --- properties of every rule ---


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("as_tensors", [True, False], ids=["learnt", "fixed"])
@pytest.mark.parametrize("name", TWINS)
def test_dtype_and_structure_are_kept(name, as_tensors, dtype):
    rule, _ = TWINS[name]
    params = weights(dtype)
    state = rule.init(params)
    hypers = {k: torch.tensor(v, dtype=dtype) if as_tensors else v for k, v in rule.defaults.items()}
    grads = {k: g.to(dtype) for k, g in gradient(params, 0).items()}
    for _ in range(3):
        before = (params, state)
        copies = tree.map(torch.clone, before)
        params, state = update(rule, params, grads, state, hypers)
        assert tree.equal(before, copies), "a rule wrote into its arguments"
        shapes = [tree.map(lambda x: (x.shape, x.dtype, x.device), side) for side in (before, (params, state))]
        assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", TWINS)
def test_a_group_moves_as_one_vector(name):
    rule, _ = TWINS[name]
    apart = together = (weights(), rule.init(weights()))
    assert in_one(rule) is not rule.update
    for t in range(3):
        hypers = {k: torch.tensor(SCHEDULES[k](t), dtype=torch.float64) for k in rule.defaults}
        apart = rule.update(apart[0], gradient(apart[0], t), apart[1], hypers)
        together = in_one(rule)(together[0], gradient(together[0], t), together[1], hypers)
        assert tree.equal(apart, together)
        assert [x.shape for x in tree.leaves(apart)] == [x.shape for x in tree.leaves(together)]
    mixed = weights() | {"vector": weights(torch.float32)["vector"]}  # no vector can hold them
    grads = {name: torch.ones_like(p) for name, p in mixed.items()}
    kept = in_one(rule)(mixed, grads, rule.init(mixed), hypers)
    assert tree.equal(kept, rule.update(mixed, grads, rule.init(mixed), hypers))


def by_norm(params, grads, state, h):
    return {name: p - h["lr"] * grads[name] / grads[name].norm() for name, p in params.items()}, state


def by_count(params, grads, state, h):
    return {name: p - h["lr"] * grads[name] / (1 + state[name]) for name, p in params.items()}, state


@pytest.mark.parametrize(
    "rule",
    [
        lh.Rule("own", {"lr": 0.1}, lambda params: (), by_norm, elementwise=True),
        lh.Rule("own", {"lr": 0.1}, lambda p: {k: x.new_zeros(()) for k, x in p.items()}, by_count, elementwise=True),
    ],
    ids=["norm", "one number a tensor"],
)
def test_a_rule_that_is_not_elementwise_is_found_out(rule):
    """It would train otherwise on a GPU than on a CPU."""
    with environment():
        p = make_problem(problem("mlp").task, rule, {"lr": lh.Hyper(0.1)}, 3, 0)
        with pytest.raises(ValueError, match=r"the rule 'own' has elementwise=True, but moves"):
            p.inner.check_elementwise(p.start)


@pytest.mark.parametrize("name", TWINS)
def test_rules_that_are_elementwise_are_believed(name):
    with environment():
        p = make_problem(problem("buffers").task, TWINS[name][0], {"lr": lh.Hyper(0.1)}, 3, 0)
        p.inner.check_elementwise(p.start)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint(compile=True)], ids=str)
@pytest.mark.parametrize("name", ["sgd-from-zero", "adamw", "clipped"])
def test_hypergradients_of_a_group_that_moves_as_one_vector(name, engine, monkeypatch):
    """As on a GPU."""
    case, setting = problem("buffers"), RULES[name]
    given = {"steps": 4, "seed": 3, "engine": engine}
    apart = lh.hypergradient(case.task, setting.rule, hypers_for(case, setting), **given)
    joined = []

    def pure_update(self, *args):
        joined.append(len(args[0]))
        return self._apply(in_one(self.rule), *args)

    monkeypatch.setattr(Inner, "pure_update", pure_update)
    together = lh.hypergradient(case.task, setting.rule, hypers_for(case, setting), **given)
    assert joined
    for key, g in apart.grad.items():
        assert (g - together.grad[key]).abs().max() <= 1e-9 * g.abs().max()


@pytest.mark.parametrize("name", TWINS)
def test_every_float_argument_is_listed_and_learnable(name):
    """The table that the engines are tested on learns every default of every rule."""
    rule, _ = TWINS[name]
    same = [setting for setting in RULES.values() if setting.rule.name == rule.name]
    assert {key for setting in same for key in setting.hypers} >= set(rule.defaults) - {
        *(("momentum", "dampening", "weight_decay") if "clipped" in name else ())  # sgd's own, learnt there
    }


@pytest.mark.parametrize("name", TWINS)
def test_jvp_is_vjp(name):
    """The two derivatives that the engines use are of one function: ⟨u, J v⟩ = ⟨Jᵀ u, v⟩."""
    rule, _ = TWINS[name]
    params = weights()
    _, state = rule.update(params, gradient(params, 0), rule.init(params), {k: 0.1 for k in rule.defaults})
    real, rebuild = tree.split(
        (params, gradient(params, 1), state, {k: draw(9).abs() * 0.1 + 0.3 for k in rule.defaults})
    )

    def step(*leaves):
        params, grads, state, hypers = rebuild(leaves)
        return tuple(tree.split(update(rule, params, grads, state, hypers))[0])

    v = tuple(draw(20 + i, *leaf.shape) for i, leaf in enumerate(real))
    outputs, pushed = torch.func.jvp(step, tuple(real), v)
    u = tuple(draw(50 + i, *leaf.shape) for i, leaf in enumerate(outputs))
    pulled = torch.func.vjp(step, *real)[1](u)
    left = sum((a * b).sum() for a, b in zip(u, pushed, strict=True))
    right = sum((a * b).sum() for a, b in zip(pulled, v, strict=True))
    assert float(left) == pytest.approx(float(right), rel=1e-12)
    assert left.abs() > 1e-3


class Idle(torch.nn.Module):
    """A parameter that never gets a gradient, one whose gradient is always zero, and one that works."""

    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.flat = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self):
        return (self.w**2).sum() + (0.0 * self.flat).sum()


@pytest.mark.parametrize("engine", [lh.Forward(compile=False), lh.Forward(compile=True), lh.Adjoint()], ids=str)
@pytest.mark.parametrize("rule", [lh.adam(weight_decay=0.0), lh.adamw(), lh.adam(eps=1e-3)], ids=lambda r: r.name)
def test_adam_from_a_zero_second_moment_is_finite(rule, engine):
    """√s has an infinite slope at 0; a parameter without gradient stays there for the whole run."""
    task = lh.Task(
        Idle, lambda model, batch: model() + 0 * model.unused.sum().detach(), lambda seed: [0] * 5, lambda seed: [0]
    )
    hypers = {key: lh.Hyper(value) for key, value in rule.defaults.items() if key != "weight_decay"}
    h = lh.hypergradient(task, rule, hypers, steps=5, engine=engine)
    assert h.status.ok
    assert all(g.isfinite().all() for g in h.grad.values())
    assert h.grad["lr"] != 0
    if rule.name == "adam":
        assert torch.equal(h.params["flat"], torch.ones(2, dtype=torch.float64))


def test_a_rule_of_one_s_own():
    """Any pure update is differentiated: here a smooth cousin of Lion with a state of its own."""

    def update(params, grads, state, h):
        mixed = {k: h["mix"] * state[k] + (1 - h["mix"]) * g for k, g in grads.items()}
        return {k: p - h["lr"] * torch.tanh(mixed[k] / h["width"]) for k, p in params.items()}, mixed

    rule = lh.Rule(
        "soft lion",
        {"lr": 0.1, "mix": 0.9, "width": 0.5},
        lambda p: {k: torch.zeros_like(v) for k, v in p.items()},
        update,
    )
    task = lh.Task(Idle, lambda model, batch: model(), lambda seed: [0] * 6, lambda seed: [0])
    hypers = {"lr": lh.Hyper(0.1, windows=3), "mix": lh.Hyper(0.5), "width": lh.Hyper(0.5)}
    truth, forward, adjoint = (
        lh.hypergradient(task, rule, hypers, steps=6, engine=e).grad
        for e in (lh.FiniteDifference(), lh.Forward(), lh.Adjoint())
    )
    for key in hypers:
        assert torch.allclose(forward[key], truth[key], rtol=1e-6)
        assert torch.allclose(adjoint[key], forward[key], rtol=1e-9)


def test_rules_of_the_same_arguments_are_equal():
    """So that runs share their traces, whoever made the rule."""
    for make in (lh.sgd, lh.adam, lh.adamw, lambda **more: lh.clipped(lh.sgd(**more), 0.5)):
        assert make() == make()
        assert make(lr=0.1) != make()
    assert lh.sgd(nesterov=True) != lh.sgd()
    assert lh.adam(weight_decay=0.01) != lh.adamw(weight_decay=0.01)
    assert lh.clipped(lh.sgd(), 1.0) != lh.clipped(lh.adam(), 1.0)


def two_groups(by_norm_of=1.0):
    """A learning rate of its own for the weights: the rule then sees the parameters in two groups."""
    hypers = {"lr": lh.Hyper(0.1), "lr/w": lh.Hyper(0.2, params="weight"), "grad_clip": lh.Hyper(by_norm_of)}
    x = draw(5, 4, 3, 2)
    task = lh.Task(
        lambda: torch.nn.Linear(2, 1).double(),
        lambda model, batch: model(batch).square().mean() * 10,
        lambda seed: list(x),
        lambda seed: [x[0]],
    )
    return task, hypers


def test_the_norm_is_that_of_all_groups():
    task, hypers = two_groups(0.5)
    rule = lh.clipped(lh.sgd(), 0.5, by="norm")
    found = lh.hypergradient(task, rule, hypers, steps=4, engine=lh.Adjoint())
    with environment():
        start = make_problem(task, rule, hypers, 4, 0).start.params
    model = task.model()
    model.load_state_dict(start)
    groups = [{"params": [model.weight], "lr": 0.2}, {"params": [model.bias], "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    for batch in task.train(0):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) > 0.5
        optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found.params[name], p.detach(), rtol=1e-12, atol=1e-14)
    for engine in (lh.Forward(), lh.FiniteDifference()):
        other = lh.hypergradient(task, rule, hypers, steps=4, engine=engine)
        for key, g in found.grad.items():
            torch.testing.assert_close(other.grad[key], g, rtol=1e-6, atol=1e-9)


def test_a_norm_has_one_level_for_all_parameters():
    task, hypers = two_groups()
    hypers["grad_clip"] = lh.Hyper(1.0, params="weight")
    with pytest.raises(ValueError, match="'grad_clip' has `params`, but 'grad_clip' is one for all parameters"):
        lh.hypergradient(task, lh.clipped(lh.sgd(), 1.0, by="norm"), hypers, steps=4)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint()], ids=repr)
def test_a_gradient_of_zero_has_a_derivative_behind_a_norm(engine):
    zeros = lambda: torch.nn.Linear(2, 1, bias=False).double().apply(lambda m: torch.nn.init.zeros_(m.weight))  # noqa: E731
    batches = [torch.zeros(3, 2, dtype=torch.float64), torch.ones(3, 2, dtype=torch.float64)]
    task = lh.Task(
        zeros, lambda m, b: (m(b) - b.sum(1, keepdim=True)).square().mean(), lambda s: batches, lambda s: batches
    )
    hypers = {"lr": lh.Hyper(0.1), "grad_clip": lh.Hyper(0.5)}
    found = lh.hypergradient(task, lh.clipped(lh.sgd(), 0.5, by="norm"), hypers, steps=2, engine=engine)
    assert found.status.ok
    assert all(bool(g.isfinite().all()) and g.abs().sum() > 0 for g in found.grad.values())
