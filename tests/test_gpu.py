"""What only a GPU can show: compiled steps, replay with deterministic kernels, precision, resume. `make test-gpu`."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import longhorizon as lh
from longhorizon import compile, lanes, seeds
from longhorizon.problem import environment, make_problem
from longhorizon.rivals import rows, space
from longhorizon.rivals.descent import Descent
from longhorizon.rivals.descents import Descents
from longhorizon.rivals.training import Counter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HYPERS = {"lr": lh.Hyper(0.05, windows=3), "momentum": lh.Hyper(0.5), "weight_decay": lh.Hyper(1e-3)}


def make_task(device="cuda", dtype=torch.float64):
    def make_model():
        layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)]
        return nn.Sequential(*layers).to(device, dtype)

    def batches(seed, count=40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(count, 16, 2, 8, 8, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (count, 16), generator=generator)
        return [(x[i].to(device, dtype), y[i].to(device)) for i in range(count)]

    return lh.Task(
        make_model, lambda model, b: F.cross_entropy(model(b[0]), b[1]), batches, lambda seed: batches(seed + 1, 2)
    )


def hypergradient(engine, **settings):
    return lh.hypergradient(make_task(**settings), lh.sgd(), HYPERS, steps=20, engine=engine)


def assert_close(found, reference, tolerance):
    assert found.status.ok, found.status
    for key, g in reference.grad.items():
        assert (found.grad[key] - g).abs().max() <= tolerance * g.abs().max(), key


@pytest.fixture(scope="module")
def reference():
    # Initial weights come from the CPU's generator on both devices, so the runs are the same.
    return hypergradient(lh.Forward(compile=False), device="cpu")


@pytest.mark.parametrize(
    "engine",
    [
        lh.Forward(compile=False),
        lh.Forward(compile=True),
        lh.Forward(compile=True, chunk=2),
        lh.Adjoint(store="all", compile=False),
        lh.Adjoint(store="all", compile=True),
        lh.Adjoint(store="sqrt"),
        lh.Greedy(horizon=20),
    ],
    ids=repr,
)
def test_the_gpu_gives_what_the_cpu_gives(engine, reference):
    with torch.device("cpu"):
        assert_close(hypergradient(engine), reference, 1e-9)


@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(store="all", compile=True)], ids=repr)
def test_float32_is_near_float64(engine, reference):
    assert_close(hypergradient(engine, dtype=torch.float32), reference, 1e-3)


def test_seeding_leaves_nothing_behind():
    """`torch.manual_seed` queues every seed, with a stack trace, for kinds of devices that are not there."""

    def queued():
        return [len(getattr(kind, "_queued_calls", ())) for kind in (torch.cuda, torch.xpu, torch.mtia)]

    def drawn():
        return [torch.rand(3), torch.rand(3, device="cuda")]

    seeds.seed_all(1)
    before, first = queued(), drawn()
    seeds.seed_all(1)
    assert queued() == before
    assert all(torch.equal(a, b) for a, b in zip(first, drawn(), strict=True))
    torch.manual_seed(seeds.mix(1))
    expected = drawn()
    seeds.seed_torch(seeds.mix(1))
    assert all(torch.equal(a, b) for a, b in zip(expected, drawn(), strict=True))


def test_replay_is_exact_in_float32():
    """Deterministic kernels: a replay that ended elsewhere would raise ReplayError."""
    assert hypergradient(lh.Adjoint(store="sqrt"), dtype=torch.float32).status.ok


def test_whole_storage_is_preferred_when_it_fits():
    found = hypergradient("auto")
    assert "all states kept" in found.engine


def test_tf32_is_off_inside_and_put_back_outside():
    before = torch.backends.cudnn.allow_tf32
    with environment():
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cuda.matmul.allow_tf32
    with environment("tf32"):
        assert torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


@pytest.mark.parametrize(
    "engine",
    [
        lh.Forward(compile=False),
        lh.Adjoint(store="all", compile=False),
        lh.Greedy(horizon=5, compile=False),
        lh.FiniteDifference(),
        lh.Factorial(),
        lh.Hybrid(),
    ],
    ids=repr,
)
def test_a_broken_run_goes_on(tmp_path, engine, monkeypatch):
    """Files are read to the CPU; what is in them has to find its way back to the device."""
    doubted = {key: ["chaotic"] * hyper.windows for key, hyper in HYPERS.items()}
    monkeypatch.setattr("longhorizon.engines.hybrid.doubts", lambda *_: doubted)  # so that it smooths
    task = dataclasses.replace(make_task(), metrics=lambda model, b: {"sum": model(b[0]).sum()})
    calls, stop_at = 0, 0

    class Stop(Exception):  # noqa: N818
        pass

    def progress(_):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise Stop

    def tune(**settings):
        settings |= {"engine": engine, "checkpoint_seconds": 0.0, "progress": progress}
        return lh.tune(task, lh.sgd(), HYPERS, steps=20, outer_steps=2, **settings)

    calm = tune()
    calls, stop_at = 0, 3 * calls // 4  # in the middle of the second outer step
    with pytest.raises(Stop):
        tune(dir=tmp_path / "r")
    resumed = tune(dir=tmp_path / "r")
    for name in ("grad", "metrics"):
        expected, found = (getattr(one.history[-1], name) for one in (calm, resumed))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)


def test_greedy_compiled_is_greedy():
    """The step, the step back and every validation, each as a recorded graph."""
    shared = lh.Traces()
    settings = {"steps": 20, "traces": shared}
    found = lh.hypergradient(make_task(), lh.sgd(), HYPERS, engine=lh.Greedy(compile=True), **settings)
    assert_close(found, hypergradient(lh.Greedy(compile=False), device="cpu"), 1e-9)
    assert len(shared) == 3


def test_runs_of_other_seeds_share_one_compilation():
    task, rule, shared = make_task(), lh.sgd(), lh.Traces()
    settings = {"steps": 20, "engine": lh.Adjoint(store="all", compile=True)}
    for seed in range(3):
        found = lh.hypergradient(task, rule, HYPERS, seed=seed, traces=shared, **settings)
        cpu = lh.hypergradient(make_task("cpu"), rule, HYPERS, seed=seed, steps=20, engine=lh.Adjoint(compile=False))
        assert_close(found, cpu, 1e-9)
    assert len(shared) == 2


def test_hypergradient_descent_compiled_is_the_same():
    traces = []
    with environment():
        for device, compiled in (("cuda", True), ("cuda", False), ("cpu", False)):
            run = Descent(make_problem(make_task(device), lh.sgd(), HYPERS, 20, 0), Counter())
            run.compiles = compiled
            while run.t < 20:
                run.advance()
            traces.append({key: values.cpu() for key, values in run.trace.items()})
    for other in traces[1:]:
        for key, values in traces[0].items():
            assert torch.allclose(values, other[key], rtol=1e-9, atol=1e-12), key


def convolutions():
    """Of forms that the kernels take, with a stride, and with the first image narrower than a tensor core."""
    body = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.Softplus()]
    body += [nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.Softplus()]
    return nn.Sequential(*body, nn.AvgPool2d(16), nn.Flatten(), nn.Linear(32, 3)).cuda()


def pictures(seed, count=8, side=32):
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(64, 3, side, side, generator=generator).cuda(),
            torch.randint(3, (64,), generator=generator).cuda(),
        )
        for _ in range(count)
    ]


def picture_task(side=32, **more):
    return lh.Task(
        convolutions,
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        lambda seed: pictures(seed, side=side),
        lambda seed: pictures(seed + 100, 1, side),
        **more,
    )


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_training_runs_side_by_side_are_near_single_ones():
    traces = lh.Traces()
    with environment():
        task = picture_task()
        assert lanes.at_once(make_problem(task, lh.sgd(), HYPERS, 8, 0), 16) == 8
        made = [make_problem(task, lh.sgd(), HYPERS, 8, seed, traces=traces) for seed in range(3)]
        row = lanes.Lanes(made, count=4, steps=10_000)
        losses = torch.stack([row.step(t) for t in range(8)])
        for i, one in enumerate(made):
            state = one.start
            for t in range(8):
                state, loss = one.train_step(state, t)
                assert float(losses[t, i]) == pytest.approx(float(loss.detach()), rel=1e-3)
    assert len(traces) == 1


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_training_runs_in_bfloat16_are_near_float32():
    found = []
    for precision in ("float32", "bf16"):
        traces = lh.Traces()
        with environment(precision):
            made = [make_problem(picture_task(), lh.sgd(), HYPERS, 8, seed, traces=traces) for seed in range(3)]
            row = lanes.Lanes(made, steps=10_000)
            found.append(torch.stack([row.step(t) for t in range(8)]))
    assert found[1].cpu() == pytest.approx(found[0].cpu(), rel=2e-2)
    assert not torch.equal(*found)


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_hypergradient_descent_side_by_side_is_near_single_runs():
    hypers = {key: lh.Hyper(float(hyper.values()[0])) for key, hyper in HYPERS.items()}
    traces, singles = lh.Traces(), []
    with environment():
        for seed in range(3):
            single = Descent(make_problem(picture_task(), lh.sgd(), hypers, 8, seed), Counter())
            while single.t < 8:
                single.advance()
            singles.append(single.learnt())
    for precision, within in (("float32", 1e-3), ("bf16", 5e-2)):
        with environment(precision):
            made = [make_problem(picture_task(), lh.sgd(), hypers, 8, seed, traces=traces) for seed in range(3)]
            row = Descents(made, None, 8, 10_000)
            for t in range(8):
                row.step(t)
        for i, single in enumerate(singles):
            for key, values in row.learnt(i, 8).items():
                assert values == pytest.approx(single[key], rel=within, abs=within * 0.01), (precision, key)


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_a_design_in_bfloat16_trains_its_middle_run_along(monkeypatch):
    monkeypatch.setattr(compile, "WORTH_COMPILING", 1)
    how = {"steps": 8, "precision": "bf16"}
    found = lh.hypergradient(picture_task(), lh.sgd(), HYPERS, engine=lh.Factorial(0.3), **how)
    exact = lh.hypergradient(picture_task(), lh.sgd(), HYPERS, engine=lh.Adjoint(), **how)
    assert found.val_loss == pytest.approx(exact.val_loss, rel=2e-2)
    assert found.train_loss.cpu().tolist() == pytest.approx(exact.train_loss.cpu().tolist(), rel=2e-2)
    assert all(bool(found.error[key].isfinite().all()) for key in HYPERS)


def test_tuning_smooths_all_values_where_runs_stand_side_by_side_in_bfloat16():
    for precision, engine in (("bf16", "smoothed differences"), ("float32", "adjoint")):
        how = {"steps": 4, "outer_steps": 1, "precision": precision}
        assert lh.tune(picture_task(), lh.sgd(), HYPERS, **how).history[0].engine.startswith(engine)


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_trials_side_by_side_are_the_same_trials(monkeypatch):
    monkeypatch.setattr(compile, "WORTH_COMPILING", 1)
    settings = {"methods": ["grid"], "steps": 8, "outer_steps": 2, "budget": "10 runs", "test": "none"}
    task, wide = picture_task(), []
    width = rows.width
    monkeypatch.setattr(rows, "width", lambda arena, *runs: wide.append(width(arena, *runs)) or wide[-1])
    row = lh.compare(task, lh.sgd(), HYPERS, **settings).evaluations
    assert set(wide) == {10}
    monkeypatch.setattr(rows, "width", lambda arena, *runs: 1)
    single = lh.compare(task, lh.sgd(), HYPERS, **settings).evaluations
    assert [e.key for e in row] == [e.key for e in single]
    calm = [(a.val_loss, b.val_loss) for a, b in zip(row, single, strict=True) if b.val_loss < 3]  # the rest amplify
    assert len(calm) >= 5
    assert [a for a, _ in calm] == pytest.approx([b for _, b in calm], rel=2e-2)


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
def test_a_search_works_on_several_trials_each_at_its_own_step(monkeypatch):
    pytest.importorskip("optuna")
    monkeypatch.setattr(compile, "WORTH_COMPILING", 1)
    settings = {"methods": ["hyperband"], "steps": 8, "outer_steps": 2, "budget": "6 runs", "epoch": 2, "test": "none"}
    task, seen = picture_task(), []
    step = lanes.Lanes.step
    monkeypatch.setattr(lanes.Lanes, "step", lambda self, t: seen.append(t) or step(self, t))
    found = lh.compare(task, lh.sgd(), HYPERS, **settings).evaluations
    assert any(len(set(at)) > 1 for at in seen)
    assert sum(e.cost for e in found) <= 48
    for e in [e for e in found if e.val_loss < 3]:  # the rest amplify
        hypers = space.hypers_for(e.values, HYPERS, lh.sgd(), e.steps)  # the whole schedule on every rung
        with environment():
            one = make_problem(
                task, lh.sgd(), hypers, e.steps, lh.tuning.run_seed(e.seed, e.trial, [2, 8].index(e.steps))
            )
            state = one.start
            for t in range(e.steps):
                state, _ = one.train_step(state, t)
            assert e.val_loss == pytest.approx(float(one.validation_loss(state, e.steps)), rel=2e-2)


@pytest.mark.filterwarnings("error::longhorizon.compile.TraceMismatch")
@pytest.mark.parametrize("side", [32, 33])
@pytest.mark.parametrize("engine", [lh.Forward(compile=True), lh.Adjoint(store="all", compile=True)], ids=repr)
def test_compiled_convolutions_are_near_plain_ones(engine, side):
    """Sides that the kernels do not know are left to cuDNN."""

    def model():
        return nn.Sequential(*list(convolutions())[:5], nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 3)).cuda()

    task = dataclasses.replace(picture_task(side), model=model)
    found, plain = (
        lh.hypergradient(task, lh.sgd(), HYPERS, steps=6, engine=dataclasses.replace(engine, compile=compiled))
        for compiled in (True, False)
    )
    assert_close(found, plain, 2e-3)
