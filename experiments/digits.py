"""The embedded example over several tuning seeds, against schedules off the shelf.

Shows: an MLP on scikit-learn's digits, 200 steps; 5 learning rates, momentum and weight decay learnt from zero in 12
outer steps (what `make tune` runs, once per tuning seed), then trained from scratch on all training data and tested.
Command: python experiments/digits.py            writes experiments/results/digits.json
Time:    about three minutes on two cores. `--smoke` takes seconds, and writes into the folder `--work`.
Result:  in the file; README.md shows it.
"""

import time
from dataclasses import replace
from statistics import mean, stdev

import record
import torch

import longhorizon as lh
from longhorizon import recipe as recipes
from longhorizon import recipe_text
from longhorizon.offtheshelf import train_off_the_shelf


def main() -> None:
    args = record.parse(record.arguments(__doc__ or "", "digits"))
    recipe = recipes.Recipe(device=args.device)
    tuning_seeds, test_seeds = 5, 5
    if args.smoke:
        recipe, tuning_seeds, test_seeds = replace(recipe, steps=20, outer_steps=2), 2, 2
    task, _ = recipes.task_of(recipe)
    torch.set_num_threads(recipes.threads_of(recipe, task))
    hypers, rule, steps = recipes.hypers_of(recipe), recipes.rule_of(recipe), recipe.steps
    runs = []
    for seed in range(tuning_seeds):
        began = time.perf_counter()
        tuned = lh.tune(
            task,
            rule,
            hypers,
            steps=steps,
            outer_steps=recipe.outer_steps,
            engine=recipes.engine_of(recipe),
            seed=seed,
        )
        seconds = time.perf_counter() - began
        row = {"seed": seed, "seconds": seconds, "outer_steps": len(tuned.history)}
        for name, schedule in (("learnt", tuned.schedule), ("best by validation", tuned.best)):
            found = lh.retrain(task, rule, hypers, schedule, steps=steps, seeds=test_seeds)
            row[name] = {
                "schedule": {key: list(v) for key, v in schedule.values.items()},
                "loss": found.test_loss,
                "accuracy": found.metrics["accuracy"],
            }
        runs.append(row)
        print(f"tuning seed {seed}: {seconds:.1f} s, test accuracy {mean(row['learnt']['accuracy']):.4f}", flush=True)
    table = {
        name: summary([r[name]["loss"] for r in runs], [r[name]["accuracy"] for r in runs])
        for name in ("learnt", "best by validation")
    }
    for name, found in train_off_the_shelf(task, rule, hypers, steps, tuning_seeds * test_seeds).items():
        table[name] = summary([found.test_loss], [found.metrics["accuracy"]])
    content = {
        "recipe": recipe_text.to_toml(recipe),
        "table": table,
        "seconds_per_tuning_run": mean(r["seconds"] for r in runs),
        "runs": runs,
    }
    record.finish(args, "digits", content)
    for name, row in table.items():
        print(
            f"{name:<32} loss {row['loss']:.4f}, accuracy {100 * row['accuracy']:.2f} ± {100 * row['deviation']:.2f} %"
        )


def summary(losses: list[list[float]], accuracies: list[list[float]]) -> dict[str, float]:
    """Means over everything, and the deviation between single trainings."""
    flat = [a for row in accuracies for a in row]
    return {
        "loss": mean(x for row in losses for x in row),
        "accuracy": mean(flat),
        "deviation": stdev(flat),
        "trainings": len(flat),
    }


if __name__ == "__main__":
    record.run(main)
