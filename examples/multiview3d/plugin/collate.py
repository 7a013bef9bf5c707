# SPDX-License-Identifier: Apache-2.0
"""Samples to a batch, written straight into the memory that goes to the main process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from mmengine.registry import FUNCTIONS

from plugin.geometry import lidar2img

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.collate import BatchMemory

__all__ = ["CollateViews"]


@FUNCTIONS.register_module()
class CollateViews:
    """Normalises the views, pads them to one size, and packs the boxes of all samples in a row.

    Args:
        mean: Of each channel, in 0..255, RGB.
        std: Likewise.
        divisor: Height and width are padded to multiples of it, with 0 at the right and bottom, so
            that the cameras' matrices stay true.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], divisor: int = 32) -> None:
        self.mean = np.array(mean, np.float32)[:, None, None]
        self.std = np.array(std, np.float32)[:, None, None]
        self.divisor = divisor

    def collate_into(self, samples: Sequence[dict[str, Any]], out: BatchMemory) -> dict[str, Any]:
        return {
            "images": out.leaf(self._images(samples, out)),
            **{name: out.leaf(array) for name, array in _cameras(samples).items()},
            "boxes": out.leaf(np.concatenate([sample["boxes"] for sample in samples])),
            "labels": out.leaf(np.concatenate([sample["labels"] for sample in samples])),
            "num_boxes": out.leaf(np.array([len(sample["boxes"]) for sample in samples])),
            "metas": [_meta(sample) for sample in samples],
        }

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the same batch in memory of its own, for torch's loader."""
        return self.collate_into(samples, _OwnMemory())

    def _images(self, samples: Sequence[dict[str, Any]], out: BatchMemory) -> NDArray[np.float32]:
        views = [sample["views"] for sample in samples]
        sizes = [view.shape[:2] for of_sample in views for view in of_sample]
        height, width = (
            -(-max(side) // self.divisor) * self.divisor for side in zip(*sizes, strict=True)
        )
        images = out.empty((len(samples), len(views[0]), 3, height, width), np.float32)
        for of_batch, of_sample in zip(images, views, strict=True):
            for image, view in zip(of_batch, of_sample, strict=True):
                rows, columns = view.shape[:2]
                inside = image[:, :rows, :columns]
                np.subtract(view.transpose(2, 0, 1), self.mean, out=inside)
                np.divide(inside, self.std, out=inside)
                # The memory holds what an earlier batch left there.
                image[:, rows:] = image[:, :rows, columns:] = 0
        return images


def _cameras(samples: Sequence[dict[str, Any]]) -> dict[str, NDArray[np.float32]]:
    intrinsics = np.stack([sample["intrinsics"] for sample in samples])
    extrinsics = np.stack([sample["extrinsics"] for sample in samples])
    cameras = {
        "intrinsics": intrinsics,
        "extrinsics": extrinsics,
        "lidar2img": lidar2img(intrinsics, extrinsics),  # multiplied in float64
    }
    return {name: matrices.astype(np.float32) for name, matrices in cameras.items()}


def _meta(sample: dict[str, Any]) -> dict[str, Any]:
    return {
        "sample_idx": sample["sample_idx"],
        "token": sample["token"],
        "img_paths": sample["img_paths"],
        "img_shapes": [view.shape[:2] for view in sample["views"]],  # before padding
    }


class _OwnMemory:
    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def leaf(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array)
