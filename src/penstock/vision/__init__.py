# SPDX-License-Identifier: Apache-2.0
"""Images and what is marked in them: folders of them, decoding, annotations."""

from __future__ import annotations

from penstock.images import decode_image
from penstock.vision.image_folder import ImageFolder
from penstock.vision.voc import VOCAnnotation, parse_voc

__all__ = ["ImageFolder", "VOCAnnotation", "decode_image", "parse_voc"]
