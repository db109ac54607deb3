"""A learnt schedule leaves the house: files, stretching, torch optimizers, plain Python."""

import csv
import io
import json
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon.export import to_csv, to_python
from longhorizon.problem import environment, make_problem

SCHEDULE = lh.Schedule({"lr": (0.1, 0.3, 0.2), "momentum": (0.9,)}, {"name": "sgd"}, ("lr",))


def test_values_stretch_to_any_horizon():
    assert [SCHEDULE.value("lr", t, 6) for t in range(8)] == [0.1, 0.1, 0.3, 0.3, 0.2, 0.2, 0.2, 0.2]
    assert [SCHEDULE.value("lr", t, 2) for t in range(2)] == [0.1, 0.3]
    assert SCHEDULE.value("momentum", 5, 10) == 0.9


def test_saved_and_loaded_is_equal(tmp_path):
    SCHEDULE.save(tmp_path / "s.json")
    assert lh.Schedule.load(tmp_path / "s.json") == SCHEDULE
    assert list(tmp_path.iterdir()) == [tmp_path / "s.json"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is no JSON"),
        ("[]", "is no longhorizon schedule"),
        ('{"format": "other"}', "its \"format\" is 'other'"),
        ('{"format": "longhorizon-schedule", "version": 99}', "version 99; this longhorizon reads up to 2: update"),
        ('{"format": "longhorizon-schedule", "version": 1, "hypers": {"lr": {}}}', "is damaged"),
        ('{"format": "longhorizon-schedule", "version": 1, "hypers": {"lr": {"values": []}}}', "has no values"),
    ],
)
def test_a_bad_file_is_named(tmp_path, content, words):
    path = tmp_path / "s.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=words):
        lh.Schedule.load(path)


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([{"lr": ()}], ValueError, r"'lr' is \(\), which has no value"),
        ([{"lr": [0.1, "x"]}], TypeError, r"'lr' has the value 'x': expected numbers"),
        ([{"lr": [0.1, True]}], TypeError, "'lr' has the value True"),
        ([{"lr": torch.ones(2, 2)}], TypeError, r"'lr' has the value \[1\.0, 1\.0\]"),
        ([{"lr": "0.1"}], TypeError, r"'lr' is '0\.1': expected a number, or one per window"),
        ([{"lr": None}], TypeError, "'lr' is None"),
        ([{1: (0.1,)}], TypeError, "has the key 1: expected a name"),
        ([[0.1]], TypeError, r"Schedule\(values=\[0\.1\]\): expected a dictionary such as"),
        ([{"lr": 0.1}, "sgd"], TypeError, r"Schedule\(rule='sgd'\): expected a dictionary such as {\"name\": \"sgd\"}"),
        ([{"lr": 0.1}, {}, "lr"], TypeError, r"Schedule\(learnt='lr'\): expected a tuple of keys, \('lr',\)"),
        ([{"lr": 0.1}, {}, (), (), ["head.*"]], TypeError, r"Schedule\(params=\['head"),
    ],
)
def test_a_schedule_that_is_none_is_refused_where_it_is_made(given, error, words):
    with pytest.raises(error, match=words):
        lh.Schedule(*given)


@pytest.mark.parametrize(
    "values", [0.5, np.float32(0.5), [0.5], torch.tensor(0.5), torch.tensor([0.5]), np.array([0.5])]
)
def test_numbers_of_any_form_are_values(values):
    schedule = lh.Schedule({"lr": values})
    assert schedule == lh.Schedule({"lr": (0.5,)})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule.attach(optimizer, steps=4)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(KeyError, match="Did you mean 'momentum'"):
        SCHEDULE["momentun"]


def make_model():
    return nn.Sequential(nn.Linear(5, 12), nn.ReLU(), nn.Linear(12, 3))


def batches(seed, count=200):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, 5, generator=generator)
    y = (x.sum(-1) > 0).long() + (x[..., 0] > 1).long()
    return [(x[i], y[i]) for i in range(count)]


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


