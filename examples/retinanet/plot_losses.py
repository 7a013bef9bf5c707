# SPDX-License-Identifier: Apache-2.0
"""Draw the losses of a run: python plot_losses.py runs/first/log.jsonl runs/first/losses.svg."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
import step_log
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

CURVES = {"class_loss": "classes (focal)", "box_loss": "boxes (smooth L1)"}


def draw(log: Path, image: Path, smoothed_over: int = 50) -> None:
    """Draw both losses by step: each mean is over the last `smoothed_over` steps."""
    lines = step_log.read(log)
    if not lines:
        raise ValueError(f"{log} has no step yet")
    figure = Figure(figsize=(7, 3), layout="constrained")
    axes = figure.subplots()
    steps = [line["step"] for line in lines]
    for name, label in CURVES.items():
        axes.plot(steps, trailing_means([line[name] for line in lines], smoothed_over), label=label)
    axes.set(xlabel="step", ylabel=f"loss, mean of {smoothed_over} steps", ylim=(0, None))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    # The same log makes the same file: neither a date nor random names in the SVG.
    with mpl.rc_context({"svg.hashsalt": "losses"}):
        figure.savefig(image, dpi=120, metadata={"Date": None} if image.suffix == ".svg" else None)


def trailing_means(values: Sequence[float], length: int) -> NDArray[np.float64]:
    """Return the mean of each value and those before it, `length` of them at most."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - length, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("log", type=Path)
    parser.add_argument("image", type=Path, help="NAME.svg or NAME.png")
    given = parser.parse_args(arguments)
    draw(given.log, given.image)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
