# SPDX-License-Identifier: Apache-2.0
"""Draws the picture of a report that README and the start page show.

    python docs/report_picture.py --record    # trains first, and writes assets/report/run.json
    python docs/report_picture.py             # draws assets/report/page.png; needs Chromium

The picture holds the SHA-256 of the page that it shows, so a test can say that it is out of date.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from penstock import Loader, sample_rng
from penstock.insight.report.page import page
from penstock.insight.trace import read_trace

if TYPE_CHECKING:
    from numpy.typing import NDArray

FOLDER = Path(__file__).parent / "assets" / "report"
RUN = FOLDER / "run.json"
PICTURE = FOLDER / "page.png"
SIZE = (1000, 760)
NOTE = "page"


class Photos:
    """Stands for photos: a sample takes about 3 ms of CPU, one is slow, two are broken."""

    def __len__(self) -> int:
        """Return their number."""
        return 2400

    def describe(self, index: int) -> str:
        """Return the path of a photo."""
        return f"photos/{index:05}.jpg"

    def __getitem__(self, index: int) -> NDArray[np.float32]:
        """Return the pixels of a photo."""
        if index in (700, 1900):
            raise ValueError("Premature end of JPEG file")
        pixels = sample_rng().random((48, 48, 3), np.float32)
        end_s = time.thread_time() + (0.04 if index == 1234 else 0.003)
        while time.thread_time() < end_s:
            pixels *= np.float32(0.999)
        return pixels


def record() -> None:
    """Train for three epochs, with one worker too few, and keep the trace."""
    loader = Loader(
        Photos(), 32, shuffle=True, num_workers=1, seed=7, on_error="skip", monitor="full"
    )
    for _ in range(3):
        for _batch in loader:
            time.sleep(0.03)  # stands for the GPU
    FOLDER.mkdir(parents=True, exist_ok=True)
    loader.trace(RUN)
    content = json.loads(RUN.read_text("utf-8"))
    content["traceEvents"] = []  # the page is drawn from the recording alone
    RUN.write_text(json.dumps(content, separators=(",", ":")) + "\n", "utf-8")


def digest() -> str:
    """Return the SHA-256 of the page as the code of today draws it."""
    return hashlib.sha256(page(read_trace(RUN)).encode()).hexdigest()


def draw() -> None:
    """Draw the top of the page."""
    with tempfile.TemporaryDirectory() as folder:
        html, shot = Path(folder, "run.html"), Path(folder, "shot.png")
        html.write_text(page(read_trace(RUN)), "utf-8")
        browser = shutil.which("chromium") or shutil.which("google-chrome") or "chromium"
        command = [
            *(browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--screenshot={shot}", f"--window-size={SIZE[0]},{SIZE[1]}", html.as_uri()),
        ]
        subprocess.run(command, check=True, capture_output=True)
        note = PngInfo()
        note.add_text(NOTE, digest())
        with Image.open(shot) as image:
            image.convert("RGB").quantize(64).save(PICTURE, optimize=True, pnginfo=note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    if parser.parse_args().record:
        record()
    draw()
