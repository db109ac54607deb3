"""Every engine against independent oracles and against every other: problems × rules × engines, in float64."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
import oracles
from longhorizon.engines import clipping, vjp
from problems import PROBLEMS, RULES, Case, Point, Setting, compute, hypers_for, problem, relative, task_of

ENGINES = {
    "forward": lambda steps: lh.Forward(compile=False),
    "forward, chunk 2": lambda steps: lh.Forward(chunk=2, compile=False),
    "adjoint, all": lambda steps: lh.Adjoint(store="all"),
    "adjoint, sqrt": lambda steps: lh.Adjoint(store="sqrt"),
    "greedy, horizon T": lambda steps: lh.Greedy(horizon=steps),
}
VARIANTS = {"batchnorm-train", "batchnorm-average", "dropout-everywhere", "tied", "generator"}  # two rules are enough


def rules_for(name):
    if problem(name).replace is not None:
        return ["sgd"]
    return ["sgd", "adam"] if name in VARIANTS else list(RULES)


TABLE = [(name, rule) for name in PROBLEMS for rule in rules_for(name)]


@pytest.mark.parametrize(("name", "rule"), TABLE)
def test_engines_agree_with_central_differences_and_each_other(name, rule):
    case, setting = problem(name), RULES[rule]
    truth = oracles.extrapolated(case, setting)
    engines = {label: make(case.steps) for label, make in ENGINES.items()}
    if name == "quadratic" or (rule == "sgd" and name not in VARIANTS):  # tracing takes seconds: not every pair
        engines["forward, traced"] = lh.Forward(chunk=2, compile=True)  # two shapes, however many windows
        engines["adjoint, traced"] = lh.Adjoint(store="all", compile=True)
    results = {label: compute(case, setting, engine) for label, engine in engines.items()}
    assert all(h.status.ok for h in results.values())
    off = {label: relative(h.grad, truth) for label, h in results.items()}
    assert max(off.values()) <= 1e-6, off
    apart = {label: relative(h.grad, results["forward"].grad) for label, h in results.items()}
    assert max(apart.values()) <= 1e-9, apart
    losses = [h.val_loss for h in results.values()]
    assert max(losses) - min(losses) <= 1e-12


BACKPROP = ["mlp", "dropout", "dropout-everywhere", "batchnorm-train", "transformer", "tied"]


@pytest.mark.parametrize(("name", "rule"), [(name, rule) for name in BACKPROP for rule in rules_for(name)])
def test_adjoint_is_backpropagation_without_its_graph(name, rule):
    case, setting = problem(name), RULES[rule]
    assert relative(compute(case, setting, lh.Adjoint()).grad, oracles.backprop(case, setting, rule)) <= 1e-9


LOSSES = {
    "mse": F.mse_loss,
    "mse, sum": nn.MSELoss(reduction="sum"),
    "mse, none": lambda a, b: F.mse_loss(a, b, reduction="none").mean(),
    "mse, weighted": lambda a, b: F.mse_loss(a, b, weight=b.abs()),
    "huber": nn.HuberLoss(delta=0.5),
    "huber, weighted": lambda a, b: F.huber_loss(a, b, reduction="sum", weight=b.abs()),
    "smooth l1": F.smooth_l1_loss,
    "logits": lambda a, b: F.binary_cross_entropy_with_logits(a, (b > 0).double()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_of_a_regression(name):
    """Some of torch's fused losses have no tangent of their gradient, or one that fails."""

    def batches(seed):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(2, 8, 3, generator=generator, dtype=torch.float64) for _ in range(6)]

    task = lh.Task(
        model=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double(),
        loss=lambda model, batch: LOSSES[name](model(batch[0]), batch[1]),
        train=batches,
        val=lambda seed: batches(seed + 1)[:2],
    )
    hypers = {"lr": lh.Hyper(0.02, windows=2), "momentum": lh.Hyper(0.5)}
    engines = (
        lh.Forward(compile=False),
        lh.Forward(chunk=3, compile=True),
        lh.Adjoint(compile=True),
        lh.FiniteDifference(),
    )
    found = [lh.hypergradient(task, lh.sgd(), hypers, steps=6, engine=engine) for engine in engines]
    assert max(relative(h.grad, found[0].grad) for h in found[:3]) <= 1e-9
    assert relative(found[3].grad, found[0].grad) <= 1e-6


