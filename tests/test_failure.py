"""A run that fails is a result that says where; one that cannot be differentiated is refused by name beforehand."""

import dataclasses
import os
import re
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import longhorizon as lh
from longhorizon import functional
from longhorizon.engines.choose import instead
from longhorizon.problem import environment, make_problem
from problems import assert_identical, classify, held_out, mlp, pairs, problem, task_of, through_a_file

ENGINES = {
    "forward": lh.Forward(compile=False),
    "traced": lh.Forward(compile=True),
    "adjoint-all": lh.Adjoint("all"),
    "adjoint-sqrt": lh.Adjoint("sqrt"),
    "greedy": lh.Greedy(20),
    "difference": lh.FiniteDifference(),
    "factorial": lh.Factorial(1e-3, pairs=1),
}
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


class One(nn.Module):
    """A single number."""

    dtype = torch.float64

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1, dtype=self.dtype))


class Single(One):
    dtype = torch.float32


def endless(seed):
    return [torch.tensor(float(t)) for t in range(64)]


# --- the loss ---


class Start(One):
    def __init__(self):
        super().__init__()
        self.w.data.fill_(1.0)


def diverging():
    """w ← w − 10 · 4 w³ from 1: −39, 2e6, −5e20 …; soon the loss w⁴ overflows."""
    return lh.Task(Start, lambda model, batch: model.w.pow(4).sum(), endless, lambda seed: [0])


@EVERY_ENGINE
def test_a_diverging_loss_names_its_step(engine):
    task = diverging()
    w, first = 1.0, 0
    while w**4 < float("inf") if abs(w) < 1e77 else False:
        w, first = w - 10 * 4 * w**3, first + 1
    h = lh.hypergradient(
        task, lh.sgd(), {"lr": lh.Hyper(10.0, windows=4), "momentum": lh.Hyper(0.0)}, steps=20, engine=engine
    )
    assert not h.status.ok
    assert not h.status
    assert (h.status.what, h.status.step) == ("loss", first)
    assert re.fullmatch(rf"non-finite loss at step {first}: .*lower `lr`.*", str(h.status))
    assert all(g.isnan().all() for g in (h.grad | h.mean).values())
    assert h.train_loss[:first].isfinite().all()
    assert not h.train_loss[first:].isfinite().any()


@EVERY_ENGINE
def test_a_validation_loss_that_is_not_finite(engine):
    task = lh.Task(
        One,
        lambda model, batch: (model.w - 1).square().sum(),
        endless,
        lambda seed: [0],
        val_loss=lambda model, batch: (0.1 - model.w).log().sum(),  # which training makes grow beyond 0.1
    )
    h = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1, windows=2)}, steps=4, engine=engine)
    assert (h.status.what, h.status.step) == ("validation loss", 4)
    assert h.grad["lr"].isnan().all()
    assert torch.tensor(h.val_loss).isnan()


def test_a_validation_loss_with_an_infinite_slope():
    """√w at w = 0: the loss is 0, its derivative is not finite."""
    task = lh.Task(
        One,
        lambda model, batch: (0 * model.w).sum(),
        endless,
        lambda seed: [0],
        val_loss=lambda model, batch: model.w.sqrt().sum(),
    )
    for engine, what in ((lh.Forward(), "tangent"), (lh.Adjoint(), "adjoint")):
        h = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, engine=engine)
        assert h.status.what == what
        assert h.grad["lr"].isnan().all()


@pytest.mark.parametrize(("engine", "what"), [(lh.Forward(), "tangent"), (lh.Adjoint(), "adjoint")])
def test_a_validation_loss_with_an_infinite_slope_in_a_value(engine, what):
    """√h at h = 0, and the same as 0 · ∞."""
    for slope in (lambda h: h.sqrt(), lambda h: h.abs().sqrt()):
        task = lh.Task(
            One,
            lambda model, batch, hypers: model.w.square().sum(),
            endless,
            lambda seed: [0],
            val_loss=lambda model, batch, hypers: model.w.sum() + slope(hypers["h"]),  # noqa: B023
        )
        hypers = {"h": lh.Hyper(0.0, step=0.1), "lr": lh.Hyper(0.1)}
        h = lh.hypergradient(task, lh.sgd(), hypers, steps=4, engine=engine)
        assert h.status.what == what
        assert h.grad["h"].isnan().all()
        if what == "tangent":
            assert h.grad["lr"].isfinite().all()


