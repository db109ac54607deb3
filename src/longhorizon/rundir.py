"""A run's directory: everything that is on disk.

    run.json          what is being run: settings, their fingerprint, the recipe, the environment
    journal.jsonl     one line per outer step, only ever appended to
    checkpoint.pt     where the run is, inside an outer step too; written aside, then renamed
    schedule.json     the latest values, at the end what was confirmed       best.json   those of the best run
    confirmed.json    the plain training runs that decided between the two
    lock              held by the process that runs

A reader never sees half a file. Checkpoints hold tensors, numbers and strings only and are read with
`weights_only=True`, so that a stranger's directory can be looked at without running his code.
"""

import errno
import fcntl
import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from longhorizon.files import write_aside
from longhorizon.outer_step import OuterStep
from longhorizon.schedule import Schedule

FORMAT = 1
CONFIRMED = "confirmed.json"
# Of a run, and of the methods of a comparison; other files may lie beside them.
PROGRESS = ("journal.jsonl", "checkpoint.pt", "tuning.pt", "trial-*.pt", "row-*.pt", "study.log")


class RunError(RuntimeError):
    """Something about a run's directory, in one sentence."""


class RunDirectory:
    """A run on disk, held by one process at a time.

    Use as a context manager: entering takes the lock, leaving gives it back.
    """

    def __init__(self, path: str | os.PathLike[str]):
        if not isinstance(path, str | os.PathLike) or not os.fspath(path):
            raise ValueError(f"dir={path!r}: expected the name of a directory; '.' is the one you are in.")
        self.path = Path(path).expanduser()
        self._lock: int | None = None

    def __enter__(self) -> "RunDirectory":
        with _Said(f"cannot create {self.path}"):
            self.path.mkdir(parents=True, exist_ok=True)
        with _Said(f"cannot write into {self.path}"):
            handle = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(handle, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise RunError(
                f"{self.path} is in use by process {pid}; stop that one first, or choose another directory."
            ) from None
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        self._lock = handle
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            os.close(self._lock)  # gives the lock back
            self._lock = None

    @property
    def exists(self) -> bool:
        """Whether a run was begun here."""
        return (self.path / "run.json").exists()

    @property
    def begun(self) -> bool:
        """Whether there is something to go on from. What a run that failed at once leaves may be written over."""
        return self.exists and any(next(self.path.rglob(name), None) for name in PROGRESS)

    def begin(self, settings: Mapping[str, Any], recipe: str | None = None) -> None:
        """Write down what is run, or check that it is what was begun here.

        Raises:
            RunError: if another run is here, naming the setting that differs.
        """
        print_ = fingerprint(settings)
        if self.exists:
            there = self.describe()
            same = there["fingerprint"] == print_ or there["settings"] == _jsonable(settings)  # 1 and 1.0 are one
            begun = self.begun
            if begun and not same:
                raise RunError(
                    f"{self.path} holds another run: {_first_difference(there['settings'], _jsonable(settings))}. "
                    "Choose another directory, or use the settings it was begun with."
                )
            if begun and recipe is not None and recipe != there.get("recipe"):  # more outer steps: so when resumed
                self.save_json("run.json", there | {"recipe": recipe})
            if begun:
                return
        elif (self.path / "journal.jsonl").exists() or (self.path / "checkpoint.pt").exists():
            raise RunError(
                f"{self.path} has a journal or a checkpoint but no run.json: part of it was deleted. "
                "Put run.json back, or choose another directory."
            )
        elif kept := [name for name in ("schedule.json", "best.json") if (self.path / name).exists()]:
            raise RunError(
                f"{self.path} has a {kept[0]} but no run.json: no run of ours has made it, and this one would write "
                "over it. Move it away, or choose another directory."
            )
        self._write(
            "run.json",
            json.dumps(
                {
                    "format": FORMAT,
                    "fingerprint": print_,
                    "settings": _jsonable(settings),
                    "recipe": recipe,
                    "environment": environment_record(),
                },
                indent=2,
            ).encode(),
        )

    def measured(self, name: str, value: Any) -> None:
        """Add to the environment's record something that only the run itself could show."""
        there = self.describe()
        environment = there.get("environment") or {}
        self.save_json("run.json", there | {"environment": environment | {name: value}})

    def describe(self) -> dict[str, Any]:
        """The content of run.json."""
        path = self.path / "run.json"
        if not self.path.is_dir():
            is_file = self.path.exists()
            raise RunError(f"{self.path} {'is a file, not the directory of a run' if is_file else 'does not exist'}.")
        if not path.exists():
            raise RunError(f"{self.path} is no run directory: it has no run.json.")
        try:
            content = json.loads(path.read_text())
            version = content["format"]
            content["fingerprint"], content["settings"]
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged ({type(error).__name__}: {error}).") from None
        if version > FORMAT:
            raise RunError(f"{self.path} has format {version}; this longhorizon reads up to {FORMAT}: update it.")
        return dict(content)

    def journal(self) -> list[OuterStep]:
        """The outer steps so far; a torn last line, of a process that was killed while writing it, does not count."""
        path = self.path / "journal.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().split(b"\n")
        records = []
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                records.append(OuterStep.from_dict(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                if number == len(lines):  # no newline behind it: torn
                    break
                raise RunError(f"{path} is damaged at line {number} ({type(error).__name__}: {error}).") from None
        return records

    def append(self, record: OuterStep) -> None:
        """Add an outer step to the journal, unless it is there already."""
        path = self.path / "journal.jsonl"
        if any(known.index == record.index for known in self.journal()):
            return  # killed between journal and checkpoint; this step was repeated bit for bit
        append_line(path, record.to_dict())

    def checkpoint(self, content: Mapping[str, Any]) -> None:
        """Save where the run is."""
        save_tensors(self.path / "checkpoint.pt", {"fingerprint": self._fingerprint(), "content": dict(content)})

    def load(self) -> dict[str, Any] | None:
        """The last checkpoint, or None if there is none yet."""
        path = self.path / "checkpoint.pt"
        payload = load_tensors(path)
        if payload is None:
            return None
        if payload["fingerprint"] != self._fingerprint():
            raise RunError(f"{path} belongs to another run than {self.path / 'run.json'}: they were mixed up.")
        return dict(payload["content"])

    def save_schedule(self, name: str, schedule: Schedule) -> None:
        """Write schedule.json or best.json."""
        with _Said(f"cannot write {self.path / name}"):
            schedule.save(self.path / name)

    def save_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write any other result."""
        self._write(name, json.dumps(content, indent=2).encode())

    def result(self, name: str = "result.json") -> dict[str, Any]:
        """The content of result.json, or of another result; nothing if it is missing or unreadable."""
        try:
            content = json.loads((self.path / name).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def _write(self, name: str, content: bytes) -> None:
        path = self.path / name
        with _Said(f"cannot write {path}"):
            write_aside(path, content + b"\n")

    def _fingerprint(self) -> str:
        """Of the run that a checkpoint belongs to; equal settings may go with another model or other data."""
        there = self.describe()
        return f"{there['fingerprint']}{there.get('environment', {}).get('run', '')}"


def save_tensors(path: Path, payload: Mapping[str, Any]) -> None:
    """Write a checkpoint: aside, then renamed, so that the one before it stays until this one is whole."""
    with _Said(f"cannot write {path}; the checkpoint before it is untouched"):
        write_aside(path, lambda file: torch.save({"format": FORMAT, **payload}, file))


def load_tensors(path: Path) -> dict[str, Any] | None:
    """Read a checkpoint, or None if there is none yet; nothing in it is run."""
    if not path.exists():
        return None
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
        version, _ = payload["format"], payload["content"]
    except Exception as error:  # torch raises many kinds for a damaged file
        # Not what torch says: how to read it all the same, at the cost of safety.
        raise RunError(
            f"{path} cannot be read ({type(error).__name__}); delete it to go on from the journal."
        ) from None
    if version > FORMAT:
        raise RunError(f"{path} has format {version}; this longhorizon reads up to {FORMAT}: update it.")
    return dict(payload)


def append_line(path: Path, content: Mapping[str, Any]) -> None:
    """Add a line to a journal, in the place of one that a killed process left torn."""
    line = json.dumps(content, allow_nan=False).encode() + b"\n"
    with _Said(f"cannot write {path}"), open(path, "a+b") as journal:
        _drop_torn_line(journal)
        journal.write(line)
        journal.flush()
        os.fsync(journal.fileno())


def fingerprint(settings: Mapping[str, Any]) -> str:
    """A short name for settings: equal settings, equal name."""
    text = json.dumps(_jsonable(settings), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def environment_record() -> dict[str, Any]:
    """What a result depends on besides its settings."""
    from longhorizon import __version__

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "longhorizon": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "cuda": device,
        "threads": torch.get_num_threads(),
        "run": uuid4().hex,  # tells runs of equal settings apart
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": [os.path.basename(sys.argv[0]), *sys.argv[1:]] if sys.argv and sys.argv[0] else [],
    }


class _Said:
    """Turn an error of the file system into one sentence."""

    def __init__(self, what: str):
        self.what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        cause: BaseException | None = error
        if isinstance(error, RuntimeError) and not isinstance(error, RunError):
            # torch.save reports a full disk as a RuntimeError of its zip writer
            raise RunError(f"{self.what}: {str(error).splitlines()[0]} (is the disk full?)") from error
        if isinstance(cause, OSError):
            remedy = {
                errno.ENOSPC: "the disk is full: make room, then go on",
                errno.EDQUOT: "the quota is used up: make room, then go on",
                errno.EACCES: "no permission to write there",
                errno.EROFS: "the file system is read-only",
                errno.ENOTDIR: "something that is no directory is in the way",
                errno.EEXIST: "a file of that name is in the way",
            }.get(cause.errno or 0, cause.strerror or str(cause))
            raise RunError(f"{self.what}: {remedy}.") from error


def _drop_torn_line(journal: Any) -> None:
    """Cut off what a killed process left; a line that lacks only its end was read as one, and gets it."""
    journal.seek(0)
    content = journal.read()
    if content and not content.endswith(b"\n"):
        start = content.rfind(b"\n") + 1
        try:
            json.loads(content[start:])
            journal.write(b"\n")
        except ValueError:
            journal.truncate(start)
    journal.seek(0, os.SEEK_END)


def _jsonable(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _first_difference(there: Any, here: Any, path: str = "") -> str:
    """Where two settings differ, in words."""
    if isinstance(there, dict) and isinstance(here, dict):
        for key in [*there, *(k for k in here if k not in there)]:
            if there.get(key) != here.get(key):
                return _first_difference(there.get(key), here.get(key), f"{path}.{key}" if path else key)
    return f"its {path or 'settings'} is {there!r}, here it is {here!r}"
