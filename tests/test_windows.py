"""Sharing: a window's hypergradient is the sum of its steps', for any number of windows and any length of run."""

import pytest
import torch

import longhorizon as lh
from longhorizon.hypers import window_lengths, window_of, window_start
from problems import RULES, compute, problem

SIZES = [
    (steps, windows) for steps in (1, 2, 7, 10, 12, 100) for windows in (1, 2, 3, 5, 7, 10, 12, 99) if windows <= steps
]


@pytest.mark.parametrize(("steps", "windows"), SIZES)
def test_windows_tile_the_run(steps, windows):
    index = [window_of(t, steps, windows) for t in range(steps)]
    assert index == sorted(index)
    assert set(index) == set(range(windows))
    lengths = [index.count(w) for w in range(windows)]
    assert max(lengths) - min(lengths) <= 1
    assert window_lengths(steps, windows).tolist() == lengths
    assert [window_start(w, steps, windows) for w in range(windows)] == [index.index(w) for w in range(windows)]


def spread(windows):
    """Equal values: the same run, however many windows."""
    return lh.Hyper([0.3] * windows, windows=windows)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Greedy(4)], ids=str)
@pytest.mark.parametrize("windows", [1, 2, 4, 9])
def test_a_window_is_the_sum_of_its_steps(engine, windows):
    case = problem("mlp")
    steps = case.steps

    def grad(n):
        hypers = {"lr": spread(n), "momentum": spread(n)}
        return lh.hypergradient(case.task, lh.sgd(), hypers, steps=steps, engine=engine).grad

    single, shared = grad(steps), grad(windows)  # N = T, and fewer
    index = torch.tensor([window_of(t, steps, windows) for t in range(steps)])
    for key in single:
        total = torch.zeros(windows, dtype=torch.float64).index_add(0, index, single[key])
        assert torch.allclose(shared[key], total, rtol=1e-9, atol=1e-12)
        assert shared[key].abs().max() > 1e-3


@pytest.mark.parametrize("engine", [lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Greedy(9)], ids=str)
def test_per_step_is_what_one_window_per_step_gives(engine):
    case = problem("learnt-loss")
    setting = RULES["sgd"]
    h = compute(case, setting, engine, per_step=True)
    values = {
        k: v.values()[[window_of(t, case.steps, v.windows) for t in range(case.steps)]]
        for k, v in (setting.hypers | case.extra).items()
    }
    single = {k: lh.Hyper(v.tolist(), windows=case.steps) for k, v in values.items()}
    forward = lh.hypergradient(case.task, setting.rule, single, steps=case.steps, engine=lh.Forward(), seed=3)
    for key, g in forward.grad.items():
        assert torch.allclose(h.per_step[key], g, rtol=1e-9, atol=1e-12)
        windows = len(h.grad[key])
        sums = [
            h.per_step[key][[window_of(t, case.steps, windows) == w for t in range(case.steps)]].sum()
            for w in range(windows)
        ]
        assert torch.allclose(h.grad[key], torch.stack(sums), rtol=1e-12, atol=1e-15)


def test_per_step_is_absent_unless_asked_for():
    assert compute(problem("mlp"), RULES["sgd"], lh.Adjoint()).per_step is None
    assert (
        compute(problem("mlp"), RULES["sgd"], lh.Adjoint(per_step=True)).per_step.keys() == RULES["sgd"].hypers.keys()
    )


def test_mean_divides_by_the_window_s_length():
    h = compute(problem("mlp"), RULES["sgd"], lh.Adjoint())
    assert torch.equal(h.mean["momentum"], h.grad["momentum"] / torch.tensor([5.0, 4.0]))
    assert torch.equal(h.mean["dampening"], h.grad["dampening"] / 9)


def test_values_evaluate_elsewhere_than_at_the_start():
    case = problem("mlp")
    here = lh.hypergradient(case.task, lh.sgd(), {"lr": lh.Hyper([0.1, 0.4], windows=2)}, steps=9)
    there = lh.hypergradient(
        case.task,
        lh.sgd(),
        {"lr": lh.Hyper(0.0, windows=2)},
        steps=9,
        values={"lr": torch.tensor([0.1, 0.4], dtype=torch.float64)},
    )
    assert torch.equal(here.grad["lr"], there.grad["lr"])
    assert here.val_loss == there.val_loss


