"""A key that was learnt for some parameters only stays with these: in the file, in torch, in exported code."""

import copy
import csv
import io
from dataclasses import replace

import pytest
import torch
from torch import nn

import longhorizon as lh
from longhorizon.export import to_csv, to_python
from test_docs import ROOT, blocks

HYPERS = {"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.2, params="ndim>=2")}
BY_NAME = {"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.2, params=["0.*", "2.bias"])}


def schedule_of(hypers, rule=None):
    return lh.Schedule.of(hypers, {key: hyper.values() for key, hyper in hypers.items()}, rule or lh.sgd())


def make_model():
    return nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))


def attached(schedule, optimizer):
    schedule.attach(optimizer, steps=10)


def exported(schedule, optimizer):
    space: dict = {}
    exec(to_python(schedule), space)
    space["set_hyperparameters"](optimizer, 0, 10)


def decays(optimizer):
    return [group["weight_decay"] for group in optimizer.param_groups]


@pytest.fixture
def float64():
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


def test_the_flow_of_the_readme_trains_as_retrain_does(tmp_path, monkeypatch, float64):
    monkeypatch.chdir(tmp_path)
    (_, tuning), (_, training) = blocks(ROOT / "README.md", "python")
    space: dict = {"__name__": "readme"}
    exec(tuning, space)
    path = tmp_path / "runs/mine/schedule.json"
    learnt = lh.Schedule.load(path)
    learnt.values["weight_decay"] = (0.05,)  # enough to tell, after three outer steps it is not yet
    learnt.save(path)
    start, task, hypers = space["task"].model(), space["task"], space["hypers"]
    task = space["task"] = replace(task, model=lambda: copy.deepcopy(start), test=lambda: task.val(0))
    exec(training, space)
    on_all = {**hypers, "weight_decay": lh.Hyper(0.0)}
    right, wrong = (lh.retrain(task, lh.sgd(), h, learnt, steps=300, seeds=[1]).params for h in (hypers, on_all))
    for name, p in space["model"].named_parameters():
        torch.testing.assert_close(p.detach(), right[name], rtol=0, atol=1e-12, msg=name)
    assert max((right[name] - wrong[name]).abs().max() for name in right) > 1e-2


def test_the_file_says_which_parameters_a_key_is_for(tmp_path):
    for hypers, params in ((HYPERS, "ndim>=2"), (BY_NAME, ("0.*", "2.bias"))):
        schedule = schedule_of(hypers)
        assert schedule.params == {"weight_decay": params}
        schedule.save(tmp_path / "s.json")
        assert lh.Schedule.load(tmp_path / "s.json") == schedule
        assert schedule.without("weight_decay").params == {}
    chosen = schedule_of({"lr": lh.Hyper(0.1, params=lambda name, p: True)})
    assert chosen.to_dict()["hypers"]["lr"]["params"] == "a function"


def test_a_file_of_version_1_loads_and_applies_as_before():
    content = schedule_of(HYPERS).to_dict() | {"version": 1}
    del content["hypers"]["weight_decay"]["params"]
    optimizer = torch.optim.SGD(make_model().parameters(), lr=1.0)
    attached(lh.Schedule.from_dict(content), optimizer)
    assert decays(optimizer) == [0.2]


@pytest.mark.parametrize("put", [attached, exported])
def test_groups_that_match_by_dimension_are_found(put):
    model = make_model()
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    biases = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.SGD([{"params": biases}, {"params": matrices}], lr=1.0)
    put(schedule_of(HYPERS), optimizer)
    assert decays(optimizer) == [0, 0.2]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


@pytest.mark.parametrize("put", [attached, exported])
def test_groups_that_match_by_name_are_found(put):
    model = make_model()
    named = dict(model.named_parameters())
    ours = [(name, named.pop(name)) for name in ("0.weight", "0.bias", "2.bias")]
    optimizer = torch.optim.SGD([{"params": list(named.items())}, {"params": ours}], lr=1.0)
    put(schedule_of(BY_NAME), optimizer)
    assert decays(optimizer) == [0, 0.2]


class Nested(nn.Module):
    """With wrapped modules inside, and a `module` of its own."""

    def __init__(self):
        super().__init__()
        self.first = torch.compile(nn.Linear(5, 4))
        self.module = nn.DataParallel(nn.Linear(4, 3))


