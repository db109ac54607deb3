"""Several training runs as one batched step: the same as one after the other, and only where it can be had."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import longhorizon as lh
from longhorizon import data, lanes, retraining, tree
from longhorizon.engines import factorial
from longhorizon.problem import environment, make_problem
from problems import Block, Case, classify, mlp, problem, task_of, through_a_file, whole

HYPERS = {"lr": lh.Hyper([0.1, 0.3], windows=2, step=0.05), "momentum": lh.Hyper(0.5, step=0.1)}
STEPS = 12


def runs(case: Case, seeds=(0, 1, 2), values=None, steps=STEPS):
    traces = lh.Traces()
    return [make_problem(case.task, lh.sgd(), HYPERS, steps, seed, values, traces) for seed in seeds]


class Counting(nn.Module):
    """Writes into its buffers, one of them whole numbers."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("centre", torch.zeros(3, dtype=torch.float64))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        h = self.inner(x)
        if self.training:
            self.centre.mul_(0.7).add_(0.3 * h.mean(0))
            self.calls += 1
        return h - self.centre


def words(t):
    tokens = whole(t, 5, 3, 5)
    return tokens[:, :-1], tokens[:, 1:]


def predict(model, batch):
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


CASES = {
    "mlp": lambda: task_of(mlp),
    "transformer": lambda: task_of(Block, words, predict),
    "tied": lambda: task_of(lambda: Block(tied=True), words, predict),
    "buffers": lambda: task_of(Counting),
}


@pytest.mark.parametrize("steps", [0, 1000], ids=["plain", "traced"])
@pytest.mark.parametrize("name", CASES)
def test_each_lane_is_a_run(name, steps):
    with environment():
        made = runs(Case(CASES[name]()))
        assert lanes.at_once(made[0], 3) == 3
        made[1] = make_problem(made[1].task, lh.sgd(), HYPERS, STEPS, 1, {"lr": [0.2, 0.05]}, made[0].traces)
        together = lanes.Lanes(made, steps=steps)
        losses = [together.step(t) for t in range(STEPS)]
        judged = together.validation_losses(STEPS)
        for i, one in enumerate(made):
            state = one.start
            for t in range(STEPS):
                state, loss = one.train_step(state, t)
                torch.testing.assert_close(losses[t][i], loss, rtol=1e-9, atol=1e-12)
            for a, b in zip(tree.leaves(together.lane(i)), tree.leaves(state), strict=True):
                torch.testing.assert_close(a, b.detach(), rtol=1e-8, atol=1e-10)
            torch.testing.assert_close(judged[i], one.validation_loss(state, STEPS), rtol=1e-8, atol=1e-10)


def test_how_many_at_once():
    with environment():
        (small,) = runs(problem("mlp"), seeds=[0])
        assert lanes.at_once(small, 24) == 24
        assert lanes.at_once(small, 1000) == lanes.MOST
        assert lanes.at_once(small, 1) == 1


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x) if float(x.sum()) < 1e9 else self.inner(-x)


def strange(model, batch):
    """Another one where it is batched."""
    value = classify(model, batch)
    return value + 1 if torch._C._functorch.peek_interpreter_stack() is not None else value


@pytest.mark.parametrize(
    "name", ["dropout", "batchnorm-eval", "generator", "buffers", "transformer", "branches", "differs"]
)
def test_what_cannot_be_batched_runs_one_after_the_other(name):
    if name == "branches":
        case = Case(task_of(lambda: Branches().double()))
    elif name == "differs":
        case = Case(task_of(mlp, loss=strange))
    else:
        case = problem(name)
    with environment():
        (one,) = runs(case, seeds=[0])
        assert lanes.at_once(one, 8) == 1


def test_a_lane_that_diverges_leaves_the_others_alone():
    with environment():
        made = runs(problem("mlp"))
        together, alone = lanes.Lanes(made), lanes.Lanes([made[0], made[2]])
        for p in together.state.params.values():
            p[1] = torch.nan
        for t in range(STEPS):
            together.step(t)
            alone.step(t)
        first, lost, last = together.validation_losses(STEPS)
        assert not lost.isfinite()
        torch.testing.assert_close([first, last], alone.validation_losses(STEPS))


