# SPDX-License-Identifier: Apache-2.0
"""`ImagePipeline`: from a file's bytes to a row of the batch, in one chain.

    decode -> crop -> resize -> flip -> colour -> your own steps -> normalise, layout
    '----- images.regions ----'                                    '-- into the slot --'

The crop is drawn from the header's size, so that no more is decoded than it needs.
"""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Self, cast

import cv2
import numpy as np
from PIL import Image

from penstock.deprecation import removed_arguments
from penstock.faults import annotate
from penstock.images.headers import MAX_PIXELS, read_header
from penstock.images.regions import Region, decode_region, reduced, reduction
from penstock.opening import read_file
from penstock.randomness.samples import sample_rng
from penstock.stores.records import EncodedImage
from penstock.vision.arguments import (
    ShownByArguments,
    checked_channels,
    checked_choice,
    checked_number,
    checked_size,
    checked_transforms,
)
from penstock.vision.crops import CenterCropResize, Cut, RandomResizedCrop, checked_crop

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.vision.crops import Crop
    from penstock.vision.transforms.color import ColorJitter

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
"""Mean of ImageNet's pixels, for red, green, blue; in units of the full scale."""
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
"""Their standard deviation."""

Resample = Literal["bilinear", "antialias"]

_MOST_BESIDE: Final = 8  # times what is kept: a photo resized as a whole has 1 to 3
Output = Literal["float_chw", "uint8_hwc"]


