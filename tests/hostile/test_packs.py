# SPDX-License-Identifier: Apache-2.0
"""Stores whose files were cut or changed anywhere: refused by name, or what was packed."""

from __future__ import annotations

import faulthandler

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("lmdb")

from tests.hostile.damage import KINDS, attacked


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_store_is_refused_or_right(kind):
    said = attacked(kind, 1, 0, 10)
    assert not said["wrong"], "\n".join(said["wrong"])
    assert sum(said["outcomes"].values()) == 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_damaged_stores_are_refused_or_right(kind):
    faulthandler.cancel_dump_traceback_later()  # pytest's two minutes; each read has its own
    said = attacked(kind, 2, 0, 1000)
    assert not said["wrong"], "\n".join(said["wrong"])
    assert said["outcomes"]["refused"] > 10  # else nothing gets as far as what is looked for
