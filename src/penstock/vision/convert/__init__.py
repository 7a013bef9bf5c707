# SPDX-License-Identifier: Apache-2.0
"""From one form of annotations to another: VOC's XML, imglab's, YOLO's, lists."""

from __future__ import annotations

from penstock.vision.convert.conversion import ConvertReport, convert
from penstock.vision.convert.sources import FORMATS, Source

__all__ = ["FORMATS", "ConvertReport", "Source", "convert"]
