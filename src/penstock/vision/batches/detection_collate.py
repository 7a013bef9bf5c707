# SPDX-License-Identifier: Apache-2.0
"""`detection_collate`: images with any number of objects each, as one batch.

A sample is a dict as `penstock.vision.samples` describes it. The batch is `(images, targets)`: the
images in one array, and a list with what is marked in each.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.collate import Collator
from penstock.errors import CollateError, ConfigError
from penstock.faults import annotate
from penstock.vision.batches.image_batch import ImageBatch, as_array, is_tensor
from penstock.vision.batches.targets import Targets, split
from penstock.vision.samples import num_objects

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import DTypeLike, NDArray

    from penstock.collate import BatchMemory
    from penstock.vision.batches.image_batch import Images, Output

__all__ = ["DetectionCollate", "detection_collate"]

# What a field is without a row, where no image of the batch has one.
_NOTHING: Final[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {
    "boxes": ((4,), np.dtype(np.float32)),
    "labels": ((), np.dtype(np.int64)),
}


class DetectionCollate:
    """Makes `(images, targets)` of samples with objects, as detection code expects it.

    In a loader of Penstock the images are converted straight into the slot that goes to the
    main process. In torch's own loader, or called by itself, it makes the same batch.

    Concurrency:
        Any thread or process; it pickles.

    Example:
        >>> boxes = np.array([[0, 0, 8, 6], [2, 2, 4, 4]], np.float32)
        >>> photo = {"image": np.full((6, 8, 3), 255, np.uint8), "image_id": "a",
        ...          "boxes": boxes, "labels": np.array([1, 0])}
        >>> plain = {**photo, "image_id": "b", "boxes": boxes[:0], "labels": np.array([], int)}
        >>> images, targets = DetectionCollate()([photo, plain])
        >>> images.shape, images.dtype, images.max()
        ((2, 3, 6, 8), dtype('float32'), np.float32(1.0))
        >>> [(target["image_id"], target["boxes"].shape) for target in targets]
        [('a', (2, 4)), ('b', (0, 4))]
    """

    def __init__(
        self,
        images: Images = "stack",
        output: Output = "float_chw",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        *,
        pad_multiple: int = 1,
        fill: int = 114,
        targets: Literal["dict", "array"] = "dict",
    ) -> None:
        """Choose the form of the batch.

        Args:
            images: "stack" wants images of one size. "pad" adds pixels at the right and bottom, up
                to the largest height and width of the batch, so that boxes stay true; each target
                gets "image_size", (height, width) before that. "list" keeps a list of images.
            output: "float_chw" makes float32 (channels, height, width) in 0..1 of uint8 images of
                shape (height, width, channels). Whatever else a transform made, floats or tensors,
                is taken as it is. "uint8_hwc" takes all as they are.
            mean: Subtracted from the values in 0..1, one per channel, of images converted here.
                Itself in units of 0..1: (0.485, 0.456, 0.406) rather than (123.7, 116.3, 103.5).
            std: Then they are divided by it. Likewise.
            pad_multiple: "pad" goes on to a multiple of this many pixels, 32 for most networks.
            fill: Value of pixels that "pad" adds, from 0 to 255; converted like the others.
            targets: "dict" gives a dict per image: all of the sample but the image, as
                torchvision's detectors take it. "array" gives float32 (objects, 5), each row x1,
                y1, x2, y2, class, as older SSD and RetinaNet code takes it; all else is left out,
                "image_size" too: who needs the sizes before padding takes "dict".

        Raises:
            ConfigError: an argument is out of its range, or contradicts another.
        """
        if targets not in ("dict", "array"):
            raise ConfigError(f"targets is 'dict' or 'array', not {targets!r}")
        self._images = ImageBatch(images, output, mean, std, pad_multiple=pad_multiple, fill=fill)
        self._targets = targets
        self.mean, self.std = mean, std

    def __call__(self, samples: Sequence[Mapping[str, Any]]) -> tuple[Any, list[Any]]:
        """Return the batch in memory of its own.

        Args:
            samples: At least one.

        Returns:
            The images, and a target for each. Tensors if any sample holds one, otherwise arrays.

        Raises:
            CollateError: images of different sizes are to be stacked, or arrays of a name differ in
                type or shape; the message names two samples.
            ConfigError: a sample is no dict with an image, or its arrays differ in their rows.
        """
        holds_tensors = any(map(_holds_tensors, samples))
        out: BatchMemory = _TensorMemory() if holds_tensors else Collator(np.empty)
        return self.collate_into(samples, out)

    def collate_into(
        self, samples: Sequence[Mapping[str, Any]], out: BatchMemory
    ) -> tuple[Any, list[Any]]:
        """Return the batch in memory of `out`; otherwise as calling it does."""
        taken = [_with_arrays(sample, position) for position, sample in enumerate(samples)]
        batch, sizes = self._images.collate([sample["image"] for sample in taken], out)
        if self._targets == "array":
            return batch, _class_rows(taken, out)
        rows = {
            key: split(_leaf(values, out), offsets)
            for key, (values, offsets) in _fields(taken, out).items()
        }
        targets = Targets(_target(sample, rows, number) for number, sample in enumerate(taken))
        if sizes is not None:
            for target, size in zip(targets, sizes, strict=True):
                target["image_size"] = size
        return batch, targets


def _holds_tensors(sample: object) -> bool:
    return isinstance(sample, Mapping) and any(map(is_tensor, sample.values()))


def _leaf(values: NDArray[Any], out: BatchMemory) -> Any:  # noqa: ANN401
    """What the batch has for an array; itself, as of texts, where torch has no such type."""
    dtype = values.dtype
    is_number = dtype.kind in "biufc" and dtype.char not in "gG" and dtype.isnative
    return out.leaf(values) if is_number else values


class _TensorMemory:
    """Ordinary memory, of which leaves are tensors."""

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        return np.empty(shape, dtype)

    def leaf(self, array: NDArray[Any]) -> Any:  # noqa: ANN401
        return sys.modules["torch"].from_numpy(array)


def _with_arrays(sample: Any, position: int) -> dict[str, Any]:  # noqa: ANN401
    """Return a sample with arrays for tensors, having checked that they fit together."""
    if not isinstance(sample, Mapping) or "image" not in sample:
        what = (
            f"a dict of {sorted(map(str, sample))}"
            if isinstance(sample, Mapping)
            else type(sample).__name__
        )
        raise ConfigError(
            f'detection_collate takes dicts with an "image", but sample {position} of the batch '
            f"is {what}. Other samples need the default collate, or a collate_fn of your own"
        )
    taken = {key: as_array(value) if is_tensor(value) else value for key, value in sample.items()}
    for key, (trailing, _) in _NOTHING.items():
        if isinstance(taken.get(key), np.ndarray) and taken[key].shape == (0,):
            taken[key] = taken[key].reshape(0, *trailing)  # np.array([]), as many write it
    try:
        num_objects(taken)
    except ConfigError as error:
        annotate(error, f"in sample {position} of the batch")
        raise
    return taken


def _target(sample: dict[str, Any], rows: dict[str, list[Any]], number: int) -> dict[str, Any]:
    return {k: rows[k][number] if k in rows else v for k, v in sample.items() if k != "image"}


def _fields(
    samples: list[dict[str, Any]], out: BatchMemory
) -> dict[str, tuple[NDArray[Any], NDArray[np.int64]]]:
    """Return each array by object: the rows of all images, and where each image's begin."""
    names = [_arrays_in(sample) for sample in samples]
    for position, found in enumerate(names):
        if found.keys() != names[0].keys():
            key = min(found.keys() ^ names[0].keys())
            having, lacking = ("{first}", "{other}") if key in names[0] else ("{other}", "{first}")
            raise CollateError(
                f"the arrays of objects should be the same in all samples of a batch, but {having} "
                f"has {_quoted(key)} and {lacking} has not. Give every sample one, of no rows if "
                "need be, or drop it in a transform.",
                (0, position),
            )
    return {key: _field(key, [sample[key] for sample in samples], out) for key in names[0]}


