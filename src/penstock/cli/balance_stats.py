# SPDX-License-Identifier: Apache-2.0
"""`penstock stats --sampler`: the balance of classes before and after a sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.errors import ConfigError
from penstock.lines import say, say_json
from penstock.sampling.balance import balance_report
from penstock.sampling.repeat_factor import RepeatFactorSampler

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.cli.sampler_options import SamplerChoice
    from penstock.sampling.balance import BalanceReport

__all__ = ["show_balance"]


def show_balance(
    address: str,
    labels: Any,  # noqa: ANN401 - in any form
    class_names: Any,  # noqa: ANN401 - by number, if they are known
    choice: SamplerChoice,
    *,
    column: str | None = None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Print the balance of a data set's classes as it is, and as a sampler has it.

    Args:
        address: Of the data set.
        labels: Of its samples; None if they have none.
        class_names: By number; None if there are none.
        choice: The sampler.
        column: The field of objects that the labels are, if one was asked for.
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
    if isinstance(labels, np.ndarray) and labels.dtype.kind not in "biu":
        class_names = None  # names go by number; strings are names themselves
    sampler = choice.sampler_of(labels)
    report = balance_report(sampler, labels, class_names=class_names)
    about = _about_threshold(sampler, report) if isinstance(sampler, RepeatFactorSampler) else None
    if png is not None:
        from penstock.cli.balance_chart import draw_balance

        draw_balance(png, address, report, str(choice))
    if as_json:
        chosen = {"name": str(choice.kind), **choice.settings}
        record = {"address": address, "sampler": chosen, "balance": report.record()}
        if column is not None:
            record["column"] = column
        if about is not None:
            record["threshold"] = about
        say_json(record)
    else:
        by = "" if column is None else f", by {column}"
        lines = [f"{address}{by}, sampler: {choice}", ""]
        if about is not None:
            lines += [about, ""]
        for line in [*lines, *str(report).splitlines()]:
            say(line)
    if png is not None:  # beside JSON nothing is on stdout
        say(f"{png}: chart", err=as_json)


def _about_threshold(sampler: RepeatFactorSampler, report: BalanceReport) -> str:
    """Say how the threshold lies among the shares of images that have the classes."""
    frequencies = sampler.class_frequencies
    if not len(frequencies):
        return "No image has a class: none is repeated."
    least, most = int(np.argmin(frequencies)), int(np.argmax(frequencies))
    num_below = int(np.count_nonzero(frequencies < sampler.threshold))
    return (
        f"Classes are in {100 * frequencies[least]:.3g}% ({report.class_names[least]}) to "
        f"{100 * frequencies[most]:.3g}% ({report.class_names[most]}) of the images; "
        f"{num_below:,} of {len(frequencies):,} in less than the threshold, "
        f"{100 * sampler.threshold:g}%" + ("." if num_below else ": nothing changes.")
    )
