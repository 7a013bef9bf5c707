# SPDX-License-Identifier: Apache-2.0
"""What every comparison with torch's loader needs."""

from __future__ import annotations

import sys
from multiprocessing import resource_sharer
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def no_resource_sharer() -> Iterator[None]:
    """End the thread and the socket by which torch's loader sends indices that are tensors."""
    yield
    resource_sharer.stop()
    reductions = sys.modules.get("torch.multiprocessing.reductions")  # where there is torch
    if reductions is not None:  # torch 2.6 keeps what it has sent, slots of ours too
        reductions.shared_cache.free_dead_references()
