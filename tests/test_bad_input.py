"""Bad input is refused before any work, with the error type and the words that say what, where and what to do."""

import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from problems import classify, held_out, mlp, pairs, stream

LOSS_KEYS = {"lr": lh.Hyper(0.1), "smoothing": lh.Hyper(0.1)}


def task(**changes):
    given = {"model": mlp, "loss": classify, "train": stream(pairs, 8), "val": held_out(pairs)} | changes
    return lh.Task(**given)


def learnt(model, batch, hypers):
    return (1 + hypers["smoothing"]) * classify(model, batch)


def ends_early(seed):
    yield from stream(pairs, 5)(seed)


class Endless:
    """A sequence without a length, that ends all the same."""

    def __getitem__(self, t):
        if t >= 5:
            raise IndexError(t)
        return pairs(t)


def half_frozen():
    model = mlp()
    model.requires_grad_(False)
    return model


def halving(model, batch):
    return classify(model, (batch[0].div_(2), batch[1]))


def hooked(register):
    """A model whose first weight has a hook for its gradient."""

    def make():
        model = mlp()
        getattr(model[0].weight, register)(lambda *_: None)
        return model

    return make


def looked_up(kind):
    return lambda: nn.Sequential(kind(5, 4, max_norm=1.0), nn.Linear(4, 3))


class Kept(nn.Sequential):
    """Keeps a list of its own weights, for a penalty."""

    def __init__(self):
        super().__init__(nn.Linear(5, 3, dtype=torch.float64))
        self.decayed = [p for p in self.parameters() if p.ndim > 1]


def penalised(model, batch):
    return classify(model, batch) + 0.1 * sum(p.square().sum() for p in model.decayed)


def spoilt(number, part=pairs):
    """Batches with a number that is none, or is too large."""
    return lambda t: (part(t)[0] * number, part(t)[1])


def call(**changes):
    """A call that is good but for `changes`; `hypers` given as a dict of keyword arguments replace the learnt lr."""
    given = {"task": task(), "rule": lh.sgd(), "hypers": {"lr": lh.Hyper(0.1)}, "steps": 8} | changes
    return lh.hypergradient(given.pop("task"), given.pop("rule"), given.pop("hypers"), **given)


def lr(*args, **options):
    return {"hypers": {"lr": lh.Hyper(*args, **options)}}


