"""Truth by central differences of the seed-averaged loss, and what estimators are worth by it."""

import json
import math

import pytest
import torch

import longhorizon as lh
from longhorizon import data
from longhorizon.truth import Truth, score, truth
from problems import problem

HYPERS = {"lr": lh.Hyper([0.3, 0.5, 0.2], windows=3), "momentum": lh.Hyper(0.5)}
SETTING = {"steps": 9, "distance": {"lr": 0.3, "momentum": 0.1}}


def final_loss(values, seed):
    h = lh.hypergradient(problem("mlp").task, lh.sgd(), HYPERS, steps=9, seed=seed, values=values)
    return h.val_loss


def test_it_is_the_difference_of_whole_runs():
    found = truth(problem("mlp").task, lh.sgd(), HYPERS, seeds=3, **SETTING)
    for seed in range(3):
        up, down = final_loss({"lr": [0.3, 0.65, 0.2]}, seed), final_loss({"lr": [0.3, 0.35, 0.2]}, seed)
        assert found.differences["lr"][seed, 1] == pytest.approx((up - down) / 0.3)
    assert found.differences["lr"].shape == (3, 3)
    assert found.mean["momentum"] == pytest.approx(found.differences["momentum"].mean(0))
    assert found.error["momentum"].item() == pytest.approx(found.differences["momentum"].std().item() / 3**0.5)


def test_a_measurement_does_not_go_on_in_another_precision(tmp_path):
    given = {"seeds": 2, "path": tmp_path / "truth.json", **SETTING}
    task = data.image_task("digits", "mlp-16", batch_size=32, val_fraction=0.2, device="cpu")
    truth(task, lh.sgd(), HYPERS, **given)
    with pytest.raises(ValueError, match="truth.json"):
        truth(task, lh.sgd(), HYPERS, precision="bf16", **given)
    given["path"] = tmp_path / "rough.json"
    truth(task, lh.sgd(), HYPERS, precision="bf16", **given)
    with pytest.raises(ValueError, match="its precision is bf16, not float32"):
        truth(task, lh.sgd(), HYPERS, **given)


def test_a_measurement_does_not_go_on_with_another_rule(tmp_path):
    given = {"seeds": 2, "path": tmp_path / "truth.json", **SETTING}
    task = problem("mlp").task
    first = truth(task, lh.sgd(), HYPERS, **given)
    for other in (lh.sgd(weight_decay=0.1), lh.sgd(nesterov=True), lh.clipped(lh.sgd(), 1.0)):
        with pytest.raises(ValueError, match="holds another measurement: its rule is"):
            truth(task, other, HYPERS, **given)
    content = json.loads(given["path"].read_text())
    del content["setting"]["rule"], content["setting"]["precision"]  # as in files of before
    given["path"].write_text(json.dumps(content))
    assert torch.equal(truth(task, lh.sgd(), HYPERS, **given).differences["lr"], first.differences["lr"])
    del content["setting"]["steps"]
    content["setting"]["epochs"] = 3
    given["path"].write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its steps is None, not 9"):
        truth(task, lh.sgd(), HYPERS, **given)


def test_every_learnt_key_has_a_distance():
    given = problem("mlp").task, lh.sgd(), HYPERS
    with pytest.raises(ValueError, match="no distance for hyperparameter 'momentum'"):
        truth(*given, seeds=2, steps=9, distance={"lr": 0.3})
    fixed = HYPERS | {"momentum": lh.Hyper(0.5, learn=False)}
    truth(*given[:2], fixed, seeds=2, steps=9, distance={"lr": 0.3})
    truth(*given, seeds=2, steps=9, distance={"lr": 0.3}, only={"lr": [1]})


def test_chosen_values_cost_nothing_else():
    counted = []
    task = problem("mlp").task
    found = truth(
        task, lh.sgd(), HYPERS, seeds=2, only={"lr": [2]}, progress=lambda *done: counted.append(done), **SETTING
    )
    assert counted == [(1, 2), (2, 2)]
    assert found.differences["lr"].isfinite().tolist() == [[False, False, True]] * 2
    assert not found.significant()["momentum"].any()
    with pytest.raises(ValueError, match=r"only=\{'lr': \[3\]\}: lr has the windows 0 to 2"):
        truth(task, lh.sgd(), HYPERS, seeds=2, only={"lr": [3]}, **SETTING)
    with pytest.raises(ValueError, match="'lrr', which is not learnt. Did you mean 'lr'"):
        truth(task, lh.sgd(), HYPERS, seeds=2, only={"lrr": [0]}, **SETTING)
    with pytest.raises(ValueError, match="'momentm', which is not learnt. Did you mean 'momentum'"):
        truth(task, lh.sgd(), HYPERS, seeds=2, only={"lr": [0], "momentm": [0]}, **SETTING)
    with pytest.raises(ValueError, match="seeds=1.*at least two"):
        truth(task, lh.sgd(), HYPERS, seeds=1, **SETTING)


