# SPDX-License-Identifier: Apache-2.0
"""The commands of `penstock`, put together with typer."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.check import check
from penstock.cli.convert import convert
from penstock.cli.lines import without_password
from penstock.cli.pack import pack
from penstock.cli.report import report
from penstock.cli.stats import stats
from penstock.cli.tune import tune
from penstock.cli.view import view

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


def _show_version(*, is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"penstock {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=lambda value: _show_version(is_asked=value),
            is_eager=True,
            help="Show the version and exit.",
        ),
    ] = False,
) -> None:
    """Pack training data, check it, count it, feed it, and see what that costs."""


def make_app() -> typer.Typer:
    """Return the command line."""
    app = typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its boxes call flags <bool>, and break lines twice
    )
    app.callback()(_common)
    for command in (pack, check, stats, view, bench, tune, report, convert):
        app.command()(command)
    return app
