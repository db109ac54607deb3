"""The table in README.md beside this file, from experiments/results/*.json, and its pictures.

    python experiments/tables.py           write them
    python experiments/tables.py --check   say whether they are out of date, and exit with 1 if so

The paper's numbers are typed in here, ours never: a cell without a result file reads "not run yet".
"""

import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGE = HERE / "README.md"
NOT_RUN = "not run yet"
PLAIN = "100000 runs"  # contest.py's budget that ends nobody
HEAD = ["experiment", "what", "paper", "ours", "command", "time", "hardware"]
_PLACE = re.compile(r"<!-- (table|pictures) -->\n(.*?)<!-- end -->", re.S)

FIGURE2 = {
    "svhn": ("Figure 2", "ε ≈ 0.08, mean variance ≈ 0.25, best W = 50"),
    "svhn-plain": ("Figure 2 without momentum", "the same, if the paper used none"),
    "svhn-hot": ("Appendix D, cosine from 0.05", "smaller ε, larger W, lower MSE; no numbers"),
    "svhn-flat": ("Appendix D, constant 0.01", "the same"),
    "cifar-1": ("Figure 2 on CIFAR-10, 1 epoch", "–"),
    "cifar-10": ("Figure 2 on CIFAR-10, 10 epochs", "–"),
    "cifar-1-hot": ("the same from 0.1, 1 epoch", "–"),
    "cifar-10-hot": ("the same from 0.1, 10 epochs", "–"),
}
FIGURE1 = {  # the start of a label -> what it is, and the paper's test accuracy and hours
    "fds-forward": ("FDS, forward, as the paper", "89.4 ± 0.3 % in 3 h"),
    "fds-adjoint": ("FDS, adjoint", "– (forward: 89.4 ± 0.3 % in 3 h)"),
    "fds-hybrid": ("FDS, this library's default", "– (forward: 89.4 ± 0.3 % in 3 h)"),
    "fds-smoothed": ("FDS, smoothed differences for all values", "– (forward: 89.4 ± 0.3 % in 3 h)"),
    "hd": ("hypergradient descent", "80.6 ± 1.0 %"),
    "bohb": ("BOHB", "89.1 ± 0.5 % in 55–60 h"),
    "hyperband": ("Hyperband", "84.1 ± 4.1 %"),
    "bo": ("Bayesian optimization", "84.5 ± 5.2 %"),
    "random": ("random search", "80.8 ± 4.9 %"),
}
FIGURE3 = {
    ("mnist", "greedy"): "rates too small",
    ("mnist", "greedy_last"): "–",
    ("mnist", "together"): "–",
    ("mnist", "non_greedy"): "works",
    ("mnist", "fds"): "works",
    ("svhn", "greedy"): "rates too small",
    ("svhn", "together"): "–",
    ("svhn", "non_greedy"): "fails, rates too high",
    ("svhn", "fds"): "better than cosine",
}

CAPTIONS = {  # by the start of a picture's name
    "appendix-b": "The error of window means against the window size. Where noise is uncorrelated or equally "
    "correlated, maximal drift lies on the bound and is hidden by it.",
    "figure1": "Regret of each method's choices over time and over inner steps, and the test of its last one. A method "
    "of which only one choice was tested is a short line.",
    "figure1-learnt": "What each way to run FDS has learnt, by outer step, with the first of its seeds.",
    "figure2": "Above, hypergradients of every step's learning rate, a faint line per seed. Below, the error of window "
    "means against the window size, linear and logarithmic; the ring marks the best size. *Corrected* takes away what "
    "few seeds do to *measured*, and hides it where the two agree.",
    "figure3": "Learning rates of each method, and the test accuracy of what was stopped early. A method that is not "
    "there has not been run yet.",
    "trust": "How often the sign of an estimate is right, a selection of [the table](../docs/trust.md#how-they-did). "
    "Bars are one standard error over seeds; there is none where all signs are right.",
}


