"""Black-box methods through Optuna: random search, Bayesian optimization, Hyperband, BOHB.

A study is a journal file in the method's own folder. The sampler is made anew for every trial from the seed and the
trial's number, so that a resumed search draws what an unbroken one would. A trial that was running when its process
died is taken up again, at its last checkpoint.

A network that training has ruined may have any loss, 1e25 as well as infinity, and a model of the loss that has to
explain such numbers sees nothing else. So searches are told at most twice the loss of an untrained network; the journal
has the loss itself.
"""

import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longhorizon import seeds
from longhorizon.rivals import hyperband, rows
from longhorizon.rivals.arena import Arena, GaveUp, Setup, Stop, Trial
from longhorizon.rivals.crew import Crew, Failed
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.space import Setting, setting_of
from longhorizon.rivals.training import Training, Trains

STUDY = "study.log"
CEILING = 2.0  # times the loss of an untrained network
_WARM: set[str] = set()  # samplers that this process has used


@dataclass(frozen=True)
class BlackBox:
    """A search that sees only values and losses.

    Attributes:
        sampler: who proposes: uniformly, a Gaussian process, or a tree-structured Parzen estimator.
        early: whether Hyperband ends trials early.
    """

    name: str
    sampler: Literal["random", "gp", "tpe"]
    early: bool = False

    @property
    def packages(self) -> tuple[str, ...]:
        return ("optuna", "scipy") if self.sampler == "gp" else ("optuna",)

    def check(self, setup: Setup) -> None: ...

    def warm(self) -> None:
        if self.sampler in _WARM:
            return
        import optuna

        _WARM.add(self.sampler)
        with quiet():
            study = optuna.create_study(sampler=self._sampler(0, 0))
            for number in range(12):  # samplers begin with ten random trials
                trial = study.ask()
                trial.suggest_float("x", 0.0, 1.0)
                study.tell(trial, float(number))

    def least(self, setup: Setup) -> int:
        return self.rungs(setup)[0]

    def rungs(self, setup: Setup) -> list[int]:
        """Training steps at which a trial is judged."""
        if not self.early:
            return [setup.steps]
        return hyperband.rungs(setup.steps, hyperband.epoch_of(setup.steps, setup.epoch))

    def run(self, arena: Arena) -> None:
        with quiet():
            self.work(arena, self.running(arena))

    def running(self, arena: Arena) -> list[int]:
        """Trials that no process works on any more, by number."""
        from optuna.trial import TrialState

        return [t.number for t in self.study(arena).get_trials(deepcopy=False, states=(TrialState.RUNNING,))]

    def work(self, arena: Arena, unfinished: Sequence[int], worker: int = 0) -> None:
        """Finish these trials, then take new ones until the purse is empty."""
        study = self.study(arena)
        if rows.width(arena) > 1:
            self._together(arena, study, list(unfinished), worker)
            return
        arena.recompile()
        for number in unfinished:
            self._trial(arena, study, number, worker)
        while arena.purse.allows(self.least(arena.setup)):
            self._trial(arena, study, None, worker)

    def _together(self, arena: Arena, study: Any, unfinished: list[int], worker: int) -> None:
        """Several trials at a time. A search proposes while others are at work, as with several processes."""
        rungs = self.rungs(arena.setup)
        if not unfinished and not arena.purse.allows(rungs[0]):
            return
        rows.recompile(arena)
        crew = Crew(arena, rows.width(arena))
        try:
            while True:
                while not crew.full and (unfinished or _affords(arena, crew, rungs[0])):
                    with crew.apart():
                        self._hire(arena, study, crew, unfinished.pop(0) if unfinished else None, worker)
                if not list(crew):
                    return
                if not arena.purse.allows(0, crew.seconds):
                    crew.save()
                    return
                try:
                    seats = crew.work()
                except Failed as failed:
                    seats = failed.seats
                for seat in seats:
                    found = crew.judge(seat)
                    with crew.apart():
                        self._seat(arena, study, crew, seat.trial, seat.what, found)
        except (Stop, GaveUp):
            crew.save()
            raise

    def _hire(self, arena: Arena, study: Any, crew: Crew, number: int | None, worker: int) -> None:
        """A trial, new or of a number, gets a seat, after what is in the journal of it already."""
        began = time.perf_counter()
        trial, setting, reported = self._asked(arena, study, number, worker)
        one = self._trial_of(arena, trial.number, setting, time.perf_counter() - began)
        self._seat(arena, study, crew, one, _Course(trial, setting, reported), None)

    def _seat(
        self, arena: Arena, study: Any, crew: Crew, one: Trial, course: "_Course", found: Evaluation | None
    ) -> None:
        """From an evaluation of a trial, or its beginning, to its next stretch of training, if there is one."""
        rungs = self.rungs(arena.setup)
        while found is None or self._goes_on(arena, study, course, found, one.training):
            if found is not None:
                course.rung += 1
                one.keep()
            at = rungs[course.rung]
            found = arena.found(one.number, at)
            if found is not None:
                one.since = at
                continue
            if not _affords(arena, crew, at - one.since):
                return  # it stays open, and goes on if the budget grows
            try:
                crew.sit(one, at, course)
                return
            except Exception:  # a user's model or data may fail in any way; alone it is written down as a crash
                found = one.to(at)
        one.forget()

    def _trial_of(self, arena: Arena, number: int, setting: Setting, seconds: float) -> Trial:
        def make(saved: dict[str, Any] | None) -> Training:
            return Training(arena.problem(setting, number), arena.counter, saved)

        return Trial(arena, number, setting, make, seconds)

    def study(self, arena: Arena) -> Any:
        """The study on disk, of this method and seed."""
        import optuna
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        pruner: Any = optuna.pruners.NopPruner()
        if self.early:
            most = hyperband.ETA ** (len(self.rungs(arena.setup)) - 1)  # rungs are told as powers of η
            pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=most, reduction_factor=hyperband.ETA)
        return optuna.create_study(
            storage=JournalStorage(JournalFileBackend(str(arena.dir / STUDY))),
            study_name=f"{arena.method}-{arena.seed}",
            direction="minimize",
            sampler=self._sampler(arena.seed, 0),
            pruner=pruner,
            load_if_exists=True,
        )

    def _sampler(self, seed: int, number: int) -> Any:
        from optuna import samplers

        own = seeds.mix(seed, number, seeds.INIT) % 2**32
        if self.sampler == "gp":
            return samplers.GPSampler(seed=own)
        if self.sampler == "tpe":
            return samplers.TPESampler(multivariate=True, constant_liar=True, seed=own)
        return samplers.RandomSampler(seed=own)

    def _trial(self, arena: Arena, study: Any, number: int | None, worker: int) -> None:
        """One trial, new or taken up again, up to its end or to where the pruner ends it."""
        setup, began = arena.setup, time.perf_counter()
        trial, setting, reported = self._asked(arena, study, number, worker)
        one = self._trial_of(arena, trial.number, setting, time.perf_counter() - began)
        course = _Course(trial, setting, reported)
        for course.rung, at in enumerate(self.rungs(setup)):
            if arena.found(trial.number, at) is None and not arena.purse.allows(at - one.since):
                return  # it stays open, and goes on from its last rung if the budget grows
            if not self._goes_on(arena, study, course, one.to(at), one.training):
                break
            one.keep()
        one.forget()

    def _goes_on(self, arena: Arena, study: Any, course: "_Course", found: Evaluation, training: Trains | None) -> bool:
        """Tell the search of an evaluation; whether its trial is to be trained further."""
        from optuna.trial import TrialState

        trial, rung = course.trial, course.rung
        if found.status.startswith("crashed"):
            study.tell(trial, state=TrialState.FAIL)
            return False
        told = min(found.val_loss, _ceiling(study, arena, course.setting, trial.number, training))
        if found.steps == self.rungs(arena.setup)[-1] and (math.isfinite(found.val_loss) or not self.early):
            study.tell(trial, told)
            return False
        if hyperband.ETA**rung not in course.reported:
            trial.report(told, hyperband.ETA**rung)
        if trial.should_prune() or not math.isfinite(found.val_loss):
            study.tell(trial, state=TrialState.PRUNED)
            return False
        return True

    def _asked(
        self, arena: Arena, study: Any, number: int | None, worker: int
    ) -> tuple[Any, Setting, dict[int, float]]:
        """A trial, new or that of a number, its setting, and what it has reported so far."""
        from optuna.trial import Trial as OptunaTrial

        space = arena.setup.axes
        among = study.get_trials(deepcopy=False)
        study.sampler = self._sampler(arena.seed, (len(among) if number is None else number) + worker * 2**16)
        if number is None:
            trial, reported = study.ask(), {}
        else:
            trial, reported = OptunaTrial(study, among[number]._trial_id), among[number].intermediate_values
            _catch_up(study, trial, among[number], [axis.name for axis in space])
        chosen = {axis.name: trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log) for axis in space}
        return trial, setting_of(arena.setup.hypers, chosen, space), reported


