"""What the seeds of an outer step come to together."""

import torch

from longhorizon.outer import Values


def average(found: list[Values]) -> Values:
    """The mean over seeds of what is finite; NaN where no seed knows."""
    return {key: torch.stack([f[key] for f in found]).nanmean(0) for key in found[0]}


def combined(errors: list[Values | None]) -> Values:
    """The standard error of a mean over seeds; NaN where one of them is exact, infinite where one is not known."""
    known = [e for e in errors if e is not None]
    if not known or len(known) < len(errors):
        return {}
    return {key: torch.stack([e[key] for e in known]).square().sum(0).sqrt() / len(known) for key in known[0]}


def mean_metrics(found: list[dict[str, float]]) -> dict[str, float]:
    """Of those seeds that have any."""
    found = [f for f in found if f]
    return {name: sum(f[name] for f in found) / len(found) for name in found[0]} if found else {}
