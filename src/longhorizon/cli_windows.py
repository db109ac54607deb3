"""`longhorizon windows`: into how many windows to cut a hyperparameter, from the noise of its hypergradients."""

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon.arguments import EXTRA, RECIPE, file_or_key, overrides
from longhorizon.console import arriving
from longhorizon.extras import need
from longhorizon.hypers import nearest
from longhorizon.theory import Windows, analyse, count

SHOWN = 9  # rows of the table


@click.command(context_settings=EXTRA)
@click.pass_context
@RECIPE
@click.option("--key", default="lr", show_default=True, help="Which hyperparameter.")
@click.option("--runs", default=8, show_default=True, help="Training runs, each with another seed.")
@click.option("--at", "schedule", default="", help="A schedule.json (or a run's folder) whose values to train with.")
@click.option("--png", default="", help="Draw MSE against window size into this file.")
@click.option("--json", "as_json", is_flag=True, help="JSON on stdout, for machines.")
def windows(
    context: click.Context, recipe: Path | None, key: str, runs: int, schedule: str, png: str, as_json: bool
) -> None:
    """Recommend a number of windows: few share noise away, many follow a schedule that changes.

    Takes the recipe keys of `tune`. Trains a few times, with the hypergradient of every single step (Adjoint), and
    measures for every window size how far a window's mean is from the mean over seeds (the paper's Figure 2). Where
    all values start at zero nothing is learnt yet: use --at with the schedule of a first tuning run.
    """
    recipe, words = file_or_key(recipe, context.args)
    chosen = recipes.load_recipe(recipe, overrides(words))
    hypers = recipes.hypers_of(chosen)
    if key not in hypers or not (schedule or hypers[key].learn):
        raise click.UsageError(f"--key {key!r} is not learnt.{nearest(key, list(hypers))}")
    if runs < 2:
        raise click.UsageError(f"--runs {runs}: expected at least 2, so that there is noise to measure.")
    if png and not Path(png).absolute().parent.is_dir():
        raise click.UsageError(f"--png {png}: there is no folder {Path(png).absolute().parent}.")
    with arriving() as progress:
        task, epoch = recipes.task_of(chosen, progress)
    if schedule:
        path = Path(schedule) / "schedule.json" if Path(schedule).is_dir() else Path(schedule)
        if not path.exists():
            raise lh.RunError(f"{path} does not exist; --at takes a schedule.json or a run's folder.")
        learnt = lh.Schedule.load(path)
        values = {k: torch.as_tensor(learnt[k], dtype=torch.float64).tolist() for k in hypers}
        hypers = {k: lh.Hyper(values[k], windows=len(values[k]), params=h.params) for k, h in hypers.items()}
    steps = max(recipes.horizons_of(chosen, epoch))
    torch.set_num_threads(recipes.threads_of(chosen, task))
    rows: list[Any] = []
    rule, traces = recipes.rule_of(chosen), lh.Traces()
    for seed in range(chosen.seed, chosen.seed + runs):
        found = lh.hypergradient(
            task,
            rule,
            hypers,
            steps=steps,
            engine=lh.Adjoint(),
            seed=seed,
            per_step=True,
            traces=traces,
            precision=chosen.precision,  # type: ignore[arg-type]
        )
        print(f"run {len(rows) + 1} of {runs}: validation loss {found.val_loss:.4g}", file=sys.stderr, flush=True)
        if not found.status.ok:
            print(f"longhorizon: the run with seed {seed} cannot be used: {found.status}", file=sys.stderr)
            sys.exit(1)
        assert found.per_step is not None
        rows.append(found.per_step[key].numpy())
    seen = analyse(np.stack(rows))
    if as_json:
        print(json.dumps(_content(seen)))
    else:
        _tell(seen, key, steps, runs)
    if png:
        _draw(seen, key, png)


def _tell(seen: Windows, key: str, steps: int, runs: int) -> None:
    """The table, and what it recommends."""
    print(_table(seen))
    low, high = seen.close
    within = f"from {count(high, steps)} to {count(low, steps)} windows are as good" if low < high else ""
    number = f"{seen.windows} window{'s' * (seen.windows != 1)}"
    print(f"recommended: {key} with {number} of {seen.best} steps{'; ' + within if within else ''}")
    if min(seen.corrected) <= 0:
        print(f"≤ 0: too small to be told from the noise of {runs} runs; more --runs would sharpen it")
    elif seen.noise.epsilon < 2 * seen.noise.epsilon_floor:
        print("most of the change from step to step is noise of so few runs; more --runs would sharpen it")


def _rows(seen: Windows) -> list[tuple[int, int, float, float]]:
    """A few sizes, spread evenly on a logarithmic scale, the best among them: windows, W, MSE and bound over MSE_1."""
    picked = {round(i) for i in np.geomspace(1, len(seen.sizes), SHOWN)} | {seen.sizes.index(seen.best) + 1}
    unit = seen.noise.mse_1 or 1.0
    return [
        (count(size, seen.noise.steps), size, seen.corrected[i - 1] / unit, seen.bound[i - 1] / unit)
        for i in sorted(picked)
        for size in [seen.sizes[i - 1]]
    ]


def _table(seen: Windows) -> str:
    lines = ["windows  steps each  error  bound     (error without sharing = 1)"]
    for windows, size, error, bound in _rows(seen):
        mark = "  ←" if size == seen.best else ""
        shown = f"{error:.3g}" if error > 0 else "≤ 0"
        lines.append(f"{windows:7d}  {size:10d}  {shown:>5}  {bound:5.3g}{mark}")
    return "\n".join(lines)


def _content(seen: Windows) -> dict[str, Any]:
    noise = seen.noise
    return {
        "windows": seen.windows,
        "best": seen.best,
        "close": list(seen.close),
        "epsilon": noise.epsilon,
        "epsilon_of_noise": noise.epsilon_floor,
        "correlation": noise.correlation,
        "mse_1": noise.mse_1,
        "mean": noise.mean.tolist(),
        "sizes": seen.sizes,
        "error": seen.corrected,
        "measured": seen.measured,
        "bound": seen.bound,
    }


def _draw(seen: Windows, key: str, path: str) -> None:
    need("report", "matplotlib")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(seen.noise.mean, lw=1)
    spread = np.sqrt(seen.noise.variance)
    left.fill_between(range(seen.noise.steps), seen.noise.mean - spread, seen.noise.mean + spread, alpha=0.2, lw=0)
    left.set(xlabel="step", ylabel=f"hypergradient of {key}", title="mean over runs, ± one deviation")
    curve = on_a_log_axis(seen.corrected, seen.bound)
    lost = " (≤ 0 at the bottom)" if min(seen.corrected) <= 0 else ""
    right.plot(seen.sizes, curve, label=f"measured{lost}")
    right.plot(seen.sizes, seen.bound, ls="--", label="bound")
    right.axvline(seen.best, color="0.5", lw=1)
    right.plot([seen.best], [curve[seen.sizes.index(seen.best)]], "o", color="C0")
    right.set(xscale="log", yscale="log", xlabel="steps in a window", ylabel="MSE", title=f"best: {seen.best} steps")
    right.legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def on_a_log_axis(errors: list[float], others: list[float]) -> list[float]:
    """Errors to be drawn: those that are not positive lie at the bottom, below everything that is.

    >>> on_a_log_axis([4.0, -1.0], [8.0, 2.0])
    [4.0, 1.0]
    """
    bottom = min((value for value in [*errors, *others] if value > 0), default=1.0) / 2
    return [value if value > 0 else bottom for value in errors]