class Brighter(data.Stream):
    """What a user may make of our stream."""

    def __getitem__(self, step):
        images, labels = super().__getitem__(step)
        return images + 1, labels


class Listed(list):
    """A user's sequence that happens to have a method of that name."""

    def _joined(self, other):
        raise AssertionError

    joined = _joined


@pytest.mark.parametrize("kind", ["stream", "changed", "listed", "shared"])
def test_whatever_makes_the_batches_runs_side_by_side_get_their_own(kind):
    images = data.to_device(torch.randint(256, (50, 1, 4, 4), dtype=torch.uint8), torch.arange(50) % 3, (0.5,), (0.2,))

    def train(seed):
        stream = (Brighter if kind == "changed" else data.Stream)(images, 8, 0 if kind == "shared" else seed)
        return Listed(stream[t] for t in range(STEPS)) if kind == "listed" else stream

    task = lh.Task(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)),
        lambda model, b: F.cross_entropy(model(b[0]), b[1]),
        train,
        lambda seed: [images.batch(torch.arange(10))],
    )
    with environment():
        traces = lh.Traces()
        made = [make_problem(task, lh.sgd(), HYPERS, STEPS, seed, traces=traces) for seed in (0, 1, 0)]
        made[2] = dataclasses.replace(made[0], values={**made[0].values, "momentum": made[0].values["momentum"] / 2})
        together = lanes.Lanes(made)
        steps = [together.step(t) for t in range(3)] + [together.step([3, 3, 1])]
        for i, one in enumerate(made):
            state = one.start
            for t, losses in zip([0, 1, 2, 3 if i < 2 else 1], steps, strict=True):
                state, loss = one.train_step(state, t)
                torch.testing.assert_close(losses[i], loss)


def test_runs_of_other_lengths_stand_beside_each_other():
    """Each has its own windows; one that is shorter than it has values has fewer of them."""
    with environment():
        case = problem("mlp")
        (long,) = runs(case)[:1]
        row = lanes.Lanes([long, long])
        for steps, windows in ((STEPS - 2, 2), (STEPS - 2, 3), (STEPS, 2)):
            (short,) = runs(case, seeds=[5], steps=steps)
            lr = torch.linspace(0.1, 0.3, windows, dtype=torch.float64)
            hypers = {**short.hypers, "lr": dataclasses.replace(short.hypers["lr"], start=0.1, windows=windows)}
            short = dataclasses.replace(short, hypers=hypers, values={**short.values, "lr": lr})
            row.put(1, short, short.start)
            state = short.start
            for t in range(steps):
                losses = row.step([0, t])
                state, loss = short.train_step(state, t)
                torch.testing.assert_close(losses[1], loss)


def test_wide_rows_are_narrow_where_there_is_no_room():
    assert lanes._share(100, 9, "cuda", wide=True) == lanes._share(100, 9, "cuda")


def hypergradient(monkeypatch, at_once):
    case = problem("mlp")
    monkeypatch.setattr(factorial, "at_once", lambda problem, *runs: at_once)
    return lh.hypergradient(case.task, lh.sgd(), HYPERS, steps=STEPS, engine=lh.Factorial())


