# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called. Without torch.

`penstock.vision` has the datasets and transforms of images; `penstock.torch.images` normalises
batches of them on a device.
"""

from penstock.deprecation import removed_names
from penstock.optional import missing_extra

try:
    from penstock.images.decode import decode_image
except ModuleNotFoundError as error:
    raise missing_extra(error, "penstock.images") from error

from penstock.images.headers import read_header, without_orientation
from penstock.images.jpeg import repair_image

__all__ = ["decode_image", "read_header", "repair_image", "without_orientation"]

__getattr__ = removed_names(
    __name__,
    {
        "MAX_PIXELS": "penstock.images.headers.MAX_PIXELS",
        "ImageHeader": "penstock.images.headers.ImageHeader",
        "JpegHeader": "penstock.images.headers.JpegHeader",
        "check_image": "penstock.images.decode.check_image",
        "repair_jpeg": "repair_image",
        "repair_png": "nothing: PNG files are not repaired",
        "shrink_image": "penstock.images.shrink.shrink_image",
    },
)
