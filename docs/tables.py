"""The tables in these pages that come from elsewhere: recipe keys from the code, measurements from results.

    python docs/tables.py           write them
    python docs/tables.py --check   say which are out of date, and exit with 1

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from longhorizon.recipe import Recipe

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
EXPERIMENTS = DOCS.parent / "experiments" / "results"


def recipe() -> str:
    """Every key of a recipe."""
    rows = []
    for f in fields(Recipe):
        default: Any = getattr(Recipe(), f.name)
        shown = "see below" if isinstance(default, dict) else f"`{json.dumps(default)}`"
        kind = str(f.type if not isinstance(f.type, type) else f.type.__name__)
        kind = "table" if kind.startswith("dict") else kind.replace(" | ", " or ")
        rows.append([f"`{f.name}`", kind, shown, f.metadata["doc"]])
    return _table(["key", "type", "default", "meaning"], rows)


def step_cost() -> str:
    """Plain gradients per step, by method and number of values."""
    rows = _result("step_cost.json")["rows"]
    counts = sorted({row["n"] for row in rows if row["n"]})
    methods = list(dict.fromkeys(row["method"] for row in rows if row["n"]))
    cells = {(row["method"], row["n"]): f"{row['gradients']:.1f}" for row in rows}
    lines = [[name, *(cells.get((name, n), "–") for n in counts)] for name in methods]
    return _table(["gradients per step", *(f"N = {n}" for n in counts)], lines)


def step_cost_gpu() -> str:
    """Milliseconds, plain gradients and the ratio to the loop, by method and precision."""
    found = {precision: _result(f"step_cost_wrn16_cuda_{precision}.json")["rows"] for precision in ("float32", "tf32")}
    names = list(dict.fromkeys((row["method"], row["n"]) for row in found["float32"]))
    wide = ("training step", "adjoint")  # the same for any number of values
    lines = []
    for name, n in names:
        line = [name if n is None or name in wide else f"{name}, N = {n}"]
        for rows in found.values():
            row = next((row for row in rows if (row["method"], row["n"]) == (name, n)), None)
            ratio = None if row is None or name == "training step" else row.get("faster_than_loop")
            loop = "–" if ratio is None else f"{ratio:.1f}"
            cells = ["–"] * 3 if row is None else [f"{row['ms']:.1f}", f"{row['compiled_gradients']:.1f}", loop]
            line += [*cells, "–" if row is None else _error(row["error"])]
        lines.append(line)
    head = [f"{what}{of}" for of in ("", ", TF32") for what in ("ms", "gradients", "× loop", "error")]
    return _table(["", *head], lines)


def step_cost_others() -> str:
    """Both engines and the loop with nine values on other networks, for scale."""
    lines = []
    for name, model in (("LeNet", "lenet"), ("WRN-16-1", "wrn16"), ("ResNet-18", "resnet18")):
        path = RESULTS / f"step_cost_{model}_cuda_float32.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        for row in found["rows"]:
            if row["method"] in ("double-backward loop", "forward", "adjoint") and row["n"] == 9:
                cells = [f"{row['ms']:.1f}", f"{row['compiled_gradients']:.1f}", f"{row['faster_than_loop']:.1f}"]
                cells.append(_error(row["error"]))
                lines.append([f"{name}, batch {found['settings']['batch']}", row["method"], *cells])
    return _table(["network", "engine", "ms", "gradients", "× loop", "error"], lines)


def end_to_end() -> str:
    """One outer step, all overheads included."""
    result = _result("end_to_end_wrn-16-1_cuda.json")
    rows = [
        [
            name,
            f"{r['outer_step_s']:.1f}",
            f"{r['ms_per_step']:.1f}",
            f"{r['faster_than_loop']:.1f}",
            f"{r['cold_start_s']:.0f}",
        ]
        for name, r in result["rows"].items()
    ]
    loop = result["loop_extrapolated_s"]
    rows.append(["double-backward loop", f"{loop:.0f}", f"{1e3 * loop / result['settings']['steps']:.0f}", "1", "–"])
    return _table(["", "seconds", "ms per step", "× loop", "compiling once, s"], rows)


def horizon() -> str:
    """Seconds and gigabytes against the length of a run, on a GPU."""
    rows = _result("horizon_lenet_cuda.json")["rows"]
    lengths = sorted({row["steps"] for row in rows})
    found = {(row["engine"], row["steps"]): row for row in rows}

    def cell(engine: str, steps: int) -> str:
        row = found.get((engine, steps))
        return f"{row['seconds']:.1f} s, {row['peak_gb']:.3g} GB" if row and "seconds" in row else "–"

    engines = list(dict.fromkeys(row["engine"] for row in rows))
    return _table(
        ["engine", *(f"T = {steps:,}" for steps in lengths)],
        [[engine, *(cell(engine, steps) for steps in lengths)] for engine in engines],
    )


def memory() -> str:
    """Megabytes that a run needs, by method and number of steps."""
    cells = _result("memory.json")["cells"]
    found = {tuple(key.split(", T=")): cell for key, cell in cells.items()}
    lengths = sorted({int(t) for _, t in found})
    methods = list(dict.fromkeys(name for name, _ in found))

    def show(name: str, steps: int) -> str:
        cell = found.get((name, str(steps)))
        if cell is None:
            return "–"
        return f"{cell['run_mb']:.1f}" if cell["status"] == "ok" else str(cell["status"]).split(":")[0]

    return _table(
        ["MB for the run", *(f"T = {t:,}" for t in lengths)], [[m, *(show(m, t) for t in lengths)] for m in methods]
    )


def compare() -> str:
    """What each method came to on digits."""
    rows = json.loads((DOCS.parent / "experiments" / "results" / "compare_digits.json").read_text())["table"]
    cells = [
        [
            f"`{r['method']}`",
            f"{100 * r['score']:.2f} ± {100 * r['deviation']:.2f}",
            f"{100 * r['regret']:.2f}",
            f"{r['seconds']:.1f}",
            f"{r['steps']:.0f}",
            f"{r['trials']:.0f}",
            f"{r['failed']:.0f}",
        ]
        for r in rows
    ]
    return _table(["method", "test accuracy, %", "regret", "seconds", "inner steps", "trials", "diverged"], cells)


def trust() -> str:
    """How often the sign of an estimate is right: estimators and tasks."""
    found = _estimators()
    cells = {
        task: {
            label: _interval(s["sign"], s["sign_error"], s["values"] * _made(one, label))
            for label, s in one["scores"].items()
        }
        for task, one in found.items()
    }
    head = ["signs right, % (95 % interval)", *found]
    return _table(head, [[label, *(cells[t].get(label, "–") for t in found)] for label in _labels(found, "scores")])


def trust_cost() -> str:
    """What an estimate costs in plain training runs."""
    found = _estimators()
    rows = [
        [label, *(f"{one['cost'][label]['runs']:.1f}" if label in one["cost"] else "–" for one in found.values())]
        for label in _labels(found, "cost")
    ]
    return _table(["plain training runs", *found], rows)


def trust_quality() -> str:
    """Rank correlation, bias and spread of a few estimators."""
    found = _estimators()
    rows = []
    for label in ("exact", "clip 10", "adjoint, clip auto", "smoothed", "hybrid, not clipped", "hybrid"):
        for task, one in found.items():
            if label in one["scores"]:
                s = one["scores"][label]
                rows.append([label, task, *(_short(s[name]) for name in ("rank", "bias", "spread"))])
    return _table(["estimator", "task", "rank correlation", "bias", "spread"], rows)


def trust_sure() -> str:
    """What a standard error is worth."""
    rows = []
    for task, one in _estimators().items():
        for z, said in one["sure"].get("smoothed", {}).items():
            right = "–" if said["right"] is None else f"{100 * said['right']:.0f} %"
            rows.append([task, f"more than {float(z):g}", f"{100 * said['share']:.0f} %", right])
    return _table(["task", "standard errors from zero", "share of values", "of these right"], rows)


def trust_steps() -> str:
    """What an outer step by each estimator's signs does to the mean validation loss."""
    found = json.loads((EXPERIMENTS / "trust_steps.json").read_text())["tasks"]
    order = [task for task in TASKS if task in found]
    rows = [["validation loss before", *(f"{found[task]['stay']:.3f}" for task in order)]]
    for label in dict.fromkeys(label for task in order for label in found[task]["steps"]):
        cells = [found[task]["steps"][label] for task in order]
        rows.append([label, *(f"{cell['change']:+.3f} ± {cell['error']:.3f}" for cell in cells)])
    return _table(["step by the signs of", *order], rows)