CASES = {
    "sgd": (
        lh.sgd(),
        {"lr": [0.1, 0.3, 0.05], "momentum": [0.0, 0.9, 0.5], "weight_decay": [1e-3, 0.0]},
        lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.1),
    ),
    "dampening, no momentum": (
        lh.sgd(dampening=0.4),
        {"lr": [0.1, 0.3]},
        lambda params: torch.optim.SGD(params, lr=1.0, dampening=0.4),
    ),
    "learnt dampening": (
        lh.sgd(),
        {"lr": [0.1, 0.3], "momentum": [0.0, 0.0], "dampening": [0.5, 0.0]},
        lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.1),
    ),
    "nesterov": (
        lh.sgd(nesterov=True),
        {"lr": [0.1, 0.2], "momentum": [0.5, 0.9]},
        lambda params: torch.optim.SGD(params, lr=1.0, momentum=0.1, nesterov=True),
    ),
    "adamw": (
        lh.adamw(),
        {"lr": [1e-3, 3e-3], "beta1": [0.9, 0.8], "beta2": [0.99, 0.95], "weight_decay": [0.1, 0.0], "eps": [1e-8]},
        lambda params: torch.optim.AdamW(params, lr=1.0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_attached_to_plain_torch_gives_our_weights(case):
    """200 steps in float32 with torch.optim end at the same weights as our inner loop."""
    rule, values, make_optimizer = CASES[case]
    hypers = {key: lh.Hyper(v, windows=len(v)) for key, v in values.items()}
    task = lh.Task(make_model, loss, batches, lambda seed: batches(seed, 1))
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with environment():
            problem = make_problem(task, rule, hypers, 200, 0)
            state = problem.start
            model = make_model()
            model.load_state_dict(state.params)
            for step in range(200):
                state, _ = problem.train_step(state, step)
        optimizer = make_optimizer(model.parameters())
        scheduler = lh.Schedule.of(hypers, problem.values, rule).attach(optimizer, steps=200)
        for batch in batches(0):
            optimizer.zero_grad()
            loss(model, (batch[0].float(), batch[1])).backward()
            optimizer.step()
            scheduler.step()
    finally:
        torch.set_default_dtype(default)
    for name, p in model.named_parameters():
        assert (p.detach() - state.params[name]).norm() <= 1e-6 * p.norm(), name


def test_a_group_that_comes_later_follows_too():
    schedule = lh.Schedule({"lr": (0.1, 0.2)}, {"name": "sgd"})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1.0)
    scheduler = schedule.attach(optimizer, steps=np.int64(4))
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    for _ in range(2):
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.2]


def test_the_scheduler_resumes_from_its_state_dict(tmp_path):
    def fresh():
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.5)
        return optimizer, SCHEDULE.attach(optimizer, steps=6)

    optimizer, scheduler = fresh()
    for _ in range(3):
        optimizer.step()
        scheduler.step()
    torch.save({"o": optimizer.state_dict(), "s": scheduler.state_dict()}, tmp_path / "c.pt")
    saved = torch.load(tmp_path / "c.pt", weights_only=True)
    again, resumed = fresh()
    again.load_state_dict(saved["o"])
    resumed.load_state_dict(saved["s"])
    seen = []
    for _ in range(3):
        assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == resumed.get_last_lr()[0]
        seen.append(again.param_groups[0]["lr"])
        for o, s in ((optimizer, scheduler), (again, resumed)):
            o.step()
            s.step()
    assert seen == [0.3, 0.2, 0.2]


def test_labels_find_their_parameter_groups():
    body, head = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [body]}, {"params": [head], "name": "head"}], lr=1.0)
    schedule = lh.Schedule({"lr": (0.1, 0.2), "lr/head": (0.01,), "weight_decay/head": (0.5,)})
    scheduler = schedule.attach(optimizer, steps=2)
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0, 0.5]
    optimizer.step()
    scheduler.step()
    assert [g["lr"] for g in optimizer.param_groups] == [0.2, 0.01]