@pytest.mark.parametrize(
    "status", [lh.Status(w, 3) for w in ("loss", "tangent", "adjoint", "validation loss", "difference")], ids=str
)
def test_every_failure_has_a_remedy(status):
    assert not status
    assert f"non-finite {status.what} at step 3: " in str(status)
    assert "lower `lr`" in str(status)
    assert lh.Status()
    assert str(lh.Status()) == "ok"


# --- the derivative ---

LR, STEPS = 100.0, 30


def unstable():
    """cos(w) + h sin(w) at its maximum w = 0 with h = 0: the gradient is exactly 0 and the run stands still.

    A push by h at step t moves w by −lr, and the gradient's slope −1 multiplies that by 1 + lr in every later step:

        dL/dh_t = −lr (1 + lr)^(T − 1 − t)        for the validation loss sin(w)

    In float32 this passes the largest number after 19 steps, while the loss is 1 all along.
    """

    def loss(model, batch, hypers):
        return (model.w.cos() + hypers["h"] * model.w.sin()).sum()

    return lh.Task(Single, loss, endless, lambda seed: [0], val_loss=lambda model, batch: model.w.sin().sum())


PUSH = [-LR * (1 + LR) ** (STEPS - 1 - t) for t in range(STEPS)]
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    ("engine", "what", "step"),
    [
        # the first column passes the largest number at the end of step 19; walking back, ten steps are left by then
        (lh.Forward(compile=False), "tangent", 19),
        (lh.Forward(chunk=4), "tangent", 19),
        (lh.Adjoint("all"), "adjoint", 10),
        (lh.Adjoint("sqrt"), "adjoint", 10),
        (lh.Greedy(STEPS), "adjoint", 10),
    ],
    ids=str,
)
def test_an_overflowing_derivative_names_its_step_and_keeps_what_is_exact(engine, what, step):
    hypers = {"h": lh.Hyper(0.0, windows=STEPS)}
    h = lh.hypergradient(unstable(), lh.sgd(lr=LR), hypers, steps=STEPS, engine=engine)
    assert (h.status.what, h.status.step) == (what, step)
    assert "clip" in str(h.status)
    assert h.val_loss == 0.0
    finite = torch.tensor([abs(push) < LARGEST for push in PUSH])
    assert torch.equal(h.grad["h"].isfinite(), finite)
    assert finite.sum() == 19
    truth = torch.tensor(PUSH, dtype=torch.float64)
    assert torch.allclose(h.grad["h"][finite], truth[finite], rtol=1e-4)
    assert h.grad["h"][~finite].isnan().all()


def test_a_stretch_that_overflows_costs_greedy_that_stretch():
    """Two of three stretches of ten; the first of each is fine with a rate that moves it but little."""
    hypers = {"h": lh.Hyper(0.0, windows=STEPS), "lr": lh.Hyper([1e-3, 1e20, 1e-3], windows=3, learn=False)}
    h = lh.hypergradient(unstable(), lh.sgd(), hypers, steps=STEPS, engine=lh.Greedy(10))
    assert h.status.what == "adjoint"
    assert 10 <= h.status.step < 20
    finite = h.grad["h"].isfinite()
    assert finite[:10].all()
    assert not finite[10:18].any()
    assert finite[20:].all()


