# SPDX-License-Identifier: Apache-2.0
"""From one format of annotations to another: VOC's XML, imglab's, YOLO's, COCO's JSON, lists."""

from __future__ import annotations

from penstock.deprecation import removed_names
from penstock.vision.convert.conversion import convert
from penstock.vision.convert.reading import Source

__all__ = ["Source", "convert"]

__getattr__ = removed_names(
    __name__,
    {
        "FORMATS": "penstock.vision.convert.reading.FORMATS",
        "ConvertReport": "penstock.vision.convert.conversion.ConvertReport",
    },
)
