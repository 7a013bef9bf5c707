# SPDX-License-Identifier: Apache-2.0
"""`penstock explain`: what docs/troubleshooting.md says of an error or a symptom."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.troubleshooting import completed, explained
from penstock.lines import say

__all__ = ["explain"]


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="An error, as WorkerDied, or a symptom, as first-batch-slow; other words are "
            'searched for, as "bus error". Without it, all are listed.',
            autocompletion=completed,
        ),
    ] = None,
) -> None:
    """Say what an error means, its usual causes, and what to do."""
    for line in explained(name).split("\n"):
        say(line)
