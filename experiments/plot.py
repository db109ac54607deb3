"""Pictures of the experiments: reads experiments/results/*.json and draws experiments/figures/*.png, nothing else.

Command: python experiments/plot.py [NAME …] [--results DIR] [--figures DIR]
    A NAME such as `figure2-svhn` draws that result alone. What has no result is left out.
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from longhorizon import figures
from longhorizon.axes import Numbers, Scale, log_ticks, scale_of, symlog_ticks
from longhorizon.drawing import save_picture
from longhorizon.figures import PLAIN, RING, Figure, Line, Panel
from longhorizon.outer_step import OuterStep
from longhorizon.rivals.page import COLOURS as METHOD_COLOURS

HERE = Path(__file__).resolve().parent
POINT = 1.0  # of regret: what lies below is drawn linearly
FAINT, GREY, GREEN, ORANGE = "#2a5d8f30", "#8b95a1", "#3a8f5c", "#e08e2b"
COLOURS = {"greedy": RING, "together": GREY, "non_greedy": ORANGE, "fds": PLAIN}
NAMES = {"greedy": "greedy, step by step", "greedy_last": "the same, last rates", "together": "greedy, all at once"}
NAMES |= {"non_greedy": "non-greedy, one per step", "fds": "FDS"}
ENTRANTS = {  # the start of a label in Figure 1 -> a few words
    "fds-forward": "FDS as the paper",
    "fds-smoothed": "FDS, smoothed",
    "fds-bounded": "FDS, hybrid",
    "fds-hybrid": "FDS, hybrid, not bounded",
    "fds-adjoint": "FDS, exact",
    "hd": "hypergradient descent",
    "bohb": "BOHB",
    "hyperband": "Hyperband",
    "bo": "Bayesian optimization",
    "random": "random search",
    "grid": "grid",
}


def figure2(found: dict[str, Any], _: Path) -> list[Figure]:
    """Hypergradients of all seeds, non-greedy and greedy, and MSE against W."""
    settings = found["settings"]
    panels = []
    for kind in ("non_greedy", "greedy"):
        if kind not in found["hypergradients"]:
            continue
        rows = found["hypergradients"][kind]
        lines = [Line("seed", row, colour=FAINT, width=0.8, kind="steps") for row in rows]
        lines.append(Line("mean", found[kind]["mean"], colour="#1d2730", width=2.2, kind="steps"))
        legend = [(FAINT[:7], f"{len(rows)} seeds"), ("#1d2730", "their mean")]
        if kind == "greedy":
            lines.append(Line("μ", found["non_greedy"]["mean"], colour=RING, width=1.8, kind="steps"))
            legend.append((RING, "mean of non-greedy"))
        everything = [v for row in rows for v in row]
        name = "non-greedy" if kind == "non_greedy" else "greedy, H = 1"
        sizes = sorted(abs(v) for v in everything)
        wide = sizes[-1] > 50 * sizes[len(sizes) // 2]  # exploding ones; ordinary ones are easier to read as they are
        wish: Scale = "symlog" if wide else "linear"
        panels.append(panel(name, "step", "hypergradient of the lr", lines, everything, wish, legend=legend))
    told = found["non_greedy"]
    curves = {"measured, as the paper does": (told["measured"], PLAIN), "corrected": (told["corrected"], GREEN)}
    if "greedy" in found:
        curves["greedy"] = (found["greedy"]["measured"], RING)
    gain = f"{100 * told['gain']:.0f} %" if told["gain"] > 0 else "about 0 %"  # an unbiased estimate of next to nothing
    title = f"best W = {told['best']}, MSE there {gain} of W = 1"
    panels.append(_against_size(title, told, curves, "linear"))
    panels.append(_against_size("and the theorem's bound", told, curves | {"bound": (told["bound"], GREY)}, "log"))
    title = f"{settings['data']}, {settings['model']}, T = {settings['steps']}"
    return [Figure(found["experiment"], title, "", panels)]


def _against_size(title: str, told: dict[str, Any], curves: dict[str, tuple[Numbers, str]], wish: Scale) -> Panel:
    places = [float(size) for size in told["sizes"]]
    if wish == "log":  # a corrected value may be below zero
        curves = {k: ([v if v is not None and v > 0 else None for v in y], colour) for k, (y, colour) in curves.items()}
    lines = [Line(name, y, places, colour, 2.0) for name, (y, colour) in curves.items()]
    best = told["corrected"][told["sizes"].index(told["best"])]
    if wish == "linear" or best > 0:
        lines.append(Line("best", [best], [float(told["best"])], GREEN, 2.0, "ring"))
    everything = [v for y, _ in curves.values() for v in y]
    legend = [(colour, name) for name, (_, colour) in curves.items()]
    return panel(title, "window size W", "MSE against the mean", lines, everything, wish, legend=legend)


def appendix_b(found: dict[str, Any], _: Path) -> list[Figure]:
    """Profiles of μ, and MSE against W for each kind of noise."""

    def colour(name: str) -> str:
        return {"maximum": PLAIN, "minimum": ORANGE}.get(name, "#8b95a190")

    legend = [(PLAIN, "maximal drift"), (ORANGE, "minimal drift"), (GREY, "random drift")]
    lines = [Line(name, mu, colour=colour(name), kind="steps") for name, mu in found["profiles"].items()]
    panels = [Panel("the means", "step", "μ", lines, legend=legend)]
    places = [float(size) for size in found["sizes"]]
    for noise, one in found["noises"].items():
        lines = [Line(name, one[name]["measured"], places, colour(name)) for name in found["profiles"]]
        lines.append(Line("bound", one["bound"], places, "#1d2730", 2.2))
        everything = [v for line in lines for v in line.y]
        title, more = f"{noise}, c = {one['c']:g}", [*legend, ("#1d2730", "bound")]
        panels.append(panel(title, "window size W", "MSE", lines, everything, "log", legend=more))
    return [Figure("appendix-b", "Appendix B", "", panels)]


def figure3(found: dict[str, Any], _: Path) -> list[Figure]:
    """Schedules and test accuracies per data set."""
    panels = []
    for name, one in found["sets"].items():
        for which, said in (
            ("stopped", ", stopped early"),
            ("last", f", after {found['settings']['outer_steps']} outer steps"),
        ):
            lines, legend = [], []
            for method, row in one["methods"].items():
                if method in COLOURS:
                    lr, width = row[which], 2.2 if method == "fds" else 0.9
                    place = (0.0, one["steps"] / len(lr))
                    lines.append(Line(method, [*lr, lr[-1]], place, COLOURS[method], width, "steps"))
                    legend.append((COLOURS[method], NAMES[method]))
            everything = [v for line in lines for v in line.y]
            shown, title = legend if which == "stopped" else [], one["data"] + said  # one legend for both
            panels.append(panel(title, "step", "learning rate", lines, everything, "linear", legend=shown))
        names = list(one["methods"])
        mean = [100 * one["methods"][m]["test"]["mean"] for m in names]
        error = [100 * one["methods"][m]["test"]["deviation"] for m in names]
        labels = [NAMES.get(m, m) for m in names]
        row = Line(name, mean, kind="rows", error=error, labels=labels)
        panels.append(Panel(f"{one['data']}: test", "accuracy (%)", "", [row]))
    return [Figure(found["experiment"], "Figure 3", "", panels)]


def figure4(found: dict[str, Any], results: Path) -> list[Figure]:
    """Schedules, hypergradients and γ, as a report shows them; the test against HD where that is known."""
    records = [OuterStep.from_dict(step) for step in found["outer_steps"]]
    name = found["experiment"]
    made = [figures.schedules({}, records), figures.hypergradients({}, records), figures.gammas({}, records)]
    shown = [Figure(f"{name}-{f.name}", f.title, f.text, f.panels, f.ramp) for f in made]
    if "test" in found:
        shown[0] = Figure(name, shown[0].title, shown[0].text, [*shown[0].panels, _test(found, results)], shown[0].ramp)
    return shown


def _test(found: dict[str, Any], results: Path) -> Panel:
    rows = {
        "FDS, last": found["test"]["learnt"]["accuracy"],
        "FDS, best by validation": found["test"]["best"]["accuracy"],
    }
    rivals = results / "figure1.json"
    if rivals.exists() and (first := json.loads(rivals.read_text()).get("hd_from_zero")):
        rows["hypergradient descent, from zero"] = [a or 0.0 for run in first for a in run["test"]["accuracy"]]
    mean = [100 * sum(row) / len(row) for row in rows.values()]
    error = [100 * math.sqrt(sum((a - sum(r) / len(r)) ** 2 for a in r) / max(1, len(r) - 1)) for r in rows.values()]
    line = Line("test", mean, kind="rows", error=error, labels=list(rows))
    return Panel("test, trained from scratch", "accuracy (%)", "", [line])


def figure1(found: dict[str, Any], _: Path) -> list[Figure]:
    """Regret against time and against training steps, the test of what was chosen, and what FDS has learnt.

    A method alone has nothing to be compared with, and a choice alone makes no curve.
    """
    learnt = _learnt(f"{found['experiment']}-learnt", found["outer_steps"])
    compared = len(found["table"]) > 1 and any(len(curve["times"]) > 1 for curve in found["curves"]["seconds"])
    return [*([_regret(found)] if compared else []), *([learnt] if learnt else [])]


def _learnt(name: str, steps: list[dict[str, Any]]) -> Figure | None:
    """Learning rates after every outer step of every way to run FDS, with the first of its seeds; the rest of all."""
    panels: list[Panel] = []
    others: dict[str, list[Line]] = {"momentum": [], "weight_decay": []}
    labels = list(dict.fromkeys(step["method"] for step in steps))
    for label, colour in zip(labels, _colours(labels), strict=True):
        seed = min(step["seed"] for step in steps if step["method"] == label)
        own = [step for step in steps if (step["method"], step["seed"]) == (label, seed)]
        count, lines = len(own) - 1, []
        for i, step in enumerate(own):
            lr = step["values"]["lr"]
            place = (0.0, 100 / len(lr))
            lines.append(Line(str(i), [*lr, lr[-1]], place, figures.ramp(i, count), 1.2 + (i == count), "steps"))
        panels.append(Panel(_short(label), "training (%)", "learning rate", lines))
        for key, line in others.items():
            line.append(Line(label, [step["values"][key][0] for step in own], colour=colour, width=2.0))
    names = list(zip(_colours(labels), map(_short, labels), strict=True))
    half = -(-len(names) // 2)  # one legend for both panels, under both
    for (key, lines), legend in zip(others.items(), (names[:half], names[half:]), strict=True):
        panels.append(Panel(key.replace("_", " "), "outer step", "", lines, legend=legend, whole=True))
    last = max((step["index"] for step in steps), default=0)
    return Figure(name, "What FDS has learnt", "", panels, ramp=(0, last)) if labels else None


def _short(label: str) -> str:
    """An entrant in a few words.

    >>> _short("fds-forward-clip10-growth1.5-bf16"), _short("bohb-bf16")
    ('FDS as the paper, γ grows', 'BOHB')
    """
    own = max((name for name in ENTRANTS if label.startswith(name)), key=len)
    return ENTRANTS[own] + ", γ grows" * ("growth" in label)


def _regret(found: dict[str, Any]) -> Figure:
    best = f"the best of the {_short(found['against'])}" if found["against"] else "the best of all"
    panels: list[Panel] = []
    for clock, x_title in (("seconds", "time (s)"), ("steps", "inner steps")):
        shown = [curve for curve in found["curves"][clock] if curve["times"]]
        lines, legend = [], []
        for curve, colour in zip(shown, _colours([curve["method"] for curve in shown]), strict=True):
            times, mean = [*curve["times"]], [100 * v for v in curve["mean"]]
            if len(times) == 1:  # a single choice: a short dash, to be seen
                times, mean = [times[0], 1.15 * times[0]], 2 * mean
            wide = 2.8 if curve["method"].startswith("fds") else 1.8
            lines.append(Line(curve["method"], [*mean], times, colour, wide, "steps"))
            legend.append((colour, _short(curve["method"])))
        known = [v for line in lines for v in line.y if v is not None]
        y_title = f"regret against {best} (points)"
        # what matters is which method comes down to nothing: a point is as large there as tenfold above
        shown_y = min(*known, 0.0) - POINT, max(1.2 * max(known), 2 * POINT)
        ticks = symlog_ticks(*shown_y, POINT)
        axes: dict[str, Any] = {"ticks": ticks, "y_range": shown_y, "log_x": True}
        axes |= {} if panels else {"legend": legend}  # one for both
        panels.append(Panel(x_title, x_title, y_title, lines, "symlog", POINT, **axes))
    rows = [row for row in found["table"] if row["score"] is not None]
    error = [100 * row["deviation"] for row in rows]
    labels = [_short(row["method"]) for row in rows]
    line = Line("test", [100 * r["score"] for r in rows], kind="rows", error=error, labels=labels)
    panels.append(Panel("test of the last choice", "accuracy (%)", "", [line]))
    return Figure(found["experiment"], "Figure 1", "", panels, size=(5.4, 4.4))


def _colours(labels: list[str]) -> list[str]:
    """A method's own colour; variants of one method beyond the first take what is left."""
    spare = [colour for name, colour in METHOD_COLOURS.items() if not any(label.startswith(name) for label in labels)]
    taken: list[str] = []
    for label in labels:
        own = max((name for name in METHOD_COLOURS if label.startswith(name)), key=len)
        colour = METHOD_COLOURS[own]
        taken.append(colour if colour not in taken else spare.pop(0) if spare else GREY)
    return taken


