# SPDX-License-Identifier: Apache-2.0
"""Image files to pixels, by what they hold and not by what they are called. Without torch.

segments    the parts of JPEG, PNG and WebP files
headers     form, size and orientation, without a pixel
orientation Exif's tag: read, done, taken out
jpeg, png, pillow   one way each to pixels
tiff        what its tiles would take
decode      which of them for which file
regions     a part of an image, and no more of it than the part needs
repair      truncated files made whole as far as they go
checks, shrink      what `penstock check` and `penstock pack` ask for
"""

from penstock.images.checks import check_image
from penstock.images.decode import decode_image
from penstock.images.headers import MAX_PIXELS, ImageHeader, JpegHeader, read_header
from penstock.images.orientation import without_orientation
from penstock.images.repair import repair_image, repair_jpeg, repair_png
from penstock.images.shrink import shrink_image

__all__ = [
    "MAX_PIXELS",
    "ImageHeader",
    "JpegHeader",
    "check_image",
    "decode_image",
    "read_header",
    "repair_image",
    "repair_jpeg",
    "repair_png",
    "shrink_image",
    "without_orientation",
]
