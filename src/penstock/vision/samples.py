# SPDX-License-Identifier: Apache-2.0
"""What a sample with objects is: a dict whose arrays, other than the image, go by object.

    "image"         uint8 (H, W, 3)         the one array that is not by object
    "boxes"         float32 (N, 4)          left, top, right, bottom: pixels, 0-based, half-open
    "labels"        int64 (N,)              and any other array with N rows
    "landmarks"     float32 (N, K, 2)       (0, 0) is the centre of the top left pixel; NaN: none
    "masks"         uint8, bool (N, H, W)   1 in an object
    "image_id", …   str, int, tuple, dict   of the image as a whole

So what drops an object drops its row of every array, of those too that a user has added.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

_BY_OBJECT: Final = ("boxes", "labels", "landmarks", "masks")
_HALF: Final = 127  # of 255


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor of torch, which need not be imported."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def as_array(value: Any) -> NDArray[Any]:  # noqa: ANN401 - an array, or a CPU tensor
    """Return an array, or a tensor's memory as one."""
    return np.asarray(value.detach() if is_tensor(value) else value)


def num_objects(sample: Mapping[str, Any]) -> int:
    """Return how many objects a sample has, having checked that its arrays agree on it."""
    for key, value in sample.items():
        if isinstance(value, np.ndarray) or key == "image":
            continue
        # What goes by object and is no array would not follow its object. A sample for
        # classification may well call its one class "labels".
        is_of_image = key == "labels" and "boxes" not in sample and np.isscalar(value)
        if is_tensor(value) or (key in _BY_OBJECT and not is_of_image):
            remedy = "value.numpy()" if is_tensor(value) else "numpy.asarray(value)"
            raise ConfigError(
                f'"{key}" of a sample is of type {type(value).__name__}, but what goes by object '
                f"is a numpy array with a row for each: {remedy} in the dataset. "
                "(detection_collate makes tensors of arrays. What belongs to the whole image is a "
                "number, str, tuple or dict, under another name than boxes or labels, say)"
            )
    shape = np.shape(sample.get("boxes", np.empty((0, 4))))
    if len(shape) != 2 or shape[1] != 4:
        raise ConfigError(
            f'"boxes" of a sample has the shape {shape}, not (N, 4): left, top, right and bottom '
            "of each object; without an object it is (0, 4)"
        )
    names = arrays_by_object(sample)
    first = "boxes" if "boxes" in names else next(iter(names), None)
    num_rows = len(sample[first]) if first is not None and sample[first].ndim else 0
    for key in names:
        shape = sample[key].shape
        if not shape or shape[0] != num_rows:
            raise ConfigError(
                f'"{key}" of a sample has the shape {shape}, but "{first}" has {num_rows} rows: '
                'each array other than "image" has a row for each object. Keep what belongs to '
                "the whole image as a number, str, tuple or dict"
            )
    return num_rows


def kept(sample: Mapping[str, Any], which: NDArray[Any]) -> dict[str, Any]:
    """Return a new sample with some of its objects; only their arrays are copied."""
    num_objects(sample)
    rows = arrays_by_object(sample)
    return {key: value[which] if key in rows else value for key, value in sample.items()}


def arrays_by_object(sample: Mapping[str, Any]) -> list[str]:
    """Return the names of a sample's arrays that have a row for each object."""
    return [
        key for key, value in sample.items() if key != "image" and isinstance(value, np.ndarray)
    ]


def image_of(sample: Any) -> NDArray[Any]:  # noqa: ANN401 - it is being checked
    """Return the image of a sample, or the sample itself where it is a bare image."""
    image = sample.get("image") if isinstance(sample, dict) else sample
    if isinstance(image, np.ndarray) and image.ndim in {2, 3} and image.size:
        return image
    found = f"shape {image.shape}" if isinstance(image, np.ndarray) else type(image).__name__
    raise ConfigError(
        "a transform takes an image as a uint8 array (H, W, 3), or a dict with one under "
        f'"image"; got {found}. A transform that makes tensors comes last; Pillow\'s images '
        "become arrays by numpy.asarray(image)"
    )


def colour_image_of(sample: Any, name: str) -> NDArray[np.uint8]:  # noqa: ANN401
    """Return the image of a sample for the transform `name`, which takes uint8 RGB."""
    image = image_of(sample)
    if image.dtype != np.uint8 or image.shape[2:] != (3,):
        raise ConfigError(
            f"{name} takes uint8 (H, W, 3), RGB; got {image.dtype} {image.shape}. Put it before "
            "what normalises the image"
        )
    return image


def with_image(
    sample: Any,  # noqa: ANN401
    image: NDArray[Any],
    move: Callable[[NDArray[np.uint8]], NDArray[Any]] | None = None,
) -> Any:  # noqa: ANN401
    """Return a new dict with another image; the image itself where the sample is a bare one.

    `move` does to a mask, 0 or 255 in each pixel, what was done to the image; half of a pixel is
    one. Without it no pixel was moved.
    """
    if not isinstance(sample, dict):
        return image
    result = {**sample, "image": image}
    if move is not None and isinstance(masks := sample.get("masks"), np.ndarray):
        check_masks(masks, sample["image"].shape[:2])
        result["masks"] = np.empty((len(masks), *image.shape[:2]), masks.dtype)
        for number, mask in enumerate(masks):
            moved = move(np.where(mask, np.uint8(255), np.uint8(0)))
            result["masks"][number] = moved > _HALF
    return result


def check_masks(masks: NDArray[Any], size: tuple[int, ...]) -> None:
    """Raise unless masks are as large as their image, whose height and width are given."""
    if masks.shape[1:] != size:
        raise ConfigError(
            f'"masks" of a sample has the shape {masks.shape}, and its image has {size[0]} x '
            f"{size[1]} pixels (height x width): masks are (N, height, width)"
        )


def without_letterbox(sample: Any) -> Any:  # noqa: ANN401
    """Return a sample without what `Letterbox` noted, which is true until pixels move."""
    if not isinstance(sample, dict) or "letterbox" not in sample:
        return sample
    return {key: value for key, value in sample.items() if key != "letterbox"}


def joined(samples: Sequence[Mapping[str, Any]], image: NDArray[Any]) -> dict[str, Any]:
    """Return one sample with the objects of several, which `image` shows."""
    counts = [num_objects(sample) for sample in samples]
    result = {**without_letterbox(samples[0]), "image": image}
    # An image without objects may not know how many landmarks each would have had, nor of them.
    filled = [sample for sample, count in zip(samples, counts, strict=True) if count]
    for key in dict.fromkeys(key for sample in samples for key in arrays_by_object(sample)):
        having = filled or [sample for sample in samples if key in sample][:1]
        arrays: list[Any] = [sample.get(key) for sample in having]
        shapes = {str(a.shape[1:]) if isinstance(a, np.ndarray) else "no array" for a in arrays}
        if len(shapes) > 1:
            raise ConfigError(
                f'the objects of several images cannot be joined: "{key}" has, for each object, '
                f"{' and '.join(sorted(shapes))}. All samples need the same arrays"
            )
        if shapes == {"no array"}:
            result.pop(key, None)
        else:
            result[key] = np.concatenate(arrays)
    return result
