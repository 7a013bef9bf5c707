# SPDX-License-Identifier: Apache-2.0
"""How much annotations may name: what one file adds, every object of the data set has room for.

A megabyte of XML with names that never come twice would otherwise fill the memory.
"""

from __future__ import annotations

from typing import Final

__all__ = ["MAX_ATTRIBUTES", "MAX_LANDMARKS", "MAX_LANDMARK_NAMES"]

MAX_LANDMARK_NAMES: Final = 2_000  # of all objects together; faces have 68 to 478
MAX_LANDMARKS: Final = 10_000  # of an object, without names: meshes have more than sketches
MAX_ATTRIBUTES: Final = 1_000  # that are taken because they are there, and not asked for