@dataclass
class _Course:
    """A trial of a search: what it is called there, its setting, what it has reported before, and how far it is."""

    trial: Any
    setting: Setting
    reported: dict[int, float]
    rung: int = 0


def _affords(arena: Arena, crew: Crew, steps: int) -> bool:
    """Whether the purse allows so many steps besides what the crew is at."""
    return arena.purse.allows(steps + sum(seat.left for seat in crew), crew.seconds)


def _catch_up(study: Any, trial: Any, saved: Any, names: Sequence[str]) -> None:
    """Of a trial that was killed between two axes, draw the first ones again, unused: the sampler's stream goes on."""
    from optuna import pruners

    if all(name in saved.params for name in names):
        return
    relative = trial.relative_params  # drawn before all others, together
    for name, distribution in saved.distributions.items():
        if name not in relative and not distribution.single():
            study.sampler.sample_independent(pruners._filter_study(study, saved), saved, name, distribution)


def _ceiling(study: Any, arena: Arena, setting: Setting, number: int, training: Trains | None = None) -> float:
    """The most that a search is told, from the first trial that got so far."""
    if "ceiling" not in study.user_attrs:
        problem = arena.problem(setting, number) if training is None else training.problem
        study.set_user_attr("ceiling", CEILING * float(problem.validation_loss(problem.start, 1)))
    return float(study.user_attrs["ceiling"])


class quiet:  # noqa: N801 - reads as a word
    """Optuna without its log lines, and without warnings about what is meant."""

    def __enter__(self) -> None:
        import optuna

        self._before = optuna.logging.get_verbosity()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._warnings = warnings.catch_warnings()
        self._warnings.__enter__()
        for text in (".*experimental.*", ".*multivariate.*", ".*constant_liar.*", ".*non-finite.*", ".*infinite.*"):
            warnings.filterwarnings("ignore", message=text)

    def __exit__(self, *what: Any) -> None:
        import optuna

        self._warnings.__exit__(*what)
        optuna.logging.set_verbosity(self._before)
