# SPDX-License-Identifier: Apache-2.0
"""What tests of several kinds of stores ask of one."""

from __future__ import annotations

import os

import pytest

from penstock.errors import StoreError


def refused(store, message, error=StoreError):
    """Check that the index of a store is not read, for a reason that the message names."""
    with pytest.raises(error, match=message):
        len(store)


class Program:
    """Makes a folder when its pickle is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)
