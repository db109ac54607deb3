"""What a method may spend: seconds of its own work, or training steps."""

import re
from dataclasses import dataclass
from typing import Literal

UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Budget:
    """A limit, for every method and every seed the same.

    Attributes:
        amount: how much.
        unit: of what; "steps" are inner steps, the optimizer steps of training runs.
    """

    amount: float
    unit: Literal["seconds", "steps"]

    def __str__(self) -> str:
        return f"{self.amount:g} {self.unit}"


def parse_budget(text: str | float, steps: int) -> Budget:
    """A budget from what a user writes; `steps` is the length of one training run.

    >>> parse_budget("5m", 200), parse_budget("20 runs", 200)
    (Budget(amount=300.0, unit='seconds'), Budget(amount=4000, unit='steps'))
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower())
    forms = "'300s', '5m', '2h', '20 runs' (training runs' worth of steps) or '4000 steps'"
    if found is None:
        raise ValueError(f"budget {text!r}: expected {forms}.")
    amount, unit = float(found[1]), found[2]
    if unit in UNITS:
        budget = Budget(amount * UNITS[unit], "seconds")
    elif unit in ("run", "runs"):
        budget = Budget(round(amount * steps), "steps")
    elif unit in ("step", "steps"):
        budget = Budget(round(amount), "steps")
    else:
        raise ValueError(f"budget {text!r}: expected a unit too: {forms}.")
    if not budget.amount > 0:
        raise ValueError(f"budget {text!r}: expected more than nothing.")
    return budget


class Purse:
    """What is left of a budget. Steps are never overdrawn; seconds by one unit of work, of each trial at work, at most.

    Args:
        budget: the limit.
        steps, seconds: spent already.
    """

    def __init__(self, budget: Budget, steps: int, seconds: float):
        spent = steps if budget.unit == "steps" else seconds
        self.unit = budget.unit
        self.left = max(0.0, budget.amount - spent)
        self.whole = budget.amount

    def allows(self, steps: int, seconds: float = 0.0) -> bool:
        """Whether the next piece of work, of so many training steps, may begin.

        Args:
            steps: of it, and of work in progress.
            seconds: that work in progress has taken and that were not paid for yet.
        """
        return self.left >= steps if self.unit == "steps" else self.left > seconds

    def pay(self, steps: int, seconds: float) -> None:
        self.left -= steps if self.unit == "steps" else seconds
