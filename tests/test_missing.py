"""A derivative that lacks a part is found before the run, against central differences; a whole one is left in peace."""

import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon.compile import TraceMismatch
from longhorizon.problem import environment, make_problem
from problems import classify, held_out, images, mlp, pairs, stream, task_of

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated")  # torch, when it first takes a tangent

LR = {"lr": lh.Hyper(0.5)}
ENGINES = {"forward": lh.Forward(compile=False), "adjoint": lh.Adjoint()}
BOTH = ("forward", "adjoint")
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES)


def focal(model, batch):
    right = -F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return -((1 - right.exp()).detach() ** 2 * right).mean()


def distilled(model, batch):
    logits = model(batch[0])
    target = (2 * logits).softmax(1).detach()
    return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, target)


def distilled_under_no_grad(model, batch):
    logits = model(batch[0])
    with torch.no_grad():
        target = (2 * logits).softmax(1)
    return F.cross_entropy(logits, batch[1]) + F.cross_entropy(logits, target)


class Reversed(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, g):
        return -0.5 * g

    @staticmethod
    def jvp(ctx, t):
        return t.view_as(t)


class Rounded(Reversed):
    @staticmethod
    def forward(x):
        return x.round(decimals=1)

    @staticmethod
    def backward(ctx, g):
        return g


def adversarial(model, batch):
    hidden = model[1](model[0](batch[0]))
    return F.cross_entropy(model[2](hidden), batch[1]) + F.cross_entropy(model[2](Reversed.apply(hidden)), 2 - batch[1])


def quantised(model, batch):
    return F.cross_entropy(model[1](F.linear(batch[0], Rounded.apply(model[0].weight)))[:, :3], batch[1])


def damped(model, batch):
    hidden = model[1](model[0](batch[0]))
    if hidden.requires_grad:
        hidden.register_hook(lambda g: 0.5 * g)
    return F.cross_entropy(model[2](hidden), batch[1])


LOSSES = {
    # name: loss, which engines leave something out
    "detached weight": (focal, BOTH),
    "detached target": (distilled, BOTH),
    "target under no_grad": (distilled_under_no_grad, ("adjoint",)),
    "reversed gradient": (adversarial, ("adjoint",)),
    "straight through": (quantised, BOTH),
    "hook": (damped, ("adjoint",)),
}


def look(task, engine, hypers=LR):
    with environment():
        ENGINES[engine].begin(make_problem(task, lh.sgd(), hypers, 5, 0))


@EVERY_ENGINE
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_whose_gradient_is_not_differentiated_whole(name, engine):
    loss, off = LOSSES[name]
    task = task_of(mlp, loss=loss, val_loss=classify)
    if engine not in off:
        found = lh.hypergradient(task, lh.sgd(), LR, steps=5, engine=ENGINES[engine])
    else:
        words = rf"{engine.title()} leaves out a part.*off by [\d.]+% for the gradient of Task.loss.*lh.Factorial\(\)"
        with pytest.warns(lh.MissingDerivative, match=words):
            found = lh.hypergradient(task, lh.sgd(), LR, steps=5, engine=ENGINES[engine])
    truth = lh.hypergradient(task, lh.sgd(), LR, steps=5, engine=lh.FiniteDifference())
    assert torch.allclose(found.grad["lr"], truth.grad["lr"], rtol=1e-5) == (engine not in off)


@EVERY_ENGINE
def test_a_validation_loss_that_is_not_differentiated_whole(engine):
    with pytest.warns(lh.MissingDerivative, match="% for the validation loss") as seen:
        look(task_of(mlp, val_loss=focal), engine)
    assert "Task.loss," not in str(seen[0].message)


class Centred(nn.Module):
    """Centres by a running mean."""

    def __init__(self, write, read=lambda centre: centre):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)
        self.register_buffer("centre", torch.zeros(4))
        self.write, self.read = write, read
        self.double()

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        if self.training:
            self.write(self.centre, hidden)
        return self.last(hidden - self.read(self.centre))


def plainly(centre, hidden):
    centre.mul_(0.9).add_(0.1 * hidden.mean(0))


def cut_off(centre, hidden):
    plainly(centre, hidden.detach())