def trust_windows() -> str:
    """The same with many windows, neighbours of which may share a slope."""
    found = json.loads((EXPERIMENTS / "trust_windows.json").read_text())["tasks"]
    rows = [["validation loss before", *(f"{one['stay']:.3f}" for one in found.values())]]
    for label in dict.fromkeys(label for one in found.values() for label in one["steps"]):
        cells = [one["steps"][label] for one in found.values()]
        rows.append(
            [label, *(f"{cell['change']:+.3f} ± {cell['error']:.3f} ({cell['smoothed']:.0f})" for cell in cells)]
        )
    return _table(["step by the signs of", *found], rows)


def trust_tune() -> str:
    """What better hypergradients are worth to a tuning run."""
    rows = []
    for name in ("digits", "mnist", "mnist-epoch"):
        path = EXPERIMENTS / f"trust_tune-{name}.json"
        if not path.exists():
            continue
        for label, row in json.loads(path.read_text())["table"].items():
            accuracy = [
                f"{100 * row[kind]['accuracy']:.2f} ± {100 * (row[kind]['error'] or 0):.2f}"
                for kind in ("learnt", "best", "kept")
            ]
            worst = [f"{100 * row[kind]['worst']:.2f}" for kind in ("learnt", "kept")]
            cost = [f"{row['outer_steps']:.1f}", f"{row['inner_steps']:.0f}", f"{row['plain_runs']:.0f}"]
            rows.append([name, label, *accuracy, *worst, *cost])
    head = ["task", "method", "last, test %", "best by validation, test %", "kept, test %", "worst seed, last"]
    return _table([*head, "worst seed, kept", "outer steps", "inner steps", "time in plain runs"], rows)