def test_a_validation_loss_of_its_own_and_its_direct_derivative():
    """dL_val/dh at fixed weights counts, and only through the loss that judges."""

    def loss(model, batch, hypers):
        return (
            F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
            + hypers["l2"] * model(batch[0]).square().mean()
        )

    def judge(model, batch, hypers):
        return F.cross_entropy(model(batch[0]), batch[1]) + hypers["price"] * 3.0

    task = task_of(problem("mlp").task.model, loss=loss, val_loss=judge)
    hypers = {"l2": lh.Hyper(0.1), "price": lh.Hyper([0.5, 0.7], windows=2)}
    for engine in (lh.Forward(), lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Greedy(9), lh.Forward(chunk=1)):
        h = lh.hypergradient(task, lh.sgd(lr=0.1), hypers, steps=9, engine=engine)
        assert h.grad["price"].tolist() == pytest.approx([0.0, 3.0], abs=1e-14)
        assert h.grad["l2"].abs() > 1e-4


# --- the paper's own recursion ---


def flat_mlp():
    """A tanh net on flat weights, twice: as a function, and as a task for the library."""

    def loss(w, batch):
        x, y = batch
        return F.cross_entropy(torch.tanh(x @ w[:20].view(5, 4)) @ w[20:].view(4, 3), y)

    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(0.5 * torch.randn(32, dtype=torch.float64))

    task = task_of(Flat, loss=lambda model, batch: loss(model.w, batch))
    return loss, task


def paper_run():
    """40 steps in 5 windows: a case for the library, and the recursion, shared over the same windows."""
    steps, windows = 40, 5
    loss, task = flat_mlp()
    hypers = {
        "lr": lh.Hyper([0.3, 0.25, 0.2, 0.15, 0.1], windows=windows),
        "momentum": lh.Hyper([0.5, 0.6, 0.7, 0.8, 0.9], windows=windows),
        "weight_decay": lh.Hyper([0.02, 0.01, 0.0, 0.01, 0.02], windows=windows),
    }
    start = lh.hypergradient(task, lh.sgd(lr=0.0), {"lr": lh.Hyper(0.0)}, steps=1, seed=3).params["w"]
    val = tuple(torch.cat(parts) for parts in zip(*task.val(3), strict=True))  # equal sizes: the mean of two means
    index = torch.arange(steps) * windows // steps
    values = {key: hyper.values()[index].tolist() for key, hyper in hypers.items()}

    def recursion(**options):
        single = oracles.recursion(loss, start, task.train(3)[:steps], val, values, **options)
        return {key: g.new_zeros(windows).index_add(0, index, g) for key, g in single.items()}

    return Case(task, steps), Setting(lh.sgd(), hypers), recursion


@pytest.mark.parametrize("engine", [lh.Forward(compile=False), lh.Adjoint()], ids=str)
def test_the_paper_s_recursion(engine):
    case, setting, recursion = paper_run()
    assert relative(compute(case, setting, engine).grad, recursion()) <= 1e-9


def test_the_paper_s_printed_form_is_wrong():
    """Appendix A prints δ(v_t) in C^β, where it must be δ(v_{t-1}). Central differences decide."""
    case, setting, recursion = paper_run()
    truth, right, printed = oracles.extrapolated(case, setting), recursion(), recursion(as_printed=True)
    assert relative(right, truth) <= 1e-6
    assert relative({"momentum": printed["momentum"]}, {"momentum": truth["momentum"]}) > 0.1
    for key in ("lr", "weight_decay"):  # their columns do not meet the misprint
        assert torch.equal(printed[key], right[key])


