# SPDX-License-Identifier: Apache-2.0
"""Draw the losses of three runs of train.py: packed, padded, mixture.

python plot_losses.py runs/packed runs/padded runs/mixture losses.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.figure import Figure

SMOOTHED_OVER = 10  # steps


def draw(packed: Path, padded: Path, mixture: Path, image: Path) -> None:
    """Draw loss over tokens and over time, and what the mixture does to each of its sources."""
    runs = {"packed": history_of(packed), "padded": history_of(padded)}
    figure = Figure(figsize=(10, 3), layout="constrained")
    by_tokens, by_time, sources = figure.subplots(1, 3, sharey=True)
    for (name, history), style in zip(runs.items(), ("-", "--"), strict=True):
        losses = trailing_means(column(history, "loss"))
        by_tokens.plot(np.cumsum(column(history, "tokens")) / 1e6, losses, style, label=name)
        by_time.plot(np.cumsum(column(history, "seconds")) / 60, losses, style, label=name)
    by_tokens.set(xlabel="million tokens", ylabel=f"training loss, mean of {SMOOTHED_OVER} steps")
    by_time.set(xlabel="minutes")
    history = history_of(mixture)
    tokens = np.cumsum(column(history, "tokens")) / 1e6
    saved = [place for place, line in enumerate(history) if "prose" in line]
    for kind in ("prose", "code"):
        values = [history[place][kind] for place in saved]
        sources.plot(tokens[saved], values, label=f"{kind}, validation")
    sources.axvline(tokens[len(tokens) // 2], color="grey", linestyle=":", label="weights change")
    sources.set(xlabel="million tokens, mixture")
    for axes in (by_tokens, by_time, sources):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    # The same runs make the same file: neither a date nor random names in the SVG.
    with mpl.rc_context({"svg.hashsalt": "losses"}):
        figure.savefig(image, dpi=120, metadata={"Date": None} if image.suffix == ".svg" else None)


def history_of(run: Path) -> list[dict[str, Any]]:
    history: list[dict[str, Any]] = torch.load(run / "checkpoint.pt")["history"]
    return history


def column(history: list[dict[str, Any]], name: str) -> np.ndarray:
    return np.array([line[name] for line in history])


def trailing_means(values: np.ndarray) -> np.ndarray:
    """Return the mean of each value and those before it, SMOOTHED_OVER of them at most."""
    sums = np.append(0, np.cumsum(values))
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - SMOOTHED_OVER, 0)
    return (sums[ends] - sums[starts]) / (ends - starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("packed", "padded", "mixture"):
        parser.add_argument(name, type=Path, help="folder of that run")
    parser.add_argument("image", type=Path, help="NAME.svg or NAME.png")
    draw(**vars(parser.parse_args()))


if __name__ == "__main__":
    main()
