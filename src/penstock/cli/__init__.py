# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Final

from penstock.cli.own_path import without_current_folder
from penstock.cli.sigterm import NO_OUTPUT
from penstock.cli.silence import escaped_messages
from penstock.cli.troubleshooting import explained
from penstock.errors import ConfigError, MissingExtraError, PenstockError, StoreError
from penstock.lines import OutputError, check_stdout, say
from penstock.optional import missing_extra
from penstock.redact import without_password

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
        0 where all went well, 1 where not, with the reason on stderr, 2 for a wrong option, 74
        where stdout takes no more.
    """
    status = 1
    try:
        try:
            with escaped_messages(), without_current_folder():
                status = _run(arguments)
        except ModuleNotFoundError as error:
            raise missing_extra(error, "this command", "cli") from error
        finally:
            check_stdout()
        return status
    except PenstockError as error:
        # Lines that a name may have are not at the margin, where ours are.
        text = f"penstock: {without_password(str(error))}".replace("\n", "\n  ")
        if type(error) not in _SAY_IT_ALL:
            text += f"\nHelp: `penstock explain {error.help_topic}`"
    except OutputError as error:
        text, status = f"penstock: cannot write to stdout: {error}.", NO_OUTPUT
    except Exception as error:  # the user's code's, mostly: its author needs the traceback
        text = "".join(traceback.format_exception(error)).rstrip("\n")
    for line in text.split("\n"):
        say(line, err=True)
    return status


def _run(arguments: Sequence[str] | None) -> int:
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        from penstock.cli.commands import make_app
    except ModuleNotFoundError:
        if words[:1] != ["explain"] or len(words) > 2:
            raise
        # Errors point there, so it works without the extra that the others need. Its list says how
        # it is used.
        names = [word for word in words[1:] if word not in ("-h", "--help")]
        for line in explained(*names).split("\n"):
            say(line)
        return 0
    app = make_app(*words[:1])
    try:
        app(args=arguments, prog_name="penstock")
    except SystemExit as end:
        if isinstance(end.code, str):  # of the user's code
            say(end.code, err=True)
            return 1
        if isinstance(end.__context__, BrokenPipeError):  # click's exit, silent and with status 1
            return NO_OUTPUT
        return end.code or 0
    return 0