# --- a quadratic with momentum, by hand ---


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Greedy(12)], ids=str)
@pytest.mark.parametrize("windows", [1, 5, 12])
def test_closed_form_of_a_quadratic(engine, windows):
    steps = 12
    starts = {"lr": (0.2, 0.1), "momentum": (0.4, 0.9), "weight_decay": (0.03, 0.0)}
    hypers = {
        key: lh.Hyper(torch.linspace(a, b, windows, dtype=torch.float64).tolist(), windows=windows)
        for key, (a, b) in starts.items()
    }
    index = [t * windows // steps for t in range(steps)]
    every = {key: hyper.values()[index].tolist() for key, hyper in hypers.items()}
    loss, grads = oracles.closed_form(every, Point().w.detach())
    h = lh.hypergradient(problem("quadratic").task, lh.sgd(), hypers, steps=steps, engine=engine)
    assert h.val_loss == pytest.approx(loss, rel=1e-12)
    for key, per_step in grads.items():
        shared = torch.zeros(windows, dtype=torch.float64).index_add(0, torch.tensor(index), torch.from_numpy(per_step))
        assert relative({key: h.grad[key]}, {key: shared}) <= 1e-12


# --- greedy ---


@pytest.mark.parametrize("horizon", [1, 3, 4])
def test_greedy_is_a_row_of_short_exact_runs(horizon):
    """Stretch by stretch: differentiate the loss right after it, from its first state held constant."""
    case, setting = problem("learnt-loss"), RULES["sgd"]
    got = compute(case, setting, lh.Greedy(horizon), per_step=True).per_step
    exact = {}
    for first in range(0, case.steps, horizon):
        last = min(first + horizon, case.steps)
        # The exact hypergradient of the loss after `last` steps, of which only the stretch's own steps are kept.
        values = {
            k: v.values()[[t * v.windows // case.steps for t in range(last)]]
            for k, v in hypers_for(case, setting).items()
        }
        hypers = {k: lh.Hyper(v.tolist(), windows=last) for k, v in values.items()}
        part = lh.hypergradient(case.task, setting.rule, hypers, steps=last, engine=lh.Forward(), seed=3)
        for key, g in part.grad.items():
            exact.setdefault(key, []).append(g[first:last])
    assert relative(got, {key: torch.cat(parts) for key, parts in exact.items()}) <= 1e-9


def test_a_horizon_beyond_the_run_is_the_run():
    case, setting = problem("mlp"), RULES["sgd"]
    at, beyond = (compute(case, setting, lh.Greedy(case.steps + more)).grad for more in (0, 7))
    assert all(torch.equal(at[key], beyond[key]) for key in at)


def test_horizon_one_differs_from_the_truth():
    case, setting = problem("mlp"), RULES["sgd"]
    exact, greedy = (compute(case, setting, e).grad for e in (lh.Adjoint(), lh.Greedy(1)))
    assert relative(greedy, exact) > 1e-2


# --- clip ---


def test_clip_of_the_hessian_product_by_hand():
    """One parameter, loss a w²/2: H·Z = a Z, bounded to ±c in the forward recursion and H·q̂ in the adjoint's."""
    a, lr, clip, steps = 5.0, 0.1, 0.02, 6

    class One(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))

    task = lh.Task(One, lambda model, batch: a * model.w**2 / 2, lambda seed: [0] * steps, lambda seed: [0])
    Z, w = 0.0, 1.0
    for _ in range(steps):
        Z = Z - lr * min(max(a * Z, -clip), clip) - a * w
        w -= lr * a * w
    forward = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(lr)}, steps=steps, engine=lh.Forward(clip=clip))
    assert forward.grad["lr"].item() == pytest.approx(a * w * Z, rel=1e-12)
    trajectory = [(1 - lr * a) ** t for t in range(steps + 1)]
    p, total = a * trajectory[-1], 0.0
    for t in reversed(range(steps)):
        total -= p * a * trajectory[t]
        p += min(max(a * -lr * p, -clip), clip)
    adjoint = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(lr)}, steps=steps, engine=lh.Adjoint(clip=clip))
    assert adjoint.grad["lr"].item() == pytest.approx(total, rel=1e-12)
    exact = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(lr)}, steps=steps, engine=lh.Forward())
    assert abs(forward.grad["lr"] - exact.grad["lr"]) > 1e-3
    assert abs(adjoint.grad["lr"] - exact.grad["lr"]) > 1e-3


@pytest.mark.parametrize("make", [lh.Forward, lh.Adjoint, lambda clip: lh.Greedy(9, clip=clip)])
def test_a_clip_out_of_reach_changes_nothing(make):
    case, setting = problem("mlp"), RULES["sgd"]
    exact, clipped = (compute(case, setting, make(clip=c)).grad for c in (None, 1e6))
    assert all(torch.equal(exact[key], clipped[key]) for key in exact)


def test_forward_s_clip_is_the_same_however_the_columns_are_chunked():
    case, setting = problem("mlp"), RULES["sgd"]
    whole, parts = (compute(case, setting, lh.Forward(clip=1e-2, chunk=c)).grad for c in (None, 3))
    assert relative(parts, whole) <= 1e-12
    assert relative(whole, compute(case, setting, lh.Forward()).grad) > 1e-3


