"""Black-box methods through Optuna: random search, Bayesian optimization, Hyperband, BOHB.

A study is a journal file in the method's own folder (studies.py). The sampler is made anew for every trial from the
seed and the trial's number, so that a resumed search draws what an unbroken one would. A trial that was running when
its process died is taken up again, at its last checkpoint.

Hyperband and BOHB judge trials after short runs first (hyperband.py). Where a hyperparameter is a schedule, a short run
has the whole of it, squeezed, and a longer one begins from scratch: the beginning of a long schedule says nothing of
its later values. Where all values are constant a trial goes on from where it was judged.

A network that training has ruined may have any loss, 1e25 as well as infinity, and a model of the loss that has to
explain such numbers sees nothing else. So searches are told at most twice the loss of an untrained network; the journal
has the loss itself.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longhorizon import seeds
from longhorizon.rivals import bohb, hyperband, rows, studies
from longhorizon.rivals.arena import Arena, GaveUp, Setup, Stop, Trial, trial_file
from longhorizon.rivals.crew import Crew, Failed
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.space import Setting, numbers_of, setting_of
from longhorizon.rivals.studies import quiet
from longhorizon.rivals.training import Training, Trains
from longhorizon.rundir import RunError

RUNGS = 2  # which brackets and rungs a study's trials have: before, Optuna chose the bracket
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
        kinds: Any = {"gp": optuna.samplers.GPSampler, "tpe": optuna.samplers.TPESampler}
        with quiet():
            study = optuna.create_study(sampler=kinds.get(self.sampler, optuna.samplers.RandomSampler)())
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
        """Trials that no process works on any more, by number; to be asked by whoever has the folder alone."""
        from optuna.trial import TrialState

        studies.mend(arena)
        study = self.study(arena)
        numbers = [t.number for t in study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))]
        for path in arena.dir.glob("trial-*.pt"):  # of one that was killed before it was removed, or of a lost study
            if int(path.name[6:11]) not in numbers:
                path.unlink()
        return numbers

    def work(self, arena: Arena, unfinished: Sequence[int], worker: int = 0) -> None:
        """Finish these trials, then take new ones until the purse is empty."""
        study = self.study(arena)
        if rows.width(arena) > 1:
            self._together(arena, study, list(unfinished), worker)
            return
        arena.recompile()
        for number in unfinished:
            self._trial(arena, study, number, worker)
        while arena.purse.allows(self._next(arena, study)):
            self._trial(arena, study, None, worker)

    def _together(self, arena: Arena, study: Any, unfinished: list[int], worker: int) -> None:
        """Several trials at a time. A search proposes while others are at work, as with several processes."""
        if not unfinished and not arena.purse.allows(self._next(arena, study)):
            return
        rows.recompile(arena)
        crew, waiting = Crew(arena, rows.width(arena)), list[int]()
        unfinished.sort(key=lambda number: not any(arena.dir.glob(f"trial-{number:05d}*.pt")))  # who had a seat first
        try:
            while True:
                while not crew.full and (unfinished or _affords(arena, crew, self._next(arena, study))):
                    with crew.apart():
                        waiting += self._hire(arena, study, crew, unfinished.pop(0) if unfinished else None, worker)
                if not list(crew):
                    return
                if not arena.purse.allows(0, crew.seconds):
                    crew.save()
                    return
                try:
                    seats = crew.work()
                except Failed as failed:
                    seats = failed.seats
                unfinished, waiting = [*waiting, *unfinished], []  # there may be more to spend than it seemed
                verdicts = [crew.judge(seat) for seat in seats]  # all, before anybody spends what another one may need
                for seat, found in zip(seats, verdicts, strict=True):
                    with crew.apart():
                        waiting += self._seat(arena, study, crew, seat.trial, seat.what, found)
        except (Stop, GaveUp):
            crew.save()
            raise

    def next_steps(self, arena: Arena) -> int:
        """Training steps of the first evaluation of a new trial."""
        with quiet():
            return self._next(arena, self.study(arena))

    def _next(self, arena: Arena, study: Any) -> int:
        rungs = self.rungs(arena.setup)
        return rungs[hyperband.begins_on(len(study.get_trials(deepcopy=False)), len(rungs))]

    def _hire(self, arena: Arena, study: Any, crew: Crew, number: int | None, worker: int) -> list[int]:
        """A trial, new or of a number, gets a seat, after what is in the journal of it already; as `_seat`."""
        began = time.perf_counter()
        course = self._asked(arena, study, number, worker)
        one = self._trial_of(arena, course, time.perf_counter() - began)
        return self._seat(arena, study, crew, one, course, None)

    def _seat(
        self, arena: Arena, study: Any, crew: Crew, one: Trial, course: "_Course", found: Evaluation | None
    ) -> list[int]:
        """From an evaluation of a trial, or its beginning, to its next stretch of training, if there is one.

        Returns its number if that cannot be paid for now.
        """
        rungs = self.rungs(arena.setup)
        while found is None or self._goes_on(arena, study, course, found, one.training):
            if found is not None:
                one = self._climbed(arena, one, course)
            at = rungs[course.rung]
            found = arena.found(one.number, at)
            if found is not None:
                one.since = at
                continue
            if not _affords(arena, crew, at - one.since):
                return [one.number]  # it stays open, and goes on if others leave something, or the budget grows
            try:
                crew.sit(one, at, course)
                return []
            except Exception:  # a user's model or data may fail in any way; alone it is written down as a crash
                found = one.to(at)
        one.forget()
        return []

    def _squeezes(self, arena: Arena) -> bool:
        """Whether each rung is trained from scratch, with the whole schedule in it."""
        return self.early and any(hyper.windows > 1 for hyper in arena.setup.hypers.values())

    def _trial_of(self, arena: Arena, course: "_Course", seconds: float = 0.0) -> Trial:
        """The training of a trial on its rung."""
        number, setting, file = course.trial.number, course.setting, ""
        steps = replicate = 0
        if course.squeezed:
            steps, replicate = self.rungs(arena.setup)[course.rung], course.rung
            file = trial_file(number, steps)

        def make(saved: dict[str, Any] | None) -> Training:
            problem = arena.problem(setting, number, steps, replicate)
            return Training(problem, arena.counter, saved, arena.setup.steps)

        return Trial(arena, number, setting, make, seconds, file)

    def _climbed(self, arena: Arena, one: Trial, course: "_Course") -> Trial:
        """A trial on its next rung."""
        course.rung += 1
        if not course.squeezed:
            one.keep()
            return one
        one.forget()
        return self._trial_of(arena, course)

    def study(self, arena: Arena) -> Any:
        """The study on disk, of this method and seed; made anew from the journal where it is lost."""
        study = studies.opened(arena)
        if arena.past() and not study.get_trials(deepcopy=False):
            self._relive(arena)
            study = studies.opened(arena)
        if not self.early or study.user_attrs.get("rungs") == RUNGS:
            return study
        if study.get_trials(deepcopy=False):
            raise RunError(
                f"{arena.dir} was begun by an earlier version, whose {self.name} had other rungs: give another "
                f"directory, or leave {self.name} out."
            )
        study.set_user_attr("rungs", RUNGS)
        return study

    def _relive(self, arena: Arena) -> None:
        """Tell a study all that is in the journal, in the order in which it came; written aside and renamed."""
        from optuna.samplers import PartialFixedSampler, RandomSampler
        from optuna.trial import TrialState

        past, space = arena.past(), arena.setup.axes
        for e in past:
            self._check(arena, e)
        for left in arena.dir.glob(f"{studies.STUDY}.*"):  # of one that was killed while it did this
            left.unlink()
        aside = f"{studies.STUDY}.{os.getpid()}"
        study, courses = studies.opened(arena, aside), {}
        if self.early:
            study.set_user_attr("rungs", RUNGS)
        for number in range(1 + max(e.trial for e in past)):
            values = next((e.values for e in past if e.trial == number), None)
            study.sampler = RandomSampler()
            if values is not None:
                study.sampler = PartialFixedSampler(numbers_of(values, space), study.sampler)
            trial = study.ask()
            if values is None:  # it had not come to its first evaluation
                study.tell(trial, state=TrialState.FAIL)
                continue
            for axis in space:
                trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log)
            courses[number] = _Course(trial, values, {}, self._squeezes(arena))
        ended: set[int] = set()
        for e in past:
            if e.trial in ended:
                raise self._unlike(arena, e)
            courses[e.trial].rung = self.rungs(arena.setup).index(e.steps)
            if not self._goes_on(arena, study, courses[e.trial], e, None):
                ended.add(e.trial)
        os.replace(arena.dir / aside, arena.dir / studies.STUDY)

    def _check(self, arena: Arena, e: Evaluation) -> None:
        """Whether a line of the journal can be this method's."""
        rungs, space = self.rungs(arena.setup), arena.setup.axes
        fits = all(len(e.values.get(key, [])) == hyper.windows for key, hyper in arena.setup.hypers.items())
        numbers = numbers_of(e.values, space) if fits else {}
        within = all(axis.low <= numbers.get(axis.name, math.nan) <= axis.high for axis in space)
        if not within or e.steps not in rungs[hyperband.begins_on(e.trial, len(rungs)) :]:
            raise self._unlike(arena, e)

    def _unlike(self, arena: Arena, e: Evaluation) -> RunError:
        return RunError(
            f"the study of {self.name}, seed {arena.seed}, is lost, and cannot be made anew from the journal: "
            f"trial {e.trial} after {e.steps} steps is none that this comparison would have made. Give another "
            f"directory, or leave {self.name} out."
        )

    def _sampler(self, arena: Arena, number: int) -> Any:
        from optuna import samplers

        own = seeds.mix(arena.seed, number, seeds.INIT)
        if self.sampler == "gp":
            return samplers.GPSampler(seed=own % 2**32)
        uniform = samplers.RandomSampler(seed=own % 2**32)
        if self.sampler == "random":
            return uniform
        return samplers.PartialFixedSampler(bohb.propose(arena.setup.axes, arena.past(), own), uniform)

    def _trial(self, arena: Arena, study: Any, number: int | None, worker: int) -> None:
        """One trial, new or taken up again, up to its end, or to where it is not among the best."""
        rungs, began = self.rungs(arena.setup), time.perf_counter()
        course = self._asked(arena, study, number, worker)
        one = self._trial_of(arena, course, time.perf_counter() - began)
        while True:
            at = rungs[course.rung]
            if arena.found(one.number, at) is None and not arena.purse.allows(at - one.since):
                return  # it stays open, and goes on from its last rung if the budget grows
            if not self._goes_on(arena, study, course, one.to(at), one.training):
                break
            one = self._climbed(arena, one, course)
        one.forget()

    def _goes_on(self, arena: Arena, study: Any, course: "_Course", found: Evaluation, training: Trains | None) -> bool:
        """Tell the search of an evaluation; whether its trial is to be trained further."""
        from optuna.trial import TrialState

        trial, rung = course.trial, course.rung
        if found.status.startswith("crashed"):
            study.tell(trial, state=TrialState.FAIL)
            return False
        told = min(found.val_loss, studies.ceiling(study, arena, course.setting, trial.number, training))
        if found.steps == self.rungs(arena.setup)[-1] and (math.isfinite(found.val_loss) or not self.early):
            study.tell(trial, told)
            return False
        if hyperband.ETA**rung not in course.reported:
            trial.report(told, hyperband.ETA**rung)
        if not math.isfinite(found.val_loss) or not self._survives(arena, found):
            study.tell(trial, state=TrialState.PRUNED)
            return False
        return True

    def _survives(self, arena: Arena, found: Evaluation) -> bool:
        """Whether a trial is among the best of its bracket that were judged on its rung before it."""
        count = len(self.rungs(arena.setup))
        bracket, losses = hyperband.begins_on(found.trial, count), []
        for e in arena.past():
            same = e.steps == found.steps and hyperband.begins_on(e.trial, count) == bracket
            if same and not e.status.startswith("crashed"):
                losses.append(e.val_loss)
            if e.key == found.key:  # what came later does not count: the verdict stays what it was
                break
        return hyperband.survives(found.val_loss, losses)

    def _asked(self, arena: Arena, study: Any, number: int | None, worker: int) -> "_Course":
        """A trial, new or that of a number, on the rung that it begins on."""
        from optuna.trial import Trial as OptunaTrial

        space = arena.setup.axes
        among = study.get_trials(deepcopy=False)
        study.sampler = self._sampler(arena, (len(among) if number is None else number) + worker * 2**16)
        if number is None:
            trial, reported = study.ask(), {}
        else:
            trial, reported = OptunaTrial(study, among[number]._trial_id), among[number].intermediate_values
            studies.catch_up(study, trial, among[number], [axis.name for axis in space])
        chosen = {axis.name: trial.suggest_float(axis.name, axis.low, axis.high, log=axis.log) for axis in space}
        first = hyperband.begins_on(trial.number, len(self.rungs(arena.setup)))
        return _Course(trial, setting_of(arena.setup.hypers, chosen, space), reported, self._squeezes(arena), first)


@dataclass
class _Course:
    """A trial of a search: what it is called there, its setting, what it has reported before, and how far it is."""

    trial: Any
    setting: Setting
    reported: dict[int, float]
    squeezed: bool  # trained from scratch on every rung
    rung: int = 0


def _affords(arena: Arena, crew: Crew, steps: int) -> bool:
    """Whether the purse allows so many steps besides what the crew is at."""
    return arena.purse.allows(steps + sum(seat.left for seat in crew), crew.seconds)
