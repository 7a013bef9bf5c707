# SPDX-License-Identifier: Apache-2.0
"""The commands of `penstock`, put together with typer."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from penstock.cli.bench import bench
from penstock.cli.check import check
from penstock.cli.lines import without_password
from penstock.cli.pack import pack
from penstock.cli.stats import stats

__all__ = ["make_app"]


class _Group(TyperGroup):
    """Leaves passwords out of errors about arguments, which repeat what was typed."""

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        try:
            return super().make_context(*args, **kwargs)
        except Exception as error:
            _mask(error)
            raise

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        try:
            return super().invoke(ctx)
        except Exception as error:
            _mask(error)
            raise


def _mask(error: Exception) -> None:
    # Known by what they have: newer releases of typer bring their own click.
    message = getattr(error, "message", None)
    if hasattr(error, "format_message") and isinstance(message, str):
        error.message = without_password(message)  # type: ignore[attr-defined]  # it was there


def make_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(
        cls=_Group,
        help="Pack training data, check it, count it, feed it, and see what that costs.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for command in (pack, check, stats, bench):
        app.command()(command)
    return app