SIGNS = (("right", "sure"), ("undoubted_right", "undoubted"))


def trust_figure1() -> str:
    """The same on CIFAR-10: what the ways to estimate hypergradients come to; seconds of seeds that ran alone."""
    found = json.loads((EXPERIMENTS / "figure1.json").read_text())
    points = json.loads((EXPERIMENTS / "figure1_signs.json").read_text())["points"]
    names = {"fds-forward-clip10": "clip 10", "fds-hybrid": "hybrid, not clipped", "fds-smoothed": "smoothed"}
    rows, last = [], found["settings"]["outer_steps"] - 1
    for start, name in names.items():
        cards = [c for c in found["entrants"] if c["label"].startswith(start) and c.get("growth") == 1.5]
        cards = [card for card in cards if card["label"] == cards[0]["label"]]
        own = [row for row in found["table"] if cards and row["method"] == cards[0]["label"]]
        alone = {card["seed"] for card in cards if not any(s.get("shared") for s in card["sittings"])}
        took = [c["total_seconds"] for c in found["choices"] if own and c["method"] == own[0]["method"]]
        seeds = [c["seed"] for c in found["choices"] if own and c["method"] == own[0]["method"]]
        seconds = [f"{t:.0f}" for t, seed in zip(took, seeds, strict=True) if seed in alone]
        for row in own:
            accuracy = f"{100 * row['score']:.2f} ± {100 * row['deviation']:.2f}"
            precision = cards[0]["precision"]
            near_end = [p for p in points if (p["method"], p["index"]) == (row["method"], last)]
            pairs = [[(p[a], p[b]) for p in near_end if a in p] for a, b in SIGNS]
            signs = [f"{sum(a for a, _ in both)} of {sum(b for _, b in both)}" if both else "–" for both in pairs]
            rows.append([name, precision, accuracy, str(row["seeds"]), ", ".join(seconds), *signs])
    head = ["estimates", "plain runs in", "test accuracy, %", "seeds", "seconds of a search, by seed"]
    return _table([*head, "signs right before the last outer step", "of these, not doubted"], rows)


