"""What Figure 1 and Appendix F share: one protocol, and entrants that run one at a time.

An entrant is a method with one seed: `fds-adjoint`, `bohb`. Each is a comparison of its own (`lh.compare`) in a folder
of its own under `--work`, so one call can do one and another call the next, and a call that is stopped goes on where it
was. What an entrant has done is also kept, small enough to be committed, in experiments/results/NAME-entrants/, so
that the figure can be made again, and entrants added to it, where the folders are not. `gathered` reads all that is
there.

The protocol is that of section 5.4 and Appendix C: WRN-16-1 on CIFAR-10, batches of 256, 5 % held out anew for every
run, all values from zero, γ = 0.1, 0.15 and 4e-4 over ten outer steps, which is the range α ∈ [−1, 1], β ∈ [−1.5, 1.5],
ξ ∈ [−4e-3, 4e-3] that every other method searches. A training run has 50 epochs. `PROTOCOLS` has a second one, the same
at a size that one core can repeat: a small perceptron, and one epoch of MNIST.
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import record
from record import say

import longhorizon as lh
from longhorizon import data
from longhorizon.outer_step import plain
from longhorizon.rivals.arena import Arena, Setup
from longhorizon.rivals.driver import Watcher
from longhorizon.rivals.ledger import Evaluation, Ledger
from longhorizon.rivals.registry import chosen
from longhorizon.rivals.testing import Tested, read_tests, to_test, try_all
from longhorizon.rundir import RunDirectory

EVERY = 60.0  # seconds between lines of progress
USUAL = (1.0, 10.0)  # epochs of FDS's outer steps on CIFAR-10, the last one repeating
PROTOCOLS: dict[str, dict[str, Any]] = {
    "cifar10": {"model": "wrn-16-1", "batch_size": 256, "val_batch_size": 2500, "epochs": 50.0},
    "mnist": {"model": "mlp-32", "batch_size": 128, "val_batch_size": 3000, "epochs": 1.0},
}
# "hybrid" is the library's default as it was when it ran here: "bounded" is what it has become since.
SMOOTHING = {"hybrid": lh.Hybrid(clip=None), "bounded": lh.Hybrid(), "smoothed": lh.Factorial()}
ENGINES = ("adjoint", "forward", *SMOOTHING)
PLAIN = "100000 runs"  # a budget that ends nobody: FDS, the grids and HD's single run end by themselves


@dataclass(frozen=True)
class Entrant:
    """A method with what was chosen for it."""

    method: str
    engine: str = ""  # of fds: one of ENGINES
    clip: float | None = None
    horizons: tuple[float, ...] = ()  # of fds: epochs of its outer steps' training runs; a whole run without them
    precision: str = "float32"
    gate: str = "off"  # of fds: what becomes of values whose sign is not supported
    growth: float = 1.0  # of fds: of γ, while signs stay the same

    @property
    def label(self) -> str:
        clip = "" if self.clip is None else f"clip{self.clip:g}"
        epochs = "" if self.horizons in ((), USUAL) else "epochs" + "+".join(f"{h:g}" for h in self.horizons)
        gate = "" if self.gate == "off" else self.gate
        gate += "" if self.growth == 1 else f"{'-' if gate else ''}growth{self.growth:g}"
        parts = [self.method, self.engine, clip, gate, epochs, "" if self.precision == "float32" else self.precision]
        return "-".join(part for part in parts if part)

    def differentiates(self, device: str) -> Any:
        if not self.engine:
            return "auto"
        if self.engine in SMOOTHING:
            return SMOOTHING[self.engine]
        compiled = record.compiles("auto", device)  # the first run, of one epoch, is followed by long ones
        kind = lh.Adjoint if self.engine == "adjoint" else lh.Forward
        return kind(clip=self.clip, compile=compiled)


def options(parser: argparse.ArgumentParser) -> None:
    """What these scripts take besides the usual."""
    parser.add_argument("--epochs", type=float, help="of a training run, if not the usual number")
    parser.add_argument(
        "--precision", choices=["float32", "tf32", "bf16"], default="float32", help="of products on a GPU"
    )
    parser.add_argument("--test", choices=["all", "whole", "last", "none"], default="all", help="which choices to test")
    parser.add_argument("--test-seeds", type=int, default=3, help="trainings per test")
    parser.add_argument(
        "--from-kept", action="store_true", help="searches and grids go on from what was kept of them, if not in --work"
    )
    parser.add_argument("--shared", action="store_true", help="others work on the device too: seconds are too long")


class Contest:
    """The protocol, and a folder of entrants.

    Args:
        args: the options of a script.
        name: of the folder.
        windows: learning rates.
        protocol: which of `PROTOCOLS`.
    """

    def __init__(self, args: argparse.Namespace, name: str, windows: int, protocol: str = "cifar10"):
        for what in ("epochs", "test_seeds"):
            if getattr(args, what) is not None and not getattr(args, what) > 0:
                raise SystemExit(f"--{what.replace('_', '-')} {getattr(args, what)}: expected more than nothing.")
        self.args, self.name = args, name
        self.epochs = whole(args, protocol)
        settings: dict[str, Any] = {
            **PROTOCOLS[protocol],
            "val_fraction": 0.05,
            "outer_steps": 10,
            "steps_of": {"lr": 0.1, "momentum": 0.15, "weight_decay": 4e-4},
            "windows": {"lr": windows, "momentum": 1, "weight_decay": 1},
            "epochs": self.epochs,
        }
        if args.smoke:
            small = "lenet" if protocol == "cifar10" else settings["model"]
            settings |= {"model": small, "batch_size": 32, "val_batch_size": 100, "outer_steps": 3, "epochs": 0.5}
        images = record.images(protocol, args)
        made = data.image_data(
            images,
            settings["batch_size"],
            settings["val_fraction"],
            val_batch_size=settings["val_batch_size"],
            device=args.device,
        )
        self.task, self.rule, self.epoch = made.task(settings["model"]), lh.sgd(), made.steps_per_epoch
        self.steps = max(windows, round(settings["epochs"] * self.epoch))
        self.hypers = {
            key: lh.Hyper(0.0, windows=settings["windows"][key], step=step)
            for key, step in settings["steps_of"].items()
        }
        self.settings = settings | {"steps": self.steps, "steps_per_epoch": self.epoch}
        self.settings |= {"data": record.title(images, args)}
        self.folder = record.Work(args, name, self.settings).folder
        usual = args.work if args.smoke else record.RESULTS
        self.kept = self._place_to_keep((args.out.parent if args.out else usual) / f"{name}-entrants")
        before = self._place_to_keep(usual / f"{name}-entrants")  # read in any case
        self._traces = lh.Traces()  # of tests
        self._places = [place for place in dict.fromkeys((before, self.kept)) if place is not None]

    def run(self, entrant: Entrant, seed: int, budget: str = PLAIN) -> None:
        """Let an entrant go on with its budget, and test what it chose."""
        args, label = self.args, f"{entrant.label}, seed {seed}"
        place = self.folder / f"{entrant.label}-{seed}"
        card = place / "entrant.json"
        earlier, known = self._lay_out(place, label) if args.from_kept else (None, {"sittings": []})
        known = json.loads(card.read_text()) if card.exists() else known
        here = {k: v for k, v in record.environment(args.device.split(":")[0]).items() if k != "load_before"}
        here |= {"tf32": entrant.precision == "tf32"} | ({"commit": args.commit} if args.commit else {})
        here |= {"shared": True} if args.shared else {}
        content = asdict(entrant) | {"label": entrant.label, "seed": seed, "budget": budget, "test": args.test}
        content |= {"sittings": [*known["sittings"], here]}
        test_seeds = 2 if args.smoke else args.test_seeds
        horizons = [self._shortened(h) for h in entrant.horizons] or [self.steps]
        content |= {"steps": horizons, "test_seeds": test_seeds}
        said = [time.monotonic()]

        def told(e: Evaluation) -> None:
            said[0] = time.monotonic()
            if e.best or e.status.startswith("crashed") or entrant.method == "fds":
                say(f"{label}, trial {e.trial + 1} of {e.steps} steps: {judged(e)} ({e.total_seconds:.0f} s so far)")

        def ticks(arena: Arena, done: int) -> None:
            if time.monotonic() - said[0] > EVERY:
                said[0] = time.monotonic()
                spent = sum(e.seconds for e in arena.past())
                say(f"{label}: {len(arena.past())} evaluations in {spent:.0f} s, then {done} steps")

        with RunDirectory(place):  # not while another process is at it
            record.write(card, content)
        lh.compare(
            self.task,
            self.rule,
            self.hypers,
            steps=horizons,
            train_steps=self.steps,
            budget=budget,
            methods=[entrant.method],
            outer_steps=self.settings["outer_steps"],
            engine=entrant.differentiates(args.device),
            gate=entrant.gate,  # type: ignore[arg-type]
            outer=None if entrant.growth == 1 else lh.SignDescent(growth=entrant.growth),
            seed=seed,
            epoch=self.epoch,
            test=args.test,
            test_seeds=test_seeds,
            precision=entrant.precision,  # type: ignore[arg-type]
            dir=place,
            earlier=earlier,
            watcher=Watcher(on_evaluation=told, progress=ticks, note=say),
        )
        say(f"{label}: done")

    def test_kept(self, entrant: Entrant, seed: int) -> None:
        """Test what an entrant that was kept has chosen (`--test`), and train nothing else."""
        args, name = self.args, f"{entrant.label}-{seed}"
        if name not in self._kept() or self.kept is None:
            raise SystemExit(f"--test-kept: {name} is not among {', '.join(sorted(self._kept())) or 'nothing'}.")
        one, folder = Entered.read(self._kept()[name]), self.folder / f"{name}-tests"
        path, count = folder / "tests.jsonl", one.card["test_seeds"]
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(plain(vars(t))) + "\n" for t in one.tests))
        setup = Setup(
            self.task,
            self.rule,
            self.hypers,
            horizons=[self.steps],
            outer_steps=self.settings["outer_steps"],
            outer=None,
            engine="auto",
            seeds=1,
            epoch=self.epoch,
            horizon=1,
        )
        left = {e.key for e in to_test(one.evaluations, args.test, self.steps)} - {t.key for t in read_tests(path)}
        say(f"{entrant.label}, seed {seed}: {len(left)} choices to test, {count} trainings each")
        try:
            try_all(setup, one.evaluations, path, args.test, count, None, self._traces, entrant.precision)  # type: ignore[arg-type]
        finally:
            tests = read_tests(path)
            if len(tests) > len(one.tests):
                here = record.environment(args.device.split(":")[0])
                here |= {"commit": args.commit} if args.commit else {}
                card = one.card | {"test": args.test, "tested": [*one.card.get("tested", []), here]}
                record.write(self.kept / "settings.json", plain(self.settings))
                record.write(self.kept / f"{name}.json", replace(one, card=card, tests=tests).to_dict())

    def gathered(self) -> "Gathered":
        """What all entrants have done so far, here or as it was kept; what is here is kept, too."""
        here = {
            f"{e.card['label']}-{e.card['seed']}": e for e in map(_read, sorted(self.folder.glob("*/entrant.json")))
        }
        found = {name: Entered.read(path) for name, path in self._kept().items()}
        for name, one in here.items():
            if name in found and one.size < found[name].size:
                say(f"{name}: what was kept goes further than what is in {self.folder}, and stays")
                continue
            found[name] = one
            if self.kept and one.evaluations:
                record.write(self.kept / "settings.json", plain(self.settings))
                record.write(self.kept / f"{name}.json", one.to_dict())
        return gathered([found[name] for name in sorted(found)])

    def _kept(self) -> dict[str, Path]:
        """The files of entrants that were kept, where the result is written or else with the others."""
        return {path.stem: path for place in self._places for path in kept(place)}

    def _lay_out(self, place: Path, label: str) -> tuple[Path | None, dict[str, Any]]:
        """The journal of an entrant that was kept, in a folder of its own: all that a search goes on from; its card."""
        path = self._kept().get(place.name)
        if path is None or (place / "journal.jsonl").exists():
            return None, {"sittings": []}
        one, folder = Entered.read(path), place.with_name(f"{place.name}-kept")
        if one.card["method"] in ("fds", "greedy"):  # they go on from the state of their outer optimizer
            say(f"{label}: cannot go on from its evaluations, and begins anew; or give the --work that it ran in")
            return None, {"sittings": []}
        say(f"{label}: goes on from {len(one.evaluations)} evaluations that were kept")
        lines = {"journal.jsonl": [e.to_dict() for e in one.evaluations], "tests.jsonl": [asdict(t) for t in one.tests]}
        folder.mkdir(parents=True, exist_ok=True)
        for name, contents in lines.items():
            (folder / name).write_text("".join(json.dumps(plain(content)) + "\n" for content in contents))
        return folder, one.card

    def _place_to_keep(self, place: Path) -> Path | None:
        """The folder of entrants that were kept, if they had these settings."""
        settings, path = json.loads(json.dumps(plain(self.settings))), place / "settings.json"
        if path.exists() and json.loads(path.read_text()) != settings:
            say(f"{path} has other settings: nothing is read from there, or kept")
            return None
        return place

    def smoke_first(self, labels: Sequence[str], seeds: Sequence[int]) -> None:
        """For `--smoke`, let the usual entrants run that others look at, where they are not there yet."""
        if not self.args.smoke:
            return
        there = {(card["label"], card["seed"]) for card in self.gathered().cards}
        for growth in (1.0, 1.5):
            entrant = Entrant("fds", "forward", 10.0, USUAL, growth=growth)
            for seed in seeds:
                if entrant.label in labels and (entrant.label, seed) not in there:
                    self.run(entrant, seed)

    def outer_steps_of(self, label: str, seed: int) -> list[Evaluation]:
        """The evaluations of an entrant that has run, FDS's last being of what it ended with."""
        found = self.gathered()
        own = [e for e in found.evaluations if (e.method, e.seed) == (label, seed)]
        if not own:
            known = sorted(f"{card['label']} (seed {card['seed']})" for card in found.cards)
            there = ", ".join(known) or "nothing"
            places = " or ".join(map(str, [self.folder, *self._places]))
            raise SystemExit(f"--label {label} --seed {seed}: not in {places}; there is {there}.")
        return own

    def _shortened(self, epochs: float) -> int:
        """Steps of a training run of so many epochs, in proportion where a whole run is a size for tests."""
        return max(self.settings["windows"]["lr"], round(self.steps * epochs / self.epochs))


