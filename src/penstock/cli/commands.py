# SPDX-License-Identifier: Apache-2.0
"""The commands of `penstock`, put together with typer."""

from __future__ import annotations

import importlib
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from penstock import __version__
from penstock.lines import printable, say
from penstock.redact import without_password

# Each is the function of its name in the module of its name.
_SECTIONS: Final[dict[str, tuple[str, ...]]] = {
    "Prepare data": ("pack", "convert", "split"),
    "Look at data": ("check", "stats", "view"),
    "Look at speed": ("run", "tune", "report"),
    "Find out what is wrong": ("doctor", "explain", "state"),
}
_NAMES: Final = tuple(name for names in _SECTIONS.values() for name in names)


class _CommandGroup(TyperGroup):
    """Groups the commands in the help, and masks passwords that errors about arguments repeat."""

    # Of click's classes or of typer's own copies of them: newer releases of typer bring their own.
    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ANN401
        width = formatter.width - 6 - max(map(len, self.commands))
        for title, names in _SECTIONS.items():
            rows = [(name, self.commands[name].get_short_help_str(width)) for name in names]
            with formatter.section(title):
                formatter.write_dl(rows)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return _masked(super().make_context, *args, **kwargs)

    def invoke(self, ctx: Any) -> Any:  # noqa: ANN401
        return _masked(super().invoke, ctx)


class _Command(TyperCommand):
    """Names arguments in the help, without the types that newer releases of typer add."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(*args, **kwargs)
        for parameter in self.params:
            if parameter.param_type_name == "argument":
                vars(parameter)["display_type_rich"] = lambda ctx: None


def _masked(call: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    try:
        return call(*args, **kwargs)
    except Exception as error:
        message, context = getattr(error, "message", None), getattr(error, "ctx", None)
        is_help = context is not None and message == context.get_help()  # nothing that was typed
        if hasattr(error, "format_message") and isinstance(message, str) and not is_help:
            error.message = printable(without_password(message))  # type: ignore[attr-defined]
        raise


def _show_version(value: bool) -> None:
    if value:
        say(f"penstock {__version__}")
        raise typer.Exit


def _common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Pack, check and count training data, and measure how fast it is loaded."""


def make_app(called: str = "") -> typer.Typer:
    """Return the command line.

    Args:
        called: The first word of it. Where that is a command, no other is imported.
    """
    app = typer.Typer(
        cls=_CommandGroup,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        rich_markup_mode=None,  # its boxes call flags <bool>, and break lines twice
    )
    app.callback()(_common)
    for name in [called] if called in _NAMES else _NAMES:
        command = getattr(importlib.import_module(f"penstock.cli.{name}"), name)
        # What follows the name of a program is the program's.
        settings = {"allow_interspersed_args": name != "run"}
        app.command(cls=_Command, context_settings=settings)(command)
    return app