def appendix_f(found: dict[str, Any], _: Path) -> list[Figure]:
    """Validation accuracies of the settings, by length of training, the best last."""
    panels = []
    for steps, accuracies in found["validation"].items():
        known = sorted(100 * a for a in accuracies if a is not None)
        title = f"{len(accuracies)} settings, {steps} steps"
        panels.append(Panel(title, "rank", "validation accuracy (%)", [Line(steps, [*known], colour=PLAIN)]))
    return [Figure("appendix-f", "Appendix F", "", panels)]


def trust(_: dict[str, Any], results: Path) -> list[Figure]:
    """How often each estimator's sign is right, task by task; one picture of all results."""
    labels = ("exact", "clip 10", "clip 10, mean of 4", "adjoint, clip auto")
    labels += ("smoothed", "hybrid, not clipped", "hybrid")
    panels = []
    heat = ("calm", "edge", "long", "hot")  # as the table in docs/trust.md has them, then what is larger
    results_of = {path.stem.removeprefix("estimators-"): path for path in results.glob("estimators-*.json")}
    tasks = {name: json.loads(path.read_text()) for name, path in results_of.items()}

    def place(name: str) -> Any:
        settings, kind = tasks[name]["settings"], name.rpartition("-")[2]
        return heat.index(kind) if kind in heat else len(heat), settings["data"], settings["steps"]

    for name in sorted(tasks, key=place):
        found = tasks[name]
        known = [label for label in labels if label in found["scores"]]
        mean = [100 * found["scores"][label]["sign"] for label in known]
        error = [100 * (found["scores"][label]["sign_error"] or 0) for label in known]
        line = Line("signs", mean, kind="rows", error=error, labels=known)
        panels.append(Panel(name, "signs right (%)", "", [line], x_range=(30.0, 102.0)))
    return [Figure("trust", "Signs of hypergradients", "", panels)]


