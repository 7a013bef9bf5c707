# SPDX-License-Identifier: Apache-2.0
"""docs/guide/labels.md names the attributes that are asked."""

from __future__ import annotations

from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "labels.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")
def test_the_attributes_of_the_page_are_those_that_are_asked():
    from penstock.data.labels.known import _ATTRIBUTES, _PAIRS, _PARTS

    text = PAGE.read_text()
    for name in (*_ATTRIBUTES, *_PAIRS, *_PARTS):
        assert f"`{name}`" in text
