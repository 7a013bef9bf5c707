# SPDX-License-Identifier: Apache-2.0
"""From one format of annotations to another: VOC's XML, imglab's, YOLO's, lists."""

from __future__ import annotations

from penstock.vision.convert.conversion import ConvertReport, convert
from penstock.vision.convert.reading import FORMATS, Source

__all__ = ["FORMATS", "ConvertReport", "Source", "convert"]
