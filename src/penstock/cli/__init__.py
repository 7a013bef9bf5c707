# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from penstock.cli.lines import without_password
from penstock.cli.troubleshooting import explained
from penstock.errors import ConfigError, MissingExtraError, PenstockError, StoreError
from penstock.imports import missing_extra

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

# Their messages name the argument, file or extra and what to do: one line is all there is to say.
# These classes and not their subclasses: of StoreUnreachable or StateError there is more to say.
_SAY_IT_ALL: Final = (ConfigError, MissingExtraError, PenstockError, StoreError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Args:
        arguments: What follows the word `penstock`; None takes those of this process.

    Returns:
        0 where all went well, 1 where not, with the reason on stderr, 2 for a wrong option.
    """
    try:
        try:
            return _run(arguments)
        except ModuleNotFoundError as error:
            raise missing_extra(error, "this command", "cli") from error
    except PenstockError as error:
        sys.stderr.write(f"penstock: {without_password(str(error))}\n")
        if type(error) not in _SAY_IT_ALL:
            sys.stderr.write(f"Help: `penstock explain {error.help_topic}`\n")
        return 1


def _run(arguments: Sequence[str] | None) -> int:
    try:
        from penstock.cli.commands import make_app
    except ModuleNotFoundError:
        words = sys.argv[1:] if arguments is None else list(arguments)
        if words[:1] != ["explain"] or len(words) > 2:
            raise
        # Errors point there, so it works without the extra that the others need. Its list says how
        # it is used.
        names = [word for word in words[1:] if word != "--help"]
        sys.stdout.write(f"{explained(*names)}\n")
        return 0
    app = make_app()
    try:
        app(args=arguments, prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0