@pytest.mark.parametrize("at_once", [2, 5, 24])
def test_a_design_is_the_same_in_groups_of_any_size(monkeypatch, at_once):
    one, several = hypergradient(monkeypatch, 1), hypergradient(monkeypatch, at_once)
    for key in HYPERS:
        torch.testing.assert_close(several.grad[key], one.grad[key], rtol=1e-7, atol=0)
        torch.testing.assert_close(several.error[key], one.error[key], rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("at_once", [1, 5, 24])
def test_stopped_anywhere_it_goes_on_to_the_same_bits(monkeypatch, at_once):
    monkeypatch.setattr(factorial, "at_once", lambda problem, *runs: at_once)
    case = problem("mlp")
    with environment():
        (p,) = runs(case, seeds=[0])
        run = lh.Factorial().begin(p)
        saved, count = [], 0
        while not run.done:
            if count % 7 == 3:
                saved.append(run.save())
            run.advance()
            count += 1
        expected = run.result()
        assert run.progress.done == run.progress.total == run.total * STEPS
        for one in saved:
            (p,) = runs(case, seeds=[0])
            again = lh.Factorial().begin(p, through_a_file(one))
            while not again.done:
                again.advance()
            for key in HYPERS:
                assert torch.equal(again.result().grad[key], expected.grad[key])


@pytest.mark.parametrize("key", ["lr", "momentum"])
def test_a_checkpoint_of_before_the_middle_run_went_along_goes_on(monkeypatch, key):
    """However often it is stopped; and its runs are shifted below zero, as they were."""
    monkeypatch.setattr(factorial, "at_once", lambda problem, *runs: 24)
    engine, hypers = lh.Factorial(), {key: lh.Hyper(0.0, step=0.01)}

    def begun(saved=None):
        return engine.begin(
            make_problem(problem("mlp").task, lh.sgd(), hypers, STEPS, 0), saved and through_a_file(saved)
        )

    def finished(run):
        while not run.done:
            run.advance()
        return run.result().grad[key]

    with environment():
        old = begun()
        old._apart, old._group, old.levels = True, [-1], engine.levels(old.problem, below_zero=True)
        old._begin(None)
        for _ in range(3):
            old.advance()
        saved = {name: part for name, part in old.save().items() if name not in ("apart", "levels")}
        again = begun(saved)
        assert again.side_by_side == 1
        again.advance()
        twice = begun(again.save())
        assert twice.side_by_side == 1
        expected = finished(old)
        torch.testing.assert_close(finished(again), expected, rtol=1e-7, atol=0)
        torch.testing.assert_close(finished(twice), expected, rtol=1e-7, atol=0)
        assert (key == "lr") != torch.allclose(finished(begun()), expected, rtol=1e-7, atol=0)


def test_a_design_knows_how_often_it_will_be_made(monkeypatch):
    told = []
    monkeypatch.setattr(factorial, "at_once", lambda problem, *how: told.append(how) or 1)
    task, hypers = problem("mlp").task, {"lr": lh.Hyper(0.1, step=0.01)}
    lh.tune(task, lh.sgd(), hypers, steps=STEPS, outer_steps=3, engine=lh.Factorial())
    assert told == [(9, 3)] * 3  # the middle one and four pairs, in three outer steps


def test_retraining_side_by_side_is_retraining_one_by_one(monkeypatch):
    case, values, done = Case(task_of(mlp)), {"lr": [0.1, 0.3], "momentum": [0.5]}, []
    task = dataclasses.replace(case.task, test=lambda: case.task.val(0), metrics=lambda model, batch: {"one": 1.0})

    def trained(**more):
        return lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=[3, 1, 2], **more)

    together = trained(on_seed=lambda seed, scores: done.append((seed, scores["loss"])))
    monkeypatch.setattr(retraining, "at_once", lambda problem, runs: 1)
    alone = trained()
    assert together.test_loss == pytest.approx(alone.test_loss, rel=1e-12)
    assert done == list(zip([3, 1, 2], together.test_loss, strict=True))
    for name, p in alone.params.items():
        torch.testing.assert_close(together.params[name], p, rtol=1e-10, atol=1e-12)


def test_a_run_that_diverges_leaves_its_neighbours_alone():
    """Side by side as alone: the loss of one is NaN, those of the others are not."""
    values = {"lr": [0.1, 0.3], "momentum": [0.5]}

    case = Case(task_of(mlp))

    def broken(seed):
        """Numbers that end a run, in the third batch of one seed."""
        return [(x * (torch.nan if seed == 1 and t == 2 else 1.0), y) for t, (x, y) in enumerate(case.task.train(seed))]

    task = dataclasses.replace(case.task, full=broken, test=lambda: case.task.val(0))
    found = lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=3)
    assert [math.isfinite(loss) for loss in found.test_loss] == [True, False, True]