class ImagePipeline(ShownByArguments):
    """Decodes, crops, resizes, flips, colours and normalises images.

    As the `transform` of `ImageFolder`, `ImageList` or `StoreDataset` it is given the files as they
    are, a batch at a time, and writes its last step straight into the batch's slot. Called with one
    image, it returns one array: the same numbers.

    All it draws comes from `penstock.sample_rng()`. `resample="bilinear"` is OpenCV's, after a
    reduction by 2, 4 or 8 of what is more than twice too large; "antialias" is Pillow's, which
    torchvision uses, in about twice the time. See docs/vision.md.

    Attributes:
        shape: Of one image in the batch.
        dtype: float32 or uint8.
        mean: As given; for a model that normalises "uint8_hwc" on the device.
        std: As given.

    Example:
        >>> image = np.zeros((480, 640, 3), np.uint8)
        >>> ImagePipeline.train(224)(image).shape, ImagePipeline.eval(224)(image).dtype
        ((3, 224, 224), dtype('float32'))
        >>> ImagePipeline.train(96, output="uint8_hwc")(image).shape
        (96, 96, 3)
    """

    takes_files = True

    def __init__(
        self,
        crop: Crop,
        *,
        flip: float = 0.0,
        color: ColorJitter | None = None,
        steps: Sequence[Callable[[NDArray[np.uint8]], NDArray[np.uint8]]]
        | Callable[[NDArray[np.uint8]], NDArray[np.uint8]] = (),
        output: Output = "float_chw",
        mean: Sequence[float] | None = IMAGENET_MEAN,
        std: Sequence[float] | None = IMAGENET_STD,
        resample: Resample = "bilinear",
        max_pixels: int | None = MAX_PIXELS,
        whole: bool = False,
    ) -> None:
        """Put a chain together.

        Args:
            crop: Decides which part is taken and at which size: `RandomResizedCrop`,
                `CenterCropResize`, `Resize`, or your own.
            flip: Probability that left and right are exchanged.
            color: Changes of brightness, contrast, saturation and hue.
            steps: Functions, or one, of the cropped and resized image, uint8 of shape (height,
                width, 3), which return one of the same shape; what they draw by `sample_rng()`, or
                in a loader with a seed by the global generators, is the sample's own.
            output: "float_chw" gives float32 of shape (3, height, width), in units of the full
                scale, `mean` subtracted and divided by `std`. "uint8_hwc" gives uint8 of shape
                (height, width, 3), a quarter of the bytes, to be normalised on the device.
            mean: For red, green, blue, in units of the full scale; None subtracts nothing.
            std: For red, green, blue, likewise; None divides by nothing.
            resample: "bilinear" or "antialias", see above.
            max_pixels: Files of more pixels are an error, and cost no memory. None allows all.
            whole: Whether all rows of a file are decoded, so that damage is noticed as far as a
                decoder can notice it; otherwise those below the crop are not.
        """
        checked_choice("output", output, ("float_chw", "uint8_hwc"))
        checked_choice("resample", resample, ("bilinear", "antialias"))
        self.crop = checked_crop(crop)
        self.flip = checked_number("flip", flip, 0, 1)
        self.color = color
        self.steps = checked_transforms("steps", (steps,) if callable(steps) else steps)
        self.output = output
        self.mean = checked_channels("mean", mean, 3)
        self.std = checked_channels("std", std, 3)
        self.resample = resample
        self.max_pixels = max_pixels
        self.whole = whole
        self.size = checked_size(self.crop.size)
        is_float = output == "float_chw"
        self.shape = (3, *self.size) if is_float else (*self.size, 3)
        self.dtype = np.dtype(np.float32 if is_float else np.uint8)

    @classmethod
    @removed_arguments(area="scale=")
    def train(
        cls,
        /,
        size: int | tuple[int, int] = 224,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        **options: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Return torchvision's ImageNet recipe for training.

        `RandomResizedCrop(size, scale, ratio)`, a horizontal flip, ImageNet's mean and standard
        deviation.

        Args:
            size: Height and width in pixels; one number for both.
            scale: As for `RandomResizedCrop`.
            ratio: As for `RandomResizedCrop`.
            flip: Probability of a flip.
            options: As for `ImagePipeline`.
        """
        return cls(RandomResizedCrop(size, scale, ratio), flip=flip, **options)

    @classmethod
    def eval(
        cls,
        size: int | tuple[int, int] = 224,
        *,
        resize: int | None = None,
        **options: Any,  # noqa: ANN401 - those of the class
    ) -> Self:
        """Return torchvision's ImageNet recipe for evaluation: the middle of the resized image.

        Args:
            size: Height and width in pixels; one number for both.
            resize: Length of the shorter side before the crop; None takes 256 for a size of 224,
                and the same proportion for others.
            options: As for `ImagePipeline`.
        """
        if resize is None:
            resize = round(max(checked_size(size)) * 256 / 224)
        return cls(CenterCropResize(size, resize), **options)

    @property
    def is_drawless(self) -> bool:
        """Whether no random number is drawn; never with `steps`, which may draw."""
        is_fixed = getattr(self.crop, "is_drawless", False) and self.flip == 0.0
        return is_fixed and self.color is None and not self.steps

    def __call__(self, image: Any) -> NDArray[Any]:  # noqa: ANN401 - see below
        """Return one image, as it would lie in a batch; new memory."""
        out = np.empty(self.shape, self.dtype)
        rng = None if self.is_drawless else sample_rng()
        if isinstance(image, EncodedImage):
            image = image.data
        elif isinstance(image, Path):
            image = read_file(image, remedy="give its bytes")
        elif isinstance(image, Image.Image):
            image = np.asarray(image.convert("RGB"))
        if isinstance(image, (bytes, bytearray, memoryview)):
            self.write(bytes(image), out, rng)
        elif isinstance(image, np.ndarray):
            self.write_pixels(image, out, rng)
        else:
            raise TypeError(
                "an ImagePipeline takes a file's bytes, an EncodedImage, a pathlib.Path, a uint8 "
                f"array of shape (height, width, 3) or Pillow's image, not {type(image).__name__}."
            )
        return out

    def write(
        self,
        data: bytes,
        out: NDArray[Any],
        rng: np.random.Generator | None,
        *,
        strict: bool = True,
    ) -> None:
        """Write the image of one file into a row of a batch."""
        header = read_header(data, max_pixels=self.max_pixels)
        cut = self.crop.cut(header.upright_height_px, header.upright_width_px, rng)
        region, factor = self._part(cut)
        pixels = decode_region(
            data,
            header,
            region,
            factor,
            fast=self.resample == "bilinear",
            whole=self.whole,
            strict=strict,
            max_pixels=self.max_pixels,
        )
        self._finish(pixels, cut, out, rng)

    def write_pixels(
        self, image: NDArray[Any], out: NDArray[Any], rng: np.random.Generator | None
    ) -> None:
        """Write an image that is decoded already into a row of a batch."""
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise ValueError(
                "an image is uint8 of shape (height, width, 3), not "
                f"{image.dtype} of shape {image.shape}"
            )
        cut = self.crop.cut(image.shape[0], image.shape[1], rng)
        region, factor = self._part(cut)
        self._finish(reduced(image, region, factor), cut, out, rng)

    def _part(self, cut: Cut) -> tuple[Region, int]:
        region = Region(cut.top, cut.left, cut.height, cut.width)
        if self.resample == "antialias":
            return region, 1
        return region, reduction(region, cut.resized_height, cut.resized_width)

    def _finish(
        self,
        pixels: NDArray[np.uint8],
        cut: Cut,
        out: NDArray[Any],
        rng: np.random.Generator | None,
    ) -> None:
        """Do what is left to do with the part that was cut out."""
        is_bytes = self.output == "uint8_hwc"
        small = self._resized(pixels, cut, out if is_bytes else self._workplace.image)
        if self.flip and rng is not None and rng.random() < self.flip:
            cv2.flip(small, 1, dst=small)
        if self.color is not None and rng is not None:
            small = self.color.apply(small, rng)
        for step in self.steps:
            small = self._stepped(step, small)
        if not is_bytes:
            write_planes(small, self._tables, self._workplace.planes, out)
        elif small is not out:
            out[...] = small

    def _resized(
        self, pixels: NDArray[np.uint8], cut: Cut, place: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        """Return the part at its size: `place`, or a new array that the user's steps may keep."""
        is_whole = (cut.resized_height, cut.resized_width) == self.size
        if is_whole and not self.steps and self.resample == "bilinear":
            cv2.resize(pixels, (cut.resized_width, cut.resized_height), dst=place)
            return place
        kept = kept_of_resized(pixels, cut, self.size, self.resample)
        if self.steps:
            return np.array(kept)
        place[...] = kept
        return place

    def _stepped(
        self, step: Callable[[NDArray[np.uint8]], NDArray[np.uint8]], small: NDArray[np.uint8]
    ) -> NDArray[np.uint8]:
        try:
            result: Any = step(small)
            made = getattr(result, "dtype", type(result).__name__), np.shape(result)
            if made != (np.uint8, small.shape):
                raise ValueError(f"it made {made[0]} {made[1]} of uint8 {small.shape}")
        except Exception as error:
            name = getattr(step, "__qualname__", type(step).__name__)
            annotate(error, f"in the step {name} of the ImagePipeline")
            raise
        return np.ascontiguousarray(result)

    @functools.cached_property
    def _workplace(self) -> Workplace:
        return Workplace(self.size)

    def __getstate__(self) -> dict[str, Any]:
        """Leave the memory behind that a thread works in."""
        return {name: value for name, value in self.__dict__.items() if name != "_workplace"}

    @functools.cached_property
    def _tables(self) -> NDArray[np.float32]:
        """What each value of a pixel becomes, for each colour."""
        return lookup_tables(self.mean or (0.0,) * 3, self.std or (1.0,) * 3)


class Workplace(threading.local):
    """Memory in which a thread makes one image after another: new memory costs page faults."""

    def __init__(self, size: tuple[int, int]) -> None:
        """Take it for images of one size."""
        self.image = np.empty((*size, 3), np.uint8)
        self.planes = [np.empty(size, np.uint8) for _ in range(3)]


def lookup_tables(mean: ArrayLike, std: ArrayLike) -> NDArray[np.float32]:
    """Return what each value of a pixel becomes: float32, shape (channels, 256)."""
    means, stds = (np.atleast_1d(np.asarray(given, np.float64)) for given in (mean, std))
    values = np.arange(256) / 255
    return ((values - means[:, None]) / stds[:, None]).astype(np.float32)


def write_planes(
    image: NDArray[np.uint8],
    tables: NDArray[np.float32],
    planes: Sequence[NDArray[np.uint8]],
    out: NDArray[Any],
) -> None:
    """Write an image as float planes."""
    cv2.split(image, planes)
    for channel, plane in enumerate(planes):
        cv2.LUT(plane, tables[channel % len(tables)], dst=out[channel])


def kept_of_resized(
    pixels: NDArray[np.uint8], cut: Cut, size: tuple[int, int], resample: Resample
) -> NDArray[np.uint8]:
    """Return what `cut` keeps, `size` (height, width), of the part `pixels` once it is resized."""
    height, width = size
    # How many rows and columns of the part, which may be reduced already, make one of the resized.
    down, across = pixels.shape[0] / cut.resized_height, pixels.shape[1] / cut.resized_width
    top, left = cut.row_offset * down, cut.column_offset * across
    # Pillow makes the window alone: of a panorama the rest may be thousands of times as much.
    most = _MOST_BESIDE * height * width
    if resample == "antialias" or cut.resized_height * cut.resized_width > most:
        box = (left, top, left + width * across, top + height * down)
        image = Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR, box)
        return np.asarray(image)
    resized = cast("NDArray[np.uint8]", cv2.resize(pixels, (cut.resized_width, cut.resized_height)))
    bottom, right = cut.row_offset + height, cut.column_offset + width
    return resized[cut.row_offset : bottom, cut.column_offset : right]
