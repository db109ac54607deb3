"""What all experiments share: arguments, data, work that survives a kill, and the record of where it ran.

A script is a row of units (one seed, one training). Each finished unit is a small file under `--work`, written aside
and renamed; started again, the script goes on with the first unit that is missing. Tuning runs keep their own
directories there and go on inside a training run. When all units are there, the result is written to `--out`.
"""

import argparse
import fcntl
import importlib.util
import json
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean, stdev
from types import ModuleType
from typing import Any

import torch

import longhorizon as lh
from longhorizon import data
from longhorizon.outer_step import plain

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
WORK = HERE.parent / "runs" / "experiments"
LINE = 1000  # letters of an entry of a list that is written in one line


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


environment = _load(HERE.parent / "benchmarks" / "environment.py").environment


def arguments(doc: str, name: str) -> argparse.ArgumentParser:
    """The options every script has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.set_defaults(name=name)
    parser.add_argument("--smoke", action="store_true", help="a size for tests; without a data root on digits")
    parser.add_argument("--data-root", help="where the data sets are; LONGHORIZON_DATA without it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="where unfinished work is kept")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the result; in experiments/results without it")
    parser.add_argument("--commit", help="the version of the code, where git cannot be asked")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options given, and the command as it is written into the result: without folders of this machine."""
    words = sys.argv[1:] if argv is None else list(argv)
    args = parser.parse_args(words)
    hidden = ("--data-root", "--work", "--out", "--commit", "--device", "--truth")
    kept = [w for i, w in enumerate(words) if not w.startswith(hidden) and (i == 0 or words[i - 1] not in hidden)]
    args.command = shlex.join(["python", f"experiments/{args.name}.py", *kept])
    return args


def images(name: str, args: argparse.Namespace) -> data.Images:
    """A data set; for `--smoke` 2,000 images of it, or digits at twice their size where there is no data root."""
    root = args.data_root or os.environ.get("LONGHORIZON_DATA")
    if not args.smoke:
        return data.load(name, root, download=False)
    if root is not None:
        whole = data.load(name, root, download=False)
        return _part(whole, whole.name, 2000, 500)
    digits = data.load("digits")
    return _part(digits, "digits", len(digits.train_labels), len(digits.test_labels), enlarge=2)


def _part(whole: data.Images, name: str, train: int, test: int, enlarge: int = 1) -> data.Images:
    def larger(pixels: torch.Tensor) -> torch.Tensor:
        return pixels.repeat_interleave(enlarge, 2).repeat_interleave(enlarge, 3)

    return data.Images(
        name,
        larger(whole.train_images[:train]),
        whole.train_labels[:train],
        larger(whole.test_images[:test]),
        whole.test_labels[:test],
        classes=whole.classes,
        augment=whole.augment,
    )


def title(found: data.Images, args: argparse.Namespace) -> str:
    """What to call a data set in a result: SVHN's original files are not always at hand."""
    root = args.data_root or os.environ.get("LONGHORIZON_DATA")
    note = Path(root) / "SVHN" / "README.txt" if root else None
    rebuilt = found.name == "SVHN" and note is not None and note.exists() and "RECONSTRUCTED" in note.read_text()
    return found.name + (", rebuilt" if rebuilt else "")


class Work:
    """A folder of finished units.

    Args:
        args: the options.
        name: of the folder.
        settings: what the units depend on; a folder made with others is refused.
    """

    def __init__(self, args: argparse.Namespace, name: str, settings: dict[str, Any]):
        self.folder = args.work / (name + ("-smoke" if args.smoke else ""))
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = json.loads(json.dumps(plain(settings)))
        known = self.folder / "settings.json"
        if known.exists() and json.loads(known.read_text()) != settings:
            old = json.loads(known.read_text())
            changed = sorted(k for k in old.keys() | settings.keys() if old.get(k) != settings.get(k))
            raise SystemExit(
                f"{self.folder} was made with other settings ({', '.join(changed)}): delete it or give another --work."
            )
        write(known, settings)

    def has(self, name: str) -> bool:
        return (self.folder / f"{name}.json").exists()

    def unit(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a unit, computed unless it is there already."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            began = time.perf_counter()
            value = plain(compute())
            took = time.perf_counter() - began
            if isinstance(value, dict):
                took = value.pop("seconds", took)  # a unit that was resumed knows better
            write(path, {"seconds": took, "value": value})
        return json.loads(path.read_text())["value"]

    def seconds(self) -> float:
        """What all units took."""
        units = [json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))]
        return sum(float(unit["seconds"]) for unit in units if "seconds" in unit)