def test_a_short_row_fits_the_trace_of_a_full_one():
    """Lanes left over change nothing and are told of nowhere."""
    with environment():
        made = runs(Case(task_of(mlp)))
        full = lanes.Lanes(made, steps=1000)
        for t in range(STEPS):
            full.step(t)
        known = len(made[0].inner.cache)
        assert known == 1
        short = lanes.Lanes(made[:2], count=3, steps=1000)
        for t in range(STEPS):
            assert short.step(t).shape == (2,)
        assert len(made[0].inner.cache) == known
        expected = full.validation_losses(STEPS)[:2]
        found = short.validation_losses(STEPS)
        assert len(found) == 2
        torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-12, atol=0)


def sentences_of(seed):
    """As many as there are steps, each batch of another length, which differs from seed to seed."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (STEPS,), generator=generator).tolist()
    return [
        (whole(seed * 100 + t, 5, 3, n)[:, :-1], whole(seed * 100 + t, 5, 3, n)[:, 1:]) for t, n in enumerate(lengths)
    ]


def test_batches_of_other_shapes(monkeypatch):
    """Lanes whose batches differ are stepped one by one; a shape that comes once is not traced."""
    case = Case(task_of(Block, words, predict))
    task = dataclasses.replace(case.task, train=sentences_of, full=None, test=lambda: sentences_of(9)[:1])
    values = {"lr": [0.1, 0.3], "momentum": [0.5]}
    together = lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=3)
    smooth = lh.hypergradient(task, lh.sgd(), HYPERS, steps=STEPS, engine=lh.Factorial())
    monkeypatch.setattr(retraining, "at_once", lambda problem, runs: 1)
    monkeypatch.setattr(factorial, "at_once", lambda problem, *runs: 1)
    alone = lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=3)
    assert together.test_loss == pytest.approx(alone.test_loss, rel=1e-10)
    expected = lh.hypergradient(task, lh.sgd(), HYPERS, steps=STEPS, engine=lh.Factorial())
    for key, g in expected.grad.items():
        torch.testing.assert_close(smooth.grad[key], g, rtol=1e-8, atol=1e-10)


def test_few_steps_are_not_traced():
    with environment():
        made = runs(Case(task_of(mlp)))
        lanes.Lanes(made).step(0)
        assert not made[0].inner.cache
        lanes.Lanes(made, steps=1000).step(0)
        assert len(made[0].inner.cache) == 1


def test_a_batched_step_is_tried_once_for_runs_of_one_kind(monkeypatch):
    tried, batched = [], lanes.batched
    monkeypatch.setattr(lanes, "batched", lambda problem: tried.append(1) or batched(problem))
    with environment():
        made = runs(problem("mlp"))
        assert [lanes.at_once(one, 4) for one in made] == [4, 4, 4]
        assert lanes.at_once(made[0], 3) == 3
    assert tried == [1]


def test_no_more_at_once_than_memory_has_room_for(monkeypatch):
    with environment():
        (one,) = runs(Case(task_of(mlp)), seeds=[0])
        assert lanes.at_once(one, 24) == 24
        for free, expected in ((10**5, 5), (1000, 1)):
            monkeypatch.setattr(lanes, "free_memory", lambda device, free=free: free)
            found = lanes.at_once(one, 24)
            assert 1 <= found < 24
            assert expected == 1 or found > 1
            assert expected > 1 or found == 1


class Features(nn.Module):
    """Random features that a state dict leaves out."""

    def __init__(self, buffer):
        super().__init__()
        if buffer:
            self.register_buffer("mix", torch.randn(5, 6, dtype=torch.float64), persistent=False)
        else:
            self.mix = torch.randn(5, 6, dtype=torch.float64)
        self.out = nn.Linear(6, 3).double()

    def forward(self, x):
        return self.out(torch.cos(x @ self.mix))


@pytest.mark.parametrize("buffer", [True, False])
def test_every_seed_has_the_features_that_it_drew(buffer):
    case = Case(task_of(lambda: Features(buffer)))
    task = dataclasses.replace(case.task, test=lambda: case.task.val(0))
    values = {"lr": [0.1, 0.3], "momentum": [0.5]}
    together = lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=3)
    each = [lh.retrain(task, lh.sgd(), HYPERS, values, steps=STEPS, seeds=[seed]).test_loss[0] for seed in range(3)]
    assert together.test_loss == pytest.approx(each, rel=1e-10)
    weight = together.params["out.weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes  # of its own, not of a row of runs
