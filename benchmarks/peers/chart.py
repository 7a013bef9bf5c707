# SPDX-License-Identifier: Apache-2.0
"""Bar charts of the comparison, as SVG with colours for light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Bar", "Panel", "draw"]

_WIDTH: Final = 880
_MARGIN: Final = 16
_ROW: Final = 24
_HEAD: Final = 48
_NAME_PX: Final = 225
_VALUE_PX: Final = 70
_STYLE: Final = """\
svg { --ink: #1f2933; --soft: #55616b; --paper: #ffffff; --own: #00897b; --torch: #e08a3c; \
--peer: #b4bec5 }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e4e9ec; --soft: #a9b4bc; --paper: #1f2329; --own: #4db6ac; --torch: #d9904f; \
--peer: #5a6670 }
}
text { font: 13px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: var(--ink) }
.title { font-size: 15px; font-weight: 600 }
.unit { fill: var(--soft) }
.name { text-anchor: end }
.own { font-weight: 600 }
.paper { fill: var(--paper) }
rect.own { fill: var(--own) }
rect.torch { fill: var(--torch) }
rect.peer { fill: var(--peer) }"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One loader.

    Attributes:
        name: What stands before the bar.
        value: Its length, from 0.
        text: What stands behind the bar.
        kind: "own", "torch" or "peer": its colour.
    """

    name: str
    value: float
    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One measure: a title, what the numbers are, and the bars, the best first."""

    title: str
    unit: str
    bars: tuple[Bar, ...]

    @property
    def height(self) -> int:
        """Its height in pixels."""
        return _HEAD + _ROW * len(self.bars) + _MARGIN


def draw(panels: Sequence[Panel], label: str, num_columns: int = 1) -> str:
    """Return an SVG image of the panels, row by row.

    Args:
        panels: At least one.
        label: What the image shows, for those who cannot see it.
        num_columns: Panels beside each other.
    """
    width = (_WIDTH - _MARGIN * (num_columns + 1)) // num_columns
    parts, top = [], _MARGIN
    for first in range(0, len(panels), num_columns):
        row = panels[first : first + num_columns]
        for column, panel in enumerate(row):
            parts.append(_draw_panel(panel, _MARGIN + column * (width + _MARGIN), top, width))
        top += max(panel.height for panel in row)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top}" '
        f'width="{_WIDTH}" height="{top}" role="img">\n<title>{escape(label)}</title>\n'
        f'<style>\n{_STYLE}\n</style>\n<rect class="paper" width="{_WIDTH}" height="{top}"/>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def _draw_panel(panel: Panel, left: int, top: int, width: int) -> str:
    scale = (width - _NAME_PX - _VALUE_PX) / max(bar.value for bar in panel.bars)
    lines = [
        f'<text class="title" x="{left}" y="{top + 14}">{escape(panel.title)}</text>',
        f'<text class="unit" x="{left}" y="{top + 33}">{escape(panel.unit)}</text>',
    ]
    for number, bar in enumerate(panel.bars):
        y = top + _HEAD + number * _ROW
        length = max(1.0, bar.value * scale)
        start = left + _NAME_PX
        lines += [
            f'<text class="name {bar.kind}" x="{start - 8}" y="{y + 13}">{escape(bar.name)}</text>',
            f'<rect class="{bar.kind}" x="{start}" y="{y}" width="{length:.1f}" height="17" '
            'rx="2"/>',
            f'<text class="{bar.kind}" x="{start + length + 6:.1f}" y="{y + 13}">'
            f"{escape(bar.text)}</text>",
        ]
    return "\n".join(lines)