def _arrays_in(sample: dict[str, Any]) -> dict[str, None]:
    return {k: None for k, v in sample.items() if k != "image" and isinstance(v, np.ndarray)}


def _field(
    key: str, parts: list[NDArray[Any]], out: BatchMemory
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    filled = [position for position, part in enumerate(parts) if len(part)]
    dtype: np.dtype[Any]
    if filled:
        like = parts[filled[0]]
        for position in filled:
            _check_like(key, like, parts[position], (filled[0], position))
        trailing, dtype = like.shape[1:], np.result_type(*(parts[p].dtype for p in filled))
    else:
        trailing, dtype = _NOTHING.get(key, (parts[0].shape[1:], parts[0].dtype))
    offsets = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=offsets[1:])
    values = out.empty((int(offsets[-1]), *trailing), dtype)
    if filled:
        np.concatenate([parts[position] for position in filled], out=values)
    return values, offsets


def _check_like(
    key: str, first: NDArray[Any], other: NDArray[Any], positions: tuple[int, int]
) -> None:
    """Raise unless two arrays of objects can be rows of one; texts may differ in length."""
    kinds = first.dtype.kind + other.dtype.kind
    if first.shape[1:] == other.shape[1:] and (first.dtype == other.dtype or kinds in ("UU", "SS")):
        return
    raise CollateError(
        f"{_quoted(key)} should differ in its number of rows alone, but that of {{first}} is "
        f"{_described(first)} and that of {{other}} is {_described(other)}. Make them alike in "
        "the dataset or a transform; what belongs to the image as a whole should be no array, but "
        "a number, str, tuple or dict.",
        positions,
    )


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _quoted(key: object) -> str:
    return f'"{key}"'.replace("{", "{{").replace("}", "}}")  # the message is a template


def _class_rows(samples: list[dict[str, Any]], out: BatchMemory) -> Targets:
    """Return float32 (objects, 5) for each image: its boxes and their classes."""
    for position, sample in enumerate(samples):
        boxes, labels = sample.get("boxes"), sample.get("labels")
        if boxes is None or labels is None or labels.ndim != 1:
            shape = "none" if labels is None else f"of shape {labels.shape}"
            raise ConfigError(
                'targets="array" is made of "boxes" (N, 4) and "labels" (N,), but sample '
                f"{position} of the batch has {'no' if boxes is None else 'its'} boxes, and labels "
                f"{shape}"
            )
    wanted = [{key: sample[key] for key in ("boxes", "labels")} for sample in samples]
    fields = _fields(wanted, Collator(np.empty))
    corners, offsets = fields["boxes"]
    values = out.empty((len(corners), 5), np.float32)
    values[:, :4] = corners
    values[:, 4] = fields["labels"][0]
    return Targets(split(out.leaf(values), offsets))


detection_collate: Final = DetectionCollate()
"""`DetectionCollate()`: images of one size stacked as float32, a dict for each as its target."""