def test_a_parameter_group_may_answer_to_several_labels():
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "name": ("head", "matrices")}]
    groups += [{"params": [nn.Parameter(torch.zeros(1))], "name": "matrices"}]
    values = {"lr": (0.1,), "lr/head": (0.01,), "weight_decay": (0.0,), "weight_decay/matrices": (0.5,)}
    schedule = lh.Schedule(values)
    attached, exported = torch.optim.SGD(groups, lr=1.0), torch.optim.SGD(groups, lr=1.0)
    schedule.attach(attached, steps=2)
    space: dict = {}
    exec(to_python(schedule), space)
    space["set_hyperparameters"](exported, 0, 2)
    for optimizer in (attached, exported):
        assert [(g["lr"], g["weight_decay"]) for g in optimizer.param_groups] == [(0.01, 0.5), (0.1, 0.5)]
    with pytest.raises(ValueError, match="'lr/head' and 'lr/matrices', and a parameter group has both names"):
        lh.Schedule({"lr/head": (0.1,), "lr/matrices": (0.1,)}).attach(attached, steps=2)


def test_what_no_torch_optimizer_takes_can_be_left_out():
    hypers = {"lr": lh.Hyper(0.1), "grad_clip": lh.Hyper(1.0)}
    values = {key: hyper.values() for key, hyper in hypers.items()}
    schedule = lh.Schedule.of(hypers, values, lh.clipped(lh.sgd(), 1.0))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(ValueError, match=r"attach schedule.without\('grad_clip'\)"):
        schedule.attach(optimizer, steps=5)
    schedule.without("grad_clip").attach(optimizer, steps=5)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert schedule.without("grad_clip").learnt == ("lr",)
    with pytest.raises(KeyError, match="Did you mean 'grad_clip'"):
        schedule.without("gradclip")


def test_attach_refuses_what_would_be_silently_wrong():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))])
    another, lacks = "learnt for torch.optim.SGD, and this is Adam", "sets 'momentum', which Adam does not have"
    with pytest.warns(UserWarning, match=another), pytest.raises(ValueError, match=lacks):
        SCHEDULE.attach(optimizer, steps=5)
    with pytest.raises(ValueError, match="no parameter group of the optimizer has the name 'head'"):
        lh.Schedule({"lr/head": (0.1,)}).attach(optimizer, steps=5)
    with pytest.raises(ValueError, match="steps=0"):
        lh.Schedule({"lr": (0.1,)}).attach(optimizer, steps=0)


@pytest.mark.parametrize("given", [lambda m: m.parameters(), lambda m: m.named_parameters(), lambda m: m.state_dict()])
def test_groups_are_made_of_a_model_only(given):
    with pytest.raises(TypeError, match=r"groups\(model=<\w+>\): expected the model.*: schedule\.groups\(model\)"):
        SCHEDULE.groups(given(make_model()))


@pytest.mark.parametrize("given", [lambda m: m, lambda m: m.parameters(), lambda m: torch.optim.SGD])
def test_only_an_optimizer_is_attached_to(given):
    said = r"attach\(optimizer=<\w+>\): expected a torch optimizer, .*SGD\(schedule\.groups\(model\)\)"
    with pytest.raises(TypeError, match=said):
        SCHEDULE.attach(given(make_model()), steps=5)


class Ours(torch.optim.Adam):
    """Somebody's."""


class Adam8bit(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0})


