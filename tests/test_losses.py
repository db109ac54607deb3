"""Losses whose derivative torch would leave out without a word are refused before the first step; others are not."""

import pytest
import torch
import torch.nn.functional as F

import longhorizon as lh
from longhorizon.engines.base import check_repeated
from longhorizon.problem import environment, make_problem
from longhorizon.task import takes_hypers
from problems import classify, held_out, mlp, pairs, problem, stream, task_of

S = {"s": lh.Hyper(0.1, step=0.05)}
EXACT = {"auto": "auto", "forward": lh.Forward(), "adjoint": lh.Adjoint(), "greedy": lh.Greedy(3)}
EXACT |= {"hybrid": lh.Hybrid()}
INEXACT = {"difference": lh.FiniteDifference(), "factorial": lh.Factorial()}


def smooth(model, batch, s):
    logits = model(batch[0])
    return (1 - s) * F.cross_entropy(logits, batch[1]) - s * F.log_softmax(logits, -1).mean()


def hidden(model, batch, hypers):
    with torch.no_grad():
        weight = 1 + hypers["s"] * batch[0][:, 0]
    return (weight * F.cross_entropy(model(batch[0]), batch[1], reduction="none")).mean()


def dropped(model, batch, hypers):
    return F.cross_entropy(F.dropout(model(batch[0]), p=hypers["s"], training=model.training), batch[1])


CUT_OFF = {
    "label_smoothing": lambda model, batch, h: F.cross_entropy(model(batch[0]), batch[1], label_smoothing=h["s"]),
    "dropout": dropped,
    "item": lambda model, batch, h: smooth(model, batch, h["s"].item()),
    "float": lambda model, batch, h: smooth(model, batch, float(h["s"])),
    "detach": lambda model, batch, h: smooth(model, batch, h["s"].detach()),
    "numpy": lambda model, batch, h: smooth(model, batch, h["s"].numpy().item()),
}


def differentiate(task, engine, hypers=S, steps=6):
    seen: list[lh.Progress] = []
    try:
        return lh.hypergradient(task, lh.sgd(lr=0.5), hypers, steps=steps, engine=engine, progress=seen.append)
    except lh.NotDifferentiable:
        assert seen == []  # before the first step
        raise


ALL_OF_THEM = {
    "items": lambda h: [value for key, value in h.items() if key.startswith("l2/")],
    "values": lambda h: list(h.values())[1:],
    "keys": lambda h: [h[key] for key in h if key.startswith("l2/")],
    "copy": lambda h: list(h.copy().values())[1:],
    "dict": lambda h: list(dict(h).values())[1:],
    "unpacked": lambda h: list({**h}.values())[1:],
    "union": lambda h: list((h | {}).values())[1:],
    "union from the right": lambda h: list(({} | h).values())[1:],
}


@pytest.mark.parametrize("name", ALL_OF_THEM)
def test_a_loss_may_read_its_hyperparameters_all_together(name):
    def penalised(model, batch, hypers):
        decays = zip(ALL_OF_THEM[name](hypers), model.parameters(), strict=False)
        return classify(model, batch) + sum(decay * p.square().sum() for decay, p in decays)

    hypers = {"lr": lh.Hyper(0.1)} | {key: lh.Hyper(0.01, step=0.01) for key in ("l2/a", "l2/b")}
    task = task_of(mlp, loss=penalised, val_loss=classify)
    found, expected = (differentiate(task, engine, hypers) for engine in (lh.Adjoint(), lh.FiniteDifference()))
    for key in hypers:
        assert torch.allclose(found.grad[key], expected.grad[key], rtol=1e-5)


def test_the_rules_own_among_all_are_not_what_a_validation_loss_is_made_of():
    def penalised(model, batch, hypers):
        return classify(model, batch) + sum(v for key, v in hypers.items() if key == "s")

    with environment():
        task = task_of(mlp, loss=penalised)
        assert make_problem(task, lh.sgd(), S | {"lr": lh.Hyper(0.1)}, 6, 0).read_in_validation == {"s"}


