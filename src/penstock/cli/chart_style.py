# SPDX-License-Identifier: Apache-2.0
"""What all charts of the command line have in common: colours, names that fit, axes, the file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.outputs import write_output

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["BLUE", "GREY", "MAX_NAME", "ORANGE", "save", "short", "tidy"]

# Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design").
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"
MAX_NAME: Final = 24  # characters beside a bar


def tidy(axes: Axes, along: Any) -> None:  # noqa: ANN401 - "x" or "y"
    """Draw a grid behind the bars, and no frame above and to the right."""
    axes.grid(axis=along, linewidth=0.5, alpha=0.5)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)


def short(text: str, length: int) -> str:
    """Return a text that can be drawn, no longer than `length` characters.

    Example:
        >>> short("neutrophil", 6)
        'neutr…'
    """
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= length else text[: length - 1] + "…"


def save(figure: Figure, png: Path) -> None:
    """Write a figure into a PNG file.

    Raises:
        ConfigError: it cannot be written.
    """
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png")
    write_output("--png", png, drawn.getvalue())
