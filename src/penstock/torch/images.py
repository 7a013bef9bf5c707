# SPDX-License-Identifier: Apache-2.0
"""`NormalizeImages`: uint8 images to what a model takes, on the model's device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self


class NormalizeImages(torch.nn.Module):
    """Turns a batch of uint8 HWC images into normalised floats in CHW, where the batch lies.

    For `ImagePipeline(output="uint8_hwc")`: a quarter of the bytes travels to the device, and the
    arithmetic is done there. The result equals `output="float_chw"` up to rounding of floats. Its
    memory format is `torch.channels_last`, as convolutions on GPUs like it best.

    It is one pass over the images, for half precision too: numbers are computed in float32 and
    rounded once, as they are stored. Nothing of float32's size is made in between.

    `dtype` alone decides the result's: `half()` and `.to(torch.bfloat16)`, of this module or of a
    model that it is part of, move it at most. Give it the dtype that the model takes.

    Example:
        >>> normalize = NormalizeImages(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        >>> images = normalize(torch.full((8, 224, 224, 3), 255, dtype=torch.uint8))
        >>> images.shape, images.dtype, round(float(images.max()), 3)
        (torch.Size([8, 3, 224, 224]), torch.float32, 1.0)
    """

    factor: torch.Tensor
    offset: torch.Tensor

    def __init__(
        self,
        mean: Sequence[float] | None = (0.485, 0.456, 0.406),
        std: Sequence[float] | None = (0.229, 0.224, 0.225),
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """Take the pipeline's `mean` and `std`.

        Args:
            mean: For red, green, blue, in units of the full scale; None subtracts nothing.
            std: Likewise; None divides by nothing.
            dtype: Of the result, a floating one.

        Raises:
            ConfigError: not three finite numbers, a `std` that is not above 0, or a `dtype` that is
                no floating `torch.dtype`.
        """
        super().__init__()
        self._mean = (0.0, 0.0, 0.0) if mean is None else tuple(map(float, mean))
        self._std = (1.0, 1.0, 1.0) if std is None else tuple(map(float, std))
        is_right = len(self._mean) == len(self._std) == 3 and min(self._std) > 0
        if not is_right or not math.isfinite(sum(self._mean + self._std)):
            raise ConfigError(
                f"mean and std are three finite numbers each, std above 0; got {mean!r}, {std!r}."
            )
        if not getattr(dtype, "is_floating_point", False):
            raise ConfigError(f"dtype is a floating torch.dtype, as torch.float16; not {dtype!r}.")
        self.dtype = dtype
        self._register(None)

    def _register(self, device: torch.device | None) -> None:
        """Make the buffers, in float32; None is torch's default device."""
        pairs = list(zip(self._mean, self._std, strict=True))
        for name, numbers in (
            ("factor", [1 / (255 * std) for _, std in pairs]),
            ("offset", [-mean / std for mean, std in pairs]),
        ):
            made = torch.tensor(numbers, dtype=torch.float32, device=device)
            self.register_buffer(name, made, persistent=False)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Follow to another device, but not to another precision: all of torch's moves go here."""
        before = self.factor
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        # Anew and not turned back: numbers that were rounded stay rounded, and `to_empty` has none.
        if self.factor is not before:
            self._register(self.factor.device)
        return self

    def extra_repr(self) -> str:
        """Return what `repr` says of it."""
        return f"mean={self._mean}, std={self._std}, dtype={self.dtype}"

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of shape (..., 3, height, width), in memory of their own.

        Args:
            images: uint8 of shape (..., height, width, 3), on this module's device.

        Raises:
            TypeError: no tensor, or one of another dtype.
            ValueError: another shape.
        """
        if getattr(images, "dtype", None) is not torch.uint8:
            raise TypeError(
                "images are a tensor of uint8 (output='uint8_hwc'), got a "
                f"{type(images).__name__} {getattr(images, 'dtype', '')}; of a batch take it out: "
                "device_transform=lambda batch: (normalize(batch[0]), *batch[1:])"
            )
        if images.ndim < 3 or images.shape[-1] != 3:
            raise ValueError(f"images are of shape (..., height, width, 3), not {images.shape}")
        # `out` is what makes it one kernel: `addcmul(...).to(half)` would be two. It also keeps the
        # layout whatever the strides of `images`, and the dtype under autocast.
        result = torch.empty(images.shape, dtype=self.dtype, device=images.device)
        torch.addcmul(self.offset, images, self.factor, out=result)
        return result.movedim(-1, -3)
