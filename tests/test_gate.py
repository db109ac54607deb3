"""Exact where it is calm and smoothed where it is not; and values that wait for a sign that is supported."""

import math
import re
import tomllib
from dataclasses import replace

import pytest
import torch

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon import recipe_text, report
from longhorizon.console import one_line
from longhorizon.engines import hybrid
from longhorizon.problem import environment, make_problem
from longhorizon.run import settings_of
from longhorizon.trust import among_seeds, doubts, remedy, sureness
from longhorizon.tuning import Tuning
from problems import assert_identical, problem, through_a_file
from test_meter import Saddle

EVERY = (lh.Hybrid(), lh.Hybrid(clip=None))
HYPERS = {"lr": lh.Hyper(0.1, windows=2, step=0.01), "momentum": lh.Hyper(0.0, step=0.01)}


def saddle(b, seed_matters=False):
    """y grows by 1 + lr b a step; chaos in the small. With `seed_matters` the seeds disagree on its direction."""
    sign = (lambda seed: 1.0 - 2 * (seed % 2)) if seed_matters else (lambda seed: 1.0)
    return lh.Task(
        Saddle, lambda m, batch: batch * m(1.0, b), lambda seed: [1.0] * 40, lambda seed: [torch.tensor(sign(seed))]
    )


# --- hybrid ---


def test_a_calm_run_stays_exact():
    exact, found = (
        lh.hypergradient(saddle(0.2), lh.sgd(), HYPERS, steps=40, engine=e) for e in (lh.Adjoint(), lh.Hybrid())
    )
    assert found.engine == f"{exact.engine}, H·q clipped by itself"
    assert_identical(exact, replace(found, engine=exact.engine))
    assert found.error is None


def test_what_is_smoothed_without_a_spare_pair_is_not_doubted_for_its_derivative():
    found = lh.hypergradient(saddle(0.5), lh.sgd(), HYPERS, steps=40, engine=lh.Hybrid(distance=1e-3, pairs=2))
    assert found.error["lr"].tolist() == [math.inf, pytest.approx(math.nan, nan_ok=True)]
    assert found.error["momentum"].tolist() == [math.inf]
    assert doubts(found, 40) == {"lr": ["", ""], "momentum": [""]}


def test_doubted_values_are_smoothed_and_the_others_stay_exact():
    # 1.05^40 = 7.0 for the first window, 1.05^20 = 2.7 for the second
    exact, found = (
        lh.hypergradient(saddle(0.5), lh.sgd(), HYPERS, steps=40, engine=e)
        for e in (lh.Adjoint(), lh.Hybrid(distance=1e-3))
    )
    assert found.engine == "adjoint, H·q clipped by itself, smoothed for 2 of 3 values"
    assert found.error["lr"].isfinite().tolist() == [True, False]
    assert found.error["momentum"].isfinite().tolist() == [True]
    assert found.grad["lr"][1] == exact.grad["lr"][1]
    assert found.grad["lr"][0] != exact.grad["lr"][0]
    for key in HYPERS:  # the saddle is smooth: both are right
        torch.testing.assert_close(found.grad[key], exact.grad[key], rtol=1e-4, atol=0)
    assert found.val_loss == exact.val_loss


