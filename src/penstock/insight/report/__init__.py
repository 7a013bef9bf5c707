# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one HTML page that needs no network.

    Recording ──▶ series (<= 240 points) ──▶ charts ──▶ page ──▶ run.html
                                             └ style.css, page.js, plotly.min.js go into it

Charts are Plotly's, drawn by the browser; the package is the extra `report`.
"""

from __future__ import annotations

from penstock.insight.report.page import write_report

__all__ = ["write_report"]
