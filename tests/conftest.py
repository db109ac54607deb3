"""The test room: one thread per worker (two workers on two cores), torch's own default precision.

The default dtype stays float32 on purpose: every problem says float64 itself, so that a constant which silently takes
the default precision shows up as an error of 1e-8.
"""

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
