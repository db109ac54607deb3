"""Numbers as people read them: scales, ticks, units."""

import math
from statistics import median
from typing import Any, Literal

Scale = Literal["linear", "log", "symlog"]
Numbers = list[float | None]  # None: no finite value there

WIDE = 20.0, 10.0  # ranges that need a logarithm: largest over smallest, largest over typical
UNITS = ((1.0, "s"), (60.0, "min"), (3600.0, "h"))


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) else None


def as_percent(name: str, values: Numbers) -> tuple[Numbers, str]:
    """An accuracy in per cent; anything else as it is.

    >>> as_percent("accuracy", [0.5, None])
    ([50.0, None], 'accuracy (%)')
    """
    known = [v for v in values if v is not None]
    if "accuracy" in name.lower() and known and all(0 <= v <= 1 for v in known):
        return [None if v is None else 100 * v for v in values], f"{name} (%)"
    return values, name


def in_unit(seconds: list[float]) -> tuple[list[float], str]:
    """Seconds in the unit that suits the longest."""
    longest = max(seconds, default=0.0)
    size, unit = max((pair for pair in UNITS if pair[0] <= max(longest / 2, 1.0)), key=lambda pair: pair[0])
    return [s / size for s in seconds], unit


def short(value: float | None) -> str:
    """A number as people read it.

    >>> short(-0.000123456), short(None)
    ('−0.0001235', '–')
    """
    return "–" if value is None else f"{value:.4g}".replace("-", "−")


def span(window: int, windows: int) -> str:
    """Which part of training a window is.

    >>> print(span(1, 5).replace(chr(160), " "))
    20–40 %
    """
    if windows == 1:
        return "all"
    return f"{100 * window / windows:.3g}–{100 * (window + 1) / windows:.3g}\u00a0%"


def scale_of(known: list[float], wish: Scale | Literal["auto"]) -> Scale:
    """A logarithm only where it can be taken and, unless it is the values' own scale, only where it is needed."""
    sizes = [abs(v) for v in known if v]
    if not sizes or wish == "linear":
        return "linear"
    positive = min(known) > 0
    if positive and (wish == "log" or (wish == "auto" and max(known) / min(known) > WIDE[0])):
        return "log"
    return "symlog" if wish != "log" and max(sizes) / median(sizes) > WIDE[1] else "linear"


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """A handful of round numbers in or around a range of positive values, two at least.

    >>> [text for _, text in log_ticks(0.013, 0.1)]
    ['0.01', '0.02', '0.05', '0.1']
    """
    if high / low > 100:
        first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
        return [(10.0**e, _power(e)) for e in range(first, last + 1, math.ceil((last - first + 1) / 7))]
    around = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    found = [(m * 10.0**e, _power(e, m)) for e in around for m in (1, 2, 5)]
    begin = max(i for i, (v, _) in enumerate(found) if v <= low * 1.001)
    end = min(i for i, (v, _) in enumerate(found) if v >= high * 0.999)
    return found[begin : end + 1] if end > begin else found[begin - 1 : end + 2]


def symlog(value: float, below: float) -> float:
    """The "symlog" scale: linear up to `below`, a logarithm beyond; the page's script has the same line."""
    return math.copysign(math.log10(1 + abs(value) / below), value)


def symlog_ticks(low: float, high: float, below: float) -> list[tuple[float, str]]:
    """Zero and powers of ten, on the sides that are used and not too close to each other.

    >>> [text for _, text in symlog_ticks(-0.4, 90.0, 0.1)]
    ['−1', '−0.1', '0', '0.1', '1', '10', '100']
    """
    low, high = min(low, 0.0), max(high, 0.0)
    size = symlog(high, below) - symlog(low, below)
    first, top = round(math.log10(below)), math.ceil(math.log10(max(-low, high, below * 10)))
    powers = range(top, first - 1, -math.ceil(size / 8))
    ticks = [(0.0, "0")]
    for power in powers:
        value = 10.0**power
        if symlog(value, below) > 0.07 * size:
            ticks += [(-value, "−" + _power(power))] * (value < -low * 10) + [(value, _power(power))] * (
                value < high * 10
            )
    return sorted(ticks)


def _power(exponent: int, times: int = 1) -> str:
    if -4 <= exponent <= 3:
        return f"{times * 10.0**exponent:g}"
    raised = str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{raised}" if times == 1 else f"{times}·10{raised}"