def test_a_hyperparameter_that_is_used_later_only_is_refused_with_the_remedy():
    """It cannot be told from one with a misspelt name."""
    with pytest.raises(ValueError, match=r"loss never reads it.* read it on each, if only times zero\.$"):
        differentiate(task_of(mlp, loss=lambda model, batch, hypers: classify(model, batch)), lh.Adjoint())


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")
@pytest.mark.parametrize("engine", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("name", CUT_OFF)
def test_a_hyperparameter_that_becomes_a_plain_number_is_refused(name, engine):
    task = task_of(mlp, loss=CUT_OFF[name], val_loss=classify)
    with pytest.raises(lh.NotDifferentiable, match=r"'s' has no derivative in Task.loss.*Write it with tensor operati"):
        differentiate(task, engine)
    # fixed, it needs none; nor does an engine that takes differences
    fixed = S | {"s": lh.Hyper(0.1, learn=False), "lr": lh.Hyper(0.5)}
    if name not in ("dropout", "numpy"):  # whose loss is another one; which forward mode cannot run
        assert torch.allclose(
            differentiate(task, engine, fixed).grad["lr"],
            differentiate(task_of(mlp, loss=good, val_loss=classify), engine, fixed).grad["lr"],
        )


def good(model, batch, hypers):
    return smooth(model, batch, hypers["s"])


@pytest.mark.parametrize("engine", INEXACT.values(), ids=INEXACT)
def test_differences_need_no_derivative(engine):
    task = task_of(mlp, loss=CUT_OFF["label_smoothing"], val_loss=classify)
    found, truth = differentiate(task, engine), differentiate(task_of(mlp, loss=good, val_loss=classify), engine)
    assert torch.allclose(found.grad["s"], truth.grad["s"])
    assert found.grad["s"] != 0


@pytest.mark.parametrize("engine", EXACT.values(), ids=EXACT)
@pytest.mark.parametrize("part", ["loss", "val_loss"])
def test_one_loss_sees_it_and_the_other_takes_it_as_a_number(part, engine):
    losses = {"loss": good, "val_loss": good, part: CUT_OFF["item"]}
    with pytest.raises(lh.NotDifferentiable, match=rf"'s' has no derivative in Task.{part},"):
        differentiate(task_of(mlp, **losses), engine)


def only_train(model, batch, hypers):
    s = hypers["s"]  # read in both, used in one
    return smooth(model, batch, s) if model.training else classify(model, batch)


def only_val(model, batch, hypers):
    s = hypers["s"]
    return classify(model, batch) if model.training else smooth(model, batch, s)


def flat(model, batch, hypers):
    return classify(model, batch) + 0 * hypers["s"]


def with_integers(model, batch, hypers):
    right = (model(batch[0]).argmax(1) == batch[1]).double()  # no derivative, and none is needed
    return smooth(model, batch, hypers["s"]) + 0.1 * right.mean()


def logged(model, batch, hypers):
    hypers["s"].item()
    return good(model, batch, hypers)


FINE = {
    "only in training": {"loss": only_train},
    "only in validation": {"loss": only_val},
    "only val_loss": {"loss": lambda model, batch, hypers: classify(model, batch), "val_loss": good},
    "zero": {"loss": flat},
    "integers": {"loss": with_integers},
    "logged": {"loss": logged},
}


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint()], ids=["forward", "adjoint"])
@pytest.mark.parametrize("name", FINE)
def test_what_is_differentiable_is_not_refused(name, engine):
    task = task_of(mlp, **FINE[name])
    found, truth = differentiate(task, engine), differentiate(task, lh.FiniteDifference())
    assert torch.allclose(found.grad["s"], truth.grad["s"], rtol=1e-5, atol=1e-9)
    assert (found.grad["s"] == 0).all() == (name == "zero")


def test_forward_sees_through_no_grad_and_the_adjoint_says_that_it_does_not():
    task = task_of(mlp, loss=hidden, val_loss=classify)
    found, truth = differentiate(task, lh.Forward()), differentiate(task, lh.FiniteDifference())
    assert torch.allclose(found.grad["s"], truth.grad["s"], rtol=1e-5)
    assert truth.grad["s"] != 0
    with pytest.raises(lh.NotDifferentiable, match="'s' has no derivative"):
        differentiate(task, lh.Adjoint())


def test_a_value_of_the_rule_that_the_loss_takes_as_a_number():
    task = task_of(mlp, loss=lambda model, batch, hypers: (1 + hypers["lr"].item()) * classify(model, batch))
    for engine in (lh.Forward(), lh.Adjoint()):
        with pytest.raises(lh.NotDifferentiable, match="'lr' has no derivative in Task.loss"):
            differentiate(task, engine, {"lr": lh.Hyper(0.1)})


@pytest.mark.parametrize("engine", (EXACT | INEXACT).values(), ids=EXACT | INEXACT)
def test_a_training_loss_cut_off_from_the_parameters(engine):
    task = task_of(mlp, loss=lambda model, batch: classify(model, batch).detach(), val_loss=classify)
    with pytest.raises(lh.NotDifferentiable, match="training loss does not depend on the parameters.*detach"):
        differentiate(task, engine, {"lr": lh.Hyper(0.1)})


