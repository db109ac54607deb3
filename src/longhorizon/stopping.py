"""Ctrl-C and SIGTERM: asked to stop, work ends where it can be saved."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(KeyboardInterrupt):
    """The run was asked to stop; everything is saved.

    Args:
        where: it stopped, and what is saved.
        how: to go on.
    """

    def __init__(self, where: str, how: str = ""):
        super().__init__(f"{where}; {how}" if how else where)
        self.where = where


@contextmanager
def stop_signals(enabled: bool) -> Iterator[list[int]]:
    """A list that gets an entry when Ctrl-C or SIGTERM arrives; a second one stops at once."""
    asked: list[int] = []
    if not enabled or threading.current_thread() is not threading.main_thread():
        yield asked
        return
    kinds = (signal.SIGINT, signal.SIGTERM)
    before = {kind: signal.getsignal(kind) for kind in kinds}

    def ask(kind: int, _: object) -> None:
        asked.append(kind)
        for k in kinds:
            signal.signal(k, before[k])

    for kind in kinds:
        signal.signal(kind, ask)
    try:
        yield asked
    finally:
        for kind in kinds:
            signal.signal(kind, before[kind])
