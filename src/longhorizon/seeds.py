"""One seed per purpose and step, so that any step can be replayed alone.

Fetching a batch and running a step are each preceded by a seed made of (run, step, purpose). Shuffling,
augmentation and dropout therefore repeat exactly when the adjoint comes back to a step, or a killed run to its
checkpoint, and no generator state has to be stored.
"""

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

import numpy as np
import torch

_ALONE = threading.RLock()  # held by the thread whose run has the process's generators


def _alone_again() -> None:
    """A forked process has generators of its own, and none of the threads that might have held the lock."""
    global _ALONE
    _ALONE = threading.RLock()


os.register_at_fork(after_in_child=_alone_again)

INIT, FETCH, STEP, VALIDATE, PAIR = range(5)  # purposes


def mix(*parts: int) -> int:
    """A 63-bit seed from whole numbers; neighbours give unrelated seeds.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:  # splitmix64, folded over the parts
        state = (state ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def checked(seed: object) -> int:
    """A user's seed, or an error that shows it."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"seed={seed!r}: expected a whole number.")
    return int(seed)


def seed_torch(seed: int) -> None:
    """Seed torch alone: what a model's own randomness (initialisation, dropout) uses."""
    # torch.manual_seed would also queue the seed, with a stack trace, for kinds of devices that are not there: 0.3 ms
    # a call, and a queue that grows for ever
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    elif torch.accelerator.is_available():
        torch.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed torch, numpy and random: what a user's data code may use."""
    seed_torch(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)


def torch_state() -> list[torch.Tensor]:
    """The state of torch's generators, to see whether something drew from them."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])]


@contextmanager
def isolated() -> Iterator[None]:
    """Have the random generators alone: they are the process's, so another thread's run waits; then put them back."""
    with _ALONE, restored():
        yield


@contextmanager
def restored() -> Iterator[None]:
    """Leave the caller's random generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
