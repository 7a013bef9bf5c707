# SPDX-License-Identifier: Apache-2.0
"""Images to one array: stacked, padded to one size, or as a list."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from penstock.errors import CollateError, ConfigError
from penstock.vision.arguments import checked_full_scale
from penstock.vision.normalizing import lookup_tables, write_planes
from penstock.vision.samples import is_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.collate import BatchMemory

__all__ = ["ImageBatch", "Images", "Output", "as_array", "is_tensor"]

Images = Literal["stack", "pad", "list"]
Output = Literal["float_chw", "uint8_hwc"]

_MOST_CHANNELS: Final = 4  # a longer last axis is no channels, but a width


def as_array(value: Any) -> NDArray[Any]:  # noqa: ANN401 - an array, or a CPU tensor
    """Return an array, or a tensor's memory as one."""
    return np.asarray(value.detach() if is_tensor(value) else value)


class ImageBatch:
    """Puts images together as `DetectionCollate` says it."""

    def __init__(
        self,
        images: Images,
        output: Output,
        mean: Sequence[float] | None,
        std: Sequence[float] | None,
        *,
        pad_multiple: int,
        fill: int,
    ) -> None:
        """Check the arguments."""
        if not isinstance(images, str):
            raise ConfigError(
                f"images is 'stack', 'pad' or 'list', not a {type(images).__name__}. As collate_fn "
                "give an instance, DetectionCollate(), not the class, which is called with samples"
            )
        if images not in ("stack", "pad", "list"):
            raise ConfigError(f"images is 'stack', 'pad' or 'list', not {images!r}")
        if output not in ("float_chw", "uint8_hwc"):
            raise ConfigError(f"output is 'float_chw' or 'uint8_hwc', not {output!r}")
        if pad_multiple != int(pad_multiple) or pad_multiple < 1:
            raise ConfigError(f"pad_multiple is a whole number from 1 on, not {pad_multiple!r}")
        if pad_multiple > 1 and images != "pad":
            raise ConfigError(f"pad_multiple={pad_multiple} is for images='pad', not {images!r}")
        if not 0 <= fill <= 255:
            raise ConfigError(f"fill is from 0 to 255, not {fill!r}")
        if output == "uint8_hwc" and (mean is not None or std is not None):
            raise ConfigError(
                "mean and std are for output='float_chw'; 'uint8_hwc' takes images as they are"
            )
        self._images = images
        self._converts = output == "float_chw"
        self._multiple = int(pad_multiple)
        self._fill = fill
        self._values = _values(mean, std)

    def collate(
        self, images: list[Any], out: BatchMemory
    ) -> tuple[Any, list[tuple[int, int]] | None]:
        """Return the images, and where they were padded, the (height, width) of each before."""
        arrays = [as_array(image) for image in images]
        if self._images == "list":
            return self._listed(arrays, out), None
        shapes = [self._shape(array) for array in arrays]
        if self._images == "stack":
            _check_alike(arrays, shapes)
            batch = out.empty((len(arrays), *shapes[0]), self._dtype(arrays[0]))
            self._write_all(arrays, list(batch))
            return out.leaf(batch), None
        return self._padded(arrays, shapes, out)

    def _listed(self, arrays: list[NDArray[Any]], out: BatchMemory) -> list[Any]:
        places = [out.empty(self._shape(array), self._dtype(array)) for array in arrays]
        self._write_all(arrays, places)
        return [out.leaf(place) for place in places]

    def _padded(
        self, arrays: list[NDArray[Any]], shapes: list[tuple[int, ...]], out: BatchMemory
    ) -> tuple[Any, list[tuple[int, int]]]:
        is_hwc = _is_hwc(arrays[0]) and not self._is_converted(arrays[0])
        axis = 0 if is_hwc else -2
        sizes = [_size(shape, axis) for shape in shapes]
        _check_alike(arrays, [_without_size(shape, axis) for shape in shapes])
        height, width = (
            -(-max(side) // self._multiple) * self._multiple for side in zip(*sizes, strict=True)
        )
        shape = list(shapes[0])
        shape[axis], shape[axis + 1] = height, width
        batch = out.empty((len(arrays), *shape), self._dtype(arrays[0]))
        views = []
        for place, (rows, columns) in zip(batch, sizes, strict=True):
            by_pixel = place if is_hwc else np.moveaxis(place, (-2, -1), (0, 1))
            by_pixel[rows:], by_pixel[:rows, columns:] = self._padding(place), self._padding(place)
            views.append(place[:rows, :columns] if is_hwc else place[..., :rows, :columns])
        self._write_all(arrays, views)
        return out.leaf(batch), sizes

    def _padding(self, place: NDArray[Any]) -> NDArray[Any] | float:
        """Return the value of a padded pixel, or one for each channel."""
        if place.dtype.kind != "f":
            return self._fill
        values = self._values[:, self._fill]
        return values if place.ndim == 3 and len(place) == len(values) else float(values[0])

    def _is_converted(self, array: NDArray[Any]) -> bool:
        return self._converts and array.dtype == np.uint8 and _is_hwc(array)

    def _dtype(self, array: NDArray[Any]) -> np.dtype[Any]:
        return np.dtype(np.float32) if self._is_converted(array) else array.dtype

    def _shape(self, array: NDArray[Any]) -> tuple[int, ...]:
        if not self._is_converted(array):
            return array.shape
        height, width, channels = array.shape
        return channels, height, width

    def _write_all(self, arrays: list[NDArray[Any]], places: list[NDArray[Any]]) -> None:
        planes: list[NDArray[np.uint8]] = []
        for array, place in zip(arrays, places, strict=True):
            if not self._is_converted(array):
                place[...] = array
                continue
            if [plane.shape for plane in planes] != [array.shape[:2]] * array.shape[2]:
                planes = [np.empty(array.shape[:2], np.uint8) for _ in range(array.shape[2])]
            self._convert(array, place, planes)

    def _convert(
        self, array: NDArray[Any], place: NDArray[Any], planes: list[NDArray[np.uint8]]
    ) -> None:
        """Write an image as float planes; `planes` is memory to work in."""
        if len(self._values) not in (1, len(planes)):
            raise ConfigError(
                f"mean and std have {len(self._values)} values, but an image of the batch has "
                f"{len(planes)} channel(s)"
            )
        write_planes(np.ascontiguousarray(array), self._values, planes, place)


def _values(mean: Sequence[float] | None, std: Sequence[float] | None) -> NDArray[np.float32]:
    """Return what each value of a uint8 becomes: float32, shape (channels or 1, 256)."""
    of_mean, of_std = (
        np.atleast_1d(np.asarray(default if given is None else given, np.float64))
        for given, default in ((mean, 0.0), (std, 1.0))
    )
    if (
        of_mean.ndim != 1
        or of_std.ndim != 1
        or 0 not in (len(of_mean) - 1, len(of_std) - 1, len(of_mean) - len(of_std))
    ):
        raise ConfigError(
            f"mean and std have a number for each channel, but got mean={mean!r}, std={std!r}"
        )
    if not (np.isfinite(of_mean).all() and np.isfinite(of_std).all() and (of_std > 0).all()):
        raise ConfigError(
            f"mean is finite and std above 0, but got mean={mean!r}, std={std!r}; both are in "
            "units of values in 0..1"
        )
    checked_full_scale("mean", tuple(of_mean.tolist()))
    checked_full_scale("std", tuple(of_std.tolist()))
    return lookup_tables(of_mean, of_std)


def _is_hwc(array: NDArray[Any]) -> bool:
    """Return whether the channels come last; a uint8 of torch's, (channels, height, width), no."""
    if array.ndim != 3 or array.shape[2] > _MOST_CHANNELS:
        return False
    return array.dtype == np.uint8 or array.shape[0] > _MOST_CHANNELS


def _size(shape: tuple[int, ...], axis: int) -> tuple[int, int]:
    if len(shape) < 2:
        raise ConfigError(f"an image has 2 axes or more, but one of the batch has shape {shape}")
    return shape[axis], shape[axis + 1]


def _without_size(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[2:] if axis == 0 else shape[:-2]


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
    if array.ndim == 3:
        height, width = array.shape[:2] if _is_hwc(array) else array.shape[-2:]
        return f"{height} x {width} (height x width) of shape {array.shape}, {array.dtype}"
    return f"of shape {array.shape}, {array.dtype}"
