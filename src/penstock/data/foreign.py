# SPDX-License-Identifier: Apache-2.0
"""Datasets of other libraries that loaders take as they are.

A class of another library is known by its name, and only where that library has been imported, so
nothing is imported to find out. What makes a dataset of it lies above the loaders, and is imported
by name when there is one.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["adapted"]


def adapted(
    dataset: Any,  # noqa: ANN401
    collate_fn: Callable[[list[Any]], Any] | None,
    batch_size: int | None,
    **orders: object,
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Return the dataset and the collate function that a loader is to work with.

    They are those that it was given, but for a `ray.data.Dataset` and what
    `penstock.ray.from_ray_data` made of one; these have an order of their own, so that the
    arguments that choose one are refused.
    """
    data: Any = sys.modules.get("ray.data")
    reading: Any = sys.modules.get("penstock.ray.reading")
    kinds = [getattr(data, name, None) for name in ("Dataset", "DataIterator")]
    is_rays = isinstance(dataset, tuple(kind for kind in kinds if isinstance(kind, type)))
    if is_rays or (reading is not None and isinstance(dataset, reading.RayStream)):
        adapter: Any = importlib.import_module("penstock.ray.data")
        found: tuple[Any, Any] = adapter.for_loader(dataset, collate_fn, orders)
        return found
    return dataset, collate_fn
