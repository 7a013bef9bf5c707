# SPDX-License-Identifier: Apache-2.0
"""The commands of `penstock`, put together with typer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperGroup

from penstock import __version__
from penstock.cli.bench import bench
from penstock.cli.check import check
from penstock.cli.convert import convert
from penstock.cli.doctor import doctor
from penstock.cli.explain import explain
from penstock.cli.lines import without_password
from penstock.cli.pack import pack
from penstock.cli.report import report
from penstock.cli.stats import stats
from penstock.cli.tune import tune
from penstock.cli.view import view

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["make_app"]

_SECTIONS: Final[dict[str, tuple[Callable[..., None], ...]]] = {
    "Prepare data": (pack, convert),
    "Look at data": (check, stats, view),
    "Look at speed": (bench, tune, report),
    "Find out what is wrong": (doctor, explain),
}


class _Group(TyperGroup):
    """Groups the commands in the help, and leaves passwords out of errors.

    Errors about arguments repeat what was typed.
    """

    # Of click's classes or of typer's own copies of them: newer releases of typer bring their own.
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, commands in _SECTIONS.items():
            names = [command.__name__ for command in commands]
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

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
    # Known by what they have, see above.
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
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # its boxes call flags <bool>, and break lines twice
    )
    app.callback()(_common)
    for commands in _SECTIONS.values():
        for command in commands:
            app.command()(command)
    return app
