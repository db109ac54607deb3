"""What Figure 1's result says of each method, in words, for the tables."""

from statistics import mean
from typing import Any, NamedTuple

from wording import NOT_RUN, accuracy, duration, hardware

PLAIN = "100000 runs"  # contest.py's budget that ends nobody
FIGURE1 = {  # the start of a label -> what it is, and the paper's test accuracy and hours
    "fds-forward": ("the paper's FDS (forward mode, clipped)", "89.4 ± 0.3 % in 3 h"),
    "fds-smoothed": ("smoothed differences (what `tune` takes in bf16)", "–"),
    "fds-bounded": ("hybrid (what `tune` takes otherwise)", "–"),
    "fds-hybrid": ("hybrid, not bounded", "–"),
    "fds-adjoint": ("exact derivatives alone", "–"),
    "hd": ("hypergradient descent", "80.6 ± 1.0 %"),
    "bohb": ("BOHB", "89.1 ± 0.5 % in 55–60 h"),
    "hyperband": ("Hyperband", "84.1 ± 4.1 %"),
    "bo": ("Bayesian optimization", "84.5 ± 5.2 %"),
    "random": ("random search", "80.8 ± 4.9 %"),
}


NAMES = {label: name for label, (name, _) in FIGURE1.items()} | {
    "fds-bounded": "hybrid (what `tune` takes)",
    "fds-smoothed": "smoothed differences for all values",
    "grid": "a grid around common practice (Appendix F)",
}  # on MNIST, which the paper has not


class Row(NamedTuple):
    """A method, or a variant of it, in words."""

    what: str
    label: str  # of a variant
    paper: str
    score: str
    regret: str
    unfinished: str
    command: str
    took: str
    where: str
    when: str = ""  # regret was zero
    runs: float = 0.0  # training runs that the steps would have been, those of forward mode counted once


def rows(found: dict[str, Any] | None) -> list[Row]:
    """All methods, those too that were not run yet."""
    return [row for start, (name, paper) in FIGURE1.items() for row in _rows(found, start, name, paper)]


def rows_of_mnist(found: dict[str, Any] | None) -> list[Row]:
    """All methods that were run on MNIST."""
    made = [_rows(found, start, name, "–", " --data mnist") for start, name in NAMES.items()]
    return [row for own in made for row in own if row.score != NOT_RUN]


def _rows(found: dict[str, Any] | None, start: str, name: str, paper: str, options: str = "") -> list[Row]:
    """A row for every variant of a method that was run."""
    method, _, engine = start.partition("-")
    usual = f"python experiments/figure1.py{options} --methods {method}" + f" --engine {engine}" * bool(engine)
    own = [r for r in found["table"] if r["method"] == start or r["method"].startswith(f"{start}-")] if found else []
    if found is None or not own:
        return [Row(name, "", paper, NOT_RUN, "", "", usual, NOT_RUN, "–")]
    against = f"the best of {found['against']}" if found["against"] else "the best of all"
    made = []
    for row in own:
        cards = [card for card in found["entrants"] if card["label"] == row["method"]]
        score, regret, when = "diverged in the test", "", ""
        if row["score"] is not None:
            seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
            spread = "" if row["deviation"] is None else f" ± {100 * row['deviation']:.2f}"  # of a single training
            score = f"{100 * row['score']:.2f}{spread} % ({seeds})"
            if found["against"] or len(found["table"]) > 1:  # a method alone has nothing to regret
                when = _when(row, cards, seeds)
                regret = f", regret {100 * row['regret']:.2f} against {against}, {when}"
        where, shared = _device(cards)
        alone = [card["seed"] for card in cards if not any(s.get("shared") for s in card["sittings"])]
        own_seconds = [
            c["total_seconds"] for c in found["choices"] if c["method"] == row["method"] and c["seed"] in alone
        ]
        took = f"{duration(row['seconds'])} a seed{shared}"
        if shared and own_seconds:
            which = ", ".join(map(str, alone))
            took = f"{duration(mean(own_seconds))} (seed {which}; the others on a shared device)"
        command = usual + _options(cards[-1]) + _seeds(cards)
        label = "" if row["method"] == start else row["method"]
        what = f"{name}{_beyond(cards[-1])}"
        unfinished, runs = _unfinished(found, cards), row["steps"] / found["settings"]["steps"]
        made.append(Row(what, label, paper, score, regret, unfinished, command, took, where, when, runs))
    return made