def table(results: Path = RESULTS) -> str:
    """All rows, as Markdown."""
    rows = [HEAD, ["---"] * len(HEAD)]
    found = _result(results, "figure1")
    for start, (name, paper) in FIGURE1.items():
        rows += [["Figure 1", *row] for row in _figure1(found, start, name, paper)]
    found = _result(results, "figure1_signs")
    rows.append(["Figure 1", "signs that FDS followed and that are right", "–", _signs(found)])
    rows[-1] += _where(found, "python experiments/figure1_signs.py")
    found = _result(results, "figure1_decay")
    rows.append(["Figure 1", *_decay(found), *_where(found, "python experiments/figure1_decay.py")])
    found = _result(results, "figure1_bf16")
    rows.append(["Figure 1", *_bf16(found), *_where(found, "python experiments/figure1_bf16.py")])
    found = _result(results, "appendix-f")
    rows.append(["Appendix F", *_appendix_f(found), *_where(found, "python experiments/appendix_f.py")])
    for setting, (name, paper) in FIGURE2.items():
        found = _result(results, f"figure2-{setting}")
        command = "python experiments/figure2.py" + ("" if setting == "svhn" else f" --setting {setting}")
        rows.append([name, *_figure2(found, paper), *_where(found, command)])
    found = _result(results, "appendix-b")
    rows.append(["Appendix B", *_appendix_b(found), *_where(found, "python experiments/appendix_b.py")])
    for (data, method), paper in FIGURE3.items():
        found = _result(results, "figure3") or _result(results, f"figure3-{data}")
        rows.append([f"Figure 3, {data.upper()}", *_figure3(found, data, method, paper)])
        if method == "fds":
            rows += [[f"Figure 3, {data.upper()}", *row] for row in _cosines(found, data)]
    found = _figure4(results)
    rows.append(["Figure 4", "FDS, test accuracy", "89.2 ± 0.2 % (best known, matched)", _fds(found)])
    rows[-1] += _where(found[0] if found else None, "python experiments/figure4.py", found)
    rows.append(
        ["Figure 4", "hypergradient descent from zero, test accuracy", *_from_zero(_result(results, "figure1"))]
    )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def rendered(text: str, results: Path = RESULTS) -> str:
    """The page with its table and its pictures made anew."""
    made = {"table": table(results), "pictures": pictures()}
    return _PLACE.sub(lambda found: f"<!-- {found[1]} -->\n{made[found[1]]}<!-- end -->", text)


def pictures() -> str:
    """Those that plot.py has drawn, each with what it shows."""
    text, last = "", ""
    for path in sorted((HERE / "figures").glob("*.png")):
        name = max((name for name in CAPTIONS if path.stem.startswith(name)), key=len, default="")
        text += f"`{name}`. {CAPTIONS[name]}\n\n" if name != last and name else ""  # once for all of a kind
        text, last = text + f"![{path.stem}](figures/{path.name})\n\n", name
    return text


def _figure2(found: dict[str, Any] | None, paper: str) -> list[str]:
    what = "noise and windows"
    if found is None:
        return [what, paper, NOT_RUN]
    told = found["non_greedy"]
    ours = (
        f"ε {told['epsilon']:.3g} (from noise alone {told['epsilon_floor']:.3g}), mean variance {told['mse_1']:.3g}, "
        f"c {told['c']:.2f}; best W {told['best']} (within a tenth: {told['close'][0]}–{told['close'][1]}), "
        f"MSE there {_gain(told, found['seeds'])} of W = 1"
    )
    end = found["without_end"]
    ours += (
        f"; without the last tenth of the run ε {end['epsilon']:.3g}, mean variance {end['mse_1']:.3g}, best W "
        f"{end['best']}, MSE there {_gain(end, found['seeds'])}"
    )
    if "greedy" in found:
        explained = found["greedy"]["explains"]
        ours += (
            f"; the mean of greedy explains {100 * explained:.0f} % of μ"
            if explained > 0
            else "; the mean of greedy is further from μ than zero is"
        )
    seeds = f"{what}, {found['seeds']} seeds"
    return [seeds + (f" ({len(found['left_out'])} not finite)" if found["left_out"] else ""), paper, ours]


def _gain(told: dict[str, Any], seeds: int) -> str:
    """The corrected MSE is an unbiased estimate, which may come out below zero."""
    return f"{100 * told['gain']:.0f} %" if told["gain"] > 0 else f"less than {seeds} seeds can tell from 0 %"


