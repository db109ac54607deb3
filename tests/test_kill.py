"""A run killed at any moment and resumed ends with the same values, bit for bit."""

import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("kill_driver.py")


def driven(engine: str, kills: int) -> str:
    done = subprocess.run(
        [sys.executable, str(DRIVER), engine, str(kills), "1"], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("engine", ["forward", "replay"])
def test_killed_run_resumes_exactly(engine):
    assert "same outcome" in driven(engine, 6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["forward", "traced", "adjoint", "replay", "greedy"])
def test_killed_twenty_times(engine):
    said = driven(engine, 20)
    assert "died 20 times" in said
    assert "same outcome" in said