@pytest.mark.parametrize(
    ("engine", "bound"), [(lh.Forward(clip="auto"), "AUTO"), (lh.Adjoint(clip="auto"), "MOVE")], ids=["forward", "back"]
)
def test_the_automatic_clip_has_no_unit(engine, bound, monkeypatch):
    """A learning rate in other units (the gradient is scaled) has a hypergradient in other units, clipped alike."""
    monkeypatch.setattr(clipping, "FEW", 1.0)
    monkeypatch.setattr(clipping, bound, 0.02)
    case, setting = problem("mlp"), RULES["sgd"]
    whole = compute(case, setting, engine).grad
    assert relative(whole, compute(case, setting, lh.Forward()).grad) > 1e-3

    def clipped(product, along):
        if bound == "AUTO":
            return clipping.clipped([product], [along], "auto")[0].tolist()
        return clipping.clipped_back([product], [along], [along], "auto")[0][0].tolist()

    steep, along = torch.tensor([3.0, -0.2]), torch.tensor([1.0, 0.5])
    monkeypatch.setattr(clipping, bound, 2.0)
    assert clipped(steep, along) == pytest.approx([2.0, -0.2])
    assert clipped(9 * steep, 9 * along) == pytest.approx([18.0, -1.8])
    monkeypatch.setattr(clipping, bound, 1e9)
    loose = compute(case, setting, engine).grad
    assert relative(loose, compute(case, setting, lh.Adjoint()).grad) <= 1e-9


def test_on_the_way_back_only_the_few_are_cut():
    """What most entries do is how training goes, and no outlier."""
    adjoint, steep = [torch.full((60,), 0.5), torch.full((4, 10), -0.5)], [torch.zeros(60), torch.zeros(4, 10)]
    steep[0][:3], steep[1][3, 9] = torch.tensor([4.0, -0.06, 0.04]), -7.0
    few, grown = clipping.clipped_back(steep, adjoint, [x / 2 for x in adjoint], "auto")
    assert few[0][:3].tolist() == pytest.approx([0.05, -0.05, 0.04])
    assert few[1][3, 9] == pytest.approx(-0.05)
    assert [int((x != 0).sum()) for x in few] == [3, 1]
    assert grown[0] == pytest.approx(7.25 / 0.3)  # the largest entry of the sum, without and with
    steep[0][:21] = 4.0
    many, grown = clipping.clipped_back(steep, adjoint, adjoint, "auto")
    assert all(torch.equal(a, b) for a, b in zip(many, steep, strict=True))
    assert grown[0] == 1
    by_hand, _ = clipping.clipped_back(steep, adjoint, adjoint, 1.0)  # cuts whatever is there
    assert (by_hand[0].max(), by_hand[1].min()) == (1, -1)
    assert clipping.clipped_back(steep, adjoint, adjoint, None) == (steep, [])
    mixed, _ = clipping.clipped_back([steep[0].double(), steep[1]], adjoint, adjoint, "auto")
    assert [x.dtype for x in mixed] == [torch.float64, torch.float32]


@pytest.mark.parametrize("compiled", [False, True])
def test_the_meter_of_a_clipped_adjoint_shows_what_it_would_have_been(compiled, monkeypatch):
    case, setting = problem("mlp"), RULES["sgd"]
    exact = compute(case, setting, lh.Adjoint()).meter
    assert exact.uncut is None
    loose = compute(case, setting, lh.Adjoint(clip=1e9, compile=compiled)).meter  # never cuts
    for size in (loose.size, loose.uncut):
        torch.testing.assert_close(size, exact.size, rtol=1e-9, atol=0)
    doubled = lambda product, *_: (product, [product[0].new_full((), 2.0)])  # noqa: E731
    monkeypatch.setattr(vjp, "clipped_back", doubled)
    cut = compute(case, setting, lh.Adjoint(clip="auto", compile=compiled)).meter
    torch.testing.assert_close(cut.uncut[:, 0], cut.size[:, 0] * 2.0 ** (cut.steps[-1] - cut.steps))
    assert cut.growth(0, int(cut.steps[-1]), uncut=True) > cut.growth(0, int(cut.steps[-1]))