@dataclass(frozen=True)
class Gathered:
    """All entrants in a folder; methods are called by their labels.

    A choice that was not tested (yet) counts as none, so that all scores are of the test set.
    """

    cards: list[dict[str, Any]]
    evaluations: list[Evaluation]
    tests: list[Tested]
    untested: dict[str, int]  # choices that were not tested, by entrant
    waiting: list[dict[str, Any]]  # entrants of which nothing was tested yet, and how the last thing they tried did
    outer_steps: dict[tuple[str, int], list[dict[str, Any]]]  # by label and seed, of those that differentiate


@dataclass(frozen=True)
class Entered:
    """One entrant: who it is, all it has tried, what was tested, and its outer steps where it differentiates."""

    card: dict[str, Any]
    evaluations: list[Evaluation]
    tests: list[Tested]
    outer_steps: list[dict[str, Any]]  # of each: index, steps, mean, doubts, held, engine; error (of the sum), exploded

    @property
    def size(self) -> tuple[int, int]:
        """How far it has come: what was tested counts first."""
        return len(self.tests), len(self.evaluations)

    def to_dict(self) -> dict[str, Any]:
        evaluations, tests = [e.to_dict() for e in self.evaluations], [asdict(t) for t in self.tests]
        return vars(self) | {"evaluations": evaluations, "tests": tests}

    @classmethod
    def read(cls, path: Path) -> "Entered":
        content = json.loads(path.read_text())
        evaluations = [Evaluation.from_dict(e) for e in content["evaluations"]]
        return cls(content["card"], evaluations, [Tested(**t) for t in content["tests"]], content["outer_steps"])


