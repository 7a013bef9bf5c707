# SPDX-License-Identifier: Apache-2.0
"""The time that a test of a page has, and what a page's program leaves in this process."""

from __future__ import annotations

import sys
import time

import pytest
from tests.docs.pages import DEADLINE_S


@pytest.fixture
def until():
    """By when all programs that the test runs have to end, on the monotonic clock."""
    return time.monotonic() + DEADLINE_S


@pytest.fixture(autouse=True)
def no_threads_of_opencv_are_left():
    """End them: they would be in the way of a later test's fork, which warns of them."""
    yield
    if (cv2 := sys.modules.get("cv2")) is not None:
        number = cv2.getNumThreads()
        cv2.setNumThreads(1)  # ends all; 0 would leave them
        cv2.setNumThreads(number)