@EVERY_ENGINE
def test_a_buffer_cut_off_from_the_parameters_is_named(engine):
    with pytest.warns(lh.MissingDerivative, match="% for buffer 'centre'"):
        look(task_of(lambda: Centred(cut_off)), engine)
    with pytest.warns(lh.MissingDerivative, match="% for the gradient of Task.loss"):
        look(task_of(lambda: Centred(plainly, read=torch.Tensor.detach)), engine)
    look(task_of(lambda: Centred(plainly)), engine)
    look(task_of(lambda: Centred(cut_off, read=lambda centre: 0)), engine)  # nothing reads it


def float_images(t):
    x, y = images(t)
    return x.float(), y


def kinks():
    """Many ReLUs, some with an input of exactly zero, and ties between pooled values."""
    conv = nn.Conv2d(2, 8, 3, padding=1)
    nn.init.zeros_(conv.bias)
    pool = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3))
    return nn.Sequential(conv, nn.ReLU(), *pool, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def half_black(t):
    x, y = float_images(t)
    return torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, 0.0, x), y


class Masked(nn.Module):
    """Its mask is a float that must be exactly zero; a layer is frozen."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
        self.layers[0].requires_grad_(False)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0]))

    def forward(self, x):
        return self.layers(x.masked_fill(self.mask == 0, 0.0))


class Stubborn(nn.Module):
    """Runs in one type only."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 3), torch.ones(5, 5)

    def forward(self, x):
        return self.linear(x @ self.scale)


class Rough(nn.Module):
    """Normalises in float32, whatever it is given: it does not see so small a shift."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.first(x)
        return self.last(hidden + F.layer_norm(hidden.float(), (4,)).to(hidden))


def float_pairs(t):
    x, y = pairs(t)
    return x.float(), y


def noisy(model, batch):
    x = batch[0] + np.random.randn() if model.training else batch[0]
    return classify(model, (x, batch[1]))


WHOLE = {
    "kinks": lambda: task_of(kinks, half_black),
    "mask": lambda: task_of(Masked, float_pairs),
    "stubborn": lambda: task_of(Stubborn, float_pairs),
    "rough": lambda: task_of(Rough, float_pairs),
    "noisy": lambda: task_of(mlp, loss=noisy),
    "huge": lambda: task_of(mlp, val_loss=lambda m, b: 1e200 * classify(m, b)),
    "tiny": lambda: task_of(mlp, loss=lambda m, b: 1e-200 * classify(m, b), val_loss=lambda m, b: 0 * classify(m, b)),
    "linear": lambda: task_of(lambda: nn.Linear(5, 3).double(), loss=lambda m, b: m(b[0]).mean()),
}


@EVERY_ENGINE
@pytest.mark.parametrize("name", WHOLE)
def test_no_false_alarm(name, engine):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        look(WHOLE[name](), engine)
    assert not [w for w in seen if issubclass(w.category, lh.MissingDerivative)]


def test_a_loss_that_needs_its_whole_batch_gets_it():
    def whole(model, batch):
        assert len(batch[0]) == 20
        return focal(model, batch)

    def many(t):
        return torch.cat([pairs(t + i)[0] for i in range(4)])[:20], torch.cat([pairs(t + i)[1] for i in range(4)])[:20]

    with pytest.warns(lh.MissingDerivative):
        look(task_of(mlp, many, whole), "adjoint")


@pytest.mark.parametrize("frozen", [False, True])
def test_tune_looks_and_warns_once(frozen):
    def model():
        made = mlp()
        next(made.parameters()).requires_grad_(not frozen)
        return made

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        task = task_of(model, loss=focal, val_loss=classify)
        lh.tune(task, lh.sgd(), LR, steps=4, outer_steps=3, seeds=2, engine=lh.Adjoint())
    assert [w.category for w in seen] == [lh.MissingDerivative]


def test_differences_need_no_look():
    task = lh.Task(mlp, focal, stream(pairs), held_out(pairs))
    for engine in (lh.FiniteDifference(), lh.Factorial()):
        assert lh.hypergradient(task, lh.sgd(), LR, steps=4, engine=engine).status.ok


class Padded(nn.Module):
    """A row of the embedding gets no gradient, so training never moves it."""

    def __init__(self):
        super().__init__()
        self.rows, self.out = nn.Embedding(5, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, tokens):
        return self.out(self.rows(tokens).mean(1))


class Fixed(nn.Module):
    """A first layer that is only read from, as for linear probing."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.first(x).tanh()
        return self.out(x)