@pytest.mark.parametrize("clip", ["auto", 10.0])
@pytest.mark.parametrize("engine", [lh.Forward, lh.Adjoint])
def test_a_clip_leaves_the_gradient_s_own_slope_alone(engine, clip):
    """∂g/∂λ of a hyperparameter of the loss is no part of H·Z: with one step there is no H·Z, and nothing to clip."""
    x = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    task = lh.Task(
        lambda: torch.nn.Linear(5, 3).double(),
        lambda model, b, hypers: model(b).square().mean() + hypers["l2"] * 1e3 * model.weight.square().sum(),
        lambda seed: [x] * 9,
        lambda seed: [x],
        val_loss=lambda model, b: model(b).square().mean(),
    )
    for steps in (1, 9):
        hypers = {"l2": lh.Hyper(1e-5, step=1e-5)}
        exact, found = (
            lh.hypergradient(task, lh.sgd(lr=0.05), hypers, steps=steps, engine=e).grad["l2"]
            for e in (engine(), engine(clip=clip))
        )
        assert found.sign() == exact.sign() != 0
        assert steps > 1 or torch.allclose(found, exact, rtol=1e-12)


def test_the_automatic_clip_traced_is_the_plain_one():
    case, setting = problem("mlp"), RULES["sgd"]
    for make in (lambda c: lh.Forward(clip="auto", compile=c, chunk=2), lambda c: lh.Adjoint(clip="auto", compile=c)):
        plain, traced = (compute(case, setting, make(c)).grad for c in (False, True))
        assert relative(traced, plain) <= 1e-9


# --- the automatic choice ---


def test_auto_says_what_it_picked_and_why():
    case = problem("mlp")
    few = lh.hypergradient(case.task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=8)
    assert few.engine.startswith("forward")
    assert "N=1 values, T=8 steps, D=57 parameters" in few.engine
    many = lh.hypergradient(case.task, lh.sgd(), {"lr": lh.Hyper(0.1, windows=8)}, steps=8)
    assert many.engine.startswith("adjoint")
    assert "N=8" in many.engine
    single = lh.hypergradient(case.task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=8, per_step=True)
    assert single.engine.startswith("adjoint")
    assert single.per_step["lr"].shape == (8,)


def test_auto_goes_by_memory(monkeypatch):
    modules = [sys.modules[f"longhorizon.engines.{name}"] for name in ("adjoint", "choose")]
    many = {"lr": lh.Hyper(0.1, windows=16)}

    def pick(free, **options):
        for module in modules:
            monkeypatch.setattr(module, "free_memory", lambda device: free)
        return lh.hypergradient(problem("mlp").task, lh.sgd(), many, steps=16, **options).engine

    state = 2 * 57 * 8 + 8  # weights, velocity and counter, in bytes
    assert pick(100 * state).startswith("adjoint, all states kept")
    assert pick(2 * 11 * state).startswith("adjoint, replayed")
    assert pick(10 * state).startswith("forward")
    with pytest.raises(ValueError, match=r"per_step=True needs the adjoint"):
        pick(10 * state, per_step=True)


class Scaled(torch.nn.Module):
    """A parameter without dimensions, and a buffer that is written with `alpha=`."""

    def __init__(self):
        super().__init__()
        self.layer, self.scale = torch.nn.Linear(5, 3), torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.layer(x - self.mean) * self.scale


def test_a_parameter_without_dimensions_and_a_sum_with_alpha():
    """In float32 torch makes float64 of the first's tangent; tracing a tangent of the second ends the process."""
    x = torch.randn(30, 8, 5, generator=torch.Generator().manual_seed(0)).float()
    task = lh.Task(
        lambda: Scaled().float(), lambda m, b: (m(b) - 1).square().mean(), lambda s: list(x), lambda s: [x[0]]
    )
    found = [
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.05)}, steps=30, engine=engine).grad["lr"]
        for engine in (lh.Forward(), lh.Forward(compile=False), lh.Adjoint())
    ]
    assert torch.allclose(found[0], found[2], rtol=1e-3)
    assert torch.allclose(found[1], found[2], rtol=1e-3)


def test_a_misspelt_key_of_eps_is_named():
    case, setting = problem("mlp"), RULES["sgd"]
    with pytest.raises(ValueError, match="eps has the key 'lrr', which is not learnt. Did you mean 'lr'"):
        compute(case, setting, lh.FiniteDifference(eps={"lrr": 1e-3}))
