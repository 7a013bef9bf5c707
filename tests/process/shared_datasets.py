# SPDX-License-Identifier: Apache-2.0
"""Datasets that hold what processes share, or what each has a copy of.

The module imports neither torch nor pytest, so that a spawned worker starts quickly.
"""

from __future__ import annotations


class Counting:
    """Counts its reads in whatever it was given to count in."""

    def __init__(self, counter):
        self.counter = counter

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if hasattr(self.counter, "get_lock"):
            with self.counter.get_lock():
                self.counter.value += 1
        else:
            self.counter[index] += 1
        return index


class Holding:
    """Writes to its array, and says where the array lies."""

    def __init__(self, array):
        self.array = array

    def __len__(self):
        return 6

    def __getitem__(self, index):
        before = float(self.array[index])
        self.array[index] = -1
        with open("/proc/self/maps") as maps:
            address = self.array.__array_interface__["data"][0]
            for line in maps:
                start, stop = (int(part, 16) for part in line.split()[0].split("-"))
                if start <= address < stop:
                    return before, "memfd:penstock" in line
        raise AssertionError("the array lies nowhere")


class Reading(Holding):
    """Samples are what comes out of a pipe, or what lies in shared ctypes."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return self.array.recv() if hasattr(self.array, "recv") else self.array[index]