@EVERY_ENGINE
@pytest.mark.parametrize("make", [diverging, unstable])
def test_a_failed_run_saved_anywhere_fails_the_same(make, engine):
    key, rule = ("lr", lh.sgd()) if make is diverging else ("h", lh.sgd(lr=LR))
    hypers = {key: lh.Hyper(10.0 if make is diverging else 0.0, windows=2, step=0.1)}
    with environment():
        p = make_problem(make(), rule, hypers, STEPS, 0)
        whole = engine.begin(p)
        saves = [through_a_file(whole.save())]
        while not whole.done:
            whole.advance()
            saves.append(through_a_file(whole.save()))
        expected = whole.result()
        assert make is unstable or not expected.status
        for saved in [*saves[:: max(1, len(saves) // 8)], saves[-1]]:
            run = engine.begin(p, saved)
            while not run.done:
                run.advance()
            assert_identical(run.result(), expected)


@pytest.mark.parametrize("engine", [lh.Forward(clip=1.0), lh.Adjoint(clip=1.0), lh.Greedy(5)], ids=str)
def test_the_remedies_work(engine):
    h = lh.hypergradient(unstable(), lh.sgd(lr=LR), {"h": lh.Hyper(0.0, windows=STEPS)}, steps=STEPS, engine=engine)
    assert h.status.ok
    assert h.grad["h"].isfinite().all()


def test_a_product_that_overflows_at_the_end():
    """A tangent of 1e30 is finite, its product with a slope of 1e30 is not: no infinity without a status."""
    task = lh.Task(
        Single,
        lambda model, batch, hypers: (1e30 * hypers["h"] * model.w).sum(),
        endless,
        lambda seed: [0],
        val_loss=lambda model, batch: (1e30 * model.w).sum(),
    )
    for engine, what in ((lh.Forward(), "tangent"), (lh.Adjoint(), "adjoint")):
        h = lh.hypergradient(task, lh.sgd(lr=1.0), {"h": lh.Hyper(0.0)}, steps=2, engine=engine)
        assert h.status.what == what
        assert h.grad["h"].isnan().all()


def test_a_difference_of_an_infinite_loss_is_not_known():
    task = lh.Task(
        One,
        lambda model, batch: -model.w.sum(),
        lambda seed: [0],
        lambda seed: [0],
        val_loss=lambda model, batch: torch.where(model.w > 1, torch.inf, model.w).sum(),
    )
    h = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(1.0)}, steps=1, engine=lh.FiniteDifference())
    assert h.status.what == "difference"
    assert h.grad["lr"].isnan().all()
    assert h.mean["lr"].isnan().all()


# --- streams and models that do not repeat ---


class Restless:
    """Batches from the operating system's noise, from some step on."""

    def __init__(self, first: int):
        self.first = first

    def __getitem__(self, t):
        return pairs(t if t < self.first else int.from_bytes(os.urandom(4), "big"))


def noise(seed):
    while True:
        yield pairs(int.from_bytes(os.urandom(4), "big"))


class Nervous(nn.Module):
    """Randomness that no seed of ours reaches."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3).double()
        self.own = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.linear(x) * (1 + torch.rand((), generator=self.own, dtype=torch.float64))


@pytest.mark.parametrize(
    ("train", "model", "engine", "error", "words"),
    [
        (lambda seed: Restless(0), mlp, lh.Forward(), ValueError, r"Task.train\(0\)\[0\] gave two different batches"),
        (lambda seed: Restless(5), mlp, lh.Adjoint("sqrt"), lh.ReplayError, r"repeating training from step 6 to 9"),
        (
            lambda seed: Restless(5),
            mlp,
            lh.Adjoint("all"),
            lh.ReplayError,
            r"step 8 had the loss .*random beyond its seed",
        ),
        (noise, mlp, lh.FiniteDifference(), lh.ReplayError, r"step 0 had the loss .*random beyond its seed"),
        (
            lambda seed: [pairs(t) for t in range(9)],
            Nervous,
            lh.Adjoint("all"),
            lh.ReplayError,
            "random beyond its seed",
        ),
        (
            lambda seed: [pairs(t) for t in range(9)],
            Nervous,
            lh.Adjoint("sqrt"),
            lh.ReplayError,
            "random beyond its seed",
        ),
        (
            lambda seed: [pairs(t) for t in range(9)],
            Nervous,
            lh.FiniteDifference(),
            lh.ReplayError,
            "random beyond its seed",
        ),
    ],
)
def test_what_does_not_repeat_is_noticed(train, model, engine, error, words):
    task = lh.Task(model, classify, train, held_out(pairs))
    with pytest.raises(error, match=words):
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=9, engine=engine)


def test_an_unrepeatable_stream_is_kept_where_it_is_read_once():
    """The adjoint keeps a generator's batches, so even noise has an exact hypergradient: that of the run it gave."""
    task = lh.Task(mlp, classify, noise, held_out(pairs))
    assert lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=9, engine=lh.Adjoint("sqrt")).status.ok