CALLS = {
    # name: changes to a good call, error, words
    "steps 0": ({"steps": 0}, ValueError, r"steps=0: a training run needs at least 1 step"),
    "steps negative": ({"steps": -3}, ValueError, r"steps=-3"),
    "steps float": ({"steps": 8.0}, TypeError, r"steps=8.0: expected a whole number"),
    "seed float": ({"seed": 1.5}, TypeError, r"seed=1.5: expected a whole number"),
    "steps bool": ({"steps": True}, TypeError, r"steps=True: expected a whole number"),
    "no task": ({"task": mlp}, TypeError, r"task=.*: expected a Task"),
    "no rule": ({"rule": "sgd"}, TypeError, r"rule='sgd': expected a rule such as longhorizon.sgd\(\)"),
    "rule uncalled": ({"rule": lh.sgd}, TypeError, r"expected a rule such as longhorizon.sgd\(\)"),
    "NaN in the data": (
        {"task": task(train=stream(spoilt(math.nan), 8))},
        ValueError,
        r"Task.loss is nan on the first batch of Task.train with fresh weights, before any step: look for NaN",
    ),
    "infinite loss": (
        {"task": task(loss=lambda model, batch: classify(model, batch) / 0)},
        ValueError,
        r"Task.loss is inf on the first batch of Task.train",
    ),
    "NaN in the validation data": (
        {"task": task(val=held_out(spoilt(math.nan)))},
        ValueError,
        r"Task.loss is nan on the first batch of Task.val with fresh weights",
    ),
    "cut off, and made to require a gradient": (
        {"task": task(loss=lambda model, batch: classify(model, batch).detach().requires_grad_())},
        lh.NotDifferentiable,
        r"the training loss does not depend on the parameters",
    ),
    "beta that starts at 1": (
        {"rule": lh.adam(), "hypers": {"beta2": lh.Hyper(1.0)}},
        ValueError,
        r"hyperparameter 'beta2' starts at 1: adam takes at least 0 and at most 0.9999999",
    ),
    # hyperparameters
    "windows > steps": (lr(0.1, windows=9), ValueError, r"'lr' has windows=9 but the run only steps=8: use at most 8"),
    "windows 0": (lr(0.1, windows=0), ValueError, r"'lr' has windows=0: expected a whole number from 1"),
    "windows float": (lr(0.1, windows=2.0), ValueError, r"windows=2.0: expected a whole number"),
    "NaN start": (lr(math.nan), ValueError, r"'lr' starts at nan: values must be finite"),
    "infinite start": (
        lr([0.1, math.inf], windows=2),
        ValueError,
        r"'lr' starts at \[0.1, inf\]: values must be finite",
    ),
    "start above": (lr(0.3, low=0.0, high=0.2), ValueError, r"'lr' starts at 0.3, outside \[0.0, 0.2\]; move `start`"),
    "start below": (
        lr(0.1, low=0.2),
        ValueError,
        r"'lr' starts at 0.1, outside \[0.2, inf\]; move `start` inside or widen",
    ),
    "one of many outside": (lr([0.1, 0.5], windows=2, high=0.2), ValueError, r"starts at \[0.1, 0.5\], outside"),
    "bounds swapped": (lr(0.1, low=1.0, high=0.0), ValueError, r"low=1.0 and high=0.0: low must be below high"),
    "bounds NaN": (lr(0.1, low=math.nan), ValueError, r"low must be below high"),
    "integer": (
        lr(1),
        TypeError,
        r"'lr' starts at 1, which is no float: only real values have a derivative; write 1.0",
    ),
    "bool": (lr(True), TypeError, r"'lr' starts at True, which is no float"),
    "numpy integer": (lr(np.int64(2)), TypeError, r"'lr' starts at .*2.*, which is no float.*write 2.0"),
    "integer in a list": (lr([0.1, 2], windows=2), TypeError, r"'lr' starts at 2, which is no float"),
    "a word in a list": (
        lr([0.1, "a"], windows=2),
        TypeError,
        r"'lr' starts at \[0.1, 'a'\], and 'a' is no float: expected a float, or one per window\.$",
    ),
    "integer tensor": (lr(torch.tensor([1, 2]), windows=2), TypeError, r"'lr' starts at 1, which is no float"),
    "string start": (lr("0.1"), TypeError, r"'lr' starts at '0.1': expected a float, or one per window"),
    "None start": (lr(None), TypeError, r"'lr' starts at None: expected a float"),
    "complex start": (lr(1j), TypeError, r"'lr' starts at 1j: expected a float"),
    "too few starts": (
        lr([0.1, 0.2], windows=3),
        ValueError,
        r"'lr' has 3 window\(s\) but 2 values; give one per window",
    ),
    "starts without windows": (lr([0.1, 0.2]), ValueError, r"'lr' has 1 window\(s\) but 2 values"),
    "log of zero": (lr(0.0, scale="log"), ValueError, r"'lr' is 0 on a log scale: values must be positive"),
    "unknown scale": (lr(0.1, scale="exp"), ValueError, r"scale='exp': expected 'linear' or 'log'"),
    "step 0": (lr(0.1, step=0.0), ValueError, r"'lr' has step=0.0: expected a positive number"),
    "step string": (lr(0.1, step="big"), ValueError, r"'lr' has step='big': expected a positive number"),
    "bare number": ({"hypers": {"lr": 0.1}}, TypeError, r"hypers\['lr'\] is 0.1: expected a Hyper, e.g. Hyper\(0.1\)"),
    "bound string": (lr(0.1, low="0"), TypeError, r"'lr' has low='0': expected a number, or None"),
    "params number": (lr(0.1, params=3), TypeError, r"'lr' has params=3: expected a pattern such as 'head\.\*'"),
    "params numbers": (lr(0.1, params=[3]), TypeError, r"'lr' has params=\[3\]: expected a pattern"),
    "learn string": (lr(0.1, learn="no"), TypeError, r"'lr' has learn='no': expected True or False"),
    "hypers None": ({"hypers": None}, TypeError, r"hypers=None: expected a dictionary such as \{'lr': Hyper\(0.1\)\}"),
    "hypers list": ({"hypers": ["lr"]}, TypeError, r"hypers=\['lr'\]: expected a dictionary"),
    "hypers number key": ({"hypers": {3: lh.Hyper(0.1)}}, TypeError, r"hypers has the key 3: expected a name"),
    "no hypers": ({"hypers": {}}, ValueError, r"hypers is empty"),
    "nothing learnt": (lr(0.1, learn=False), ValueError, r"learn=False everywhere: nothing is left to learn"),
    "empty key": ({"hypers": {"/head": lh.Hyper(0.1)}}, TypeError, r"hypers has the key '/head'"),
    "unknown name": (
        {"hypers": {"momentun": lh.Hyper(0.1)}},
        ValueError,
        r"unknown hyperparameter 'momentun'.*Did you mean 'momentum'\?",
    ),
    "far name": (
        {"hypers": {"xyz": lh.Hyper(0.1)}},
        ValueError,
        r"unknown hyperparameter 'xyz'.*Known: dampening, lr, momentum, weight_decay",
    ),
    "unknown label": ({"hypers": {"beta/head": lh.Hyper(0.1)}}, ValueError, r"unknown hyperparameter 'beta/head'"),
    "other rule's": (
        {"rule": lh.adam(), "hypers": {"momentum": lh.Hyper(0.1)}},
        ValueError,
        r"'momentum': it is no float argument of adam",
    ),
    "option": ({"hypers": {"nesterov": lh.Hyper(0.1)}}, ValueError, r"unknown hyperparameter 'nesterov'"),
    "unread": (
        {"task": task(loss=learnt), "hypers": LOSS_KEYS | {"smothing": lh.Hyper(0.1)}},
        ValueError,
        r"'smothing'.*loss never reads it.*'smoothing'\?",
    ),
    "unlisted": (
        {"task": task(loss=learnt)},
        ValueError,
        r"the loss reads hyperparameter 'smoothing', which `hypers` lacks",
    ),
    "params of a loss": (
        {"task": task(loss=learnt), "hypers": LOSS_KEYS | {"smoothing": lh.Hyper(0.1, params="0.*")}},
        ValueError,
        r"'smoothing' belongs to the loss: `params` applies to the rule's arguments only",
    ),
    # groups
    "overlap": (
        {"hypers": {"lr/a": lh.Hyper(0.1, params="0.*"), "lr/b": lh.Hyper(0.1, params="*.bias")}},
        ValueError,
        r"'lr/a' and 'lr/b' both set 'lr' of parameter '0.bias'; narrow one's `params`",
    ),
    "two for all": (
        {"hypers": {"lr": lh.Hyper(0.1), "lr/more": lh.Hyper(0.2)}},
        ValueError,
        r"'lr' and 'lr/more' both set 'lr'",
    ),
    "picks none": (
        lr(0.1, params="head.*"),
        ValueError,
        r"params='head.\*', which picks no parameter; the model has 0.weight, 0.bias",
    ),
    "one of several picks none": (
        lr(0.1, params=["2.*", "0.wieght", "ndim<2"]),
        ValueError,
        r"params=\['2\.\*', '0\.wieght', .*, of which '0\.wieght' picks no parameter; nearest to it: 0\.weight, 2\.w",
    ),
    "several are none": (lr(0.1, params=[]), ValueError, r"params=\[\], which picks no parameter; the model has 0"),
    "function picks none": (lr(0.1, params=lambda name, p: False), ValueError, r"picks no parameter"),
    "nothing left": (
        {"hypers": {"lr": lh.Hyper(0.1), "lr/all": lh.Hyper(0.1, params="*")}},
        ValueError,
        r"'lr' applies to no parameter: others with `params` claim them all",
    ),
    # values
    "values unknown": (
        {"values": {"lrr": 0.1}},
        ValueError,
        r"values has the unknown hyperparameter 'lrr'. Did you mean 'lr'\?",
    ),
    "values too many": ({"values": {"lr": [0.1, 0.2]}}, ValueError, r"'lr' has 1 window\(s\) but 2 values"),
    "values NaN": ({"values": {"lr": math.nan}}, ValueError, r"values must be finite"),
    # streams
    "short list": (
        {"task": task(train=stream(pairs, 5))},
        ValueError,
        r"Task.train\(0\) ended after 5 batches.*steps=8.*no batch for step 5",
    ),
    "short generator": ({"task": task(train=ends_early)}, ValueError, r"ended after 5 batches.*no batch for step 5"),
    "short generator, adjoint": (
        {"task": task(train=ends_early), "engine": lh.Adjoint()},
        ValueError,
        r"no batch for step 5",
    ),
    "short sequence": ({"task": task(train=lambda seed: Endless())}, ValueError, r"no batch for step 5"),
    "empty list": ({"task": task(train=lambda seed: [])}, ValueError, r"ended after 0 batches"),
    "empty generator": ({"task": task(train=lambda seed: iter(()))}, ValueError, r"ended after 0 batches"),
    "empty val": ({"task": task(val=lambda seed: [])}, ValueError, r"Task.val\(0\) returned no batches"),
    "val None": (
        {"task": task(val=lambda seed: None)},
        TypeError,
        r"Task.val\(\d+\) returned NoneType: expected a list of batches",
    ),
    "train no batches": (
        {"task": task(train=lambda seed: None)},
        TypeError,
        r"Task.train returned NoneType: expected batches",
    ),
    # models and losses
    "no parameters": ({"task": task(model=nn.Tanh)}, ValueError, r"the model has no parameters to train"),
    "all frozen": (
        {"task": task(model=half_frozen)},
        ValueError,
        r"the model has no parameters to train.*requires_grad",
    ),
    "no module": (
        {"task": task(model=lambda: torch.relu)},
        TypeError,
        r"Task.model returned builtin_function_or_method: expected an nn.Module",
    ),
    "vector loss": (
        {"task": task(loss=lambda model, batch: model(batch[0]).sum(0))},
        ValueError,
        r"Task.loss returned shape \(3,\).*take the mean",
    ),
    "train batch in place": (
        {"task": task(loss=halving, val_loss=classify)},
        ValueError,
        r"Task.loss or the model changes a batch of Task.train in place.*write it out of place",
    ),
    "val batch in place": (
        {"task": task(val_loss=halving)},
        ValueError,
        r"Task.val_loss or the model changes a batch of Task.val in place",
    ),
    "metrics in place": (
        {"task": task(metrics=lambda model, batch: {"loss": halving(model, batch)})},
        ValueError,
        r"Task.metrics or the model changes a batch of Task.val in place",
    ),
    "first layer in place": (
        {"task": task(model=lambda: nn.Sequential(nn.ReLU(inplace=True), *mlp()))},
        ValueError,
        r"changes a batch of Task.train in place.*inplace=True",
    ),
    "gradient hook": (
        {"task": task(model=hooked("register_hook"))},
        TypeError,
        r"parameter '0.weight' has a gradient hook, which would not be called.*lh.clipped",
    ),
    "accumulation hook": (
        {"task": task(model=hooked("register_post_accumulate_grad_hook"))},
        TypeError,
        r"parameter '0.weight' has a gradient hook",
    ),
    "max_norm": (
        {"task": task(model=looked_up(nn.Embedding))},
        TypeError,
        r"module '0' is Embedding with max_norm.*in place.*leave max_norm out",
    ),
    "max_norm of bags": (
        {"task": task(model=looked_up(nn.EmbeddingBag))},
        TypeError,
        r"module '0' is EmbeddingBag with max_norm",
    ),
    "sparse gradients": (
        {"task": task(model=lambda: nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 3)))},
        TypeError,
        r"module '0' is Embedding with sparse=True.*leave it out",
    ),
    "a rule's memory": (
        {"rule": lh.Rule("own", {"lr": 0.1}, lambda params: None, lambda params, grads, state, h: (params, state))},
        TypeError,
        r"init of the rule 'own' returned NoneType in its memory.*an empty tuple for none",
    ),
    "kept weights in val_loss": (
        {"task": task(model=Kept, val_loss=penalised)},
        ValueError,
        r"Task.val_loss reaches parameter '0.weight' by a reference that was kept",
    ),
    "float loss": (
        {"task": task(loss=lambda model, batch: 1.0)},
        TypeError,
        r"Task.loss returned float.*expected a scalar tensor",
    ),
    "integer loss": (
        {"task": task(loss=lambda model, batch: model(batch[0]).argmax())},
        ValueError,
        r"Task.loss returned shape \(\), torch.int64.*floating point",
    ),
    "vector val_loss": (
        {"task": task(val_loss=lambda model, batch: model(batch[0]).sum(0))},
        ValueError,
        r"Task.val_loss returned shape \(3,\).*on a batch of Task.val",
    ),
    "vector metric": (
        {"task": task(metrics=lambda model, batch: {"right": model(batch[0]).sum(0)})},
        TypeError,
        r"Task.metrics returned shape \(3,\) for 'right': expected a number; take the mean",
    ),
    "metric word": (
        {"task": task(metrics=lambda model, batch: {"right": "all"})},
        TypeError,
        r"Task.metrics returned 'all' for 'right'",
    ),
    "bare metric": (
        {"task": task(metrics=lambda model, batch: model(batch[0]).mean())},
        TypeError,
        r"Task.metrics returned Tensor: expected a dictionary",
    ),
    "progress": ({"progress": 3}, TypeError, r"progress=3: expected a function or None"),
    # engines
    "engine string": (
        {"engine": "foward"},
        ValueError,
        r"engine='foward': expected 'auto' or an engine such as lh.Forward\(\)",
    ),
    "engine class": ({"engine": 3}, ValueError, r"engine=3: expected 'auto'"),
    "engine uncalled": ({"engine": lh.Forward}, (TypeError, ValueError), r"lh.Forward\(\)"),
    "per_step, forward": (
        {"engine": lh.Forward(), "per_step": True},
        ValueError,
        r"per_step=True with Forward: use lh.Adjoint\(\), or windows=steps",
    ),
    "per_step, difference": (
        {"engine": lh.FiniteDifference(), "per_step": True},
        ValueError,
        r"per_step=True with FiniteDifference",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_is_refused(name):
    changes, error, words = CALLS[name]
    with pytest.raises(error, match=words):
        call(**changes)


def test_the_call_they_all_start_from_is_good():
    assert call().status.ok
    assert call(task=task(loss=learnt), hypers=LOSS_KEYS).status.ok


def tune(**changes):
    """The same through `tune`, whose own checks come first."""
    given = {"task": task(), "rule": lh.sgd(), "hypers": {"lr": lh.Hyper(0.1)}, "steps": 8, "outer_steps": 1} | changes
    return lh.tune(given.pop("task"), given.pop("rule"), given.pop("hypers"), **given)


OF_TUNE = ["no task", "no rule", "rule uncalled", "hypers None", "hypers list", "hypers number key", "learn string"]
OF_TUNE += ["val None", "vector metric", "bare metric", "progress"]
TUNES = {name: CALLS[name] for name in OF_TUNE} | {
    "seconds": ({"checkpoint_seconds": "30"}, ValueError, r"checkpoint_seconds='30': expected a number of seconds"),
    "seconds NaN": ({"checkpoint_seconds": math.nan}, ValueError, r"checkpoint_seconds=nan"),
    "on_step": ({"on_step": 3}, TypeError, r"on_step=3: expected a function or None"),
    "traces": ({"traces": 3}, TypeError, r"traces=3: expected a Traces"),
    "outer": ({"outer": lambda p: 3}, TypeError, r"outer returned 3: expected a torch.optim optimizer"),
}


@pytest.mark.parametrize("name", TUNES)
def test_a_bad_call_of_tune_is_refused_before_anything_is_written(name, tmp_path):
    changes, error, words = TUNES[name]
    with pytest.raises(error, match=words):
        tune(**changes)
    if "task" not in changes:
        with pytest.raises(error, match=words):
            tune(dir=tmp_path / "run", **changes)
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dir", ["", 3])
def test_a_directory_without_a_name_is_refused(dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"dir={dir!r}: expected the name of a directory"):
        tune(dir=dir)
    assert not list(tmp_path.iterdir())


def test_retrain_refuses_what_is_no_task():
    with pytest.raises(TypeError, match=r"task=3: expected a Task"):
        lh.retrain(3, lh.sgd(), {"lr": lh.Hyper(0.1)}, {"lr": [0.1]}, steps=3)


CONSTRUCTORS = {
    # name: constructor, error, words
    "horizon 0": (
        lambda: lh.Greedy(horizon=0),
        ValueError,
        r"Greedy\(horizon=0\): expected a whole number of steps, at least 1",
    ),
    "horizon negative": (lambda: lh.Greedy(-2), ValueError, r"Greedy\(horizon=-2\)"),
    "horizon float": (lambda: lh.Greedy(2.0), ValueError, r"Greedy\(horizon=2.0\)"),
    "horizon bool": (lambda: lh.Greedy(True), ValueError, r"Greedy\(horizon=True\)"),
    "forward clip 0": (
        lambda: lh.Forward(clip=0.0),
        ValueError,
        r"Forward\(clip=0.0\): expected a positive bound, 'auto', or None",
    ),
    "forward clip NaN": (lambda: lh.Forward(clip=math.nan), ValueError, r"Forward\(clip=nan\)"),
    "adjoint clip": (lambda: lh.Adjoint(clip=-1.0), ValueError, r"Adjoint\(clip=-1.0\)"),
    "greedy clip": (lambda: lh.Greedy(2, clip=-1.0), ValueError, r"Greedy\(clip=-1.0\)"),
    "chunk 0": (lambda: lh.Forward(chunk=0), ValueError, r"Forward\(chunk=0\): expected a whole number of columns"),
    "chunk bool": (lambda: lh.Forward(chunk=True), ValueError, r"Forward\(chunk=True\)"),
    "chunk float": (lambda: lh.Forward(chunk=2.5), ValueError, r"Forward\(chunk=2.5\)"),
    "compile": (
        lambda: lh.Forward(compile="yes"),
        ValueError,
        r"Forward\(compile='yes'\): expected True, False or 'auto'",
    ),
    "store": (
        lambda: lh.Adjoint(store="most"),
        ValueError,
        r"Adjoint\(store='most'\): expected 'auto', 'all' or 'sqrt'",
    ),
    "eps": (
        lambda: lh.FiniteDifference(eps=0.0),
        ValueError,
        r"FiniteDifference\(eps=0.0\): expected a positive fraction",
    ),
    "eps of a key": (lambda: lh.FiniteDifference(eps={"lr": -1.0}), ValueError, r"FiniteDifference\(eps=-1.0\)"),
    "model instance": (
        lambda: task(model=mlp()),
        TypeError,
        r"Task\(model=…\): expected a function that makes the model.*lambda",
    ),
    "model none": (lambda: task(model=None), TypeError, r"Task\(model=None\): expected a function"),
    "loss none": (lambda: task(loss=0.5), TypeError, r"Task\(loss=0.5\): expected a function"),
    "train list": (lambda: task(train=[1, 2]), TypeError, r"Task\(train=\[1, 2\]\): expected a function"),
    "val list": (lambda: task(val=[1, 2]), TypeError, r"Task\(val=\[1, 2\]\): expected a function"),
    "val_loss": (lambda: task(val_loss=1), TypeError, r"Task\(val_loss=1\): expected a function `.*` or None"),
    "train data": (
        lambda: task(train=[(torch.randn(99, 9), torch.randn(99))] * 99),
        TypeError,
        r"^Task\(train=.{0,80}\): expected a function `\(seed\) -> batches`\.$",
    ),
    "train takes nothing": (
        lambda: task(train=lambda: [pairs(0)]),
        TypeError,
        r"Task\(train=…\) has the parameters \(\): expected a function `\(seed\) -> batches`",
    ),
    "val takes nothing": (lambda: task(val=lambda: []), TypeError, r"Task\(val=…\) has the parameters \(\)"),
    "test takes a seed": (lambda: task(test=lambda seed: []), TypeError, r"Task\(test=…\) has the parameters \(seed\)"),
    "model takes one": (
        lambda: task(model=nn.Flatten.forward),
        TypeError,
        r"Task\(model=…\) has the parameters \(self",
    ),
    "loss takes one": (lambda: task(loss=lambda batch: 0), TypeError, r"Task\(loss=…\) has the parameters \(batch\)"),
    "loss takes four": (
        lambda: task(loss=lambda a, b, c, d: 0),
        TypeError,
        r"Task\(loss=…\) has the parameters \(a, b",
    ),
    "loss of torch": (
        lambda: task(loss=nn.CrossEntropyLoss()),
        TypeError,
        r"Task\(loss=CrossEntropyLoss\(\)\): torch's own losses take outputs and targets; .* For instance `loss",
    ),
    "loss a function of torch": (lambda: task(loss=F.cross_entropy), TypeError, "torch's own losses take outputs"),
    "val_loss of torch": (
        lambda: task(val_loss=functools.partial(F.cross_entropy, label_smoothing=0.1)),
        TypeError,
        r"Task\(val_loss=.*torch's own losses take outputs",
    ),
    "val_mode": (lambda: task(val_mode="test"), ValueError, r"Task\(val_mode='test'\): expected 'eval' or 'train'"),
    "rule argument": (
        lambda: lh.sgd(lr=torch.tensor(0.1)),
        TypeError,
        r"sgd\(lr=tensor\(0.1000\)\): expected a float; to learn it, list it",
    ),
    "rule string": (lambda: lh.adam(beta1="0.9"), TypeError, r"adam\(beta1='0.9'\): expected a float"),
    "nesterov in words": (lambda: lh.sgd(nesterov="no"), TypeError, r"sgd\(nesterov='no'\): expected True or False"),
    "beta of 1.5": (
        lambda: lh.adamw(beta1=1.5),
        ValueError,
        r"adamw\(beta1=1.5\): .* -0.9999999 and at most 0.9999999",
    ),
    "eps below zero": (lambda: lh.adam(eps=-1e-8), ValueError, r"adam\(eps=-1e-08\): adam takes at least 1e-30"),
    "nesterov": (lambda: lh.sgd(dampening=0.1, nesterov=True), ValueError, r"Nesterov momentum needs dampening 0"),
    "grad_clip": (
        lambda: lh.clipped(lh.sgd(), 0.0),
        ValueError,
        r"clipped\(grad_clip=0.0\): the clip level must be a positive number",
    ),
    "grad_clip string": (lambda: lh.clipped(lh.sgd(), "a"), ValueError, r"clipped\(grad_clip='a'\)"),
    "clipped by": (lambda: lh.clipped(lh.sgd(), 1.0, by="nrom"), ValueError, r"clipped\(by='nrom'\): expected 'value'"),
    "clipped twice": (
        lambda: lh.clipped(lh.clipped(lh.sgd(), 1.0), 1.0, by="norm"),
        ValueError,
        r"clipped sgd has a clip already",
    ),
    "clipped nothing": (lambda: lh.clipped(3, 1.0), TypeError, r"clipped\(rule=3\): expected a rule such as"),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_bad_argument_is_refused_where_it_is_given(name):
    make, error, words = CONSTRUCTORS[name]
    with pytest.raises(error, match=words):
        make()


def test_bad_input_is_refused_before_the_stream_is_touched():
    def untouchable(seed):
        raise AssertionError("the stream was read")

    with pytest.raises(ValueError, match="windows=9"):
        call(task=task(train=untouchable), hypers={"lr": lh.Hyper(0.1, windows=9)})


def test_a_start_may_be_a_tensor():
    one, two = (
        call(hypers={"lr": lh.Hyper(start)}).grad["lr"] for start in (0.1, torch.tensor(0.1, dtype=torch.float64))
    )
    assert torch.equal(one, two)


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint(), lh.FiniteDifference(), lh.Factorial()], ids=str)
def test_weights_kept_from_before_are_not_those_that_are_trained(engine):
    words = r"Task.loss reaches parameter '0.weight' by a reference that was kept.*take it from the model inside the"
    made = task(model=Kept, loss=penalised, val_loss=classify, test=lambda: [pairs(9)])
    with pytest.raises(ValueError, match=words):
        call(task=made, engine=engine)
    with pytest.raises(ValueError, match=words):
        lh.retrain(made, lh.sgd(), {"lr": lh.Hyper(0.1)}, {"lr": [0.1]}, steps=3)


def test_weights_taken_inside_the_loss_are_fine():
    def inside(model, batch):
        return classify(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters() if p.ndim > 1)

    assert call(task=task(model=Kept, loss=inside)).status.ok
