"""Every method on the embedded example, on equal terms; killed once on the way, and resumed.

Shows: `longhorizon compare` with all methods, 20 seconds for each of two seeds, on the task of `make tune` (an MLP on
scikit-learn's digits, 200 steps; 5 learning rates, momentum and weight decay). After the first third of its
evaluations the process is killed by SIGKILL, and the same command goes on. Every choice of a method is then trained on
all training data and tested, which is not in its 20 seconds.
Command: python experiments/compare_digits.py    writes experiments/results/compare_digits.json and
                                                 docs/images/compare_digits.png
Time:    six to eight minutes on two cores. `--smoke` takes half a minute, and writes both into the folder `--work`.
Result:  in the file; docs/compare.md shows it and says why.
"""

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

from longhorizon.outer_step import plain
from longhorizon.rivals.ledger import Ledger, incumbents
from longhorizon.rivals.page import write_page
from longhorizon.rivals.regret import scores, table
from longhorizon.rivals.testing import read_tests

PICTURE = record.HERE.parent / "docs" / "images" / "compare_digits.png"
FULL = ["--methods", "all", "--budget", "20s", "--repeats", "2"]
SMOKE = ["--methods", "all", "--budget", "3 runs", "--steps", "40", "--outer-steps", "2", "--test-seeds", "2"]


def main() -> None:
    parser = record.arguments(__doc__ or "", "compare_digits")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="in docs/images without it")
    parser.add_argument("--kill-after", type=int, default=0, help="evaluations; default 300, or 20 with --smoke")
    args = record.parse(parser)
    picture = args.picture or (record.out(args, "compare_digits").with_suffix(".png") if args.smoke else PICTURE)
    words, kill_after = (SMOKE, args.kill_after or 20) if args.smoke else (FULL, args.kill_after or 300)
    words = [*words, "--device", args.device]
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place) / "digits"
        began = time.monotonic()
        killed = run(words, directory, kill_after)
        run(words, directory, 0)
        seconds = time.monotonic() - began
        content = gathered(directory, words, killed, seconds)
        page = write_page(directory)
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(page.with_suffix("") / "regret.png", picture)
    record.finish(args, "compare_digits", content)
    record.say(f"written: {picture}")


def run(words: list[str], directory: Path, kill_after: int) -> int:
    """The command; killed after so many evaluations, of which it returns the number."""
    command = [sys.executable, "-c", "from longhorizon.cli import main; main()", "compare", *words, "--dir", directory]
    process = subprocess.Popen(command)
    journal = directory / "journal.jsonl"
    while process.poll() is None:
        done = journal.read_bytes().count(b"\n") if journal.exists() else 0
        if kill_after and done >= kill_after:
            process.send_signal(signal.SIGKILL)
            process.wait()
            return done
        time.sleep(0.1)
    if process.returncode != 0 or kill_after:
        sys.exit(f"compare ended with code {process.returncode}" + (" before it was killed" if kill_after else ""))
    return 0


def gathered(directory: Path, words: list[str], killed: int, seconds: float) -> dict[str, object]:
    """What is worth keeping: the table, and every choice of every method with its time and its test."""
    evaluations = Ledger(directory / "journal.jsonl").all()
    tests = {t.key: t for t in read_tests(directory / "tests.jsonl")}
    known = scores(evaluations, list(tests.values()))
    assert known is not None
    assert all(e.cost == e.counted for e in evaluations), "charged and counted steps differ"
    choices = [
        {
            "method": e.method,
            "seed": e.seed,
            "trial": e.trial,
            "steps": e.steps,
            "seconds": e.total_seconds,
            "inner_steps": e.total_steps,
            "val_loss": e.val_loss,
            "val_metrics": e.metrics,
            "test": tests[e.key].scores,
            "values": e.values if sum(map(len, e.values.values())) <= 20 else "one per step",
        }
        for e in incumbents(evaluations)
    ]
    return {
        "compared": "longhorizon compare " + " ".join(f"'{w}'" if " " in w else w for w in words),
        "killed_after_evaluations": killed,
        "seconds_in_all": seconds,
        "evaluations": len(evaluations),
        "failed": sum(e.status.startswith(("diverged", "crashed")) for e in evaluations),
        "score": known.name,
        "best_known": known.best,
        "tolerance": known.tolerance,
        "table": [plain(vars(row)) for row in table(evaluations, list(tests.values()))],
        "choices": plain(choices),
    }


if __name__ == "__main__":
    record.run(main)
