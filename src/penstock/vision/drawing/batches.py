# SPDX-License-Identifier: Apache-2.0
"""A batch as a model gets it, taken apart into samples that can be drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.vision.batches import as_array, is_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

__all__ = ["samples_of_batch"]

_MOST_CHANNELS: Final = 4
_NAMES: Final = ("image", "images", "img", "pixel_values")  # of images in a dict
_SLACK: Final = 0.02  # beyond 0..1 of rounding, and of a resampling that overshoots
# The usual ones, for images that no known pair fits.
_USUAL: Final = (((0.5,), (0.5,)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def samples_of_batch(
    batch: Any,  # noqa: ANN401 - of any loader
    normalized: Sequence[tuple[Any, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the samples of a batch, as `contact_sheet` takes them.

    Args:
        batch: Images of shape (batch, channels, height, width) or (batch, height, width, channels),
            floats or uint8, or a list of images; alone, first in a tuple, or in a dict by the name
            "image", "images", "img" or "pixel_values". Beside them classes, (batch,) or (batch,
            classes); or targets: a dict per image, arrays of rows x1, y1, x2, y2, class, or a dict
            of arrays with a row per image.
        normalized: Mean and standard deviation, in units of 0..1, that images may have been
            normalised with. The first pair that fits is undone, then the usual ones are tried.

    Returns:
        Dicts with an "image", (height, width, channels) or (channels, height, width), of uint8 or
        of floats within 0..1 if their scale is known, and what else the batch has of it.

    Raises:
        ConfigError: there are no images in the batch; the message names its leaves.

    Example:
        >>> batch = np.zeros((2, 3, 32, 32), np.float32), np.array([3, 5])
        >>> [(one["image"].shape, int(one["label"])) for one in samples_of_batch(batch)]
        [((3, 32, 32), 3), ((3, 32, 32), 5)]
    """
    images, others = _parted(batch)
    pixels = [_on_host(image) for image in images]
    scaled = _unnormalized(pixels, normalized)
    return [{**_marked(others, n, len(scaled)), "image": image} for n, image in enumerate(scaled)]


def _parted(batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the images of a batch, and the rest: a dict of fields, targets, or None."""
    if isinstance(batch, Mapping):
        for name in _NAMES:
            if name in batch and _are_images(batch[name]):
                return batch[name], {key: value for key, value in batch.items() if key != name}
    elif _are_images(batch):
        return batch, None
    elif isinstance(batch, Sequence) and len(batch) and _are_images(batch[0]):
        return batch[0], batch[1] if len(batch) > 1 else None
    names = " or ".join(map(repr, _NAMES))
    raise ConfigError(
        f"no images in the batch: {', '.join(_described(batch, 'batch'))}. Images are an array of "
        f"shape (batch, channels, height, width) or (batch, height, width, channels), or a list of "
        f"images; alone, first in a tuple, or in a dict as {names}."
    )


def _are_images(leaf: Any) -> bool:  # noqa: ANN401
    if isinstance(leaf, (list, tuple)):
        return bool(leaf) and all(map(_is_image, leaf))
    shape: tuple[int, ...] = getattr(leaf, "shape", ())
    return len(shape) == 4 and shape[0] > 0 and _has_channels(shape[1:])


def _is_image(leaf: Any) -> bool:  # noqa: ANN401
    shape: tuple[int, ...] = getattr(leaf, "shape", ())
    return len(shape) == 3 and _has_channels(shape)


def _has_channels(shape: tuple[int, ...]) -> bool:
    return 0 not in shape and (shape[0] <= _MOST_CHANNELS or shape[2] <= _MOST_CHANNELS)


def _described(value: Any, name: str) -> Iterator[str]:  # noqa: ANN401
    """Yield what each leaf is, of which type and shape."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _described(item, f"{name}[{key!r}]")
    elif isinstance(value, (list, tuple)) and any(hasattr(item, "shape") for item in value):
        for number, item in enumerate(value[:_MOST_CHANNELS]):
            yield from _described(item, f"{name}[{number}]")
    elif hasattr(value, "shape"):
        yield f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}"
    else:
        yield f"{name} is of type {type(value).__qualname__}"


def _on_host(leaf: Any) -> NDArray[Any]:  # noqa: ANN401
    """Return a leaf as an array; numpy has no bfloat16."""
    if is_tensor(leaf):
        leaf = leaf.detach().cpu()
        leaf = leaf.float() if leaf.is_floating_point() else leaf
    return as_array(leaf)


def _unnormalized(
    images: list[NDArray[Any]], normalized: Sequence[tuple[Any, Any]]
) -> list[NDArray[Any]]:
    """Return images within 0..1 if their normalisation is known, or a usual one fits."""
    if images[0].dtype.kind != "f":
        return images
    least = min(float(image.min()) for image in images)
    most = max(float(image.max()) for image in images)
    if not np.isfinite([least, most]).all() or (least >= 0 and most <= 1):
        return images
    if least >= 0 and most <= 255:
        return [image / 255 for image in images]
    for mean, std in (*normalized, *_USUAL):
        undone = [_undone(image, mean, std) for image in images]
        if all(
            one is not None and one.min() >= -_SLACK and one.max() <= 1 + _SLACK for one in undone
        ):
            return [np.clip(one, 0, 1) for one in undone if one is not None]
    return images


def _undone(image: NDArray[Any], mean: Any, std: Any) -> NDArray[Any] | None:  # noqa: ANN401
    """Return an image without its normalisation; None if that has another number of channels."""
    means, stds = np.ravel(mean), np.ravel(std)
    is_first = image.shape[2] > _MOST_CHANNELS
    if {len(means), len(stds)} - {1, image.shape[0 if is_first else 2]}:
        return None
    shape = (-1, 1, 1) if is_first else (1, 1, -1)
    undone: NDArray[Any] = image * stds.reshape(shape) + means.reshape(shape)
    return undone


def _marked(others: Any, number: int, num_images: int) -> dict[str, Any]:  # noqa: ANN401
    """Return what the batch says of one of its images."""
    if isinstance(others, Mapping):
        rows = {key: row for key, leaf in others.items() for row in _row(leaf, number, num_images)}
        if "boxes" not in rows and np.ndim(rows.get("labels", ())) == 0:
            rows["label"] = rows.pop("labels")  # one class for the image
        return rows
    for row in _row(others, number, num_images):
        if isinstance(row, Mapping):
            return {key: _leaf(value) for key, value in row.items()}
        if isinstance(row, np.ndarray) and row.ndim == 2 and row.shape[1] == 5:
            return {"boxes": row[:, :4], "labels": row[:, 4].astype(np.int64)}
        return {"label": row}
    return {}


def _row(leaf: Any, number: int, num_images: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield the row of an image, where a leaf has one for each."""
    if is_tensor(leaf):
        leaf = _on_host(leaf)
    has_rows = isinstance(leaf, (list, tuple)) or getattr(leaf, "ndim", 0) > 0
    if has_rows and len(leaf) == num_images:
        yield _leaf(leaf[number])


def _leaf(value: Any) -> Any:  # noqa: ANN401
    return _on_host(value) if is_tensor(value) else value
