# SPDX-License-Identifier: Apache-2.0
"""`DetectionCollate`: images with any number of objects each, as one batch.

A sample is a dict as `penstock.vision.samples` describes it, or a pair (image, target) whose target
is a dict of the rest, or an array (N, 5) as SSD's. The batch is `(images, targets)`: the images
stacked, padded to one size or as a list, and a list with what is marked in each.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.collate import Collator
from penstock.errors import CollateError, ConfigError
from penstock.faults import annotate
from penstock.transport.packing import AsTensor
from penstock.vision.arguments import checked_channels, checked_choice, checked_whole
from penstock.vision.pipeline import lookup_tables, write_planes
from penstock.vision.samples import arrays_by_object, as_array, check_masks, is_tensor, num_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import NDArray

    from penstock.collate import BatchMemory

_MOST_CHANNELS: Final = 4  # a longer last axis is no channels, but a width
_ITEM: Final = ""  # the field of which a target that is an array is the rows
# What a field is without a row, where no image of the batch has one.
_NOTHING: Final[dict[str, tuple[tuple[int, ...], np.dtype[Any]]]] = {
    "boxes": ((4,), np.dtype(np.float32)),
    "labels": ((), np.dtype(np.int64)),
    _ITEM: ((5,), np.dtype(np.float32)),
}


class DetectionCollate:
    """Makes `(images, targets)` of samples with objects, as detection code expects it.

    Samples are dicts, or pairs (image, target). A target that is a dict is the rest of the sample's
    dict; one that is an array, as SSD's (N, 5), becomes float32 and is otherwise left as it is.

    In a loader of Penstock the images are converted straight into the slot that goes to the
    main process. In torch's own loader, or called by itself, it makes the same batch.

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
        images: Literal["stack", "pad", "list"] = "stack",
        output: Literal["float_chw", "uint8_hwc"] = "float_chw",
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
                to the largest height and width of the batch, so that boxes stay true, and to masks;
                each target gets "image_size", (height, width) before that. "list" keeps a list of
                images.
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
                "image_size" too.
        """
        checked_choice("images", images, ("stack", "pad", "list"))
        checked_choice("output", output, ("float_chw", "uint8_hwc"))
        checked_choice("targets", targets, ("dict", "array"))
        self._multiple = checked_whole("pad_multiple", pad_multiple, 1)
        if pad_multiple > 1 and images != "pad":
            raise ConfigError(f"pad_multiple={pad_multiple} is for images='pad', not {images!r}")
        if output == "uint8_hwc" and (mean is not None or std is not None):
            raise ConfigError(
                "mean and std are for output='float_chw'; 'uint8_hwc' takes images as they are"
            )
        self._fill = checked_whole("fill", fill, 0, 255)
        self._images = images
        self._converts = output == "float_chw"
        means = checked_channels("mean", mean) or (0.0,)
        stds = checked_channels("std", std) or (1.0,)
        if len({len(means), len(stds)} - {1}) > 1:
            raise ConfigError(f"mean and std have {len(means)} and {len(stds)} values")
        self._tables = lookup_tables(means, stds)  # (channels or 1, 256)
        self._targets = targets
        self.mean, self.std = mean, std

    def __call__(self, samples: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Return the batch in memory of its own."""
        holds_tensors = any(is_tensor(of) for s in samples for of in _as_dict(s).values())
        wrap = sys.modules["torch"].from_numpy if holds_tensors else None
        return self.collate_into(samples, Collator(np.empty, wrap))

    def collate_into(self, samples: Sequence[Any], out: BatchMemory) -> tuple[Any, list[Any]]:
        """Return the batch in memory of `out`; otherwise as calling it does."""
        taken = [_with_arrays(sample, position) for position, sample in enumerate(samples)]
        images = [as_array(sample["image"]) for sample in taken]
        batch, padded = self._collated(images, out)
        items: list[Any] = [_Row] * len(taken)
        if self._targets == "array" and _ITEM not in taken[0]:
            fields = {_ITEM: _class_rows(taken, out)}
        else:
            fields = _fields(taken, out)
        if _ITEM not in fields:
            items = [
                {key: _Row if key in fields else sample[key] for key in sample if key != "image"}
                for sample in taken
            ]
            for item, image in zip(items, images, strict=True):
                if padded is not None:
                    item["image_size"] = _size(image)
                if "masks" in item:
                    num_masks, height, width = item["masks"].shape
                    shape = num_masks, *(padded or _size(image))
                    place = out.empty(shape, item["masks"].dtype)
                    place[:, height:], place[:, :height, width:] = 0, 0  # added at these sides
                    place[:, :height, :width] = item["masks"]
                    item["masks"] = out.leaf(place)
        leaves = {key: _leaf(values, out) for key, values in fields.items()}
        first = next((key for key in (*fields, "boxes") if key in taken[0]), None)
        counts = [len(sample[first]) for sample in taken] if first is not None else []
        return batch, _targets(items, leaves, [0, *itertools.accumulate(counts)])

    def _collated(
        self, arrays: list[NDArray[Any]], out: BatchMemory
    ) -> tuple[Any, tuple[int, int] | None]:
        """Return the images, and where they were padded, height and width of all."""
        shapes = [
            (array.shape[2], *array.shape[:2]) if self._is_converted(array) else array.shape
            for array in arrays
        ]
        if self._images == "list":
            pairs = zip(arrays, shapes, strict=True)
            places = [out.empty(shape, self._dtype(array)) for array, shape in pairs]
            self._write_all(arrays, places)
            return [out.leaf(place) for place in places], None
        if self._images == "pad":
            return self._padded(arrays, shapes, out)
        _check_alike(arrays, shapes)
        batch = out.empty((len(arrays), *shapes[0]), self._dtype(arrays[0]))
        self._write_all(arrays, list(batch))
        return out.leaf(batch), None

    def _padded(
        self, arrays: list[NDArray[Any]], shapes: list[tuple[int, ...]], out: BatchMemory
    ) -> tuple[Any, tuple[int, int]]:
        is_hwc = _is_hwc(arrays[0]) and not self._is_converted(arrays[0])
        axis = 0 if is_hwc else -2
        sizes = [(shape[axis], shape[axis + 1]) for shape in shapes]
        _check_alike(arrays, [shape[2:] if is_hwc else shape[:-2] for shape in shapes])
        height, width = (
            -(-max(side) // self._multiple) * self._multiple for side in zip(*sizes, strict=True)
        )
        of_all = list(shapes[0])
        of_all[axis], of_all[axis + 1] = height, width
        batch = out.empty((len(arrays), *of_all), self._dtype(arrays[0]))
        views = []
        for place, (rows, columns) in zip(batch, sizes, strict=True):
            by_pixel = place if is_hwc else np.moveaxis(place, (-2, -1), (0, 1))
            by_pixel[rows:], by_pixel[:rows, columns:] = self._padding(place), self._padding(place)
            views.append(place[:rows, :columns] if is_hwc else place[..., :rows, :columns])
        self._write_all(arrays, views)
        return out.leaf(batch), (height, width)

    def _padding(self, place: NDArray[Any]) -> NDArray[Any] | float:
        """Return the value of a padded pixel, or one for each channel."""
        if place.dtype.kind != "f":
            return self._fill
        values = self._tables[:, self._fill]
        return values if place.ndim == 3 and len(place) == len(values) else float(values[0])

    def _is_converted(self, array: NDArray[Any]) -> bool:
        return self._converts and array.dtype == np.uint8 and _is_hwc(array)

    def _dtype(self, array: NDArray[Any]) -> np.dtype[Any]:
        return np.dtype(np.float32) if self._is_converted(array) else array.dtype

    def _write_all(self, arrays: list[NDArray[Any]], places: list[NDArray[Any]]) -> None:
        planes: list[NDArray[np.uint8]] = []  # memory to work in
        for array, place in zip(arrays, places, strict=True):
            if not self._is_converted(array):
                place[...] = array
                continue
            num_channels = array.shape[2]
            if [plane.shape for plane in planes] != [array.shape[:2]] * num_channels:
                planes = [np.empty(array.shape[:2], np.uint8) for _ in range(num_channels)]
            if len(self._tables) not in (1, num_channels):
                raise ConfigError(
                    f"mean and std have {len(self._tables)} values, but an image of the batch has "
                    f"{num_channels} channel(s)"
                )
            write_planes(np.ascontiguousarray(array), self._tables, planes, place)


def _is_hwc(array: NDArray[Any]) -> bool:
    """Return whether the channels come last; a uint8 of torch's, (channels, height, width), no."""
    if array.ndim != 3 or array.shape[2] > _MOST_CHANNELS:
        return False
    return array.dtype == np.uint8 or array.shape[0] > _MOST_CHANNELS


def _size(image: NDArray[Any]) -> tuple[int, int]:
    height, width = image.shape[:2] if _is_hwc(image) else image.shape[-2:]
    return height, width


def _check_alike(arrays: list[NDArray[Any]], shapes: list[tuple[int, ...]]) -> None:
    first = arrays[0]
    for position, (array, shape) in enumerate(zip(arrays, shapes, strict=True)):
        if shape != shapes[0] or array.dtype != first.dtype:
            raise CollateError(
                "images of one batch should have the same size and type, but {first} is "
                f"{_described(first)} and {{other}} is {_described(array)}. Resize or letterbox "
                'them in a transform, or collate with DetectionCollate(images="pad") or '
                'DetectionCollate(images="list").',
                (0, position),
            )


def _described(array: NDArray[Any]) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _leaf(values: NDArray[Any], out: BatchMemory) -> Any:  # noqa: ANN401
    """What the batch has for an array; itself, as of texts, where torch has no such type."""
    dtype = values.dtype
    is_number = dtype.kind in "biufc" and dtype.char not in "gG" and dtype.isnative
    return out.leaf(values) if is_number else values


def _as_dict(sample: Any) -> Mapping[Any, Any]:  # noqa: ANN401
    """Return a pair (image, target) as a dict; an empty one for what is neither."""
    if isinstance(sample, Mapping):
        return sample
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        image, target = sample
        if isinstance(target, Mapping):
            return {**target, "image": image}
        with contextlib.suppress(ValueError):  # of rows of several lengths
            shape = np.shape(target)
            if len(shape) == 2 or shape == (0,):
                return {_ITEM: target, "image": image}
    return {}


def _with_arrays(sample: Any, position: int) -> dict[str, Any]:  # noqa: ANN401
    """Return a sample with arrays for tensors, having checked that they fit together."""
    given = _as_dict(sample)
    if "image" not in given:
        has = f" of {sorted(map(str, sample))}" if isinstance(sample, Mapping) else ""
        raise ConfigError(
            'detection_collate takes dicts with an "image", or pairs (image, target) of a dict or '
            f"an array (N, 5); sample {position} of the batch is a {type(sample).__name__}{has}. "
            "Other samples need the default collate, or a collate_fn of your own"
        )
    taken = {key: as_array(value) if is_tensor(value) else value for key, value in given.items()}
    if _ITEM in taken:
        taken[_ITEM] = np.asarray(taken[_ITEM], np.float32)
    for key, (trailing, _) in _NOTHING.items():
        if isinstance(taken.get(key), np.ndarray) and taken[key].shape == (0,):
            taken[key] = taken[key].reshape(0, *trailing)  # np.array([]), as many write it
    try:
        num_objects(taken)
        if "masks" in taken:
            check_masks(taken["masks"], _size(as_array(taken["image"])))
    except ConfigError as error:
        annotate(error, f"in sample {position} of the batch")
        raise
    return taken


def _fields(samples: list[dict[str, Any]], out: BatchMemory) -> dict[str, NDArray[Any]]:
    """Return each array by object: the rows of all images."""
    names = [arrays_by_object(sample) for sample in samples]
    for position, found in enumerate(names):
        others = set(found) ^ set(names[0])
        if others:
            key = min(others)
            having, lacking = ("{first}", "{other}") if key in names[0] else ("{other}", "{first}")
            raise CollateError(
                f"the arrays of objects should be the same in all samples of a batch, but {having} "
                f"has {_quoted(key)} and {lacking} has not. Give every sample one, of no rows if "
                "need be, or drop it in a transform.",
                (0, position),
            )
    fields = [key for key in names[0] if key != "masks"]  # which are as large as their image
    return {key: _field(key, [sample[key] for sample in samples], out) for key in fields}


def _field(key: str, parts: list[NDArray[Any]], out: BatchMemory) -> NDArray[Any]:
    filled = [position for position, part in enumerate(parts) if len(part)]
    if not filled:
        trailing, dtype = _NOTHING.get(key, (parts[0].shape[1:], parts[0].dtype))
        return out.empty((0, *trailing), dtype)
    first = parts[filled[0]]
    for position in filled:
        other = parts[position]
        is_like = first.dtype == other.dtype or first.dtype.kind + other.dtype.kind in ("UU", "SS")
        if first.shape[1:] != other.shape[1:] or not is_like:  # texts may differ in length
            raise CollateError(
                f"{_quoted(key)} should differ in its number of rows alone, but that of {{first}} "
                f"is {_described(first)} and that of {{other}} is {_described(other)}. Make them "
                "alike in the dataset or a transform; what belongs to the image as a whole should "
                "be no array, but a number, str, tuple or dict.",
                (filled[0], position),
            )
    dtype = np.result_type(*(parts[position].dtype for position in filled))
    values = out.empty((sum(map(len, parts)), *first.shape[1:]), dtype)
    np.concatenate([parts[position] for position in filled], out=values)
    return values


def _quoted(key: object) -> str:
    name = f'"{key}"' if key != _ITEM else "the target array"
    return name.replace("{", "{{").replace("}", "}}")  # the message is a template


def _class_rows(samples: list[dict[str, Any]], out: BatchMemory) -> NDArray[np.float32]:
    """Return float32 (objects, 5) of all images: boxes and their classes."""
    for position, sample in enumerate(samples):
        boxes: Any = sample.get("boxes")
        labels: Any = sample.get("labels")
        if boxes is None or labels is None or labels.ndim != 1:
            raise ConfigError(
                'targets="array" is made of "boxes" (N, 4) and "labels" (N,), but sample '
                f"{position} of the batch has boxes {np.shape(boxes)} and labels {np.shape(labels)}"
            )
    wanted = [{key: sample[key] for key in ("boxes", "labels")} for sample in samples]
    fields = _fields(wanted, Collator(np.empty))
    values = out.empty((len(fields["boxes"]), 5), np.float32)
    values[:, :4] = fields["boxes"]
    values[:, 4] = fields["labels"]
    return values


class _Row:
    """Stands where an image's rows of a field belong, in a target that is pickled or made."""


class Targets(list[Any]):
    """A list of targets, one for each image, pickled with one array for the rows of all images."""

    def __init__(
        self,
        items: Iterable[Any] = (),
        leaves: Mapping[str, Any] | None = None,
        offsets: Sequence[int] = (),
        rows: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Keep what was made: the leaves, and the rows of them that each image has."""
        super().__init__(items)
        self._leaves, self._offsets, self._rows = leaves or {}, offsets, rows

    def __reduce__(self) -> tuple[Callable[..., Targets], tuple[Any, ...]]:
        """Pickle as fields; what a user has put in place of rows, as it is."""
        if len(self) != len(self._rows):
            return Targets, (list(self),)
        pairs = zip(self, self._rows, strict=True)
        return _targets, ([_bare(item, rows) for item, rows in pairs], self._leaves, self._offsets)


def _bare(item: Any, rows: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if type(item) is dict:
        return {key: _Row if value is rows.get(key, _Row) else value for key, value in item.items()}
    return _Row if _ITEM in rows and item is rows[_ITEM] else item


def _targets(items: list[Any], leaves: Mapping[str, Any], offsets: Sequence[int]) -> Targets:
    """Return targets whose rows are views of the leaves: arrays, tensors or `AsTensor`s."""
    spans = [*itertools.pairwise(offsets)] or [(0, 0)] * len(items)
    rows = [{key: _part(leaf, *span) for key, leaf in leaves.items()} for span in spans]
    pairs = zip(items, rows, strict=True)
    return Targets([_whole(item, of_image) for item, of_image in pairs], leaves, offsets, rows)


def _whole(item: Any, rows: Mapping[str, Any]) -> Any:  # noqa: ANN401
    if type(item) is dict:
        return {key: rows[key] if value is _Row else value for key, value in item.items()}
    return rows[_ITEM] if item is _Row else item


def _part(leaf: Any, start: int, stop: int) -> Any:  # noqa: ANN401
    if isinstance(leaf, AsTensor):
        return AsTensor(leaf.array[start:stop], leaf.adapter)
    return leaf[start:stop]


detection_collate: Final = DetectionCollate()
"""`DetectionCollate()`: images of one size stacked as float32, a dict for each as its target."""
