# SPDX-License-Identifier: Apache-2.0
"""Samples of any usual form, as they can be shown: an RGB image, and what is marked in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from penstock.errors import ConfigError
from penstock.vision.batches.image_batch import as_array, is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Unshown", "class_of", "class_text", "sample_of", "shown_image"]

_MOST_CHANNELS: Final = 4
_NUM_SHOWN: Final = 2  # classes of a mixture


class Unshown(NamedTuple):
    """A sample that cannot be made, in a contact sheet: what it is called, and why."""

    name: str
    reason: str


def sample_of(sample: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a sample as a dict with an "image", uint8 (height, width, 3), and arrays.

    Args:
        sample: A dict with an "image"; (image, dict); (image, class); or an image by itself.

    Raises:
        ConfigError: there is no image in it.
    """
    if isinstance(sample, Mapping):
        found = dict(sample)
    elif isinstance(sample, (tuple, list)) and len(sample) > 1 and isinstance(sample[1], Mapping):
        found = {**sample[1], "image": sample[0]}
    elif isinstance(sample, (tuple, list)) and sample:
        found = (
            {"image": sample[0]} if len(sample) == 1 else {"image": sample[0], "label": sample[1]}
        )
    else:
        found = {"image": sample}
    if "image" not in found:
        raise ConfigError(f'a sample has no "image", but {", ".join(map(repr, found))}')
    found = {key: as_array(value) if is_tensor(value) else value for key, value in found.items()}
    found["image"] = shown_image(found["image"])
    return found


def shown_image(image: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    """Return an image as uint8 (height, width, 3), a copy.

    Args:
        image: An array or tensor with the channels last or first, or without; or Pillow's. Floats
            within 0..1 are taken as such; others, normalised ones, are stretched from their least
            to their largest value.

    Raises:
        ConfigError: it is no image.
    """
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = as_array(image)
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3) or not pixels.size:
        raise ConfigError(
            f"an image should be an array of 2 or 3 axes, but got {type(image).__name__} of shape "
            f"{pixels.shape}, dtype {pixels.dtype}"
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] > _MOST_CHANNELS >= pixels.shape[0]:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., : 3 if pixels.shape[2] >= 3 else 1]  # neither alpha, nor grey's
    return np.array(np.broadcast_to(_in_bytes(pixels), (*pixels.shape[:2], 3)), order="C")


def _in_bytes(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    if pixels.dtype == np.uint8:
        return pixels
    values = np.nan_to_num(pixels.astype(np.float64))
    least, most = values.min(), values.max()
    if pixels.dtype.kind == "f" and least >= 0 and most <= 1:
        least, most = 0.0, 1.0
    elif pixels.dtype.kind != "f" and least >= 0 and most <= 255:
        least, most = 0.0, 255.0
    scaled = (values - least) * (255 / max(most - least, 1e-12))
    in_bytes: NDArray[np.uint8] = np.rint(scaled).astype(np.uint8)
    return in_bytes


def class_of(label: Any, class_names: Sequence[str]) -> int | str | None:  # noqa: ANN401
    """Return the number of a class, of a mixture that of its largest part.

    A text that is none of `class_names` stays a text; None is returned for what is no class, as
    NaN and infinity.

    Example:
        >>> names = ["cat", "dog"]
        >>> [class_of(label, names) for label in (1, [0.2, 0.8], "dog", "cow", float("nan"))]
        [1, 1, 1, 'cow', None]
    """
    if isinstance(label, str):
        return class_names.index(label) if label in class_names else str(label)
    weights = np.asarray(label)
    if weights.dtype.kind not in "biuf" or not weights.size or not np.isfinite(weights).all():
        return None
    return int(weights.argmax()) if weights.ndim else int(weights)


def class_text(label: Any, class_names: Sequence[str]) -> str:  # noqa: ANN401
    """Return what a class is called; of a mixture, its largest parts.

    Example:
        >>> class_text(1, ["cat", "dog"]), class_text([0.7, 0.3], ["cat", "dog"])
        ('dog', '0.70 cat + 0.30 dog')
    """
    if isinstance(label, str):
        return label.splitlines()[0] if label else ""  # a packed VOC folder has whole files here
    weights = np.asarray(label)
    if weights.dtype.kind not in "biuf":
        return ""
    if weights.ndim:
        largest = [
            n
            for n in np.argsort(-weights.ravel(), kind="stable")[:_NUM_SHOWN]
            if weights.ravel()[n] > 0
        ]
        if len(largest) == 1 and weights.ravel()[largest[0]] == 1:
            return class_text(largest[0], class_names)
        return " + ".join(f"{weights.ravel()[n]:.2f} {class_text(n, class_names)}" for n in largest)
    number = weights.item()
    if isinstance(number, int) and 0 <= number < len(class_names):
        return class_names[number]
    return f"{number:g}"