def _figure1(found: dict[str, Any] | None, start: str, name: str, paper: str) -> list[list[str]]:
    """A row for every variant of a method that was run."""
    method, _, engine = start.partition("-")
    usual = f"python experiments/figure1.py --methods {method}" + f" --engine {engine}" * bool(engine)
    own = [r for r in found["table"] if r["method"] == start or r["method"].startswith(f"{start}-")] if found else []
    if found is None or not own:
        return [[name, paper, NOT_RUN, f"`{usual}`", NOT_RUN, "–"]]
    against = f"the best of {found['against']}" if found["against"] else "the best of all"
    rows = []
    for row in own:
        cards = [card for card in found["entrants"] if card["label"] == row["method"]]
        if row["score"] is None:
            ours = "diverged in the test"
        else:
            seeds = "1 seed" if row["seeds"] == 1 else f"{row['seeds']} seeds"
            ours = f"{100 * row['score']:.2f} ± {100 * row['deviation']:.2f} % ({seeds})"
            if found["against"] or len(found["table"]) > 1:  # a method alone has nothing to regret
                ours += f", regret {100 * row['regret']:.2f} against {against}"
                zero = row["seconds_to_zero"]
                ours += f", zero after {_duration(zero)}" if zero is not None else f", zero in {row['zero']} of {seeds}"
        where, shared = _device(cards)
        ours += _unfinished(found, cards)
        alone = [card["seed"] for card in cards if not any(s.get("shared") for s in card["sittings"])]
        own_seconds = [
            c["total_seconds"] for c in found["choices"] if c["method"] == row["method"] and c["seed"] in alone
        ]
        took = f"{_duration(row['seconds'])} a seed{shared}"
        if shared and own_seconds:
            which = ", ".join(map(str, alone))
            took = f"{_duration(mean(own_seconds))} (seed {which}; the others on a shared device)"
        command = usual + _options(cards[-1]) + _seeds(cards)
        what = name if row["method"] == start else f"{name}{_beyond(cards[-1])} (`{row['method']}`)"
        rows.append([what, paper, ours, f"`{command}`", took, where])
    return rows


def _unfinished(found: dict[str, Any], cards: list[dict[str, Any]]) -> str:
    """Which seeds of FDS have outer steps, or the training with what came of them, still before them."""
    said, all_steps = [], found["settings"]["outer_steps"]
    for card in cards if cards[0]["method"] == "fds" else []:
        taken = [s for s in found["outer_steps"] if (s["method"], s["seed"]) == (card["label"], card["seed"])]
        if len(taken) <= all_steps:  # the last one is the training
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
    where = _hardware(cards[-1]["sittings"][-1])
    return where, ", device shared" if any(s.get("shared") for card in cards for s in card["sittings"]) else ""


def _beyond(card: dict[str, Any]) -> str:
    """What the paper does not do."""
    return ", but γ may grow again" if card.get("growth", 1.0) != 1 else ""


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


def _from_zero(found: dict[str, Any] | None) -> list[str]:
    """Figure 4's rival, which is the first run of Figure 1's hypergradient descent."""
    paper, command = "– (80.6 ± 1.0 % in Figure 1, best of random starts)", "python experiments/figure1.py --methods hd"
    if found is None or not (runs := found.get("hd_from_zero")):
        return [paper, NOT_RUN, f"`{command}`", NOT_RUN, "–"]
    where, shared = _device([card for card in found["entrants"] if card["method"] == "hd"])
    seconds = f"{_duration(mean(run['seconds'] for run in runs))} a seed{shared}"
    seeds = "1 seed" if len(runs) == 1 else f"{len(runs)} seeds"
    command += _seeds([card for card in found["entrants"] if card["method"] == "hd"])
    ours = f"{_accuracy([a or 0.0 for run in runs for a in run['test']['accuracy']])} ({seeds})"
    return [paper, ours, f"`{command}`", seconds, where]


def _signs(found: dict[str, Any] | None) -> str:
    if found is None:
        return NOT_RUN
    epoch = found["settings"]["steps_per_epoch"]
    return "; ".join(
        f"{p['method']}, seed {p['seed']}, outer step {p['index'] + 1}, on {p['steps'] / epoch:g} epochs: "
        f"{p['right']} of {p['sure']} that are sure ({p['values']} values)"
        for p in found["points"]
    )