def kept(place: Path) -> list[Path]:
    """The files of the entrants that are kept in a folder."""
    return [path for path in place.glob("*.json") if path.name != "settings.json"]


def _read(card: Path) -> Entered:
    """An entrant from its folder."""
    content, journal = json.loads(card.read_text()), card.with_name("journal.jsonl")
    steps = RunDirectory(card.parent / f"{content['method']}-{content['seed']}").journal()
    seen = [
        {"index": s.index, "steps": s.steps, "doubts": s.doubts, "held": s.held, "engine": s.engine}
        | {"mean": {key: record.rounded(v) for key, v in s.mean.items()}}
        | ({"error": {key: record.rounded(v) for key, v in s.error.items()}} if s.error else {})
        | ({"exploded": True} if s.exploded else {})
        for s in steps
    ]
    return Entered(
        content,
        Ledger(journal).all() if journal.exists() else [],
        [t for t in read_tests(card.with_name("tests.jsonl")) if t.scores],
        seen,
    )


def gathered(entrants: list[Entered]) -> Gathered:
    """What these entrants have done so far."""
    cards, evaluations, tests, untested, waiting, outer_steps = [], [], [], {}, [], {}
    for one in entrants:
        label, seed = one.card["label"], one.card["seed"]
        keys = {t.key for t in one.tests}
        if missing := sum(e.best and e.key not in keys for e in one.evaluations):
            untested[f"{label}-{seed}"] = missing
        if not keys:
            last = one.evaluations[-1:]
            waiting += [
                {"method": label, "seed": seed, "steps": e.steps, "val_loss": e.val_loss, **e.metrics} for e in last
            ]
            continue
        cards.append(one.card)
        if one.outer_steps:
            outer_steps[label, seed] = one.outer_steps
        evaluations += [replace(e, method=label, best=e.best and e.key in keys) for e in one.evaluations]
        tests += [replace(t, method=label) for t in one.tests]
    return Gathered(cards, evaluations, tests, untested, waiting, outer_steps)