class Wrapper(torch.optim.Optimizer):
    """As accelerate's."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        super().__init__([nn.Parameter(torch.zeros(1))], optimizer.defaults)


@pytest.mark.parametrize(
    ("make", "warned"),
    [
        (torch.optim.Adam, False),
        (Ours, False),
        (Adam8bit, False),
        (lambda params: Wrapper(Ours(params)), False),
        (torch.optim.NAdam, True),
        (torch.optim.AdamW, True),
        (lambda params: torch.optim.SGD(params, lr=1.0), True),
    ],
)
def test_a_schedule_for_another_kind_of_optimizer_is_warned_of(make, warned):
    """A subclass, a wrapper and somebody else's form of an optimizer are of its kind."""
    schedule = lh.Schedule({"lr": (0.1,)}, {"name": "adam"})
    optimizer = make([nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        schedule.attach(optimizer, steps=5)
    assert [str(w.message).startswith("the schedule was learnt for torch.optim.Adam, and") for w in said] == [
        True
    ] * warned


def test_hyperparameters_of_the_loss_are_left_to_the_user():
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    lh.Schedule({"lr": (0.1,), "smoothing": (0.2,)}, in_loss=("smoothing",)).attach(optimizer, steps=5)
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_exported_python_runs_alone_and_gives_the_same_values():
    schedule = lh.Schedule({"lr": (0.1, 0.3), "momentum": (0.0, 0.9), "lr/head": (0.01,)}, {"name": "sgd"})
    space: dict = {}
    exec(to_python(schedule), space)
    assert "longhorizon" not in [name for name in space if not name.startswith("__")]
    assert space["hyperparameters"](7, 10) == {key: schedule.value(key, 7, 10) for key in schedule.keys()}  # noqa: SIM118
    make = lambda: torch.optim.SGD(  # noqa: E731
        [{"params": [nn.Parameter(torch.zeros(1))]}, {"params": [nn.Parameter(torch.zeros(1))], "name": "head"}], lr=1.0
    )
    ours, exported = make(), make()
    scheduler = schedule.attach(ours, steps=10)
    for step in range(10):
        space["set_hyperparameters"](exported, step, 10)
        pick = lambda o: [{k: g[k] for k in ("lr", "momentum")} for g in o.param_groups]  # noqa: E731
        assert pick(ours) == pick(exported)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # optimizer.step() is not called here
            scheduler.step()


def test_exported_python_refuses_a_label_no_group_has():
    space: dict = {}
    exec(to_python(lh.Schedule({"lr/head": (0.1,)}, {"name": "sgd"})), space)
    with pytest.raises(ValueError, match="no parameter group has the name 'head', for which 'lr/head' was learnt"):
        space["set_hyperparameters"](torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), 0, 2)


def exported(schedule):
    space: dict = {}
    exec(to_python(schedule), space)
    return space["set_hyperparameters"]


def test_exported_python_leaves_the_loss_its_own():
    schedule = lh.Schedule({"lr": (0.1,), "weight_decay": (0.5,)}, {"name": "rmsprop"}, (), ("weight_decay",))
    optimizer = torch.optim.RMSprop([nn.Parameter(torch.zeros(1))], lr=1.0)
    exported(schedule)(optimizer, 0, 4)
    assert (optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"]) == (0.1, 0)


@pytest.mark.parametrize("key", ["grad_clip", "momentum", "beta1"])
def test_exported_python_refuses_what_the_optimizer_does_not_have(key):
    make = torch.optim.SGD if key == "beta1" else torch.optim.AdamW
    schedule = lh.Schedule({"lr": (0.1,), key: (0.5,)}, {"name": "another"})
    with pytest.raises(ValueError, match=f"has no '{key}'; to set it yourself, take '{key}' out of SCHEDULE"):
        exported(schedule)(make([nn.Parameter(torch.zeros(1))]), 0, 4)


def test_exported_python_refuses_a_group_with_two_values():
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "name": ("a", "b")}])
    with pytest.raises(ValueError, match="more than one of the names"):
        exported(lh.Schedule({"lr/a": (0.1,), "lr/b": (0.2,)}))(optimizer, 0, 4)


def test_a_beta_of_its_own_is_no_half_of_betas():
    rule = {"name": "lion", "defaults": {"lr": 0.1, "beta": 0.9}}
    assert "for lion(…, beta=0.9)." in to_python(lh.Schedule({"lr": (0.1,)}, rule))
    groups = [{"params": [nn.Parameter(torch.zeros(1))], "beta1": 0.1}]
    for put in (lambda s, o: s.attach(o, steps=4), lambda s, o: exported(s)(o, 0, 4)):
        optimizer = torch.optim.SGD([dict(group) for group in groups], lr=1.0)
        put(lh.Schedule({"beta1": (0.8,)}), optimizer)
        assert optimizer.param_groups[0]["beta1"] == 0.8