def test_batches_are_compared_whatever_they_hold():
    """NaN in an array or as a number is no difference; another number of parts is one, and no error of ours."""

    class Stream:
        def __init__(self, more):
            self.more = more

        def __getitem__(self, t):
            return (*pairs(t), self.more())

    def judge(model, batch):
        return classify(model, batch[:2])

    def run(more):
        task = lh.Task(mlp, judge, lambda seed: Stream(more), held_out(pairs))
        return lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=3, engine=lh.Forward(compile=False))

    assert run(lambda: np.array([1.0, np.nan])).status.ok
    assert run(lambda: float("nan")).status.ok
    assert run(lambda: np.array(["a", "b"])).status.ok
    lengths = iter(range(1, 99))
    for more in (lambda: [0.0] * next(lengths), lambda: np.zeros(next(lengths)), lambda: np.full(2, next(lengths))):
        with pytest.raises(ValueError, match="gave two different batches"):
            run(more)


def test_an_index_error_of_the_user_s_own_is_not_the_end_of_the_stream():
    class Stream(list):
        def __getitem__(self, t):
            return [][t] if t == 2 else pairs(t)

    task = lh.Task(mlp, classify, lambda seed: Stream(range(5)), held_out(pairs))
    with pytest.raises(IndexError, match="list index out of range"):
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=5, engine=lh.Forward())


class Missing:
    """A stream that lacks an item."""

    def __init__(self, lacks):
        self.lacks = lacks

    def __getitem__(self, t):
        if t == self.lacks:
            raise FileNotFoundError("17.png")
        return pairs(t)


def mislabelled(lacks):
    return [(pairs(t)[0], pairs(t)[1] + 9 * (t == lacks)) for t in range(9)]


@pytest.mark.parametrize("train", [Missing, mislabelled], ids=lambda make: make.__name__)
@EVERY_ENGINE
def test_an_error_in_a_later_step_says_which(train, engine):
    task = lh.Task(mlp, classify, lambda seed: train(6), held_out(pairs))
    with pytest.raises((OSError, IndexError, RuntimeError)) as caught:
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=9, seed=5, engine=engine)
    (note,) = caught.value.__notes__
    assert re.fullmatch(r"The last training batch asked for was that of step 6 \(from 0\), with seed \d+\.", note)


@pytest.mark.parametrize("seeds", [1, 3])
def test_an_error_in_a_later_step_of_a_test_says_which(seeds):
    task = lh.Task(mlp, classify, lambda seed: mislabelled(6), held_out(pairs), test=lambda: [pairs(1)])
    with pytest.raises((IndexError, RuntimeError)) as caught:
        lh.retrain(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, {"lr": [0.1]}, steps=9, seeds=seeds)
    assert re.match(
        r"The last training batch asked for was that of step 6 \(from 0\), with", caught.value.__notes__[-1]
    )