@pytest.mark.parametrize("exact", ["adjoint", "forward"])
def test_a_hybrid_saved_at_any_step_ends_the_same(exact):
    engine = lh.Hybrid(exact, distance=0.1, pairs=1)
    with environment():
        made = make_problem(saddle(10.0), lh.sgd(), HYPERS, 12, 0)
        whole = engine.begin(made)
        saves = []
        while not whole.done:
            saves.append(through_a_file(whole.save()))
            whole.advance()
        assert len(saves) > 60  # there and back, and several runs more
        for saved in saves[:: len(saves) // 5]:
            run = engine.begin(made, saved)
            while not run.done:
                run.advance()
            assert_identical(run.result(), whole.result())
            assert run.result().error["lr"].tolist() == whole.result().error["lr"].tolist()


class Wide(torch.nn.Module):
    """L = −b y² / 2 for one of a hundred numbers: its adjoint grows by 1 + lr b a step, all others stay."""

    def __init__(self):
        super().__init__()
        self.y = torch.nn.Parameter(torch.ones(100, dtype=torch.float64))

    def forward(self, b):
        return -b * self.y[0] ** 2 / 2


def steep(count, b=5.0, steps=40):
    """The first so many batches are steep, the others flat."""
    return lh.Task(
        Wide,
        lambda m, batch: m(batch),
        lambda seed: [b] * count + [0.0] * (steps - count),
        lambda seed: [1.0],
    )


def test_what_a_bound_keeps_from_growing_is_doubted_for_how_it_would_have_grown():
    # 1.5^10 = 58 without the bound, 1.1^10 = 2.6 with it; from the second window on nothing moves
    def hypergradient(engine, count=10):
        return lh.hypergradient(steep(count), lh.sgd(), HYPERS, steps=40, engine=engine)

    found, exact = hypergradient(lh.Adjoint(clip="auto")), hypergradient(lh.Adjoint())
    assert found.meter.growth(0, 40) == pytest.approx(1.1**10)
    assert found.meter.growth(0, 40, uncut=True) == pytest.approx(1.5**10)
    assert exact.meter.growth(0, 40) == pytest.approx(1.5**10)
    assert doubts(found, 40)["lr"] == ["amplified 58 times but for its clip", ""]
    assert doubts(exact, 40)["lr"] == ["amplified 58 times", ""]
    assert remedy("amplified 58 times but for its clip") == remedy("amplified 58 times")
    assert abs(found.grad["lr"][0]) < abs(exact.grad["lr"][0])
    assert "smoothed for 2 of 3 values" in hypergradient(lh.Hybrid(distance=1e-3)).engine
    few = hypergradient(lh.Hybrid(distance=1e-3), count=5)  # 1.5^5 = 7.6, 1.1^5 = 1.6: it is trusted
    assert "smoothed" not in few.engine
    assert "smoothed" in hypergradient(lh.Hybrid(distance=1e-3, clip=None), count=5).engine


@pytest.mark.parametrize("store", ["all", "sqrt"])
def test_a_bounded_adjoint_saved_at_any_step_knows_how_it_would_have_grown(store):
    engine = lh.Adjoint(store, clip="auto")
    with environment():
        made = make_problem(steep(10, steps=12), lh.sgd(), HYPERS, 12, 0)
        whole = engine.begin(made)
        saves = []
        while not whole.done:
            saves.append(through_a_file(whole.save()))
            whole.advance()
        for saved in saves:
            run = engine.begin(made, saved)
            while not run.done:
                run.advance()
            assert torch.equal(run.result().meter.uncut, whole.result().meter.uncut)
            assert run.result().meter.uncut[0] > 10 * run.result().meter.size[0]


def test_what_an_older_version_saved_goes_on_unclipped_and_unwatched():
    engine = lh.Adjoint(clip=0.3)
    with environment():
        made = make_problem(steep(10, steps=12), lh.sgd(), HYPERS, 12, 0)
        run = engine.begin(made)
        for _ in range(17):
            run.advance()
        saved = run.save()
        del saved["uncut"], saved["meter"]["uncut"]
        for _ in range(3):  # stopped and resumed more than once
            run = engine.begin(made, through_a_file(saved))
            run.advance()
            saved = run.save()
        while not run.done:
            run.advance()
        assert run.result().meter.uncut is None
        tuning = Tuning(steep(10), lh.sgd(), HYPERS, steps=40, outer_steps=2)
        tuning.advance()
        kept = tuning.save()
        assert tuning.engine == lh.Hybrid()
        del kept["engine"]["with"]["clip"]
        again = Tuning(steep(10), lh.sgd(), HYPERS, steps=40, outer_steps=2, saved=kept)
        assert again.engine == lh.Hybrid(clip=None)
    engines = {str(e): settings_of(Tuning(steep(10), lh.sgd(), HYPERS, steps=40, engine=e))["engine"] for e in EVERY}
    assert "clip" not in engines[str(lh.Hybrid(clip=None))]  # its directories are those of older ones
    assert engines[str(lh.Hybrid())]["clip"] == "auto"


def test_a_saved_exact_part_goes_back_to_its_device():
    found = lh.hypergradient(saddle(0.5), lh.sgd(), HYPERS, steps=5)  # files are read to the CPU
    loaded = hybrid._loaded(through_a_file(hybrid._kept(found)), torch.device("meta"))
    assert {x.device.type for x in (*loaded.params.values(), *loaded.buffers.values())} == {"meta"}
    assert loaded.grad["lr"].tolist() == found.grad["lr"].tolist()


def test_what_was_exact_can_be_seen():
    exact = lh.hypergradient(saddle(10.0), lh.sgd(), HYPERS, steps=12, engine=lh.Adjoint())
    found = lh.hypergradient(saddle(10.0), lh.sgd(), HYPERS, steps=12, engine=lh.Hybrid())
    assert "smoothed" in found.engine
    assert found.exact["lr"].tolist() == exact.grad["lr"].tolist() != found.grad["lr"].tolist()
    assert exact.exact is None


def test_training_that_fails_is_not_tried_again():
    found = lh.hypergradient(saddle(1e200), lh.sgd(), HYPERS, steps=40, engine=lh.Hybrid())
    assert found.status.what == "loss"
    assert "smoothed" not in found.engine


def test_tuning_smooths_what_it_cannot_trust_by_itself():
    def engine(task, hypers):
        return lh.tune(task, lh.sgd(), hypers, steps=40, outer_steps=1).history[0].engine

    assert engine(saddle(0.5), HYPERS) == "adjoint, H·q clipped by itself, smoothed for 2 of 3 values"
    assert "smoothed" not in engine(saddle(0.2), HYPERS)
    many = engine(saddle(5.0), {"lr": lh.Hyper(0.1, windows=40)})  # which then share slopes
    assert re.fullmatch(r"adjoint, H·q clipped by itself, smoothed for [34]\d of 40 values", many)
    alone = lh.hypergradient(saddle(5.0), lh.sgd(), HYPERS, steps=40)
    assert alone.error is None  # asked for alone it is exact


def test_without_a_step_tuning_stays_exact():
    def loss(model, batch, hypers):
        return model(1.0, 5.0) * hypers["tilt"]

    task = lh.Task(Saddle, loss, lambda seed: [0] * 40, lambda seed: [0], lambda model, batch: model(1.0, 5.0))
    hypers = {"lr": lh.Hyper(0.1, learn=False), "tilt": lh.Hyper(1.0, windows=2)}
    options = {"steps": 40, "outer_steps": 1, "outer": lh.GradientDescent(1e-9)}
    assert "smoothed" not in lh.tune(task, lh.sgd(), hypers, **options).history[0].engine
    hypers["tilt"] = lh.Hyper(1.0, windows=2, step=0.01)
    assert "smoothed for 2 of 2" in lh.tune(task, lh.sgd(), hypers, **options).history[0].engine


# --- doubts from standard errors ---


def test_a_sign_needs_its_error():
    grads = [{"lr": torch.tensor([1.0, 1.0, 1.0])}]
    error = {"lr": torch.tensor([0.5, 3.0, torch.nan])}
    assert among_seeds(grads, [{"lr": [""] * 3}], error) == {"lr": ["", "unsure: 63% sure of its sign", ""]}
    unknown = {"lr": torch.full((3,), torch.inf)}  # smoothed, by as many pairs as values
    assert among_seeds(grads, [{"lr": [""] * 3}], unknown) == {"lr": [""] * 3}
    assert sureness(2.0, 1.0) == pytest.approx(0.977, abs=1e-3)


def test_the_error_of_a_mean_over_seeds_is_smaller():
    engine = lh.Factorial(1.0, pairs=4)
    one, two = (
        lh.tune(problem("mlp").task, lh.sgd(), HYPERS, steps=9, outer_steps=1, engine=engine, seeds=seeds).history[0]
        for seeds in (1, 2)
    )
    assert one.error["lr"].isfinite().all()
    each = [
        lh.hypergradient(problem("mlp").task, lh.sgd(), HYPERS, steps=9, engine=engine, seed=seed).error["lr"]
        for seed in two.seeds
    ]
    torch.testing.assert_close(two.error["lr"], torch.stack(each).square().sum(0).sqrt() / 2)
    again = lh.OuterStep.from_dict(two.to_dict())
    assert torch.equal(again.error["lr"], two.error["lr"])


# --- the gate ---


def step(gate, b=5.0, **options):
    """One outer step where the first window and the momentum, or all, are amplified."""
    options = {"outer_steps": 1, "engine": lh.Adjoint(), "gate": gate} | options
    return lh.tune(saddle(b), lh.sgd(), HYPERS, steps=40, **options).history[-1]


def test_the_gate_holds_what_is_doubted_and_lets_the_rest_move():
    free, waiting, shrinking = (step(gate, b=0.5) for gate in ("off", "wait", "shrink"))
    assert waiting.doubts == free.doubts == {"lr": ["amplified 7 times", ""], "momentum": ["amplified 7 times"]}
    assert free.held == {}
    assert waiting.held == shrinking.held == {"lr": [0], "momentum": [0]}
    moved = {gate.held != {}: gate.next["lr"] - gate.values["lr"] for gate in (free, waiting)}
    assert moved[False].abs().tolist() == pytest.approx([0.01, 0.01])
    assert moved[True].abs().tolist() == pytest.approx([0.0, 0.01])
    assert torch.equal(waiting.next["lr"], shrinking.next["lr"])
    assert waiting.outer["gamma"]["lr"].tolist() == pytest.approx([0.01, 0.01])
    assert shrinking.outer["gamma"]["lr"].tolist() == pytest.approx([0.005, 0.01])
    assert shrinking.outer["gamma"]["momentum"].tolist() == pytest.approx([0.005])


def test_a_gate_is_said_and_written_down():
    record = step("wait", b=0.5)
    assert "; held: lr 1; momentum" in one_line(record, 1)
    assert lh.OuterStep.from_dict(record.to_dict()).held == record.held
    old = {name: value for name, value in record.to_dict().items() if name not in ("held", "error")}
    assert lh.OuterStep.from_dict(old).held == {}


def test_with_everything_held_the_run_stays_and_goes_on():
    history = [step("wait", outer_steps=n) for n in (1, 3)]
    assert history[1].index == 2
    assert torch.equal(history[1].next["lr"], history[1].values["lr"])


def test_a_gate_keeps_its_run_directory(tmp_path):
    def tuned(gate, steps=2):
        return lh.tune(
            saddle(1.0),
            lh.sgd(),
            HYPERS,
            steps=40,
            outer_steps=steps,
            engine=lh.Adjoint(),
            gate=gate,
            dir=tmp_path / "r",
        )

    whole = lh.tune(saddle(1.0), lh.sgd(), HYPERS, steps=40, outer_steps=3, engine=lh.Adjoint(), gate="shrink")
    tuned("shrink")
    assert tuned("shrink", 3).schedule == whole.schedule
    with pytest.raises(lh.RunError, match="gate"):
        tuned("wait", 3)


def test_a_gate_that_cannot_be():
    with pytest.raises(ValueError, match="gate='maybe': expected 'off', 'wait' or 'shrink'"):
        step("maybe")
    with pytest.raises(ValueError, match="gate='shrink' with GradientDescent, which has no γ to shrink"):
        step("shrink", outer=lh.GradientDescent())
    assert step("wait", outer=lh.GradientDescent()).held


# --- recipes ---


def test_a_recipe_names_engine_distance_and_gate():
    made = recipes.make_recipe({"engine": "smoothed", "distance": 0.5, "pairs": 16})
    assert recipes.engine_of(made) == lh.Factorial(0.5, 16)
    assert recipes.engine_of(recipes.make_recipe({"engine": "hybrid"})) == lh.Hybrid()
    assert recipes.engine_of(recipes.make_recipe({"engine": "adjoint", "clip": "auto"})) == lh.Adjoint(clip="auto")
    assert recipes.engine_of(recipes.make_recipe({"engine": "forward", "clip": 3})) == lh.Forward(clip=3.0)
    again = recipes.make_recipe(tomllib.loads(recipe_text.to_toml(made)))
    assert again == made


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"gate": "wiat"}, "gate = 'wiat'. Did you mean 'wait'"),
        ({"gate": "shrink", "outer": "adam"}, "gate = 'shrink' with outer = 'adam', which has no γ"),
        ({"clip": "ten"}, "clip = 'ten': expected a bound, 'auto', or 0"),
        ({"clip": True}, "clip = True: expected a number or a text"),
        ({"distance": 0.0}, "distance = 0.0: expected a positive fraction"),
        ({"pairs": -1}, "pairs = -1: expected at least 0"),
    ],
)
def test_bad_recipes_of_trust(content, words):
    with pytest.raises(recipes.RecipeError, match=re.escape(words)):
        recipes.make_recipe(content)


def test_a_held_value_is_in_the_report(tmp_path):
    lh.tune(
        saddle(1.0), lh.sgd(), HYPERS, steps=40, outer_steps=1, engine=lh.Adjoint(), gate="wait", dir=tmp_path / "r"
    )
    page = (report.write_report(tmp_path / "r")).read_text()
    assert "Hypergradients not to be trusted" in page
    assert "<td>held</td>" in page
