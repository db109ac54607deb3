"""How numbers and machines are written in tables."""

from statistics import mean, stdev
from typing import Any

NOT_RUN = "not run yet"


def accuracy(values: list[float]) -> str:
    if len(values) < 2:
        return f"{100 * values[0]:.1f} %"
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"


def duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def hardware(place: dict[str, Any]) -> str:
    return place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"
