# SPDX-License-Identifier: Apache-2.0
"""The command `penstock`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from penstock.cli.lines import without_password
from penstock.cli.troubleshooting import explained
from penstock.errors import ConfigError, MissingExtraError, PenstockError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]

_EXTRA_OF: Final = {
    "typer": "cli",
    "rich": "cli",
    "plotly": "report",
    "torch": "torch",
    "cv2": "vision",
    "simplejpeg": "vision",
    "PIL": "vision",
    "lmdb": "lmdb",
    "msgspec": "lmdb",
    "xxhash": "lmdb",
    "pymongo": "mongo",
    "bson": "mongo",
    "pyarrow": "arrow",
    "matplotlib": "charts",
}
# Their messages name the argument, file or extra and what to do: one line is all there is to say.
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
            raise _name_the_extra(error) from error
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
        # Errors point there, so it works without the extra that the others need.
        sys.stdout.write(f"{explained(*words[1:])}\n")
        return 0
    app = make_app()
    try:
        app(args=arguments, prog_name="penstock")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _name_the_extra(error: ModuleNotFoundError) -> Exception:
    module = (error.name or "").partition(".")[0]
    if module not in _EXTRA_OF:
        return error
    wanted = "cli" if _EXTRA_OF[module] == "cli" else f"cli,{_EXTRA_OF[module]}"
    return MissingExtraError(
        f"this command needs {module}, which is not installed. "
        f'Install it with: pip install "penstock[{wanted}]"'
    )