def judged(e: Evaluation) -> str:
    """An evaluation's loss and accuracy in words."""
    if not e.metrics:
        return e.status
    return f"val loss {e.val_loss:.4f}, accuracy {100 * e.metrics['accuracy']:.2f} %" + (", best" if e.best else "")


def whole(args: argparse.Namespace, protocol: str) -> float:
    """Epochs of a training run."""
    return float(PROTOCOLS[protocol]["epochs"] if args.epochs is None else args.epochs)


def entrants(
    names: list[str], horizons: tuple[float, ...], args: argparse.Namespace, protocol: str = "cifar10"
) -> list[Entrant]:
    """The entrants of these names; only `fds` has an engine to choose."""
    try:
        names = [method.name for method in chosen(names)]  # "all" is every one
    except (ImportError, ValueError) as error:  # an unknown name, or a package that is not there
        raise SystemExit(f"--methods {','.join(names)}: {error}") from None
    if args.clip is not None and args.engine in SMOOTHING:
        raise SystemExit(f"--clip {args.clip:g}: {args.engine} has none; leave it out, or choose another --engine.")
    clip = args.clip if args.clip is not None else 10.0 if args.engine == "forward" else None
    if clip is not None and clip < 0:
        raise SystemExit(f"--clip {clip:g}: expected a positive bound, or 0 for none.")
    longest = whole(args, protocol)
    if not all(0 < h <= longest for h in horizons):
        raise SystemExit(f"--horizons {args.horizons}: expected epochs, more than 0 and at most {longest:g}, a run's.")
    fds = Entrant("fds", args.engine, clip or None, horizons, args.precision, args.gate, args.growth)
    return [fds if name == "fds" else Entrant(name, precision=args.precision) for name in names]
