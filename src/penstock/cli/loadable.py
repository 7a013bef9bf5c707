# SPDX-License-Identifier: Apache-2.0
"""Datasets named on the command line, whose samples make batches."""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.cli.reasons import errors_in_code, reason_of
from penstock.data import IterableDataset
from penstock.data.names import describe_sample
from penstock.errors import ConfigError, StoreUnreachable
from penstock.loader import Loader

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SIZE_HELP", "has_torch", "is_iterable", "is_loader", "loader_class", "loader_named",
    "open_loadable",
]  # fmt: skip

_MOST_BROKEN: Final = 100  # samples at the front, before a dataset is given up

SIZE_HELP: Final = (
    "Side of the images in pixels, where SRC is a folder, list or store of images: photos are "
    "cropped and resized as for training, annotated ones fitted in."
)


def open_loadable(
    src: str, split: str | None, collate: str | None, size: int, stack: contextlib.ExitStack
) -> tuple[Any, Callable[[list[Any]], Any] | None]:
    """Return a dataset, and the function that collates its samples; None is the default.

    Where `src` names a loader, or what makes one, that is returned in the dataset's place.

    Images of a folder, list or store are of all sizes, and nobody could be asked for a transform:
    they get the usual one.

    Args:
        src: What names it.
        split: Which part of it.
        collate: `module:callable`, or None.
        size: See `SIZE_HELP`.
        stack: Closes what is opened.

    Raises:
        ConfigError: it is no dataset, its first samples are all broken, or `collate` no function.
        MissingExtraError: the libraries of stores are not installed.
    """
    # Here, so that the other commands work without those libraries.
    from penstock.cli.sources import dataset_named, dataset_of, names_a_dataset, object_named

    is_code = names_a_dataset(src)
    with errors_in_code(src) if is_code else contextlib.nullcontext():
        if is_code and split is None:
            found = stack.enter_context(object_named(src))
            dataset = found if is_loader(found) else dataset_of(found, src)
        else:
            dataset = stack.enter_context(dataset_named(src, split))
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")):
        raise ConfigError(f"{src} gave {dataset!r}, which is no dataset.")
    collate_fn = None if is_code else _made_loadable(dataset, size)
    if collate is None:
        return dataset, collate_fn
    with errors_in_code(collate):
        collate_fn = stack.enter_context(object_named(collate))
    if not callable(collate_fn):
        raise ConfigError(
            f"--collate {collate} is of type {type(collate_fn).__qualname__} and cannot be called."
        )
    return dataset, collate_fn


def is_loader(thing: object) -> bool:
    """Return whether something is a loader: torch's, Penstock's, or one like them."""
    return all(hasattr(thing, name) for name in ("dataset", "num_workers", "__iter__"))


def loader_named(text: str, stack: contextlib.ExitStack) -> Any:  # noqa: ANN401
    """Return the loader that `module:name` is, or what a function or class of that name makes.

    Args:
        text: As it was typed.
        stack: Until it is left, the current folder is on the import path.

    Raises:
        ConfigError: there is no such module, or what it names gives no batches.
    """
    from penstock.cli.sources import object_named

    with errors_in_code(text):
        found = stack.enter_context(object_named(text))
        if isinstance(found, type) or (callable(found) and not hasattr(found, "__iter__")):
            found = found()
    if not hasattr(found, "__iter__"):
        raise ConfigError(
            f"{text} is of type {type(found).__qualname__}, which gives no batches. Name a loader, "
            "or a function or a class that makes one."
        )
    return found


def has_torch() -> bool:
    """Return whether what was opened has imported torch, so that its samples may be tensors."""
    return "torch" in sys.modules


def loader_class() -> Any:  # noqa: ANN401 - one of two classes
    """Return the loader that the dataset's owner would use."""
    if has_torch():
        from penstock.torch import DataLoader

        return DataLoader
    return Loader


def is_iterable(dataset: object) -> bool:
    """Return whether a dataset is a stream, by the class of either side."""
    if has_torch():
        import torch.utils.data

        if isinstance(dataset, torch.utils.data.IterableDataset):
            return True
    return isinstance(dataset, IterableDataset)


def _first_readable(dataset: Any) -> Any:  # noqa: ANN401
    """Return a sample, to see what samples are: the first that is not broken.

    Raises:
        ConfigError: too many are.
    """
    numbers = range(min(len(dataset), _MOST_BROKEN))
    for number in numbers:
        try:
            return dataset[number]
        except StoreUnreachable:
            raise
        except Exception as error:  # over damaged data Pillow raises nearly anything
            name, reason = describe_sample(dataset, number), reason_of(error)
    raise ConfigError(
        f"none of the first {len(numbers)} samples can be read; of the last, {name}: {reason}. "
        "`penstock check` lists all that are broken."
    )


def _made_loadable(dataset: Any, size: int) -> Callable[[list[Any]], Any] | None:  # noqa: ANN401
    """Give images a transform if they have none; return the collate function that they need."""
    if getattr(dataset, "transform", True) is not None or not len(dataset):
        return None
    sample = _first_readable(dataset)
    if isinstance(sample, dict) and "image" in sample:
        from penstock.vision import Letterbox, detection_collate

        dataset.transform = Letterbox(size)
        return detection_collate
    if isinstance(sample, tuple) and isinstance(sample[0], np.ndarray) and sample[0].ndim == 3:
        from penstock.vision import ImagePipeline

        dataset.transform = ImagePipeline.train(size)
    return None