def panel(
    title: str, x_title: str, y_title: str, lines: list[Line], values: Numbers, wish: Scale, **more: Any
) -> Panel:
    """A panel whose vertical axis suits its values."""
    known = [v for v in values if v is not None]
    scale, below, ticks = scale_of(known, wish), 1.0, []
    if scale == "log":
        ticks = log_ticks(min(known), max(known))
        more["y_range"] = (min(*known, ticks[0][0]) * 0.9, max(*known, ticks[-1][0]) * 1.1)
    elif scale == "symlog":
        sizes = sorted(abs(v) for v in known if v)
        below = 10.0 ** math.floor(math.log10(sizes[len(sizes) // 2]))
        ticks = symlog_ticks(min(known), max(known), below)
    return Panel(title, x_title, y_title, lines, scale, below, ticks, **more)


DRAW: dict[str, Callable[[dict[str, Any], Path], list[Figure]]] = {
    "figure1": figure1,
    "figure2": figure2,
    "appendix-b": appendix_b,
    "appendix-f": appendix_f,
    "figure3": figure3,
    "figure4": figure4,
    "estimators-digits-hot": trust,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--figures", type=Path, default=HERE / "figures")
    args = parser.parse_args()
    args.figures.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.results.glob("*.json")):
        # a setting comes after a dash, and another experiment after an underscore
        draw = next((d for name, d in DRAW.items() if path.stem == name or path.stem.startswith(f"{name}-")), None)
        if draw is None or (args.names and path.stem not in args.names):
            continue
        for figure in draw(json.loads(path.read_text()), args.results):
            target = args.figures / f"{figure.name}.png"
            save_picture(figure, target)
            print(f"drawn: {target}")


if __name__ == "__main__":
    main()
