# SPDX-License-Identifier: Apache-2.0
"""One object for many processes."""

from __future__ import annotations

import os

import numpy as np

from penstock.transport.shared import load_shared, share


def test_readers_get_equal_objects_whose_arrays_are_their_own_when_written_to():
    value = {"paths": np.arange(100_000), "small": np.arange(3), "name": "x" * 5000}
    fd = share(value)
    one, two = load_shared(os.dup(fd)), load_shared(fd)
    one["paths"][0] = -1
    assert two["paths"][0] == 0
    assert one["name"] == two["name"] == value["name"]
    assert (two["paths"] == value["paths"]).all()
    assert (two["small"] == value["small"]).all()


def test_sharing_leaves_no_descriptor_open():
    before = len(os.listdir("/proc/self/fd"))
    value = load_shared(share([np.zeros(50_000), "y"]))
    assert len(os.listdir("/proc/self/fd")) == before
    assert value[1] == "y"
