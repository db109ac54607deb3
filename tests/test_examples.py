"""The examples run as they are and improve the loss they are about."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["minimal.py", "own_model.py"])
def test_example_lowers_the_validation_loss(name):
    one_thread = dict(os.environ, OMP_NUM_THREADS="1")  # the tests run side by side
    done = subprocess.run(
        [sys.executable, EXAMPLES / name], capture_output=True, text=True, timeout=600, env=one_thread
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"val(?:idation)? loss ([\d.]+)", done.stdout)]
    assert len(losses) >= 5
    assert losses[-1] < 0.5 * losses[0]


def test_minimal_needs_torch_alone():
    source = (EXAMPLES / "minimal.py").read_text()
    assert {line.split()[1].split(".")[0] for line in re.findall(r"^(?:import|from) .*", source, re.M)} == {"torch"}
    assert len(source.splitlines()) <= 90