@contextmanager
def turn(args: argparse.Namespace, device: str) -> Iterator[None]:
    """The GPU to oneself: calls that share a work folder do what is timed one after the other."""
    if device == "cpu":
        yield
        return
    args.work.mkdir(parents=True, exist_ok=True)
    with (args.work / "turn").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def tested(
    work: Work,
    name: str,
    task: lh.Task,
    rule: lh.Rule,
    hypers: dict[str, lh.Hyper],
    values: Any,
    steps: int,
    seeds: int,
    traces: lh.Traces,
    **how: Any,
) -> dict[str, Any]:
    """Train from scratch on all training data with a schedule and test, one unit per seed; losses and accuracies.

    All tests of a script share `traces`, so that the step is compiled once. `how`: what else `retrain` takes.
    """
    last = [time.perf_counter()]

    def done(seed: int, scores: dict[str, float]) -> None:
        last.append(time.perf_counter())  # of runs side by side, the first has the time of all
        work.unit(f"test-{name}-{seed}", lambda: scores | {"seconds": last[-1] - last[-2]})
        say(f"{name}, test seed {seed + 1} of {seeds}: accuracy {100 * scores['accuracy']:.2f} %")

    left = [seed for seed in range(seeds) if not work.has(f"test-{name}-{seed}")]
    if left:
        lh.retrain(task, rule, hypers, values, steps=steps, seeds=left, traces=traces, on_seed=done, **how)
    found = [work.unit(f"test-{name}-{seed}", dict) for seed in range(seeds)]
    accuracy = [unit["accuracy"] for unit in found]
    return {
        "loss": [unit["loss"] for unit in found],
        "accuracy": accuracy,
        "mean": mean(accuracy),
        "deviation": stdev(accuracy) if len(accuracy) > 1 else 0.0,
    }


def write(path: Path, content: Any) -> None:
    """JSON, written aside and renamed: no reader sees half a file. A list of numbers is one line, as is an entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")  # two calls may share a folder
    partial.write_text(_json(plain(content)) + "\n")
    os.replace(partial, path)


def _json(value: Any, indent: str = "") -> str:
    inner = indent + " "
    if isinstance(value, dict) and value:
        lines = [f"{inner}{json.dumps(str(key))}: {_json(v, inner)}" for key, v in value.items()]
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}"
    if isinstance(value, list) and any(isinstance(v, list | dict) for v in value):
        lines = [line if len(line := json.dumps(v)) <= LINE else _json(v, inner) for v in value]
        return "[\n" + ",\n".join(inner + line for line in lines) + f"\n{indent}]"
    return json.dumps(value)


def out(args: argparse.Namespace, name: str) -> Path:
    """Where a result is written."""
    usual = args.work / f"{name}-smoke.json" if args.smoke else RESULTS / f"{name}.json"
    return Path(args.out or usual)


def finish(args: argparse.Namespace, name: str, content: dict[str, Any], kept: dict[str, Any] | None = None) -> None:
    """Write the result with its environment; and with that of an earlier result, of which parts are kept in it."""
    record = environment(args.device.split(":")[0])
    if args.commit:
        record["commit"] = args.commit
    path = out(args, name)
    head = {"experiment": name, "environment": record, "command": args.command}
    if kept:
        told = {k: kept["environment"].get(k) for k in ("date", "commit", "cpu", "gpu")} | {"command": kept["command"]}
        head["earlier"] = [*kept.get("earlier", []), told]
    write(path, head | content)
    say(f"written: {path}")


def known(name: str, args: argparse.Namespace, settings: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """The result that was written before, here or by somebody else; with these settings, if they are given."""
    path = out(args, name)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    if found.get("experiment") != name:
        return None
    if settings is not None and found["settings"] != json.loads(json.dumps(plain(settings))):
        raise SystemExit(f"{path} has other settings: move it away, or do without it.")
    return found


def compiles(choice: str, device: str) -> Any:
    """What `--compile` means for an engine: where many runs share a step, "auto" compiles on a GPU, however short."""
    if choice == "auto":
        return True if device.startswith("cuda") else "auto"
    return choice == "yes"


def cosine(steps: int) -> list[float]:
    """From 1 to 0 along half a cosine."""
    return [0.5 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]


def rounded(values: Any, digits: int = 5) -> Any:
    """Numbers with so many significant digits; NaN becomes None."""
    if isinstance(values, torch.Tensor) or hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(v, digits) for v in values]
    return plain(float(f"{values:.{digits}g}"))


def say(line: str) -> None:
    """A line of progress, at once."""
    print(line, flush=True)


def run(main: Callable[[], None]) -> None:
    """Run a script; Ctrl-C and SIGTERM end it with a word and lose nothing but the unit in hand."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)
    try:
        main()
    except KeyboardInterrupt:
        say("stopped: the same command goes on where it was")
        sys.exit(130)
