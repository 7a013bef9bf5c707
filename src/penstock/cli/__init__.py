# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import penstock
from penstock.cli.terminal import (
    INTERRUPTED,
    NO_OUTPUT,
    TERMINATED,
    escaped_messages,
    sigterm_as_ctrl_c,
    was_terminated,
)
from penstock.errors import ConfigError, MissingExtraError, PenstockError, StoreError
from penstock.lines import OutputError, check_stdout, say
from penstock.optional import missing_extra
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

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
        where stdout takes no more, 130 or 143 after Ctrl-C or SIGTERM.
    """
    words = sys.argv[1:] if arguments is None else list(arguments)
    # What `penstock run` starts in this process's place has signals of its own.
    signals = contextlib.nullcontext() if words[:1] == ["run"] else sigterm_as_ctrl_c()
    status = 1
    try:
        try:
            with escaped_messages(), _without_current_folder(), signals:
                status = _run(words)
        except KeyboardInterrupt:  # while the command was imported
            status = INTERRUPTED
        except ModuleNotFoundError as error:
            raise missing_extra(error, "this command", "cli") from error
        finally:
            check_stdout()
        return TERMINATED if status == INTERRUPTED and was_terminated() else status
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


def _run(words: list[str]) -> int:
    try:
        from penstock.cli.commands import make_app
    except ModuleNotFoundError:
        if words[:1] != ["explain"]:
            raise
        from penstock.cli.explain import explain  # errors point there: it works without the extra

        explain(*(word for word in words[1:2] if word not in ("-h", "--help")))
        return 0
    try:
        make_app(*words[:1])(args=words, prog_name="penstock")
    except SystemExit as end:
        if isinstance(end.code, str):  # of the user's code
            say(end.code, err=True)
            return 1
        if isinstance(end.__context__, BrokenPipeError):  # click's exit, silent and with status 1
            return NO_OUTPUT
        return end.code or 0
    return 0


@contextlib.contextmanager
def _without_current_folder() -> Iterator[None]:
    """Take the current folder off the import path, here and in processes started meanwhile.

    A data set may have a file `multiprocessing.py`. `python -m penstock` puts the current folder
    on the path, and so does `python -c`, by which multiprocessing starts its processes. These get
    this process's path once they have begun.
    """
    flags: Any = vars(util)["_args_from_interpreter_flags"]  # called for each process
    vars(util)["_args_from_interpreter_flags"] = lambda: [*flags(), "-P"]
    path = sys.path.copy()
    first = Path((path[0] if path else "") or os.curdir)
    is_module = getattr(sys.modules["__main__"], "__spec__", None) is not None
    is_current = first.is_dir() and first.samefile(os.curdir)
    is_needed = Path(penstock.__file__).parents[1] == first
    if is_module and is_current and not is_needed and not sys.flags.safe_path:
        del sys.path[0]
    try:
        yield
    finally:
        sys.path[:] = path
        vars(util)["_args_from_interpreter_flags"] = flags
