"""The table in README.md beside this file and that on the front page, from experiments/results/*.json, and pictures.

The headers of the figures' scripts say the same of each (headers.py).

    python experiments/tables.py           write them
    python experiments/tables.py --check   say whether they are out of date, and exit with 1 if so

The paper's numbers are typed in here, ours never: a cell without a result file reads "not run yet".
"""

import argparse
import json
import re
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import figure1_rows
import headers
from wording import NOT_RUN, accuracy, duration, hardware

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PAGES = HERE / "README.md", HERE.parent / "README.md"
HEAD = ["experiment", "what", "paper", "ours", "command", "time", "hardware"]
_PLACE = re.compile(r"<!-- (table|pictures|figure1|figure1-mnist|figure2) -->\n(.*?)<!-- end -->", re.S)

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
    "appendix-f": "Validation accuracies of the settings that are in each round of the shortcut, sorted.",
    "appendix-b": "The error of window means against the window size. Where noise is uncorrelated or equally "
    "correlated, maximal drift lies on the bound and is hidden by it.",
    "figure1": "Regret of each method's choices over time and over inner steps, and the test of its last one. A method "
    "of which only one choice was tested is a short line.",
    "figure1-learnt": "What each way to run FDS has learnt, by outer step, with the first of its seeds.",
    "figure1-mnist": "The same comparison on MNIST: a small perceptron, one epoch, one core for each method.",
    "figure1-mnist-learnt": "What FDS has learnt there, with the first of its seeds.",
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
    return _markdown([HEAD, ["---"] * len(HEAD), *rows_of(results)])


def rows_of(results: Path = RESULTS) -> list[list[str]]:
    """A row for everything that the paper shows, and for what goes beyond it."""
    rows: list[list[str]] = []
    own = figure1_rows.rows(_result(results, "figure1"))
    small = figure1_rows.rows_of_mnist(_result(results, "figure1-mnist"))
    for name, row in [("Figure 1", row) for row in own] + [("Figure 1, MNIST", row) for row in small]:
        what = f"{row.what} (`{row.label}`)" if row.label else row.what
        ours = row.score + row.regret + row.unfinished
        rows.append([name, what, row.paper, ours, f"`{row.command}`", row.took, row.where])
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
        [
            "Figure 4",
            "hypergradient descent from zero, test accuracy",
            *figure1_rows.from_zero(_result(results, "figure1")),
        ]
    )
    return rows


def front(results: Path = RESULTS) -> str:
    """What each method came to in Figure 1, for the front page."""
    rows = [["", "test accuracy", "search, one H200", "the paper, RTX 2080 Ti"], ["---"] * 4]
    made = figure1_rows.rows(_result(results, "figure1"))
    rows += [[row.what, row.score + row.unfinished, row.took, row.paper] for row in made if row.score != NOT_RUN]
    found = _result(results, "appendix-f")
    if found is not None:
        _, paper, ours = _appendix_f(found)
        rows.append(["a grid around common practice", ours.partition(" with ")[0], duration(found["seconds"]), paper])
    missing = [row for row in made if row.score == NOT_RUN]
    said = [row.what + (f" ({row.paper})" if row.paper != "–" else "") for row in missing]
    return _markdown(rows) + (f"\nNot run yet, with the paper's results: {'; '.join(said)}.\n" if said else "")


def front_mnist(results: Path = RESULTS) -> str:
    """The same at a size that one core can repeat."""
    head = ["", "test accuracy", "search, one core", "training runs' worth of steps", "as good as the best of the grid"]
    rows = [head, ["---"] * 5]
    for row in figure1_rows.rows_of_mnist(_result(results, "figure1-mnist")):
        rows.append([row.what, row.score, row.took, f"{row.runs:.0f}", row.when.removeprefix("zero ")])
    return _markdown(rows)


def figure2(results: Path = RESULTS) -> str:
    """What else Figure 2's settings say: of ε's noise, of how sure W is, of the run without its end, of greedy."""
    head = ["setting", "ε from noise alone", "W within a tenth of the best", "without the last tenth of the run"]
    rows = [[*head, "the mean of greedy"], ["---"] * 5]
    for setting, (name, _) in FIGURE2.items():
        found = _result(results, f"figure2-{setting}")
        if found is None:
            continue
        told, end = found["non_greedy"], found["without_end"]
        low, high = told["close"]
        within = f"{low}–{high}" if low < high else f"{low} alone"
        rest = f"ε {end['epsilon']:.3g}, mean variance {end['mse_1']:.3g}; best W {end['best']}, "
        rest += f"MSE there {_gain(end, found['seeds'])}"
        greedy = "not run"
        if "greedy" in found:
            explained = found["greedy"]["explains"]
            greedy = f"explains {100 * explained:.0f} % of μ" if explained > 0 else "is further from μ than zero is"
        rows.append([name, f"{told['epsilon_floor']:.3g}", within, rest, greedy])
    return _markdown(rows)


def _markdown(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def rendered(text: str, results: Path = RESULTS) -> str:
    """A page with its tables and its pictures made anew."""
    made = {"table": table(results), "pictures": pictures()}
    made |= {"figure1": front(results), "figure1-mnist": front_mnist(results), "figure2": figure2(results)}
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
        f"ε {told['epsilon']:.3g}, mean variance {told['mse_1']:.3g}, c {told['c']:.2f}; best W {told['best']}, "
        f"MSE there {_gain(told, found['seeds'])}"
    )
    seeds = f"{what}, {found['seeds']} seeds"
    return [seeds + (f" ({len(found['left_out'])} not finite)" if found["left_out"] else ""), paper, ours]


