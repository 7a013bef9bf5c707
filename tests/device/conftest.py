# SPDX-License-Identifier: Apache-2.0
"""A CUDA device, for the tests that ask for one; the others here run anywhere."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch


def missing(reason):
    """Skip, or fail where a GPU is required."""
    if os.environ.get("PENSTOCK_REQUIRE_GPU") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_GPU=1 forbids to skip.")
    pytest.skip(reason)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The current CUDA device, in use already: what it opens for good is open before a test."""
    import torch

    if not torch.cuda.is_available():
        missing(f"torch {torch.__version__} finds no CUDA device")
    device = torch.device("cuda", torch.cuda.current_device())
    square = torch.ones(64, 64, device=device)
    with torch.cuda.stream(torch.cuda.Stream()):
        (square @ square).sum().item()
    torch.ones(64, pin_memory=True).to(device, non_blocking=True)
    torch.cuda.synchronize()
    return device