def _when(row: dict[str, Any], cards: list[dict[str, Any]], seeds: str) -> str:
    """When regret was zero, as far as that is known."""
    zero = row["seconds_to_zero"]
    if zero is None:
        return f"zero in {row['zero']} of {seeds}"
    if any(card["test"] not in ("all", "whole") for card in cards):  # of earlier choices nothing was tested
        return "zero at the end"
    return f"zero after {duration(zero)}{_device(cards)[1]}"


def _unfinished(found: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    """Which seeds of FDS have outer steps, or the training with what came of them, still before them."""
    said, all_steps = [], found["settings"]["outer_steps"]
    for card in cards if cards[0]["method"] == "fds" else []:
        taken = [s for s in found["outer_steps"] if (s["method"], s["seed"]) == (card["label"], card["seed"])]
        if len(taken) < all_steps + bool(card["horizons"]):  # after shorter runs, the last one is the training
            said.append(f"; seed {card['seed']} is at {len(taken)} of {all_steps} outer steps so far")
    for one in found.get("waiting", []):
        if one["method"] == cards[0]["label"]:
            got = f"{100 * one['accuracy']:.1f} %" if "accuracy" in one else "diverged"
            epochs = one["steps"] / found["settings"]["steps_per_epoch"]
            said.append(
                f"; seed {one['seed']} is not tested yet: {got} on its own validation images after {epochs:g} epochs"
            )
    return "".join(said)


def _device(cards: list[dict[str, Any]]) -> tuple[str, str]:
    """Where entrants ran, and whether others did at the same time."""
    where = hardware(cards[-1]["sittings"][-1])
    return where, ", device shared" if any(s.get("shared") for card in cards for s in card["sittings"]) else ""


def _beyond(card: dict[str, Any]) -> str:
    """What the paper does not do."""
    return f", `growth={card['growth']:g}`" if card.get("growth", 1.0) != 1 else ""


def _seeds(cards: list[dict[str, Any]]) -> str:
    """The seeds and the budget that were given."""
    seeds, budget = [card["seed"] for card in cards], cards[-1]["budget"]
    given = "" if seeds == [0] else " --seeds " + ",".join(map(str, sorted(seeds)))
    return given + ("" if budget == PLAIN else f" --budget '{budget}'")


def _options(card: dict[str, Any]) -> str:
    """What was chosen for an entrant and is not usual."""
    given = ""
    if card["engine"] and card["clip"] != (10.0 if card["engine"] == "forward" else None):
        given += f" --clip {card['clip'] or 0:g}"
    if card["horizons"] not in ([], [1.0, 10.0]):
        given += " --horizons " + ",".join(f"{h:g}" for h in card["horizons"])
    for name, usual in (("gate", "off"), ("growth", 1.0), ("precision", "float32")):
        value = card.get(name, usual)
        given += "" if value == usual else f" --{name} {value}"
    return given


def from_zero(found: dict[str, Any] | None) -> list[str]:
    """Figure 4's rival, which is the first run of Figure 1's hypergradient descent."""
    paper, command = "– (80.6 ± 1.0 % in Figure 1, best of random starts)", "python experiments/figure1.py --methods hd"
    if found is None or not (runs := found.get("hd_from_zero")):
        return [paper, NOT_RUN, f"`{command}`", NOT_RUN, "–"]
    where, shared = _device([card for card in found["entrants"] if card["method"] == "hd"])
    seconds = f"{duration(mean(run['seconds'] for run in runs))} a seed{shared}"
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    command += _seeds([card for card in found["entrants"] if card["method"] == "hd"])
    ours = f"{accuracy([a or 0.0 for run in runs for a in run['test']['accuracy']])} ({seeds})"
    return [paper, ours, f"`{command}`", seconds, where]