def _gain(told: dict[str, Any], seeds: int) -> str:
    """The corrected MSE is an unbiased estimate, which may come out below zero."""
    return f"{100 * told['gain']:.0f} % of W = 1" if told["gain"] > 0 else f"too small for {seeds} seeds to tell from 0"


UNDOUBTED = ("undoubted_right", "undoubted")


def _signs(found: dict[str, Any] | None) -> str:
    if found is None:
        return NOT_RUN
    kinds: dict[tuple[str, int, str], list[dict[str, Any]]] = {}
    epoch = found["settings"]["steps_per_epoch"]
    for p in found["points"]:
        kinds.setdefault((p["method"], p["index"] + 1, f"{p['steps'] / epoch:g}"), []).append(p)
    said = []
    for (method, outer_step, epochs), points in kinds.items():
        count = {name: sum(p.get(name, 0) for p in points) for name in ("right", "sure", *UNDOUBTED)}
        text = (
            f"{method}, outer step {outer_step}, on {epochs} epochs: {count['right']} of {count['sure']} that are sure"
        )
        if all(name in p for name in UNDOUBTED for p in points):
            text += f", {count[UNDOUBTED[0]]} of {count[UNDOUBTED[1]]} where it did not doubt its own"
        said.append(f"{text} ({len(points)} seed{'s' * (len(points) > 1)} of {points[0]['values']} values)")
    return "; ".join(said)


def _decay(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["what FDS has learnt, with other weight decays", "–", NOT_RUN]
    rows = found["rows"]
    ours = "; ".join(accuracy(row["accuracy"]) for row in rows.values())
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
    ours = f"{accuracy(found['accuracy'])} with {best} (`{found['method']}`, {trainings} trainings)"
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
    ours = f"rates {min(lr):.2g} to {max(lr):.2g}, test {accuracy(row['test']['accuracy'])}"
    if row["stopped_at"] is not None:
        ours += f" (after all outer steps {accuracy(row['test_last']['accuracy'])})"
    return [what, paper, ours, *_made(found, row)]


def _made(found: dict[str, Any] | None, row: dict[str, Any] | None) -> list[str]:
    """Where a part of Figure 3 comes from: calls on other machines may have made the others."""
    if found is None or row is None or "made" not in row:
        return _where(found if row else None, "python experiments/figure3.py")
    made = row["made"]
    took = duration(made["seconds"]) if "seconds" in made else f"{duration(made['call_seconds'])} for all of its call"
    return [f"`{made['command']}`", took, hardware(made)]


def _cosines(found: dict[str, Any] | None, data: str) -> list[list[str]]:
    if found is None or data not in found["sets"]:
        return [["cosine, off the shelf", "–", NOT_RUN, *_made(None, None)]]
    rows = found["sets"][data]["methods"]
    if not any("peak" in row for row in rows.values()):
        return _cosines(None, data)
    return [
        [f"cosine from {row['peak']:g}", "–", f"test {accuracy(row['test']['accuracy'])}", *_made(found, row)]
        for row in rows.values()
        if "peak" in row
    ]


def _figure4(results: Path) -> list[dict[str, Any]]:
    """One result per tuning seed, with the paper's settings."""
    names = ["figure4", *sorted(p.stem for p in results.glob("figure4-seed*.json"))]
    return [found for name in names if (found := _result(results, name)) is not None]


def _fds(found: list[dict[str, Any]]) -> str:
    whole = [one for one in found if "test" in one]
    if found and not whole:
        settings, done = found[0]["settings"], len(found[0]["outer_steps"])
        return f"not done yet: {done} of {settings['outer_steps']} outer steps"
    found = whole
    if not found:
        return NOT_RUN
    means = [100 * one["test"]["learnt"]["mean"] for one in found]
    best = [100 * one["test"]["best"]["mean"] for one in found]
    if len(found) == 1:
        test = found[0]["test"]
        return f"{accuracy(test['learnt']['accuracy'])} (best by validation: {accuracy(test['best']['accuracy'])})"
    spread = f"± {stdev(means):.1f} % over {len(means)} tuning seeds"
    return f"{mean(means):.1f} {spread} (best by validation: {mean(best):.1f} ± {stdev(best):.1f} %)"


def _where(found: dict[str, Any] | None, command: str, several: list[dict[str, Any]] | None = None) -> list[str]:
    if found is None:
        return [f"`{command}`", NOT_RUN, "–"]
    seconds = mean(one["seconds"] for one in several or [found])
    return [f"`{found['command']}`", duration(seconds), hardware(found["environment"])]


def _result(results: Path, name: str) -> dict[str, Any] | None:
    path = results / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is out of date")
    check = parser.parse_args().check
    rows = rows_of()
    made = {page: rendered(page.read_text()) for page in PAGES}
    made |= {script: headers.rendered(script, rows) for script in headers.SCRIPTS}
    stale = {path: text for path, text in made.items() if text != path.read_text()}
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(HERE.parent)}: out of date, run python experiments/tables.py")
        else:
            path.write_text(text)
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
