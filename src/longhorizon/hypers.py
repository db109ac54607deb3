"""What is learnt: a hyperparameter's start, its windows in time, its bounds, and what it applies to.

A run of T steps is cut into `windows` stretches whose lengths differ by at most one; step t (from 0) lies in
window ⌊t · windows / T⌋. All steps of a window share one value, so the window's hypergradient is the sum of
its steps' hypergradients.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import pairwise
from numbers import Integral, Real
from typing import Literal

import torch
from torch import Tensor

Selector = str | Sequence[str] | Callable[[str, Tensor], bool]

WRAPPERS = ("_orig_mod", "module")  # what torch.compile, and DataParallel and its distributed form, put into names
BY_DIMENSION = ("ndim>=2", "ndim<2")  # the patterns that need no name

# Outer step sizes for the arguments everybody tunes; the paper's Appendix C where it has one.
DEFAULT_STEPS = {"lr": 0.1, "momentum": 0.15, "weight_decay": 4e-4, "dampening": 0.1, "beta1": 0.05, "beta2": 0.005}


@dataclass(frozen=True)
class Hyper:
    """One hyperparameter, constant or a schedule.

    In the dictionary `hypers`, the key names the rule's argument ("lr"), or one that the loss reads. A label
    after a slash ("lr/head") makes room for several values of one argument, told apart by `params`.

    Args:
        start: first value, a float, or one float per window.
        windows: number of values along the run, from 1 (constant) to the number of steps.
        step: how far one outer step moves a value at first (γ of the paper's Algorithm 2); in units of ln(value) for
            the log scale. Default: the paper's for lr, momentum and weight_decay (Adam's lr: 1e-3), but no more than
            the largest start, where that is not zero; 0.25 for the log scale.
        low, high: bounds, kept by projection. Default: those of the rule's argument, which Adam's betas and eps have.
        scale: "linear", or "log" for values that must stay positive and move by factors.
        params: which parameters it applies to: a pattern ("head.*"), several, "ndim>=2" or "ndim<2" (matrices; biases
            and norms), or a function `(name, tensor) -> bool`. Default: all that no other entry selects.
        learn: False keeps the value (or the schedule) fixed at `start`.
    """

    start: float | Sequence[float]
    windows: int = 1
    step: float | None = None
    low: float | None = None
    high: float | None = None
    scale: Literal["linear", "log"] = "linear"
    params: Selector | None = None
    learn: bool = True

    def values(self) -> Tensor:
        """The starting values, one per window, in float64."""
        if isinstance(self.start, Real):
            return torch.full((self.windows,), float(self.start), dtype=torch.float64)
        return torch.as_tensor(self.start, dtype=torch.float64).reshape(-1).clone()


def argument(key: str) -> str:
    """The rule's argument (or the loss's) behind a key of `hypers`.

    >>> argument("lr/head")
    'lr'
    """
    return key.split("/", 1)[0]


def step_size(key: str, hyper: Hyper, usual: float | None = None) -> float:
    """γ at the start; `usual` is what it is for this argument, if that is known better."""
    if hyper.step is not None:
        return float(hyper.step)
    if hyper.scale == "log":
        return 0.25
    usual = usual or DEFAULT_STEPS.get(argument(key))
    if usual is not None:
        return min(usual, float(hyper.values().abs().max()) or usual)
    raise ValueError(f"hyperparameter {key!r} has no `step`, and there is no usual one for it; give Hyper(…, step=…).")


def window_of(step: int, steps: int, windows: int) -> int:
    """The window that step `step` (from 0) of `steps` lies in."""
    return step * windows // steps


def window_start(window: int, steps: int, windows: int) -> int:
    """The first step of a window."""
    return -(-window * steps // windows)


def window_lengths(steps: int, windows: int) -> Tensor:
    """How many steps each window has.

    >>> window_lengths(10, 4)
    tensor([3., 2., 3., 2.], dtype=torch.float64)
    """
    edges = [window_start(w, steps, windows) for w in range(windows + 1)]
    return torch.tensor([b - a for a, b in pairwise(edges)], dtype=torch.float64)


def nearest(name: str, known: Sequence[str]) -> str:
    """A hint for a misspelt name: ' Did you mean …?', or the known ones."""
    plain = {one.lower(): one for one in known}
    close = get_close_matches(name.lower(), plain, n=1, cutoff=0.5)
    return f" Did you mean {plain[close[0]]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def check_hypers(hypers: Mapping[str, Hyper], steps: int) -> None:
    """Refuse what cannot be learnt, naming the entry and the remedy."""
    if isinstance(steps, bool) or not isinstance(steps, Integral):
        raise TypeError(f"steps={steps!r}: expected a whole number of optimizer steps.")
    if steps < 1:
        raise ValueError(f"steps={steps}: a training run needs at least 1 step.")
    if not isinstance(hypers, Mapping):
        raise TypeError(f"hypers={hypers!r}: expected a dictionary such as {{'lr': Hyper(0.1)}}.")
    if not hypers:
        raise ValueError("hypers is empty: list at least one hyperparameter to learn, e.g. {'lr': Hyper(0.1)}.")
    for key, hyper in hypers.items():
        if not isinstance(key, str) or not argument(key):
            raise TypeError(f"hypers has the key {key!r}: expected a name such as 'lr' or 'lr/head'.")
        if not isinstance(hyper, Hyper):
            raise TypeError(f"hypers[{key!r}] is {hyper!r}: expected a Hyper, e.g. Hyper({_as_float(hyper)}).")
        _check_one(key, hyper, steps)
    if not any(hyper.learn for hyper in hypers.values()):
        raise ValueError("hypers has learn=False everywhere: nothing is left to learn.")


def check_values(key: str, hyper: Hyper, values: Tensor) -> None:
    """Refuse values that do not fit their entry: wrong number, not finite, or not positive on the log scale."""
    if values.shape != (hyper.windows,):
        raise ValueError(
            f"hyperparameter {key!r} has {hyper.windows} window(s) but {values.numel()} values; give one per window."
        )
    if not bool(values.isfinite().all()):
        raise ValueError(f"hyperparameter {key!r} starts at {in_short(values)}: values must be finite.")
    if hyper.scale == "log" and not bool((values > 0).all()):
        raise ValueError(f"hyperparameter {key!r} is {in_short(values)} on a log scale: values must be positive.")


def _check_one(key: str, hyper: Hyper, steps: int) -> None:
    starts = [hyper.start] if isinstance(hyper.start, Real) else hyper.start
    if isinstance(starts, str) or not isinstance(starts, Sequence | Tensor):
        raise TypeError(f"hyperparameter {key!r} starts at {hyper.start!r}: expected a float, or one per window.")
    for value in starts.reshape(-1).tolist() if isinstance(starts, Tensor) else starts:
        if not isinstance(value, Real):
            raise TypeError(
                f"hyperparameter {key!r} starts at {hyper.start!r}, and {value!r} is no float: expected a float, or "
                "one per window."
            )
        if isinstance(value, Integral):
            raise TypeError(
                f"hyperparameter {key!r} starts at {value!r}, which is no float: only real values have a derivative; "
                f"write {_as_float(value)} if it is one."
            )
    windows = hyper.windows
    if isinstance(windows, bool) or not isinstance(windows, Integral) or windows < 1:
        raise ValueError(f"hyperparameter {key!r} has windows={windows!r}: expected a whole number from 1 to steps.")
    if windows > steps:
        raise ValueError(
            f"hyperparameter {key!r} has windows={windows} but the run only steps={steps}: "
            f"use at most {steps} windows or a longer run."
        )
    if hyper.scale not in ("linear", "log"):
        raise ValueError(f"hyperparameter {key!r} has scale={hyper.scale!r}: expected 'linear' or 'log'.")
    values = hyper.values()
    check_values(key, hyper, values)
    for name, bound in (("low", hyper.low), ("high", hyper.high)):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, Real)):
            raise TypeError(f"hyperparameter {key!r} has {name}={bound!r}: expected a number, or None for no bound.")
    low = -math.inf if hyper.low is None else hyper.low
    high = math.inf if hyper.high is None else hyper.high
    if not low < high:
        raise ValueError(f"hyperparameter {key!r} has low={hyper.low} and high={hyper.high}: low must be below high.")
    if bool((values < low).any() or (values > high).any()):
        raise ValueError(
            f"hyperparameter {key!r} starts at {in_short(values)}, outside [{low}, {high}]; "
            "move `start` inside or widen the bounds."
        )
    if hyper.step is not None and not (isinstance(hyper.step, Real) and 0 < float(hyper.step) < math.inf):
        raise ValueError(f"hyperparameter {key!r} has step={hyper.step!r}: expected a positive number.")
    if not isinstance(hyper.learn, bool):
        raise TypeError(f"hyperparameter {key!r} has learn={hyper.learn!r}: expected True or False.")
    if hyper.params is not None and not _is_selector(hyper.params):
        raise TypeError(
            f"hyperparameter {key!r} has params={hyper.params!r}: expected a pattern such as 'head.*', several of "
            "them, or a function (name, tensor) -> bool."
        )


def select(key: str, selector: Selector, params: Mapping[str, Tensor]) -> list[str]:
    """The names of the parameters that a selector picks; refuses one that picks none, alone or among several."""
    if callable(selector):
        names = [name for name, p in params.items() if selector(name, p)]
        if not names:
            raise ValueError(_picks_none(key, selector, "", params))
        return names
    patterns = [selector] if isinstance(selector, str) else list(selector)
    picked = {pattern: {name for name, p in params.items() if matches(pattern, name, p)} for pattern in patterns}
    for pattern in patterns or [""]:
        if not picked.get(pattern):
            raise ValueError(_picks_none(key, selector, pattern, params))
    return [name for name in params if any(name in names for names in picked.values())]


def _picks_none(key: str, selector: Selector, pattern: str, params: Mapping[str, Tensor]) -> str:
    which = f"of which {pattern!r}" if pattern and pattern != selector else "which"
    start = pattern.strip("*.")
    known = list(map(unwrapped, params))
    begins = {name: ".".join(name.split(".")[: start.count(".") + 1]) for name in known}  # as long as the pattern
    close = get_close_matches(start, set(begins.values()), cutoff=0.6)
    names = [name for name in known if begins[name] in close]
    shown, names = ("nearest to it:", names) if names else ("the model has", known)
    return (
        f"hyperparameter {key!r} has params={selector!r}, {which} picks no parameter; "
        f"{shown} {', '.join(names[:8])}{' …' if len(names) > 8 else ''}."
    )


def _is_selector(selector: object) -> bool:
    if callable(selector) or isinstance(selector, str):
        return True
    return isinstance(selector, Collection) and all(isinstance(pattern, str) for pattern in selector)


def matches(pattern: str, name: str, p: Tensor) -> bool:
    """Whether a pattern of `params` picks a parameter."""
    if pattern == BY_DIMENSION[0]:
        return p.ndim >= 2
    if pattern == BY_DIMENSION[1]:
        return p.ndim < 2
    return fnmatchcase(name, pattern) or fnmatchcase(unwrapped(name), pattern)


def unwrapped(name: str) -> str:
    """The name that a pattern is matched against, besides the name as it is, where a wrapper of torch's has changed it.

    >>> unwrapped("module._orig_mod.head.weight")
    'head.weight'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def in_short(values: Tensor) -> str:
    """The first few."""
    shown = [f"{v:g}" for v in values[:4].tolist()]
    return shown[0] if len(values) == 1 else f"[{', '.join(shown)}{', …' if len(values) > 4 else ''}]"


def _as_float(value: object) -> str:
    return repr(float(value)) if isinstance(value, Real) else "0.1"
