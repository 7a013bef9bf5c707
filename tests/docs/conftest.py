# SPDX-License-Identifier: Apache-2.0
"""The time that a test of a page has."""

from __future__ import annotations

import time

import pytest
from tests.docs.pages import DEADLINE_S


@pytest.fixture
def until():
    """By when all programs that the test runs have to end, on the monotonic clock."""
    return time.monotonic() + DEADLINE_S