def test_an_interrupted_measurement_goes_on(tmp_path):
    path = tmp_path / "truth.json"

    def stop(done, _):
        if done == 2:
            raise KeyboardInterrupt

    task = problem("mlp").task
    with pytest.raises(KeyboardInterrupt):
        truth(task, lh.sgd(), HYPERS, seeds=4, path=path, progress=stop, **SETTING)
    assert list(json.loads(path.read_text())["seeds"]) == ["0", "1"]
    found, whole = (truth(task, lh.sgd(), HYPERS, seeds=4, path=p, **SETTING) for p in (path, None))
    assert torch.equal(found.differences["lr"], whole.differences["lr"])
    with pytest.raises(ValueError, match="holds another measurement: its steps is 9, not 8"):
        truth(task, lh.sgd(), HYPERS, seeds=4, path=path, **(SETTING | {"steps": 8}))


def test_no_digit_of_a_difference_is_lost():
    found = truth(problem("mlp").task, lh.sgd(), HYPERS, seeds=2, **SETTING)
    exact = lh.FiniteDifference(SETTING["distance"])
    for seed in range(2):
        h = lh.hypergradient(problem("mlp").task, lh.sgd(), HYPERS, steps=9, seed=seed, engine=exact)
        torch.testing.assert_close(found.differences["lr"][seed], h.grad["lr"], rtol=1e-11, atol=0)


@pytest.mark.parametrize("count", [1, 2, 5, 24])
def test_runs_may_be_made_at_once(monkeypatch, count):
    made = []
    monkeypatch.setattr("longhorizon.truth.at_once", lambda problem, *how: made.append(how) or count)
    found = truth(problem("mlp").task, lh.sgd(), HYPERS, seeds=2, **SETTING)
    for seed in range(2):
        engine = lh.FiniteDifference(SETTING["distance"])
        one = lh.hypergradient(problem("mlp").task, lh.sgd(), HYPERS, steps=SETTING["steps"], seed=seed, engine=engine)
        for key in HYPERS:
            torch.testing.assert_close(found.differences[key][seed], one.grad[key], rtol=1e-6, atol=1e-7)
        assert float(found.val_loss[seed]) == pytest.approx(one.val_loss, rel=1e-6)
    assert made == [(2 * sum(h.windows for h in HYPERS.values()) + 1, 2)] * 2  # runs of a seed, and how many seeds


def test_scores_by_hand():
    # Window 0 falls, 1 rises, 2 is unknown, 3 diverged in half of the seeds.
    differences = torch.tensor([[-1.0, 2.0, 1.0, math.nan], [-1.2, 2.2, -1.0, 5.0]], dtype=torch.float64)
    given = Truth({"lr": differences}, torch.zeros(2))
    assert given.significant()["lr"].tolist() == [True, True, False, False]
    estimates = torch.tensor([[-1.1, 2.1, 0.0, 3.0], [5.0, math.nan, 0.0, 3.0]], dtype=torch.float64)
    assert score({"lr": torch.zeros(1, 4, dtype=torch.float64)}, given).rank == 0  # all equal: no order
    found = score({"lr": estimates}, given)
    assert found.values == 2
    assert found.sign == 0.5
    assert found.sign_error == pytest.approx(0.5)
    assert found.rank == pytest.approx((1 + 0) / 2)
    assert found.bias == pytest.approx(0.0)  # of windows 0 and 1: 3.05 / 1.1 and 0; the lower median


def test_exact_hypergradients_of_a_calm_run_are_true():
    task = problem("mlp").task
    found = truth(task, lh.sgd(), HYPERS, seeds=6, steps=9, distance=1e-4)
    exact = [lh.hypergradient(task, lh.sgd(), HYPERS, steps=9, seed=s).grad for s in range(6)]
    for key in HYPERS:
        torch.testing.assert_close(torch.stack([g[key] for g in exact]), found.differences[key], rtol=1e-5, atol=1e-9)
