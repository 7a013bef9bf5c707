# SPDX-License-Identifier: Apache-2.0
"""Messages of `penstock pack`: an interruption, a sample that cannot be packed."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from penstock.cli.sigterm import INTERRUPTED, TERMINATED, Termination
from penstock.errors import PenstockError, StoreError, StoreUnreachable, WorkerDied
from penstock.faults import text_of
from penstock.lines import say
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["errors_of_samples", "saying_what_is_kept"]

_HINT: Final = (
    "--skip-bad leaves such samples out and lists them; with --resume it goes on from here."
)
# Of the notes that are added to an error: the one of a record, that of a sample or of those read
# together, and the one that speaks to those who call the library.
_OF_RECORD: Final = "while encoding"
_OF_SAMPLE: Final = "while reading sample"
_OF_LIBRARY: Final = "(on_error="


@contextlib.contextmanager
def saying_what_is_kept(dst: str) -> Iterator[None]:
    """Say at a Ctrl-C or SIGTERM how to go on."""
    with Termination() as termination:
        try:
            yield
            return
        except KeyboardInterrupt:
            pass
        except WorkerDied:
            if not termination.is_noted:  # sent to the whole group, it ends workers as well
                raise
    say(f"penstock: {without_password(_stopped(dst))}", err=True)
    raise typer.Exit(TERMINATED if termination.is_noted else INTERRUPTED)


def _stopped(dst: str) -> str:
    from penstock.cli.sources import parse

    kind, place = parse(dst)
    partial = Path(f"{place}.partial")
    if kind == "mongodb":
        kept = "What was packed so far is kept beside the collection"
    elif partial.exists():
        kept = f"What was packed so far is kept in {partial}"
    else:
        return "stopped before anything was packed."
    return f"stopped. {kept}: the same command with --resume goes on."


@contextlib.contextmanager
def errors_of_samples(src: str) -> Iterator[None]:
    """Say at an error of a sample which one it was, and what to do.

    An exception of the user's own code keeps its type and traceback: its author needs them.
    """
    from penstock.cli.sources import names_a_dataset

    try:
        yield
    except Exception as error:
        notes = _notes(error)
        is_of_sample = any(note.startswith(_OF_SAMPLE) for note in notes)
        if isinstance(error, StoreError) and is_of_sample:
            if isinstance(error, StoreUnreachable):
                raise
            raise StoreError(f"{error} {_HINT}") from error
        if isinstance(error, PenstockError) or not is_of_sample:
            raise
        if names_a_dataset(src):
            error.__notes__ = [*notes, _HINT]
            raise
        where = [note for note in notes if note.startswith(_OF_RECORD)] or notes
        raise StoreError(f"{text_of(error)} ({'; '.join(where)}). {_HINT}") from error


def _notes(error: BaseException) -> list[str]:
    """Return the notes of an error, but the one that speaks to those who call the library."""
    notes = map(str, getattr(error, "__notes__", ()))
    named_twice = re.compile(r"\b(sample \d+) \(\1\)")
    return [named_twice.sub(r"\1", note) for note in notes if not note.startswith(_OF_LIBRARY)]
