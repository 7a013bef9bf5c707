# SPDX-License-Identifier: Apache-2.0
"""The report of a run: one HTML page without scripts, which needs no network.

Recording ──▶ charts over time (SVG) ──▶ page ──▶ run.html, with style.css in it
"""

from __future__ import annotations

from penstock.insight.report.page import write_report

__all__ = ["write_report"]