def test_an_error_within_a_run_says_that_it_can_be_resumed(tmp_path):
    seen = []

    def train(seed):
        seen.append(seed)
        return Missing(6 if len(set(seen)) > 1 and not fixed else -1)

    fixed = []
    task = lh.Task(mlp, classify, train, held_out(pairs))
    words = {"steps": 9, "outer_steps": 2, "engine": lh.Forward(), "dir": tmp_path / "r", "confirm": 0}
    with pytest.raises(FileNotFoundError) as caught:
        lh.tune(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, **words)
    where, remedy = caught.value.__notes__
    assert where.endswith(f"step 6 (from 0), with seed {seen[-1]}, in outer step 2.")
    assert remedy.startswith(f"{tmp_path / 'r'} has what was done up to the last checkpoint: put this right, and the")
    fixed.append(True)
    assert len(lh.tune(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, **words).history) == 2


# --- models that cannot be differentiated twice, or only in part ---


class OldStyle(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp()


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return g * x.exp()


class Batched(NewStyle):
    generate_vmap_rule = True


class Through(nn.Module):
    def __init__(self, fn):
        super().__init__()
        self.linear, self.fn = nn.Linear(5, 3).double(), fn

    def forward(self, x):
        return self.fn(self.linear(x))


class Hidden(nn.Module):
    """A running mean that the loss reads, written where autograd does not look."""

    def __init__(self, write):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("centre", torch.zeros(3))
        self.write = write
        self.double()

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            self.write(self, y)
        return y - self.centre


def in_place(model, y):
    with torch.no_grad():
        model.centre.mul_(0.5).add_(0.5 * y.mean(0))


def anew(model, y):
    with torch.no_grad():
        model.centre = 0.5 * model.centre + 0.5 * y.mean(0)


class OwnNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(2 * x)


def linear(*more):
    return nn.Sequential(nn.Linear(5, 3), *more).double()


def saving(y):
    return checkpoint(torch.tanh, y, use_reentrant=False)


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 3))).double()


def old_spectral():
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(5, 3))).double()


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(4, 3)

    def forward(self, x):
        return self.bag((x > 0).long())


def bags():
    return Bags().double()


def weight_norm(dim=0):
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 3), dim=dim)).double()


def old_weight_norm():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it is to go
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(5, 3))).double()


def instance_norm():
    return linear(nn.Unflatten(1, (3, 1)), nn.InstanceNorm1d(3, track_running_stats=True))