def meters() -> str:
    """What the meters cost."""
    found = _result("meters.json")["engines"]
    rows = [[name, f"{100 * m['share']:.2f} %", f"{m['step_ms']:.0f} ms"] for name, m in found.items()]
    return _table(["engine", "meters, share of a step", "the step"], rows)


TABLES: dict[str, Callable[[], str]] = {
    "recipe": recipe,
    "step_cost": step_cost,
    "step_cost_gpu": step_cost_gpu,
    "step_cost_others": step_cost_others,
    "end_to_end": end_to_end,
    "horizon": horizon,
    "memory": memory,
    "compare": compare,
    "trust": trust,
    "trust_cost": trust_cost,
    "trust_quality": trust_quality,
    "trust_sure": trust_sure,
    "trust_steps": trust_steps,
    "trust_windows": trust_windows,
    "trust_tune": trust_tune,
    "trust_figure1": trust_figure1,
    "meters": meters,
}
TASKS = ["digits-calm", "mnist-calm", "digits-edge", "mnist-edge", "lenet-edge", "digits-long", "digits-hot"]
TASKS += ["mnist-hot", "cifar-5", "cifar-10"]  # calm ones first
_PLACE = re.compile(r"<!-- table: (\w+) -->\n(.*?)<!-- end -->", re.S)


def rendered(text: str) -> str:
    """A page with its tables made anew; one whose measurements are missing stays as it is."""

    def table(found: re.Match[str]) -> str:
        try:
            content = TABLES[found[1]]()
        except FileNotFoundError:
            return found[0]
        return f"<!-- table: {found[1]} -->\n{content}<!-- end -->"

    return _PLACE.sub(table, text)


def pages() -> list[Path]:
    """All pages."""
    return sorted(DOCS.glob("*.md"))


def _estimators() -> dict[str, Any]:
    """Results by task."""
    paths = {task: EXPERIMENTS / f"estimators-{task}.json" for task in TASKS}
    return {task: json.loads(path.read_text()) for task, path in paths.items() if path.exists()}


def _labels(found: dict[str, Any], part: str) -> list[str]:
    return list(dict.fromkeys(label for one in found.values() for label in one[part]))


def _made(found: dict[str, Any], label: str) -> int:
    """How many estimates there are under a label; "mean of 4" takes four seeds for one."""
    base, _, grouped = label.partition(", me")  # a mean or a median
    made = int(found["estimates_made"][base if grouped else label])
    return made // int(grouped.split(" of ")[1]) if grouped else made


def _interval(share: float, error: float | None, signs: int) -> str:
    """Wilson's 95 % interval, for as many independent signs as the error over seeds amounts to."""
    count = share * (1 - share) / error**2 if error else float(signs)
    z2 = 1.96**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    half = 1.96 * math.sqrt(share * (1 - share) / count + z2 / (4 * count**2)) / (1 + z2 / count)
    return f"{100 * share:.0f} ({100 * max(0.0, middle - half):.0f}–{100 * min(1.0, middle + half):.0f})"


def _error(value: float) -> str:
    return f"{value:.1e}".replace("e-0", "e-")


def _short(value: float | None) -> str:
    return "–" if value is None else f"{value:.2g}"


def _result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    """Write or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is out of date")
    check = parser.parse_args().check
    old = [page for page in pages() if rendered(page.read_text()) != page.read_text()]
    for page in old:
        print(f"{page.name}: {'out of date' if check else 'written'}")
        if not check:
            page.write_text(rendered(page.read_text()))
    sys.exit(bool(old) and check)


if __name__ == "__main__":
    main()