def test_values_may_lie_outside_the_bounds_and_leave_the_caller_s_tensor_alone():
    """Central differences at a bound need the other side of it."""
    given = torch.tensor([0.5], dtype=torch.float64)
    hypers = {"lr": lh.Hyper(0.1, low=0.0, high=0.2)}
    lh.hypergradient(problem("mlp").task, lh.sgd(), hypers, steps=2, values={"lr": given}, engine=lh.FiniteDifference())
    assert given.item() == 0.5


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint(), lh.FiniteDifference()], ids=str)
def test_the_scale_is_the_outer_step_s_business(engine):
    """grad is dL/d(value) on either scale."""
    case = problem("mlp")
    linear, log = (
        lh.hypergradient(case.task, lh.sgd(), {"lr": lh.Hyper(0.2, scale=scale, low=0.01)}, steps=9, engine=engine)
        for scale in ("linear", "log")
    )
    assert torch.equal(linear.grad["lr"], log.grad["lr"])


def test_a_fixed_entry_is_used_but_not_learnt():
    """learn=False: the same run as if it were learnt, and no derivative for it."""
    case = problem("mlp")
    schedule = [0.1, 0.9]

    def run(learn):
        hypers = {"lr": lh.Hyper(0.1), "momentum": lh.Hyper(schedule, windows=2, learn=learn)}
        return lh.hypergradient(case.task, lh.sgd(), hypers, steps=9, engine=lh.Forward())

    fixed, learnt = run(False), run(True)
    assert fixed.grad.keys() == {"lr"}
    assert learnt.grad.keys() == {"lr", "momentum"}
    assert torch.allclose(fixed.grad["lr"], learnt.grad["lr"], rtol=1e-12)
    assert fixed.val_loss == learnt.val_loss


def test_a_run_of_one_step():
    case = problem("mlp")
    hypers = {"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.1)}
    grads = [
        lh.hypergradient(case.task, lh.sgd(), hypers, steps=1, engine=e).grad
        for e in (lh.Forward(), lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Greedy(1), lh.FiniteDifference())
    ]
    for key in hypers:
        assert all(torch.allclose(g[key], grads[0][key], rtol=1e-6) for g in grads)


# --- parameter groups ---


def test_groups_are_torch_s_parameter_groups():
    """The same run with torch.optim: another rate for the head, no decay on vectors."""
    case = problem("groups")
    h = compute(case, RULES["sgd"], lh.Forward())
    torch.manual_seed(0)
    model = case.task.model()
    start = lh.hypergradient(case.task, lh.sgd(lr=0.0), {"lr": lh.Hyper(0.0)}, steps=1, seed=3).params
    model.load_state_dict(start)
    optimizer = torch.optim.SGD([{"params": [p], "name": n} for n, p in model.named_parameters()], lr=0.1, momentum=0.6)
    hypers = case.replace
    for t, batch in enumerate(case.task.train(3)[: case.steps]):
        now = {k: hyper.values()[window_of(t, case.steps, hyper.windows)].item() for k, hyper in hypers.items()}
        for group in optimizer.param_groups:
            (p,) = group["params"]
            group["lr"] = now["lr/head" if group["name"].startswith("2.") else "lr"]
            group["weight_decay"] = now["weight_decay/matrices"] if p.ndim >= 2 else 0.0
            group["dampening"] = now["dampening"]
        optimizer.zero_grad()
        case.task.loss(model, batch).backward()
        optimizer.step()
    for name, p in model.named_parameters():
        assert torch.allclose(h.params[name], p, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("selector", "picked"),
    [
        ("0.*", {"0.weight", "0.bias"}),
        (["*.bias", "2.weight"], {"0.bias", "2.bias", "2.weight"}),
        ("ndim>=2", {"0.weight", "2.weight"}),
        ("ndim<2", {"0.bias", "2.bias"}),
        (lambda name, p: p.numel() > 20, {"0.weight"}),
    ],
)
def test_selectors(selector, picked):
    """A huge rate on the selected parameters moves them and no others."""
    task = problem("mlp").task
    hypers = {"lr/some": lh.Hyper(1.0, params=selector)}
    before = lh.hypergradient(task, lh.sgd(lr=0.0), {"lr": lh.Hyper(0.0)}, steps=1).params
    after = lh.hypergradient(task, lh.sgd(lr=0.0), hypers, steps=1).params
    assert {name for name in after if not torch.equal(after[name], before[name])} == picked