CANNOT = lh.NotDifferentiable
REFUSED = {
    # name: model, engine, error, words
    "once": (lambda: Through(OldStyle.apply), lh.Adjoint(), CANNOT, r"Adjoint cannot .*once_differentiable"),
    "old-style": (lambda: Through(OldStyle.apply), lh.Forward(), CANNOT, r"Forward cannot .*setup_context.*lh.Adjoint"),
    "no-vmap": (lambda: Through(NewStyle.apply), lh.Forward(), CANNOT, r"Forward cannot .*NewStyle.*vmap"),
    "no-jvp": (lambda: Through(Batched.apply), lh.Forward(), CANNOT, r"Forward cannot .*jvp"),
    "hidden-in-place": (lambda: Hidden(in_place), lh.Adjoint(), CANNOT, r"buffer 'centre'.*no_grad.*lh.Forward"),
    "hidden-anew": (lambda: Hidden(anew), lh.Greedy(2), CANNOT, r"buffer 'centre'.*no_grad.*lh.Forward"),
    "spectral-adjoint": (spectral, lh.Adjoint(), CANNOT, r"buffer '0.parametrizations.weight.0._u'"),
    "bag-forward": (bags, lh.Forward(), CANNOT, r"_embedding_bag .*lh.Factorial\(\), which needs no derivative"),
    "bag-adjoint": (bags, lh.Adjoint(), CANNOT, r"_embedding_bag_backward.*lh.Factorial"),
    "weight-norm": (
        old_weight_norm,
        lh.Forward(),
        TypeError,
        r"module '0' is weight-normed by a hook.*parametrizations",
    ),
    "sync": (lambda: linear(nn.SyncBatchNorm(3)), "auto", TypeError, r"module '1' is SyncBatchNorm"),
    "instance": (instance_norm, "auto", TypeError, r"module '2' is InstanceNorm1d.*track_running_stats=False"),
    "own-norm": (lambda: linear(OwnNorm(3)), "auto", TypeError, r"module '1' is OwnNorm, a BatchNorm with a forward"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(3)), "auto", TypeError, r"module '0' is LazyLinear: run one batch"),
    "checkpointed": (lambda: Through(saving), lh.Forward(), CANNOT, r"Forward cannot .*saved tensor hooks.*lh.Adjoint"),
    "rrelu": (lambda: linear(nn.RReLU()), lh.Forward(), CANNOT, r"rrelu_with_noise.*lh.Adjoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name_before_the_run(name):
    model, engine, error, words = REFUSED[name]
    steps: list[lh.Progress] = []
    with pytest.raises(error, match=words):
        lh.hypergradient(task_of(model), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=9, engine=engine, progress=steps.append)
    assert steps == []


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_normalisation_is_differentiated_twice(dim):
    task, hypers = task_of(lambda: weight_norm(dim)), {"lr": lh.Hyper(0.1, windows=2), "momentum": lh.Hyper(0.5)}
    differences = lh.hypergradient(task, lh.sgd(), hypers, steps=9, engine=lh.FiniteDifference())
    for engine in (lh.Forward(), lh.Adjoint(store="all"), lh.Adjoint(store="sqrt")):
        found = lh.hypergradient(task, lh.sgd(), hypers, steps=9, engine=engine)
        for key, g in differences.grad.items():
            torch.testing.assert_close(found.grad[key], g, rtol=1e-6, atol=1e-9)
    model, x = weight_norm(dim), torch.randn(4, 5, dtype=torch.float64)
    ours = functional.Functional(task, model)
    expected, params = model(x), dict(model.named_parameters())
    with ours._holding({name: p.detach() for name, p in params.items()}):
        torch.testing.assert_close(model(x), expected.detach(), rtol=1e-12, atol=1e-14)


ALLOWED = {
    # neither influences a derivative: nothing reads it; it does not depend on the parameters
    "a record": (lambda: Recorder(), lh.Adjoint()),
    "an annealed buffer": (lambda: Annealed(), lh.Adjoint()),
    # forward mode sees through no_grad; the adjoint through a custom backward made of plain operations
    "hidden-in-place": (lambda: Hidden(in_place), lh.Forward()),
    "hidden-anew": (lambda: Hidden(anew), lh.Forward()),
    "new-style": (lambda: Through(NewStyle.apply), lh.Adjoint()),
    "data-dependent": (lambda: Through(lambda y: 2 * y if y.sum() > 0 else y), lh.Forward(compile=False)),
    "recurrent": (lambda: Recurrent(), lh.Forward()),
    # its vectors are written by out=
    "spectral": (spectral, lh.Forward()),
    "spectral-old": (old_spectral, lh.Forward(compile=False)),
}


class Recorder(Hidden):
    def __init__(self):
        super().__init__(in_place)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.training:
            self.write(self, y)
        return y


class Annealed(Hidden):
    def __init__(self):
        def write(model, y):
            with torch.no_grad():
                model.centre.add_(torch.tensor([0.1, 0.2, 0.3]))

        super().__init__(write)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRU(5, 4, batch_first=True).double(), nn.Linear(4, 3).double()

    def forward(self, x):
        return self.head(self.cell(x[:, None])[0][:, -1])


@pytest.mark.parametrize("name", ALLOWED)
def test_not_refused_where_it_is_exact(name):
    model, engine = ALLOWED[name]
    got, truth = (
        lh.hypergradient(task_of(model), lh.sgd(), {"lr": lh.Hyper(0.2)}, steps=6, engine=e)
        for e in (engine, lh.FiniteDifference())
    )
    assert torch.allclose(got.grad["lr"], truth.grad["lr"], rtol=1e-6, atol=1e-9)


def test_a_validation_loss_cut_off_from_the_parameters():
    task = task_of(mlp, val_loss=lambda model, batch: classify(model, batch).detach())
    for engine in (lh.Forward(), lh.Adjoint()):
        with pytest.raises(lh.NotDifferentiable, match="does not depend on the parameters"):
            lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=3, engine=engine)