@pytest.mark.parametrize("engine", EXACT.values(), ids=EXACT)
def test_a_validation_loss_cut_off_from_the_parameters(engine):
    for lr in ({"lr": lh.Hyper(0.1)}, S):
        task = task_of(mlp, loss=good if lr is S else classify, val_loss=lambda m, b: classify(m, b).detach())
        with pytest.raises(lh.NotDifferentiable, match="validation loss does not depend on the parameters"):
            differentiate(task, engine, lr)


def test_a_validation_loss_of_buffers_alone_is_fine():
    class Averaged(torch.nn.Linear):
        def __init__(self):
            super().__init__(5, 3, dtype=torch.float64)
            self.register_buffer("mean", torch.zeros_like(self.weight))

        def forward(self, x):
            if not self.training:
                return F.linear(x, self.mean)
            self.mean = 0.5 * self.mean + 0.5 * self.weight
            return super().forward(x)

    lr = {"lr": lh.Hyper(0.1)}
    truth = differentiate(task_of(Averaged), lh.FiniteDifference(), lr)
    for engine in (lh.Forward(), lh.Adjoint()):
        assert torch.allclose(differentiate(task_of(Averaged), engine, lr).grad["lr"], truth.grad["lr"], rtol=1e-5)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint()], ids=["forward", "adjoint"])
def test_looking_changes_nothing(engine):
    with environment():
        made = make_problem(problem("buffers").task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 4, 0)
        before = [x.clone() for x in (*made.start.params.values(), *made.start.buffers.values())]
        engine.begin(made)
        after = [*made.start.params.values(), *made.start.buffers.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not any(x.requires_grad for x in after)


@pytest.mark.parametrize("engine", [*EXACT.values(), lh.FiniteDifference()], ids=[*EXACT, "difference"])
def test_a_validation_batch_of_another_shape_is_named(engine):
    def val(seed):
        inputs, labels = held_out(pairs)(seed)[0]
        return [(inputs, labels), (inputs[:, 1:], labels)]

    task = lh.Task(mlp, classify, stream(pairs), val)
    steps = 3 if isinstance(engine, lh.Greedy) else 6
    with pytest.raises(RuntimeError, match=rf"Task.val\(0\) has a batch 1 .*after {steps} steps of training: .*shape"):
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=6, engine=engine)


def test_a_third_parameter_with_a_default_is_the_loss_s_own():
    def weighted(model, batch, weight=0.5):
        return weight * classify(model, batch)

    def named(model, batch, hypers=None):
        return (1 + hypers["s"]) * classify(model, batch)

    lr = {"lr": lh.Hyper(0.1)}
    half = task_of(mlp, loss=lambda model, batch: 0.5 * classify(model, batch))
    assert torch.equal(
        differentiate(task_of(mlp, loss=weighted), "auto", lr).grad["lr"], differentiate(half, "auto", lr).grad["lr"]
    )
    assert all(takes_hypers(f) for f in (named, lambda m, b, h: 0))
    assert not any(takes_hypers(f) for f in (weighted, lambda m, b, *rest: 0))
    assert differentiate(task_of(mlp, loss=named), "auto").status.ok


class Mixed(torch.nn.Module):
    """A model of one dtype whose logits have another."""

    def __init__(self, own, logits):
        super().__init__()
        self.inside, self.own, self.logits = mlp().to(own), own, logits

    def forward(self, x):
        return self.inside(x.to(self.own)).to(self.logits)


@pytest.mark.parametrize(
    ("own", "logits", "close"),
    [
        (torch.bfloat16, torch.float32, 0.1),
        (torch.float16, torch.float32, 0.02),
        (torch.float32, torch.float64, 1e-4),
        (torch.float64, torch.float32, 1e-4),
    ],
    ids=str,
)
@pytest.mark.parametrize("engine", ["adjoint", "greedy", "hybrid"])
def test_the_loss_may_have_another_dtype_than_the_parameters(own, logits, close, engine):
    found = differentiate(task_of(lambda: Mixed(own, logits)), EXACT[engine], {"lr": lh.Hyper(0.1)})
    truth = differentiate(task_of(mlp), EXACT[engine], {"lr": lh.Hyper(0.1)})
    assert torch.allclose(found.grad["lr"], truth.grad["lr"], rtol=close)


@pytest.mark.parametrize(("loss", "repeats"), [(1.0, True), (1.01, True), (1.1, False)])
def test_a_repeated_loss_may_differ_by_the_rounding_of_its_coarser_dtype(loss, repeats):
    one, other = torch.tensor(1.0, dtype=torch.bfloat16), torch.tensor(loss)
    if repeats:
        check_repeated(0, one, other)
        return
    with pytest.raises(lh.ReplayError):
        check_repeated(0, one, other)
