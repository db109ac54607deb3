"""What a run carries along: buffers, randomness, batches, and itself when it is saved and begun again."""

import copy
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import longhorizon as lh
from longhorizon import tree
from longhorizon.problem import environment, make_problem
from problems import (
    RULES,
    Block,
    Ema,
    assert_identical,
    classify,
    compute,
    convnet,
    held_out,
    hypers_for,
    images,
    mlp,
    pairs,
    problem,
    stream,
    task_of,
    through_a_file,
)

ENGINES = {
    "forward": lh.Forward(compile=False),
    "traced": lh.Forward(chunk=1, compile=True),  # one shape to trace
    "chunked": lh.Forward(chunk=2, compile=False),
    "adjoint-all": lh.Adjoint("all", per_step=True),
    "adjoint-sqrt": lh.Adjoint("sqrt", per_step=True),
    "greedy": lh.Greedy(2, per_step=True),
    "difference": lh.FiniteDifference(),
    "factorial": lh.Factorial(0.01, pairs=1),
    "hybrid": lh.Hybrid(distance=0.01, pairs=1),
}
EVERY_ENGINE = pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)


# --- BatchNorm and other buffers ---


def torch_twin(model: nn.Module, batches, steps: int, lr: float):
    """Plain PyTorch training, the module's own in-place buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model.train()
    for batch in batches[:steps]:
        optimizer.zero_grad()
        classify(model, batch).backward()
        optimizer.step()
    return dict(model.named_parameters()), dict(model.named_buffers())


def shared_norm() -> nn.Module:
    """One BatchNorm used twice: two updates a step."""
    norm = nn.BatchNorm1d(5)
    return nn.Sequential(nn.Linear(5, 5), norm, nn.Tanh(), nn.Linear(5, 5), norm, nn.Linear(5, 3)).double()


NORMS = {
    "momentum": (convnet, images),
    "average": (lambda: convnet(momentum=None), images),
    "full": (lambda: convnet(momentum=1.0), images),
    "shared": (shared_norm, pairs),
    "plain": (lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3)).double(), pairs),
    "untracked": (
        lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 3)).double(),
        pairs,
    ),
}


@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint("sqrt"), lh.Greedy(3)], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_torch_s_own(name, engine):
    """After training, and with validation passes in between (greedy has one every three steps)."""
    make, batch = NORMS[name]
    steps, start = 7, make()
    saved = {k: v.clone() for k, v in start.state_dict().items()}

    def model():
        fresh = make()
        fresh.load_state_dict(saved)
        return fresh

    task = task_of(model, batch)
    h = lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.2, windows=2)}, steps=steps, engine=engine)
    params, buffers = torch_twin(model(), task.train(0), steps, 0.2)
    assert h.params.keys() == params.keys()
    assert h.buffers.keys() == buffers.keys()
    for name, truth in (params | buffers).items():
        got = (h.params | h.buffers)[name]
        assert got.dtype == truth.dtype
        assert torch.allclose(got, truth, rtol=1e-12, atol=1e-13), name
    restored = model()
    restored.load_state_dict(h.params | h.buffers, strict=False)  # a shared module has a second name
    restored.eval()
    judged = torch.stack([classify(restored, b) for b in task.val(0)]).mean()
    assert h.val_loss == pytest.approx(judged.item(), rel=1e-12)


def test_validation_in_training_mode_leaves_the_statistics_alone():
    one, two = (
        lh.hypergradient(
            task_of(convnet, images, val_mode=mode), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, engine=lh.Greedy(1)
        )
        for mode in ("eval", "train")
    )
    assert tree.equal(one.buffers, two.buffers)
    assert one.val_loss != two.val_loss


def test_a_module_that_writes_its_buffer_in_place():
    """Its own tensors are copied: the run starts from the same state every time, and ends where torch would."""
    task, made = problem("buffers").task, []

    def model():
        made.append(Ema())
        return made[-1]

    task = task_of(model)
    h = lh.hypergradient(task, lh.sgd(lr=0.1), {"momentum": lh.Hyper(0.5)}, steps=5)
    assert h.buffers["calls"] == 5
    assert h.buffers["calls"].dtype == torch.int64
    assert h.buffers["centre"].abs().min() > 0
    assert made[0].calls == 0
    assert made[0].centre.abs().max() == 0


def test_frozen_parameters_stay_and_are_used():
    task = problem("buffers").task
    h = lh.hypergradient(task, lh.sgd(lr=0.1), {"weight_decay": lh.Hyper(0.5)}, steps=3)
    assert not any(name.startswith("frozen") for name in h.params)

    def scaled():
        model = Ema()
        model.frozen.weight.data.mul_(3)
        return model

    other = lh.hypergradient(task_of(scaled), lh.sgd(lr=0.1), {"weight_decay": lh.Hyper(0.5)}, steps=3)
    assert other.grad["weight_decay"] != h.grad["weight_decay"]


def test_tied_weights_stay_tied():
    h = compute(problem("tied"), RULES["sgd"], lh.Forward())
    assert "head.weight" not in h.params
    model = Block(tied=True)
    model.load_state_dict(h.params, strict=False)
    assert model.head.weight is model.embed.weight


def test_a_module_used_twice_keeps_no_tensor_of_a_run():
    """Torch's `functional_call` leaves the last ones in it, and the next run's weights would be written into them."""
    task, traces = task_of(shared_norm), lh.Traces()

    def run(seed):
        return lh.hypergradient(
            task, lh.sgd(), {"lr": lh.Hyper(0.2)}, steps=3, seed=seed, engine=lh.Forward(), traces=traces
        )

    first = run(0)
    kept = {name: p.clone() for name, p in first.params.items()}
    run(1)
    assert tree.equal(first.params, kept)


class Saving(nn.Module):
    """Its first half is run again in every backward pass, to save memory."""

    def __init__(self, saving: bool):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, 4))
        self.head, self.saving = nn.Linear(4, 3), saving
        self.register_buffer("centre", torch.zeros(4))
        self.double()

    def half(self, x):
        y = self.first(x).tanh()
        if self.training:
            self.centre = 0.7 * self.centre + 0.3 * y.mean(0)
        return y - self.centre

    def forward(self, x):
        return self.head(checkpoint(self.half, x, use_reentrant=False) if self.saving else self.half(x))


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("engine", [lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.FiniteDifference()], ids=str)
def test_checkpointing_changes_nothing(engine, mode):
    def found(saving):
        task = task_of(lambda: Saving(saving), val_mode=mode)
        return lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper([0.3, 0.5], windows=2)}, steps=6, engine=engine)

    plain, saving = found(False), found(True)
    assert saving.val_loss == pytest.approx(plain.val_loss, rel=1e-12)
    assert torch.allclose(saving.grad["lr"], plain.grad["lr"], rtol=1e-9)
    for name, b in plain.buffers.items():
        assert torch.allclose(saving.buffers[name], b, rtol=1e-12), name


# --- randomness ---


@EVERY_ENGINE
@pytest.mark.parametrize("name", ["dropout-everywhere", "batchnorm-eval", "generator"])
def test_same_seed_same_bits(name, engine):
    case, setting = problem(name), RULES["sgd-from-zero"]
    torch.manual_seed(1)
    first = compute(case, setting, engine)
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    assert_identical(first, compute(case, setting, engine))


@pytest.mark.parametrize("name", ["mlp", "dropout", "generator"])
def test_another_seed_is_another_run(name):
    case, setting = problem(name), RULES["sgd"]
    assert (
        compute(case, setting, lh.Adjoint(), seed=3).val_loss != compute(case, setting, lh.Adjoint(), seed=4).val_loss
    )


@EVERY_ENGINE
def test_the_caller_s_generators_are_left_alone(engine):
    def states():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    def noisy(seed):
        while True:
            yield (
                torch.randn(6, 5, dtype=torch.float64) + np.random.rand() + random.random(),
                torch.zeros(6, dtype=torch.int64),
            )

    before = states()
    task = lh.Task(problem("dropout").task.model, classify, noisy, held_out(pairs))
    lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, engine=engine)
    assert states() == before


def test_the_caller_s_generators_are_left_alone_by_a_failure():
    def broken(seed):
        torch.randn(3)
        raise OSError("no disk")

    before = torch.get_rng_state()
    with pytest.raises(OSError, match="no disk"):
        lh.hypergradient(lh.Task(mlp, classify, broken, held_out(pairs)), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_masks_change_from_step_to_step_and_repeat_in_a_replay():
    masks: dict[str, list[torch.Tensor]] = {"all": [], "sqrt": []}

    for store, seen in masks.items():

        class Spy(nn.Module):
            def __init__(self, seen=seen):
                super().__init__()
                self.linear, self.drop, self.seen = nn.Linear(5, 3).double(), nn.Dropout(0.5), seen

            def forward(self, x):
                y = self.drop(self.linear(x))
                self.seen.append((y == 0).detach().clone())
                return y

        lh.hypergradient(task_of(Spy), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=9, engine=lh.Adjoint(store))
    distinct = {store: {tuple(mask.flatten().tolist()) for mask in seen} for store, seen in masks.items()}
    # nine steps and the validation's none: a replay that drew new masks would make more
    assert len(distinct["all"]) == 10
    assert distinct["sqrt"] == distinct["all"]
    assert len(masks["sqrt"]) > len(masks["all"])


def test_dropout_on_a_transposed_activation():
    """Its mask fills memory in order; under torch.func the same tensor lies there differently. Found with
    nn.TransformerEncoderLayer, whose forward and adjoint then belonged to different runs.
    """

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3, activation="gelu", batch_first=True)
            self.stem, self.head = nn.Linear(5, 12), nn.Linear(4, 3)
            self.double()

        def forward(self, x):
            return self.head(self.layer(self.stem(x).view(-1, 3, 4)).mean(1))

    forward, adjoint = (
        lh.hypergradient(task_of(Encoder), lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=5, engine=e)
        for e in (lh.Forward(), lh.Adjoint())
    )
    assert forward.val_loss == pytest.approx(adjoint.val_loss, rel=1e-12)
    assert torch.allclose(forward.grad["lr"], adjoint.grad["lr"], rtol=1e-9)


def in_place(x, training):
    x = x * 1.0
    F.dropout(x, 0.3, training, inplace=True)
    return x


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "drop",
    [
        lambda x, training: F.dropout(x, 0.3, training),
        in_place,
        lambda x, training: torch.dropout(x, 0.3, training),
        lambda x, training: F.alpha_dropout(x, 0.3, training),
        lambda x, training: F.dropout1d(x, 0.3, training),
        lambda x, training: F.feature_alpha_dropout(x, 0.3, training),
    ],
    ids=["function", "in place", "torch.dropout", "alpha", "channels", "channels, alpha"],
)
def test_dropout_as_a_function_on_a_transposed_activation(drop, compiled):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 3)
            self.double()

        def forward(self, x):
            return self.second(drop(torch.tanh(self.first(x)).t(), self.training).t())

    problem = task_of(Net), lh.sgd(), {"lr": lh.Hyper(0.1)}
    forward, adjoint, differences = (
        lh.hypergradient(*problem, steps=5, engine=e)
        for e in (lh.Forward(compile=compiled), lh.Adjoint(compile=compiled), lh.FiniteDifference())
    )
    for found in (forward, adjoint):
        assert found.val_loss == pytest.approx(differences.val_loss, rel=1e-12)
        assert torch.allclose(found.grad["lr"], differences.grad["lr"], rtol=1e-6)


# --- batches ---


def test_batches_of_a_sequence_are_read_by_number_and_not_kept():
    reads: list[int] = []

    class Lazy:
        def __getitem__(self, t):
            reads.append(t)
            return pairs(t)

    lh.hypergradient(
        lh.Task(mlp, classify, lambda seed: Lazy(), held_out(pairs)),
        lh.sgd(),
        {"lr": lh.Hyper(0.1)},
        steps=6,
        engine=lh.Forward(),
    )
    assert reads[-6:] == [0, 1, 2, 3, 4, 5]
    listed = lh.Task(mlp, classify, stream(pairs), held_out(pairs))
    lazy = lh.Task(mlp, classify, lambda seed: Lazy(), held_out(pairs))
    for engine in (lh.Adjoint("all"), lh.Adjoint("sqrt"), lh.Forward()):
        grads = [
            lh.hypergradient(t, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=6, engine=engine).grad["lr"]
            for t in (listed, lazy)
        ]
        assert torch.equal(*grads)


def test_a_sequence_and_a_generator_of_the_same_batches_agree():
    def generated(seed):
        yield from stream(pairs)(seed)

    one, two = (
        compute(problem("mlp"), RULES["sgd"], e, seed=3).grad["lr"]
        if train is None
        else lh.hypergradient(
            lh.Task(mlp, classify, train, held_out(pairs)), lh.sgd(), RULES["sgd"].hypers, steps=9, seed=3, engine=e
        ).grad["lr"]
        for train, e in ((None, lh.Adjoint()), (generated, lh.Adjoint("sqrt")))
    )
    assert torch.equal(one, two)


def test_a_stream_too_large_to_be_kept_is_refused(monkeypatch):
    monkeypatch.setattr("longhorizon.engines.adjoint.free_memory", lambda device: 4000)
    with pytest.raises(ValueError, match=r"reads batches backwards.*__getitem__ by step.*lh.Forward"):
        compute(problem("generator"), RULES["sgd"], lh.Adjoint("sqrt"))


# --- a saved run goes on as if nothing had happened ---


@EVERY_ENGINE
@pytest.mark.parametrize(
    ("name", "rule"), [("dropout", "adam-negative"), ("buffers", "sgd-from-zero"), ("generator", "clipped")]
)
def test_a_run_saved_at_any_step_ends_the_same(name, rule, engine):
    case, setting = problem(name), RULES[rule]
    with environment():
        shared = lh.Traces()

        def make():
            return make_problem(case.task, setting.rule, hypers_for(case, setting), 5, 3, traces=shared)

        whole = engine.begin(make())
        saves = [through_a_file(whole.save())]
        while not whole.done:
            whole.advance()
            saves.append(through_a_file(whole.save()))
        assert whole.progress.done == whole.progress.total
        stride = max(1, len(saves) // 12)  # central differences take dozens of steps
        for saved in [*saves[::stride], saves[-1]]:
            run = engine.begin(make(), saved)
            while not run.done:
                run.advance()
            assert_identical(run.result(), whole.result())


def test_a_replay_to_rounding_goes_on():
    """As on a GPU, where fast kernels do not repeat their bits, and a chaotic run makes more of that."""
    case, setting = problem("mlp"), RULES["sgd-from-zero"]
    with environment():
        p = make_problem(case.task, setting.rule, setting.hypers, 30, 3)
        whole = lh.Adjoint("all").begin(p)
        while whole.phase == "train" or whole.t > 23:
            whole.advance()
        saved = through_a_file(whole.save())
        while not whole.done:
            whole.advance()

        def resumed(watch):
            run = lh.Adjoint("all").begin(make_problem(case.task, setting.rule, setting.hypers, 30, 3), watch)
            run.exact, step = False, run._step

            def noisy(state, t):
                after, loss = step(state, t)
                return after._replace(params={name: 1.02 * x for name, x in after.params.items()}), loss

            run._step = noisy
            while not run.done:
                run.advance()
            return run

        run = resumed(saved)
        assert run._again
        again = torch.stack([run._again[t] for t in (1, 2)])
        assert ((again / whole.watch.losses[1:3] - 1).abs() > 1e-3).all()  # more than two kernels may differ by
        for key, g in whole.result().grad.items():
            assert torch.allclose(run.result().grad[key], g, rtol=0.3, atol=0.1 * float(g.abs().max()))
        other = saved | {"watch": saved["watch"] | {"losses": saved["watch"]["losses"] * 1.01}}  # of other data
        with pytest.raises(lh.ReplayError, match="step 20 had the loss"):
            resumed(other)


@EVERY_ENGINE
def test_a_save_is_a_copy(engine):
    """Going on after a save does not change it, and one save can be begun from twice."""
    case, setting = problem("mlp"), RULES["sgd-from-zero"]
    with environment():
        p = make_problem(case.task, setting.rule, setting.hypers, 5, 3)
        run = engine.begin(p)
        for _ in range(4):
            run.advance()
        saved = run.save()
        kept = through_a_file(saved)

        def finish(run):
            while not run.done:
                run.advance()
            return run.result()

        first = finish(run)
        assert tree.equal(saved, kept)
        assert_identical(finish(engine.begin(p, saved)), first)
        assert tree.equal(saved, kept)
        assert_identical(finish(engine.begin(p, saved)), first)


def test_a_save_of_another_model_is_refused():
    with environment():
        p = make_problem(problem("mlp").task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 5, 3)
        q = make_problem(problem("mlp").task, lh.adam(), {"lr": lh.Hyper(0.1)}, 5, 3)
        for engine in (lh.Forward(), lh.Adjoint(), lh.FiniteDifference()):
            with pytest.raises(ValueError, match="another model or rule"):
                engine.begin(q, engine.begin(p).save())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Linear(3, 2), r"saved state has \[1, 3\] of torch.float32 where this run's has \[2, 3\]"),
        (lambda: nn.Linear(3, 1).double(), r"\[1, 3\] of torch.float32 where this run's has \[1, 3\] of torch.float64"),
    ],
)
@pytest.mark.parametrize("engine", [lh.Forward(), lh.Adjoint(), lh.FiniteDifference(), lh.Factorial(pairs=1)], ids=str)
def test_a_save_of_other_sizes_is_refused(engine, model, words):
    def loss(model, batch):
        return (model(batch.to(model.weight.dtype)) - 1).square().mean()

    x = torch.ones(4, 3)
    task = lh.Task(lambda: nn.Linear(3, 1), loss, lambda seed: [x] * 5, lambda seed: [x])
    with environment():
        p = make_problem(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, 5, 3)
        q = make_problem(replace(task, model=model), lh.sgd(), {"lr": lh.Hyper(0.1)}, 5, 3)
        run = engine.begin(p)
        run.advance()
        with pytest.raises(ValueError, match=words + ".*another model or rule"):
            engine.begin(q, run.save())


def test_progress_is_reported_after_every_step():
    seen: list[lh.Progress] = []
    compute(problem("mlp"), RULES["sgd"], lh.Adjoint("sqrt"), progress=seen.append)
    assert {p.phase for p in seen} >= {"train", "replay", "back"}
    assert [p.done for p in seen] == sorted(p.done for p in seen)
    assert seen[-1].done == seen[-1].total


def test_a_model_that_is_handed_out_again_and_again_stays_plain():
    """As for fine-tuning: `lambda: pretrained`. Afterwards it trains as if nothing had been."""
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).double()
    before = copy.deepcopy(model)
    x, y = torch.randn(16, 5, dtype=torch.float64), torch.randint(3, (16,))
    task = lh.Task(
        lambda: model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), lambda s: [(x, y)] * 4, lambda s: [(x, y)]
    )
    first, second = (
        lh.hypergradient(task, lh.sgd(), {"lr": lh.Hyper(0.1)}, steps=4, engine=engine).grad["lr"]
        for engine in (lh.Adjoint(), lh.Forward())
    )
    assert torch.allclose(first, second)
    for name, t in model.state_dict().items():
        assert torch.equal(t, before.state_dict()[name]), name
    assert not any("forward" in vars(part) for part in model.modules())
    model.train()
    F.cross_entropy(model(x), y).backward()
    assert not model[1].running_mean.requires_grad
    copy.deepcopy(model)