@pytest.mark.parametrize("model", [Padded, Fixed])
@pytest.mark.parametrize(
    "engine", [lh.Forward(compile=True), lh.Adjoint(), lh.Adjoint(compile=True)], ids=["forward", "adjoint", "traced"]
)
def test_no_alarm_about_weights_that_training_never_moves(model, engine):
    tokens, labels = torch.randint(5, (16, 6)), torch.randint(3, (16,))
    batch = (tokens if model is Padded else tokens.float(), labels)
    task = lh.Task(
        lambda: model().float(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda s: [batch] * 30, lambda s: [batch]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", lh.MissingDerivative)
        warnings.simplefilter("error", TraceMismatch)
        lh.hypergradient(task, lh.sgd(), LR, steps=6, engine=engine)
    if model is Fixed:  # weight decay does move them
        with pytest.warns(lh.MissingDerivative):
            lh.hypergradient(task, lh.sgd(), LR | {"weight_decay": lh.Hyper(0.0)}, steps=6, engine=lh.Adjoint())


def cut_rule(cut, what="lr"):
    """Adam without corrections, with something taken from autograd."""

    def update(params, grads, state, h):
        h = {**h, what: cut(h[what])} if what in h else h
        second = {k: h["beta"] * state[k] + (1 - h["beta"]) * g * g for k, g in grads.items()}
        size = {k: s + 0.1 for k, s in second.items()}
        if what == "size":
            size = {k: cut(s) for k, s in size.items()}
        return {k: p - h["lr"] * grads[k] / size[k] for k, p in params.items()}, second

    def init(params):
        return {k: torch.zeros_like(p) for k, p in params.items()}

    return lh.Rule("own", {"lr": 0.1, "beta": 0.9}, init, update)


def under_no_grad(x):
    with torch.no_grad():
        return x * 1


CUTS = {
    "item": (lambda x: x.item(), "lr", "'lr'", BOTH),
    "float": (float, "beta", "'beta'", BOTH),
    "detach": (torch.detach, "lr", "'lr'", BOTH),
    "no_grad": (under_no_grad, "beta", "'beta'", ("adjoint",)),
    "detached memory": (torch.detach, "size", "memory", BOTH),
}


@EVERY_ENGINE
@pytest.mark.parametrize("name", CUTS)
def test_a_rule_whose_derivative_lacks_a_part(name, engine):
    cut, what, named, off = CUTS[name]
    hypers = {"lr": lh.Hyper(0.1), "beta": lh.Hyper(0.9, step=0.1)}
    rules = (cut_rule(cut, what), engine in off), (cut_rule(lambda x: x, what), False)
    for rule, expected in rules:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            lh.hypergradient(task_of(mlp), rule, hypers, steps=3, engine=ENGINES[engine])
        told = [str(w.message) for w in seen if w.category is lh.MissingDerivative]
        assert bool(told) == expected, told
        assert all("the rule 'own'" in text and named in text for text in told)


@EVERY_ENGINE
def test_a_rule_that_moves_by_a_sign_is_left_in_peace(engine):
    def update(params, grads, state, h):
        moved = {k: p - h["lr"] * torch.sign(h["beta"] * state[k] + grads[k]) for k, p in params.items()}
        return moved, {k: h["beta"] * state[k] + (1 - h["beta"]) * g for k, g in grads.items()}

    rule = lh.Rule("lion", {"lr": 0.01, "beta": 0.9}, lambda p: {k: torch.zeros_like(x) for k, x in p.items()}, update)
    hypers = {"lr": lh.Hyper(0.0, step=0.1), "beta": lh.Hyper(0.9, step=0.1)}
    with warnings.catch_warnings():
        warnings.simplefilter("error", lh.MissingDerivative)
        lh.hypergradient(task_of(mlp), rule, hypers, steps=3, engine=ENGINES[engine])
        for known in (lh.sgd(nesterov=True), lh.adam(), lh.adamw(), lh.clipped(lh.adamw(), 0.1)):
            learnt = {arg: lh.Hyper(value, step=0.1) for arg, value in known.defaults.items() if arg != "dampening"}
            lh.hypergradient(task_of(mlp), known, learnt, steps=3, engine=ENGINES[engine])
