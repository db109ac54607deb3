"""Several trials of a search at a time, each at its own step: as many workers as there are lanes, in one process.

On a GPU a small network's step leaves most of the device idle, so one batched step (lanes.py) takes a whole crew of
trials further. Each has a seat. When one has come to where it is to be judged, or has diverged, it gets up, and another
may sit down: no lane waits for the others. Seconds are shared out among the seats that are taken. A trial is saved as
one that trains alone is (`arena.Trial`), so it can go on alone, too, or in another seat.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from longhorizon import tree
from longhorizon.engines.base import CHECK_EVERY
from longhorizon.lanes import Lanes
from longhorizon.rivals.arena import Arena, Trial, settle
from longhorizon.rivals.ledger import Evaluation
from longhorizon.rivals.training import Training


@dataclass
class Seat:
    """A trial at work, up to a step."""

    trial: Trial
    training: Training
    until: int
    what: Any  # whatever its owner wants to know again

    @property
    def left(self) -> int:
        """Steps that it will still be charged for before it is judged."""
        return self.until - self.trial.since


class Failed(Exception):  # noqa: N818 - says what happened
    """A step that several trials took together failed: by whose fault, each alone will show."""

    def __init__(self, seats: list[Seat]):
        self.seats = seats
        super().__init__(f"a step of {len(seats)} trials failed")


class Crew:
    """Seats for trials of one method.

    Args:
        arena: whose trials they are.
        width: how many seats there are.
    """

    def __init__(self, arena: Arena, width: int):
        self.arena, self.seats = arena, list[Seat | None]([None] * width)
        self._lanes: Lanes | None = None
        self._bad = self._at = torch.empty(0)  # by seat, the first step whose loss was not finite, or −1; the next step
        self._taken = 0
        self._clock = self._saved_at = time.perf_counter()

    def __iter__(self) -> Iterator[Seat]:
        return (seat for seat in self.seats if seat is not None)

    @property
    def full(self) -> bool:
        return None not in self.seats

    @property
    def seconds(self) -> float:
        """Of work that no evaluation has been charged for yet."""
        return sum(seat.trial.seconds for seat in self)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While something is done that is not the seats' work; what is a trial's own is put down to it."""
        self._share()
        try:
            yield
        finally:
            self._clock = time.perf_counter()

    def sit(self, trial: Trial, until: int, what: Any = None) -> None:
        """Give a trial a seat, from where it is; to be called `apart`."""
        place = self.seats.index(None)
        training: Any = trial.begun()
        if self._lanes is None:
            width, steps = len(self.seats), self.arena.setup.steps
            self._lanes = Lanes([training.problem] * width, steps=steps)
            self._bad = torch.full((width,), -1, dtype=torch.int64, device=training.problem.device)
            self._at = torch.zeros_like(self._bad)
        self._lanes.put(place, training.problem, training.state)
        self._bad[place], self._at[place] = training.watch.flag, training.t
        self.seats[place] = Seat(trial, training, until, what)
        trial.seconds += trial.since_begun()

    def work(self) -> list[Seat]:
        """Train until somebody is to be judged, and tell who.

        Raises:
            Failed: if a step fails; nobody has a seat then.
            Stop: if that was asked for.
        """
        while not (due := [seat for seat in self if self._is_due(seat)]):
            try:
                self._step()
            except Exception as error:  # a user's model, loss or data may fail in any way
                self._share()
                seats = list(self)
                for seat in seats:
                    self._get_up(seat)
                raise Failed(seats) from error
            self.arena.pulse(max(seat.training.t for seat in self))
            if time.perf_counter() - self._saved_at >= self.arena.checkpoint_seconds:
                self.save()
        return sorted(due, key=lambda seat: seat.trial.number)  # in one order, whoever sat where

    def judge(self, seat: Seat) -> Evaluation:
        """Judge a trial and write it down; then it has no seat any more."""
        settle(self._bad.device)
        self._share()
        if seat in self.seats:
            self._bring_up_to_date(self.seats.index(seat), seat)
        self.arena.under_way = self.seconds - seat.trial.seconds * (seat in self.seats)
        try:
            found = seat.trial.to(seat.until)
        finally:
            self.arena.under_way = 0.0
            self._clock = time.perf_counter()  # that was its own time
        if seat in self.seats:
            self.seats[self.seats.index(seat)] = None
        return found

    def save(self) -> None:
        """Save all on their way, off the clock."""
        settle(self._bad.device)
        self._share()
        for place, seat in enumerate(self.seats):
            if seat is not None:
                self._bring_up_to_date(place, seat)
                seat.trial.keep()
        self._clock = self._saved_at = time.perf_counter()

    def _step(self) -> None:
        assert self._lanes is not None
        first = next(place for place, seat in enumerate(self.seats) if seat is not None)
        at = []
        for place, seat in enumerate(self.seats):
            if seat is None:  # it does again what another one does, which costs least
                self._lanes.repeat(place, first)
            busy = seat or self.seats[first]
            assert busy is not None
            at.append(busy.training.t)
        losses = self._lanes.step(at)
        self._bad = torch.where((self._bad < 0) & ~losses.isfinite(), self._at, self._bad)
        self._at = self._at + 1  # kept where the losses are: to copy it there would be to wait
        for one in self:
            one.training.t += 1
            one.trial.counted += 1
            self.arena.counter.steps += 1
        self._taken += 1
        self._share()
        if self._bad.device.type == "cpu" or self._taken % CHECK_EVERY == 0:
            for seat, bad in zip(self.seats, self._bad.tolist(), strict=True):
                if seat is not None and bad >= 0:
                    seat.training.failed = bad

    def _is_due(self, seat: Seat) -> bool:
        return seat.training.t >= seat.until or seat.training.failed is not None

    def _share(self) -> None:
        """Share out the time since it was last done."""
        now, seats = time.perf_counter(), list(self)
        for seat in seats:
            seat.trial.seconds += (now - self._clock) / len(seats)
        self._clock = now

    def _bring_up_to_date(self, place: int, seat: Seat) -> None:
        """What the trial's own training would hold by now."""
        assert self._lanes is not None
        state = self._lanes.lane(place)
        seat.training.state = tree.map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, state)
        seat.training.watch.flag = self._bad[place]

    def _get_up(self, seat: Seat) -> None:
        place = self.seats.index(seat)
        self._bring_up_to_date(place, seat)
        seat.trial.keep()
        self.seats[place] = None
