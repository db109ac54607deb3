"""Where a figure was measured: versions, processor, commit. No names of machines, people or folders."""

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

RESULTS = Path(__file__).parent / "results"


def environment(device: str = "cpu") -> dict[str, Any]:
    """The record that every result file carries."""
    record: dict[str, Any] = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "system": platform.system(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),  # above zero: something else was running too
    }
    if device == "cuda":
        record |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    if importlib.util.find_spec("jax"):  # a peer in step_cost_gpu.py
        record["jax"] = importlib.metadata.version("jax")
    return record


def commit() -> str:
    """The version of the code, with a plus sign if files of the package differ from it."""
    here = Path(__file__).parent
    try:
        head = _git("rev-parse", "--short", "HEAD", cwd=here)
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "../src", ".", cwd=here)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if [line for line in changed.splitlines() if "results/" not in line] else "")


def folder(text: str) -> Path:
    """A folder of results, made when the command line is read: an hour of measuring is not lost to a missing one."""
    path = Path(text)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be made a folder: {error.strerror}") from None
    return path


def _git(*args: str, cwd: Path) -> str:
    return subprocess.run(["git", *args], cwd=cwd, check=True, capture_output=True, text=True).stdout.strip()


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo") as info:
            return next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