def test_a_tensor_in_the_optimizer_stays_that_tensor():
    def fresh():
        lr = torch.tensor(1.0)
        return lr, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)

    (lr, optimizer), (again, other), (third, last) = fresh(), fresh(), fresh()
    scheduler = SCHEDULE.attach(optimizer, steps=3)
    optimizer.step()
    scheduler.step()
    resumed = SCHEDULE.attach(other, steps=3)
    resumed.load_state_dict(scheduler.state_dict())
    exported(SCHEDULE)(last, 1, 3)
    for tensor, o in ((lr, optimizer), (again, other), (third, last)):
        assert o.param_groups[0]["lr"] is tensor
        assert tensor.item() == pytest.approx(0.3)


def test_retrain_refuses_a_key_that_hypers_lacks():
    task = lh.Task(make_model, loss, batches, lambda seed: batches(seed, 1), test=lambda: batches(5, 1))
    schedule = lh.Schedule({"lr": (0.1,), "momentum": (0.9,)})
    for given in (schedule, schedule.values):
        with pytest.raises(ValueError, match="the schedule has 'momentum', which `hypers` lacks: add it there"):
            lh.retrain(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, given, steps=3, seeds=1)


def test_the_exported_head_names_both_betas_while_one_of_them_is_fixed():
    rule = {"name": "adam", "defaults": {"beta1": 0.9, "beta2": 0.99}}
    assert "betas=(0.9, 0.99)" in to_python(lh.Schedule({"beta1": (0.8,)}, rule))
    assert "betas=" not in to_python(lh.Schedule({"beta1": (0.8,), "beta2": (0.9,)}, rule))


def test_exported_csv_has_a_row_per_step():
    rows = to_csv(SCHEDULE, 6).splitlines()
    assert rows[0] == "step,lr,momentum"
    assert rows[3] == "2,0.3,0.9"
    assert len(rows) == 7


def test_exported_csv_quotes_a_label_with_a_comma():
    rows = csv.reader(io.StringIO(to_csv(lh.Schedule({"lr/a,b": (0.1,), "momentum": (0.9,)}), 1)))
    assert list(rows) == [["step", "lr/a,b", "momentum"], ["0", "0.1", "0.9"]]


def test_the_file_format_is_the_documented_one(tmp_path):
    SCHEDULE.save(tmp_path / "s.json")
    content = json.loads((tmp_path / "s.json").read_text())
    assert content["format"] == "longhorizon-schedule"
    assert content["version"] == 2
    assert content["hypers"]["lr"] == {"values": [0.1, 0.3, 0.2], "argument": "lr", "learnt": True, "of": "optimizer"}


def test_exported_code_names_a_fixed_clip():
    """No torch optimizer has it, so that whoever carries the schedule on would train without."""
    hypers = {"lr": lh.Hyper(0.1)}
    clipped = lh.Schedule.of(hypers, {"lr": [0.1]}, lh.clipped(lh.sgd(), grad_clip=0.5))
    by_norm = lh.Schedule.of(hypers, {"lr": [0.1]}, lh.clipped(lh.sgd(), 0.5, by="norm"))
    assert "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5), " in to_python(by_norm)
    assert "clip_by" not in to_python(by_norm)
    assert "torch.nn.utils.clip_grad_value_(model.parameters(), 0.5), optimizer.step()" in to_python(clipped)
    assert "clip" not in to_python(lh.Schedule.of(hypers, {"lr": [0.1]}, lh.sgd()))


def test_values_given_as_a_list_keep_their_digits():
    assert lh.Schedule.of({"lr": lh.Hyper(0.1)}, {"lr": [0.1]}, lh.sgd()).values == {"lr": (0.1,)}


def of(rule, **values):
    hypers = {key: lh.Hyper(value) for key, value in values.items()}
    return lh.Schedule.of(hypers, {key: [value] for key, value in values.items()}, rule)


