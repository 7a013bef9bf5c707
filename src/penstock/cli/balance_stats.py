# SPDX-License-Identifier: Apache-2.0
"""`penstock stats --sampler`: the balance of classes before and after a sampler."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from penstock.cli.lines import printable
from penstock.errors import ConfigError
from penstock.sampling.balance import balance_report

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.cli.sampler_options import SamplerChoice

__all__ = ["show_balance"]


def show_balance(
    address: str,
    labels: Any,  # noqa: ANN401 - in any form
    class_names: Any,  # noqa: ANN401 - by number, if they are known
    choice: SamplerChoice,
    *,
    png: Path | None,
    as_json: bool,
) -> None:
    """Print the balance of a data set's classes as it is, and as a sampler has it.

    Args:
        address: Of the data set.
        labels: Of its samples; None if they have none.
        class_names: By number; None if there are none.
        choice: The sampler.
        png: Where a chart goes.
        as_json: Whether to print one JSON object.

    Raises:
        ConfigError: there are no labels, or the sampler cannot be made of them.
    """
    if labels is None or not len(labels):
        raise ConfigError(
            f"{address}: its samples have no labels, so --sampler {choice.kind} has no classes to "
            "go by."
        )
    report = balance_report(choice.sampler_of(labels), labels, class_names=class_names)
    if png is not None:
        from penstock.cli.balance_chart import draw_balance

        draw_balance(png, address, report, str(choice))
    if as_json:
        sampler = {"name": str(choice.kind), **choice.options}
        record = {"address": address, "sampler": sampler, "balance": report.record()}
        sys.stdout.write(json.dumps(record, indent=2) + "\n")
    else:
        typer.echo(f"{printable(address)}, sampler: {choice}\n")
        typer.echo("\n".join(map(printable, str(report).splitlines())))
    if png is not None:  # beside JSON nothing is on stdout
        typer.echo(printable(f"{png}: chart"), err=as_json)
