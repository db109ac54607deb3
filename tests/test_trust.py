"""What speaks against a hypergradient is said, and only then."""

import torch

import longhorizon as lh
from longhorizon import data
from longhorizon.console import doubts_in_words, marked, one_line
from longhorizon.trust import REMEDIES, among_seeds, doubts, remedy
from test_meter import Saddle, measured


def test_windows_before_the_chaos_are_doubted():
    # y grows by 1.05 a step; a tangent shows it from the end of the first window on, the adjoint from the beginning
    forward, adjoint = (doubts(measured(engine, b=0.5), 40)["lr"] for engine in (lh.Forward(), lh.Adjoint()))
    assert forward == ["", ""]  # 1.05^20 = 2.7
    assert adjoint == ["amplified 7 times", ""]  # 1.05^40 = 7.0
    hot = [doubts(measured(engine, b=5.0), 40)["lr"] for engine in (lh.Forward(), lh.Adjoint())]
    assert hot == [["amplified 3e+03 times"] * 2, ["amplified 1e+07 times", "amplified 3e+03 times"]]
    assert doubts(measured(lh.Forward(), b=5.0, windows=1), 40)["lr"] == [""]  # nothing to read it off


def test_what_is_not_finite_or_clipped_is_doubted():
    hot = measured(lh.Adjoint(), b=1e30, steps=40)
    assert doubts(hot, 40)["lr"][0] == "not finite"
    assert doubts(measured(lh.Forward(clip=1e-3), b=0.5), 40)["lr"][0].startswith("clipped: ")


def test_a_clip_that_hides_chaos_is_doubted():
    """On a hot schedule clipped tangents hardly grow, few entries are cut off, and signs are a coin's."""
    task = data.image_task("digits", "mlp-64", batch_size=64, val_fraction=0.2, device="cpu")
    hypers = {"lr": lh.Hyper([0.6, 0.6, 0.6, 0.4, 0.2], windows=5), "momentum": lh.Hyper(0.9)}
    h = lh.hypergradient(task, lh.sgd(), hypers, steps=200, engine=lh.Forward(clip=10.0))
    assert h.meter is not None
    assert h.meter.growth(40, 200) < 5  # 1e5 and more without the clip
    found = doubts(h, 200)
    assert all(found["lr"][:3])
    assert found["lr"][2].startswith("clipped: 0.")
    assert found["lr"][4] == ""  # it has little time to grow


def test_seeds_that_disagree():
    grads = [{"lr": torch.tensor([1.0, 1.0])}, {"lr": torch.tensor([2.0, -1.0])}]
    calm = {"lr": ["", ""]}
    assert among_seeds(grads, [calm, calm]) == {"lr": ["", "seeds disagree: 2 of 2"]}
    grads = [{"lr": torch.tensor([sign])} for sign in (1.0, 1.0, 1.0, -1.0)]
    assert among_seeds(grads, [{"lr": [""]}] * 4) == {"lr": [""]}
    grads = [{"lr": torch.tensor([g])} for g in (1.0, 1.0, 1.0, -100.0)]  # one outvotes three in the mean
    assert among_seeds(grads, [{"lr": [""]}] * 4) == {"lr": ["seeds disagree: 3 of 4"]}
    assert among_seeds(grads, [{"lr": ["not finite"]}] * 3 + [{"lr": [""]}]) == {"lr": ["not finite"]}


def test_every_doubt_has_a_remedy():
    for doubt in ("not finite", "amplified 3e+03 times", "clipped: 7% of H·Z", "seeds disagree: 2 of 4"):
        assert remedy(doubt) in REMEDIES.values()


def test_a_run_writes_doubts_down_and_says_them():
    task = lh.Task(Saddle, lambda model, batch: model(1.0, 5.0), lambda seed: [0] * 40, lambda seed: [0])
    hypers = {"lr": lh.Hyper(0.1, windows=2), "momentum": lh.Hyper(0.0)}
    record = lh.tune(task, lh.sgd(), hypers, steps=40, outer_steps=1, engine=lh.Forward()).history[0]
    assert record.doubts == {"lr": ["amplified 3e+03 times"] * 2, "momentum": ["amplified 3e+03 times"]}
    assert lh.OuterStep.from_dict(record.to_dict()).doubts == record.doubts
    assert doubts_in_words(record).startswith("lr 1, 2 (amplified 3e+03 times); momentum (")
    assert "not to be trusted: lr 1, 2 (amplified" in one_line(record, 1)
    old = {name: value for name, value in record.to_dict().items() if name != "doubts"}
    assert lh.OuterStep.from_dict(old).doubts == {}  # a journal from before there were doubts


def test_marks_stand_at_the_doubted_numbers():
    assert marked("1 2 3", ["", "amplified", ""]) == "1 2? 3"
    assert marked("1 2 … (9)", ["x", "", "", ""]) == "1? 2 … (9)"