@pytest.mark.parametrize("put", [attached, exported])
@pytest.mark.parametrize(
    ("wrap", "patterns"),
    [
        (torch.compile, BY_NAME["weight_decay"].params),
        (nn.DataParallel, BY_NAME["weight_decay"].params),
        (lambda model: torch.compile(nn.DataParallel(model)), BY_NAME["weight_decay"].params),
        (lambda model: nn.DataParallel(torch.compile(model)), BY_NAME["weight_decay"].params),
        (lambda model: Nested(), ["first.*", "bias"]),
        (lambda model: Nested(), ["first.*", "module.*bias"]),
    ],
)
def test_patterns_are_for_names_without_the_prefixes_of_wrappers(put, wrap, patterns):
    schedule = schedule_of({"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.2, params=patterns)})
    model = wrap(make_model())
    optimizer = torch.optim.SGD(schedule.groups(model), lr=1.0)
    put(schedule, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 1]
    assert decays(optimizer) == [0.2, 0]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    assert set(names) == {name for name, _ in model.named_parameters()}, "names are the model's own"


def test_a_compiled_model_is_tuned_by_the_same_patterns():
    data = torch.randn(4, 5)
    task = lh.Task(
        make_model, lambda model, batch: model(batch).square().mean(), lambda _: [data] * 2, lambda _: [data]
    )
    compiled = replace(task, model=lambda: torch.compile(make_model(), backend="eager"))
    plain, wrapped = (lh.hypergradient(t, lh.sgd(), BY_NAME, steps=2) for t in (task, compiled))
    torch.testing.assert_close(plain.grad["weight_decay"], wrapped.grad["weight_decay"])


@pytest.mark.parametrize("put", [attached, exported])
def test_a_group_named_after_the_key_has_it(put):
    model = make_model()
    groups = [{"params": model[0].parameters(), "name": "weight_decay"}, {"params": model[2].parameters()}]
    for params in ("ndim>=2", "0.*", lambda name, p: name.startswith("0.")):
        optimizer = torch.optim.SGD(groups, lr=1.0)
        put(schedule_of({"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.2, params=params)}), optimizer)
        assert decays(optimizer) == [0.2, 0]


@pytest.mark.parametrize("put", [attached, exported])
@pytest.mark.parametrize(
    ("params", "parameters", "words"),
    [
        ("ndim>=2", lambda m: m.parameters(), r"'weight_decay' is for the parameters 'ndim>=2' only, but .* group 0"),
        ("0.*", lambda m: m.named_parameters(), r"'0\.\*' only, but parameter group 0 has others, too"),
        (
            "0.*",
            lambda m: m.parameters(),
            r"only, and the optimizer does not know which.*SGD\(schedule.groups\(model\)",
        ),
        (lambda name, p: True, lambda m: m.named_parameters(), r"'a function' only.*\"name\": 'weight_decay'"),
        ("ndim>=2", lambda m: [m[0].bias], r"'ndim>=2' only, and the optimizer has none of them"),
    ],
)
def test_an_optimizer_that_mixes_them_is_refused(put, params, parameters, words):
    schedule = schedule_of({"lr": lh.Hyper(0.1), "weight_decay": lh.Hyper(0.2, params=params)})
    optimizer = torch.optim.SGD(parameters(make_model()), lr=1.0)
    if put is exported:
        words = r"'weight_decay' was learnt for the parameters \[.*\] only: give these a parameter group of their own"
    with pytest.raises(ValueError, match=words):
        put(schedule, optimizer)


@pytest.mark.parametrize("put", [attached, exported])
def test_groups_are_those_of_the_run(put):
    """Labels and patterns together; what an entry leaves out has the value the rule was made with."""
    hypers = {
        "lr": lh.Hyper(0.1),
        "lr/head": lh.Hyper(0.01, params="2.*"),
        "beta1": lh.Hyper(0.5, params="ndim<2"),
        "weight_decay/head": lh.Hyper(0.3, params="2.*"),
        "eps/first": lh.Hyper(1e-3, params="0.weight"),
    }
    schedule = schedule_of(hypers, lh.adamw(beta2=0.95, weight_decay=0.4, eps=1e-6))
    optimizer = torch.optim.AdamW(schedule.groups(make_model()))
    put(schedule, optimizer)
    found = {
        group["param_names"][0]: [group[key] for key in ("lr", "betas", "weight_decay", "eps")]
        for group in optimizer.param_groups
    }
    assert found == {
        "0.weight": [0.1, (0.9, 0.95), 0.4, 1e-3],
        "0.bias": [0.1, (0.5, 0.95), 0.4, 1e-6],
        "2.weight": [0.01, (0.9, 0.95), 0.3, 1e-6],
        "2.bias": [0.01, (0.5, 0.95), 0.3, 1e-6],
    }


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (lh.Schedule({"lr/head": (0.1,)}), "does not know which parameters 'lr/head' is for .*\"name\": 'head'"),
        (schedule_of({"lr": lh.Hyper(0.1, params=lambda name, p: True)}), "'lr' is for .a function chose them"),
        (schedule_of({"lr": lh.Hyper(0.1, params="head.*")}), "params='head\\.\\*', which picks no parameter"),
        (
            schedule_of({"lr/a": lh.Hyper(0.1, params="0.*"), "momentum/a": lh.Hyper(0.1, params="0.bias")}),
            "'momentum/a' is not for '0.weight', but another key with this label is",
        ),
    ],
)
def test_groups_that_cannot_be_known_are_refused(schedule, words):
    with pytest.raises(ValueError, match=words):
        schedule.groups(make_model())


def test_a_misspelt_pattern_is_told_the_names_that_patterns_fit():
    with pytest.raises(ValueError, match=r"of which '0\.wieght' picks no parameter; nearest to it: 0\.weight"):
        schedule_of({"lr": lh.Hyper(0.1, params=["2.*", "0.wieght"])}).groups(torch.compile(make_model()))


def test_groups_leave_out_what_is_frozen():
    model = make_model()
    model[0].requires_grad_(False)
    names = [name for group in schedule_of(HYPERS).groups(model) for name, _ in group["params"]]
    assert names == ["2.weight", "2.bias"]


def test_the_head_of_a_table_says_it():
    assert next(csv.reader(io.StringIO(to_csv(schedule_of(BY_NAME), 2)))) == [
        "step",
        "lr",
        "weight_decay (0.* or 2.bias)",
    ]


def test_the_exported_head_says_what_the_other_parameters_have():
    assert "weight_decay=0.05" in to_python(schedule_of(HYPERS, lh.sgd(weight_decay=0.05)))
