"""What the settings are worth: every incumbent trained from scratch on training and validation data, and tested.

This is no part of a method's budget. One line per test in tests.jsonl; a setting that several methods or seeds have
come to is trained once. A training that diverges is a result; a test that fails with an error is not, and is tried
again when it is next asked for.
"""

import json
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from longhorizon.cuda import Precision
from longhorizon.files import whole_lines, write_aside
from longhorizon.outer_step import plain
from longhorizon.retraining import retrain
from longhorizon.rivals.arena import Setup, Stop, words_of
from longhorizon.rivals.ledger import Evaluation, incumbents
from longhorizon.rivals.packaged import OPTIMIZERS, retrain_packaged
from longhorizon.rivals.space import hypers_for
from longhorizon.rundir import append_line
from longhorizon.traces import Traces

Key = tuple[str, int, int, int]  # of an evaluation and of its test
Which = Literal["all", "whole", "last", "none"]


@dataclass(frozen=True)
class Tested:
    """An evaluation's setting on the test set: per seed of the test, its loss and metrics."""

    method: str
    seed: int
    trial: int
    steps: int
    scores: dict[str, list[float | None]]  # None where a training diverged
    status: str = "ok"

    @property
    def key(self) -> Key:
        return (self.method, self.seed, self.trial, self.steps)

    @property
    def crashed(self) -> bool:
        """Whether it failed with an error, so that it has no scores."""
        return self.status.startswith("crashed")

    def single(self, name: str) -> list[float | None]:
        """A score of every training; None where its loss is not finite, whatever accuracy such a model has."""
        found = self.scores.get(name, [])
        losses = self.scores.get("loss", found)
        pairs = zip_longest(losses, found)
        return [v if v is not None and loss is not None and math.isfinite(loss) else None for loss, v in pairs]


def read_tests(path: Path) -> list[Tested]:
    """All tests so far; a torn last line does not count. Of one that was tried again only the last."""
    tests = [Tested(**json.loads(line)) for line in whole_lines(path) if line.strip()]
    return list({t.key: t for t in tests}.values())


def to_test(evaluations: Sequence[Evaluation], which: Which, steps: int = 0) -> list[Evaluation]:
    """Which evaluations are to be tested.

    Of every method and seed all incumbents; or those of whole runs, of so many steps, and the last; or the last alone.
    """
    best = incumbents(evaluations)
    if which in ("all", "none"):
        return best if which == "all" else []
    last = {(e.method, e.seed): e for e in best}
    return [e for e in best if e is last[e.method, e.seed] or (which == "whole" and e.steps >= steps)]


def try_all(
    setup: Setup,
    evaluations: Sequence[Evaluation],
    path: Path,
    which: Which,
    seeds: int,
    progress: Callable[[int, int], None] | None = None,
    traces: Traces | None = None,
    precision: Precision = "float32",
    tried: set[Key] | None = None,
    later: Collection[tuple[str, int]] = (),
) -> None:
    """Test what has not been tested yet, or failed.

    Args:
        later: methods and their seeds that are to go on: what is their last is not known yet.
        tried: what this process has tested, to be added to; what failed in it is not tried again.
    """
    tried = set() if tried is None else tried
    known = [t for t in read_tests(path) if not t.crashed or t.key in tried]
    done = {t.key for t in known}
    by_key = {e.key: e for e in evaluations}
    scores = {_same(by_key[t.key]): t for t in known if t.key in by_key}
    begun = path.with_name("testing.json")
    for e in to_test(evaluations, which, setup.steps):
        if e.key in done or (e.method, e.seed) in later:
            continue
        twin = scores.get(_same(e))
        found, status = (
            (twin.scores, twin.status)
            if twin is not None
            else _test(setup, e, seeds, progress, traces, precision, begun)
        )
        tested = Tested(*e.key, found, status)
        append_line(path, plain(vars(tested)))
        tried.add(e.key)
        scores[_same(e)] = tested
        begun.unlink(missing_ok=True)


def _same(e: Evaluation) -> str:
    return json.dumps([e.values, e.method if e.method in OPTIMIZERS else ""], sort_keys=True)


def _test(
    setup: Setup,
    e: Evaluation,
    seeds: int,
    progress: Callable[[int, int], None] | None,
    traces: Traces | None,
    precision: Precision,
    begun: Path,
) -> tuple[dict[str, list[Any]], str]:
    """The scores of a setting; `begun` holds those of trainings that were done when it was stopped."""
    try:
        if e.method in OPTIMIZERS:
            return plain(retrain_packaged(setup, e.method, range(seeds), progress, precision)), "ok"
        hypers = hypers_for(e.values, setup.hypers, setup.rule, setup.steps)
        values = {key: hyper.values() for key, hyper in hypers.items()}
        known = json.loads(begun.read_text()) if begun.exists() else {}
        found: dict[str, list[Any]] = known["scores"] if known.get("key") == list(e.key) else {}

        def done(seed: int, scores: dict[str, float]) -> None:
            for name, value in plain(scores).items():
                found.setdefault(name, []).append(value if math.isfinite(scores["loss"]) else None)
            write_aside(begun, json.dumps({"key": list(e.key), "scores": found}))

        left = range(len(found.get("loss", [])), seeds)
        if left:
            given: Any = (setup.task, setup.rule, hypers, values)
            how: Any = {"precision": precision, "traces": traces, "progress": progress, "on_seed": done}
            retrain(*given, steps=setup.steps, seeds=left, **how)
        return found, "ok"
    except Stop:
        raise
    except Exception as error:  # the user's test data or metric may fail in any way
        return {}, " ".join([f"crashed: {words_of(error)}", *getattr(error, "__notes__", ())])
