# SPDX-License-Identifier: Apache-2.0
"""The first batches of a loader of the user's, as samples that can be drawn."""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.loadable import loader_named
from penstock.cli.reasons import errors_in_code
from penstock.data.labels.names import class_names_of
from penstock.errors import ConfigError
from penstock.vision.drawing import samples_of_batch

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator

__all__ = ["samples_of_loader"]

_PARTS: Final = ("dataset", "transform", "transforms", "collate_fn", "device_transform")
_MOST_PARTS: Final = 100  # of a list: it may be the data
_DEEPEST: Final = 6


def samples_of_loader(
    text: str, stack: contextlib.ExitStack, num_images: int, epoch: int
) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """Return the first images that a loader gives, with what the batches say of them.

    Args:
        text: `module:name` of the loader.
        stack: Until it is left, the current folder is on the import path.
        num_images: How many images, if there are so many.
        epoch: Which epoch; 0 is the one that the loader begins with.

    Returns:
        Samples as `contact_sheet` takes them, and the names of the classes; () if not known.

    Raises:
        ConfigError: it is no loader, gives no batches, or gives batches without images.
    """
    loader = loader_named(text, stack)
    samples: list[dict[str, Any]] = []
    with errors_in_code(text):
        if epoch:
            if not hasattr(loader, "set_epoch"):
                raise ConfigError(f"--epoch: {text} has no method set_epoch.")
            loader.set_epoch(epoch)
        known = tuple(_normalizations(loader))
        for batch in loader:
            samples += samples_of_batch(batch, known)
            if len(samples) >= num_images:
                break
    if not samples:
        raise ConfigError(f"{text} gives no batches.")
    return samples[:num_images], class_names_of(getattr(loader, "dataset", None)) or ()


def _normalizations(part: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield each mean and standard deviation that a loader's parts say they normalise with."""
    if isinstance(part, (list, tuple)):
        for item in part[:_MOST_PARTS]:
            yield from _normalizations(item, depth + 1)
        return
    mean, std = getattr(part, "mean", None), getattr(part, "std", None)
    if _are_numbers(mean) and _are_numbers(std):
        yield mean, std
    if depth < _DEEPEST:
        for name in _PARTS:
            inner = getattr(part, name, None)
            if inner is not None and inner is not part:
                yield from _normalizations(inner, depth + 1)


def _are_numbers(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, numbers.Real) for item in value)
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 1