def _decay(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["what FDS has learnt, with other weight decays", "–", NOT_RUN]
    rows = found["rows"]
    ours = "; ".join(_accuracy(row["accuracy"]) for row in rows.values())
    learnt = found["learnt"]["weight_decay"][0]
    return [
        f"with weight decay {', '.join(rows)}",
        "–",
        f"{ours} (`{found['settings']['label']}` has {round(learnt, 9) + 0.0:.1g})",
    ]


def _bf16(found: dict[str, Any] | None) -> list[str]:
    what = "tests in bfloat16 instead of float32"
    if found is None:
        return [what, "–", NOT_RUN]
    change, error = 100 * found["change"], 100 * found["error"]
    return [what, "–", f"accuracy changes by {change:+.2f} ± {error:.2f} points ({found['trainings']} trainings)"]


def _appendix_f(found: dict[str, Any] | None) -> list[str]:
    what, paper = "best of the grid around common practice", "89.2 ± 0.2 %"
    if found is None:
        return [what, paper, NOT_RUN]
    best = ", ".join(f"{key.replace('_', ' ')} {value:g}" for key, value in found["winner"].items())
    trainings = sum(found["trainings"].values())
    ours = f"{_accuracy(found['accuracy'])} with {best} (`{found['method']}`, {trainings} trainings)"
    return [what, paper, ours]


def _appendix_b(found: dict[str, Any] | None) -> list[str]:
    what, paper = "the theorem's bound over measured MSE", "holds; reached by maximal drift"
    if found is None:
        return [what, paper, NOT_RUN]
    part = "; ".join(
        f"{noise}: MSE is {found['smallest_ratio'][noise]:.2f}–{found['largest_ratio'][noise]:.2f} of it"
        for noise in found["noises"]
    )
    return [what, paper, f"{'holds' if found['holds'] else 'does not hold'} ({part})"]


def _figure3(found: dict[str, Any] | None, data: str, method: str, paper: str) -> list[str]:
    what = {
        "greedy": "greedy, each rate before the next step",
        "greedy_last": "the same, the last of each 50 rates instead of the best",
        "together": "greedy, all rates at once",
        "non_greedy": "non-greedy, one rate per step",
        "fds": "FDS, W ≈ 50",
    }[method]
    row = None if found is None else found["sets"].get(data, {"methods": {}})["methods"].get(method)
    if row is None:
        return [what, paper, NOT_RUN, *_made(None, None)]
    lr = row["stopped"]
    ours = f"rates {min(lr):.2g} to {max(lr):.2g}, test {_accuracy(row['test']['accuracy'])}"
    if row["stopped_at"] is not None:
        ours += f" (after all outer steps {_accuracy(row['test_last']['accuracy'])})"
    return [what, paper, ours, *_made(found, row)]


def _made(found: dict[str, Any] | None, row: dict[str, Any] | None) -> list[str]:
    """Where a part of Figure 3 comes from: calls on other machines may have made the others."""
    if found is None or row is None or "made" not in row:
        return _where(found if row else None, "python experiments/figure3.py")
    made = row["made"]
    took = _duration(made["seconds"]) if "seconds" in made else f"{_duration(made['call_seconds'])} for all of its call"
    return [f"`{made['command']}`", took, _hardware(made)]


def _cosines(found: dict[str, Any] | None, data: str) -> list[list[str]]:
    if found is None or data not in found["sets"]:
        return [["cosine, off the shelf", "–", NOT_RUN, *_made(None, None)]]
    rows = found["sets"][data]["methods"]
    if not any("peak" in row for row in rows.values()):
        return _cosines(None, data)
    return [
        [f"cosine from {row['peak']:g}", "–", f"test {_accuracy(row['test']['accuracy'])}", *_made(found, row)]
        for row in rows.values()
        if "peak" in row
    ]


def _figure4(results: Path) -> list[dict[str, Any]]:
    """One result per tuning seed, with the paper's settings."""
    names = ["figure4", *sorted(p.stem for p in results.glob("figure4-seed*.json"))]
    return [found for name in names if (found := _result(results, name)) is not None]


def _fds(found: list[dict[str, Any]]) -> str:
    if not found:
        return NOT_RUN
    means = [100 * one["test"]["learnt"]["mean"] for one in found]
    best = [100 * one["test"]["best"]["mean"] for one in found]
    if len(found) == 1:
        test = found[0]["test"]
        return f"{_accuracy(test['learnt']['accuracy'])} (best by validation: {_accuracy(test['best']['accuracy'])})"
    spread = f"± {stdev(means):.1f} % over {len(means)} tuning seeds"
    return f"{mean(means):.1f} {spread} (best by validation: {mean(best):.1f} ± {stdev(best):.1f} %)"


def _accuracy(values: list[float]) -> str:
    if len(values) < 2:
        return f"{100 * values[0]:.1f} %"
    return f"{100 * mean(values):.1f} ± {100 * stdev(values):.1f} %"


def _where(found: dict[str, Any] | None, command: str, several: list[dict[str, Any]] | None = None) -> list[str]:
    if found is None:
        return [f"`{command}`", NOT_RUN, "–"]
    seconds = mean(one["seconds"] for one in several or [found])
    return [f"`{found['command']}`", _duration(seconds), _hardware(found["environment"])]


def _hardware(place: dict[str, Any]) -> str:
    return place.get("gpu") or f"{place['cpu']}, {place['threads']} threads"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _result(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    """Write or check."""
    old = PAGE.read_text()
    stale = rendered(old) != old
    if "--check" not in sys.argv:
        PAGE.write_text(rendered(old))
    elif stale:
        print("experiments/README.md: out of date, run python experiments/tables.py")
        sys.exit(1)


if __name__ == "__main__":
    main()
