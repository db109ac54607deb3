"""What a person sees while a run goes on: a live table on a terminal, plain lines elsewhere, JSON for machines."""

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor

from longhorizon.outer_step import OuterStep
from longhorizon.trust import gathered
from longhorizon.tuning import Tuning


class Display(Protocol):
    """Shows a tuning run."""

    def start(self, tuning: Tuning) -> None: ...
    def inner(self, tuning: Tuning) -> None: ...
    def outer(self, record: OuterStep) -> None: ...
    def note(self, text: str) -> None: ...
    def stop(self) -> None: ...


def make_display(as_json: bool) -> Display:
    """The display that fits the output."""
    if as_json:
        return JsonDisplay()
    return LiveDisplay() if sys.stderr.isatty() else PlainDisplay()


def numbers(values: Tensor, limit: int = 8) -> str:
    """A few numbers in little room."""
    shown = [number(v) for v in values.tolist()[:limit]]
    return " ".join(shown) + (f" … ({len(values)})" if len(values) > limit else "")


def number(value: float) -> str:
    """Three digits, and more for one just below 1, such as Adam's beta2, which 1 would be wrong for.

    >>> number(0.123456), number(0.9999), number(0.99937)
    ('0.123', '0.9999', '0.99937')
    """
    if 0.99 < value < 1:
        return f"{value:.{1 - math.floor(math.log10(1 - value))}f}".rstrip("0")
    return f"{value:.3g}"


def marked(shown: str, doubted: list[str]) -> str:
    """Numbers with a question mark where a hypergradient cannot be believed."""
    words = shown.split(" ")
    return " ".join(word + ("?" if i < len(doubted) and doubted[i] else "") for i, word in enumerate(words))


def one_line(record: OuterStep, outer_steps: int) -> str:
    """An outer step in words."""
    metrics = "".join(f", {name} {value:.4g}" for name, value in record.metrics.items())
    values = ", ".join(f"{key} {numbers(v)}" for key, v in record.next.items())
    text = f"outer step {record.index + 1}/{outer_steps}: validation loss {record.val_loss:.4g}{metrics}; now {values}"
    text = text if record.status == "ok" else f"{text} [{record.status}]"
    doubted = doubts_in_words(record)
    text = f"{text}; not to be trusted: {doubted}" if doubted else text
    return f"{text}; held: {held_in_words(record)}" if record.held else text


def doubts_in_words(record: OuterStep) -> str:
    """Which hypergradients of a step cannot be believed, and why."""
    if record.status != "ok":
        return ""  # it says more
    return "; ".join(f"{values} ({reason})" for values, reason in gathered(record.doubts))


def held_in_words(record: OuterStep) -> str:
    """Which values the gate kept where they are, windows counted from 1."""
    return "; ".join(
        key if len(record.values[key]) == 1 else f"{key} {', '.join(str(w + 1) for w in windows)}"
        for key, windows in record.held.items()
    )


class JsonDisplay:
    """One JSON object per line on stdout."""

    def start(self, tuning: Tuning) -> None:
        self._say({"event": "start", "outer_steps": tuning.outer_steps, "search_range": tuning.range()})

    def inner(self, tuning: Tuning) -> None: ...

    def outer(self, record: OuterStep) -> None:
        self._say({"event": "outer_step", **record.to_dict()})

    def note(self, text: str) -> None:
        print(text, file=sys.stderr)

    def stop(self) -> None: ...

    def _say(self, content: dict[str, Any]) -> None:
        print(json.dumps(content), flush=True)


class PlainDisplay:
    """A line per outer step, and one now and then within a long one, on stderr."""

    every = 15.0  # seconds between lines inside an outer step

    def start(self, tuning: Tuning) -> None:
        self.outer_steps = tuning.outer_steps
        self._spoke = time.monotonic()
        self.note(_opening(tuning))

    def inner(self, tuning: Tuning) -> None:
        run = tuning.run
        if run is None or time.monotonic() - self._spoke < self.every:
            return
        self._spoke = time.monotonic()
        phase, done, total = run.progress
        self.note(f"outer step {tuning.index + 1}/{self.outer_steps}: {phase}, {done} of {total} steps")

    def outer(self, record: OuterStep) -> None:
        self._spoke = time.monotonic()
        self.note(one_line(record, self.outer_steps))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def stop(self) -> None: ...