def test_arguments_that_were_not_learnt_and_differ_are_warned_of():
    model = torch.nn.Linear(2, 1)
    nesterov = of(lh.sgd(momentum=0.9, nesterov=True, weight_decay=1e-2), lr=0.1)
    said = (
        r"learnt with momentum=0\.9, weight_decay=0\.01, nesterov=True, and SGD has momentum=0, weight_decay=0, "
        r"nesterov=False: give it those values to train alike"
    )
    with pytest.warns(UserWarning, match=said):
        nesterov.attach(torch.optim.SGD(nesterov.groups(model), lr=1.0), 10)
    adamw = of(lh.adamw(beta2=0.99), lr=0.1)
    with pytest.warns(UserWarning, match=r"learnt with beta2=0\.99, .*AdamW has beta2=0\.999"):
        adamw.attach(torch.optim.AdamW(model.parameters(), weight_decay=lh.adamw().defaults["weight_decay"]), 10)


@pytest.mark.parametrize("by", ["value", "norm"])
def test_what_no_torch_optimizer_has_is_not_compared(by):
    rule = lh.clipped(lh.sgd(momentum=0.9), 1.0, by=by)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        of(rule, lr=0.1).without("grad_clip").attach(optimizer, 10)
    with pytest.warns(UserWarning, match=r"learnt with momentum=0\.5, .*SGD has momentum=0\.9"):
        of(lh.clipped(lh.sgd(momentum=0.5), 1.0, by=by), lr=0.1).without("grad_clip").attach(optimizer, 10)


@pytest.mark.parametrize("by", ["value", "norm"])
def test_a_fixed_clip_is_warned_of_until_it_is_taken_out(by, tmp_path):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = of(lh.clipped(lh.sgd(), 0.05, by=by), lr=0.1)
    call = rf"torch\.nn\.utils\.clip_grad_{by}_\(model\.parameters\(\), 0\.05\) before every step"
    with pytest.warns(UserWarning, match=call) as said:
        schedule.attach(optimizer, 10)
    assert [warning.filename for warning in said] == [__file__]
    schedule.without("grad_clip").save(tmp_path / "s.json")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lh.Schedule.load(tmp_path / "s.json").attach(optimizer, 10)
        learnt = of(lh.clipped(lh.sgd(), 0.05, by=by), lr=0.1, grad_clip=0.05)
        learnt.without("grad_clip").attach(optimizer, 10)
    assert schedule.rule["fixed"]["grad_clip"] == 0.05


class AdamW8bit(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("rule", "make", "warns"),
    [
        (lh.sgd, torch.optim.SGD, False),
        (lh.adam, torch.optim.Adam, False),
        (lh.adamw, torch.optim.AdamW, False),
        (lh.adamw, AdamW8bit, False),
        (lh.adamw, lambda p: torch.optim.Adam(p, weight_decay=0.01, decoupled_weight_decay=True), False),
        (lh.adamw, torch.optim.Adam, True),
        (lh.adam, torch.optim.AdamW, True),
        (lh.adamw, torch.optim.SGD, True),
        (lh.sgd, torch.optim.RMSprop, True),
        (lambda: lh.clipped(lh.sgd(), 1.0), torch.optim.Adam, True),
        (lambda: lh.clipped(lh.sgd(), 1.0), torch.optim.SGD, False),
    ],
)
def test_an_optimizer_of_another_kind_is_warned_of(rule, make, warns):
    optimizer = make([nn.Parameter(torch.zeros(1))])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        schedule = of(rule(), lr=0.1)
        (schedule.without("grad_clip") if "grad_clip" in rule().defaults else schedule).attach(optimizer, 10)
    assert [("and this is" in str(w.message)) for w in said] == [True] * warns


def test_arguments_that_are_the_same_in_one_group_or_of_another_optimizer_are_not():
    model = torch.nn.Linear(2, 1)
    decays = of(lh.sgd(weight_decay=1e-2), lr=0.1)
    groups = [{"params": [model.weight], "weight_decay": 1e-2}, {"params": [model.bias], "weight_decay": 0.0}]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        decays.attach(torch.optim.SGD(groups, lr=1.0), 10)
        lh.Schedule({"lr": (0.1,)}).attach(torch.optim.AdamW(model.parameters(), weight_decay=0.5), 10)
        of(lh.sgd(momentum=0.9), lr=0.1, momentum=0.5).attach(torch.optim.SGD(model.parameters(), lr=1.0), 10)
