# SPDX-License-Identifier: Apache-2.0
"""A collate function that writes into the slot, in a module that does not import torch."""

from __future__ import annotations

import sys

import numpy as np

from penstock.collate import Collator
from penstock.errors import CollateError
from penstock.transport.packing import AsTensor


class Rows:
    """Samples of 3 x 900 floats, 10 KiB: enough to lie in a slot."""

    def __init__(self, length=12, odd=()):
        self.length, self.odd = length, odd

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        width = 7 if index in self.odd else 900
        return np.full((3, width), index, np.float32), f"sample {index}"


class Doubled:
    """Twice the samples; says what kind of memory it got, and what a leaf is there."""

    def collate_into(self, samples, out):
        first = samples[0][0]
        batch = out.empty((len(samples), *first.shape), first.dtype)
        for position, (place, (row, _)) in enumerate(zip(batch, samples, strict=True)):
            if row.shape != first.shape:
                raise CollateError("{first} and {other} differ in width.", (0, position))
            np.multiply(row, 2, out=place)
        leaf = out.leaf(batch)
        kind = "late tensor" if isinstance(leaf, AsTensor) else type(leaf).__name__
        is_copied = batch.base is None
        names = out.leaf(np.array([name for _, name in samples]))
        return leaf, names, {"kind": kind, "is_copied": is_copied, "torch": "torch" in sys.modules}

    def __call__(self, samples):
        return self.collate_into(samples, Collator(np.empty))