class LiveDisplay:
    """Bars for outer and inner steps, with the values and how they change below."""

    refresh = 0.1  # seconds

    def __init__(self) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)
        self.live: Any = None

    def start(self, tuning: Tuning) -> None:
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console.print(_opening(tuning), highlight=False)
        self.bars = Progress(
            TextColumn("{task.description:>10}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
        )
        self.outer_bar = self.bars.add_task(
            "outer", total=tuning.outer_steps, completed=tuning.index, speed="", left=""
        )
        self.inner_bar = self.bars.add_task("inner", total=1, speed="", left="")
        self.last: OuterStep | None = None
        self.outer_steps = tuning.outer_steps
        self._drawn, self._began, self._units = 0.0, time.monotonic(), 0
        self._first = tuning.index
        self.live = Live(self._picture(), console=self.console, refresh_per_second=8, transient=True)
        self.live.start()

    def inner(self, tuning: Tuning) -> None:
        self._units += 1
        now = time.monotonic()
        run = tuning.run
        if run is None or now - self._drawn < self.refresh:
            return
        self._drawn = now
        phase, done, total = run.progress
        speed = self._units / max(now - self._began, 1e-9)
        fraction = tuning.index - self._first + done / total  # outer steps since this process began
        left = (self.outer_steps - tuning.index - done / total) * (now - self._began) / max(fraction, 1e-6)
        self.bars.update(
            self.inner_bar,
            description=phase,
            completed=done,
            total=total,
            speed=f"{speed:.0f} steps/s",
            left=f"about {_duration(left)} left" if fraction > 0.05 else "",
        )
        self.live.update(self._picture())

    def outer(self, record: OuterStep) -> None:
        self.last = record
        self.bars.update(self.outer_bar, completed=record.index + 1)
        self.live.update(self._picture())
        if record.status != "ok":
            self.note(f"outer step {record.index + 1}: {record.status}")

    def note(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False)

    def stop(self) -> None:
        if self.live is None:
            return
        self.live.update(self._picture(), refresh=True)
        self.live.stop()
        self.live = None
        if self.last is not None:
            self.console.print(self._values())

    def _picture(self) -> Any:
        from rich.console import Group

        return Group(self.bars, self._values()) if self.last is not None else self.bars

    def _values(self) -> Any:
        from rich.table import Table

        assert self.last is not None
        record = self.last
        table = Table(box=None, pad_edge=False, title_justify="left")
        for title in ("", "value", "change", "hypergradient"):
            table.add_column(title, overflow="fold")
        for key, value in record.next.items():
            mean = record.mean.get(key)
            doubted = record.doubts.get(key, [])
            table.add_row(
                key,
                numbers(value),
                numbers(value - record.values[key]),
                "" if mean is None else marked(numbers(mean), doubted),
            )
        metrics = "".join(f"   {name} {value:.4g}" for name, value in record.metrics.items())
        table.add_row("validation", f"loss {record.val_loss:.4g}{metrics}", "", "")
        return table


@contextmanager
def arriving() -> Iterator[Callable[[str, int, int | None], None]]:
    """Shows how files arrive, on stderr: a bar for each on a terminal, elsewhere a line every few seconds."""
    shown = ArrivingBars() if sys.stderr.isatty() else ArrivingLines()
    try:
        yield shown.progress
    finally:
        shown.stop()


class ArrivingLines:
    """A line when a file is there, and every few seconds before."""

    every = 3.0  # seconds

    def __init__(self) -> None:
        self._spoke = time.monotonic()

    def progress(self, name: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if done != total and now - self._spoke < self.every:
            return
        self._spoke = now
        of = f" of {_size(total)}" if total is not None and done != total else ""
        print(f"{name}: {_size(done)}{of}", file=sys.stderr, flush=True)

    def stop(self) -> None: ...


class ArrivingBars:
    """A bar per file, from its first byte on."""

    def __init__(self) -> None:
        self._bars: Any = None
        self._rows: dict[str, Any] = {}

    def progress(self, name: str, done: int, total: int | None) -> None:
        if self._bars is None:
            self._bars = _byte_bars()
            self._bars.start()
        if name not in self._rows:
            self._rows[name] = self._bars.add_task(name, total=total)
        self._bars.update(self._rows[name], completed=done, total=total)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()


def _byte_bars() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True))


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 1e6 else f"{count / 1e3:.1f} kB"


def _opening(tuning: Tuning) -> str:
    ranges = ", ".join(f"{key} in [{number(low)}, {number(high)}]" for key, (low, high) in tuning.range().items())
    steps = sorted(set(tuning.horizons))
    size = str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"
    begin = f"from outer step {tuning.index + 1} on, " if tuning.index else ""
    searching = f"; searching {ranges}" if ranges else ""
    outer, inner = ("step" if count == 1 else "steps" for count in (tuning.outer_steps, steps[-1]))
    return f"{begin}{tuning.outer_steps} outer {outer} through {size} training {inner} each{searching}"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