def test_an_error_of_the_user_s_own_is_left_as_it_is():
    def loss(model, batch):
        if torch.is_grad_enabled():
            raise RuntimeError("the user's own trouble")
        return classify(model, batch)

    for engine in (lh.Forward(), lh.Adjoint()):
        with pytest.raises(RuntimeError, match="the user's own trouble") as caught:
            lh.hypergradient(task_of(mlp, loss=loss), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=3, engine=engine)
        assert not isinstance(caught.value, lh.NotDifferentiable)


def test_batches_that_are_not_iterable():
    with pytest.raises(TypeError, match="Task.train returned int: expected batches"):
        lh.hypergradient(
            lh.Task(mlp, classify, lambda seed: 3, problem("mlp").task.val), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=3
        )


def test_a_run_that_differs_in_its_seed_is_not_tried_again():
    """A design has dozens of them, and trying takes three passes; other data or hyperparameters are tried."""
    tried = []

    def metrics(model, batch):
        tried.append(batch)
        return {"one": 1.0}

    task = dataclasses.replace(problem("dropout").task, metrics=metrics)
    traces, hypers = lh.Traces(), {"lr": lh.Hyper(0.1)}

    def made(task=task, hypers=hypers, seed=0):
        return make_problem(task, lh.sgd(), hypers, 3, seed, traces=traces)

    with environment():
        assert all(made(seed=seed).draws for seed in range(3))
        assert len(tried) == 1
        made(hypers=hypers | {"momentum": lh.Hyper(0.5)})
        assert len(tried) == 2
        made(dataclasses.replace(task, val=lambda seed: task.val(seed)))
        assert len(tried) == 3
        made(dataclasses.replace(task, train=lambda seed: task.train(seed)))
        assert len(tried) == 4


def test_the_automatic_choice_takes_the_engine_that_can():
    """An LSTM in float32 has a kernel that torch differentiates twice backwards, and not forwards."""

    class Fast(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.cell(x[:, None].float())[0][:, -1])

    settings, told = {"hypers": {"lr": lh.Hyper(0.2)}, "steps": 6}, []
    found = lh.hypergradient(task_of(Fast), lh.sgd(), **settings, progress=told.append)
    assert found.engine.endswith("forward mode cannot differentiate this model's gradient")
    assert [at.done for at in told][:7] == [1, 2, 3, 4, 5, 6, 7]
    same = lh.hypergradient(task_of(Fast), lh.sgd(), **settings, engine=lh.Adjoint())
    assert torch.equal(found.grad["lr"], same.grad["lr"])
    with pytest.raises(lh.NotDifferentiable, match="Forward cannot differentiate"):
        lh.hypergradient(task_of(Fast), lh.sgd(), **settings, engine=lh.Forward())
    how = settings | {"outer": lh.GradientDescent(0.1), "outer_steps": 2}  # without outer steps nothing is smoothed
    tuned = lh.tune(task_of(Fast), lh.sgd(), **how)
    assert [step.engine.partition(",")[0] for step in tuned.history] == ["adjoint"] * 2
    by_adjoint = lh.tune(task_of(Fast), lh.sgd(), **how, engine=lh.Adjoint())
    assert tuned.schedule == by_adjoint.schedule
    with pytest.raises(lh.NotDifferentiable, match="Forward cannot differentiate"):
        lh.tune(task_of(Fast), lh.sgd(), **how, engine=lh.Forward())


def test_the_automatic_choice_of_a_hybrid_takes_the_adjoint_where_it_must():
    assert instead(lh.Hybrid("forward", pairs=5)) == lh.Hybrid("adjoint", pairs=5)
    assert instead(lh.Forward(clip=10.0)) == lh.Adjoint()
    assert [instead(engine) for engine in (lh.Adjoint(), lh.Hybrid(), lh.Factorial())] == [None] * 3
