# SPDX-License-Identifier: Apache-2.0
"""`NormalizeImages`: uint8 images to what a model takes, on the model's device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NormalizeImages"]


class NormalizeImages(torch.nn.Module):
    """Turns a batch of uint8 HWC images into normalised floats in CHW, where the batch lies.

    For `ImagePipeline(output="uint8_hwc")`: a quarter of the bytes travels to the device, and the
    arithmetic is done there. The result equals `output="float_chw"` up to rounding of floats. Its
    memory format is `torch.channels_last`, as convolutions on GPUs like it best.

    It is one pass over the images, for half precision too: numbers are computed in float32 and
    rounded once, as they are stored. Nothing of float32's size is made in between.

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
            ConfigError: not three numbers, a `std` that is not above 0, or a `dtype` that is not
                floating.
        """
        super().__init__()
        means = torch.as_tensor((0.0,) * 3 if mean is None else mean, dtype=torch.float64)
        stds = torch.as_tensor((1.0,) * 3 if std is None else std, dtype=torch.float64)
        if means.shape != (3,) or stds.shape != (3,) or bool((stds <= 0).any()):
            raise ConfigError(
                f"mean and std are three numbers each, std above 0; not {mean!r} and {std!r}."
            )
        if not dtype.is_floating_point:
            raise ConfigError(f"dtype is a floating one, as torch.float16; not {dtype}.")
        self.dtype = dtype
        self.register_buffer("factor", (1 / (255 * stds)).to(torch.float32), persistent=False)
        self.register_buffer("offset", (-means / stds).to(torch.float32), persistent=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return images of shape (..., 3, height, width), in memory of their own.

        Args:
            images: uint8 of shape (..., height, width, 3), on this module's device.

        Raises:
            TypeError: another dtype.
            ValueError: another shape.
        """
        if images.dtype != torch.uint8:
            raise TypeError(f"images are uint8 (output='uint8_hwc'), not {images.dtype}")
        if images.ndim < 3 or images.shape[-1] != 3:
            raise ValueError(f"images are of shape (..., height, width, 3), not {images.shape}")
        # `out` is what makes it one kernel: `addcmul(...).to(half)` would be two. It also keeps the
        # layout whatever the strides of `images`, and the dtype under autocast.
        result = torch.empty(images.shape, dtype=self.dtype, device=images.device)
        torch.addcmul(self.offset, images, self.factor, out=result)
        return result.movedim(-1, -3)
