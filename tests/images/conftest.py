# SPDX-License-Identifier: Apache-2.0
"""Every test of images runs with both libraries that may decode JPEG files."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["simplejpeg", "OpenCV"], autouse=True)
def decoder(request, monkeypatch):
    """The library's name; OpenCV decodes as where simplejpeg is not installed."""
    from penstock.images import jpeg

    if request.param == "OpenCV":
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    elif jpeg.simplejpeg is None:
        pytest.skip("simplejpeg is not installed")
    return request.param


@pytest.fixture
def preamble(decoder):
    """What a program begins with, so that it decodes by that library."""
    return "import sys; sys.modules['simplejpeg'] = None\n" if decoder == "OpenCV" else ""
