# SPDX-License-Identifier: Apache-2.0
"""Exceptions that are raised again: in another process, or in the same one."""

from __future__ import annotations

import contextlib
import pickle
import traceback
from typing import NamedTuple

__all__ = ["ExceptionReport", "copy_of_error", "report_exception", "revive_exception"]


class ExceptionReport(NamedTuple):
    """An exception on its way to another process.

    Attributes:
        pickled: The exception, or None where it does not survive pickling.
        text: Its type and message.
        traceback: The traceback as text; empty if it is reported otherwise.
    """

    pickled: bytes | None
    text: str
    traceback: str


class WorkerTraceback(Exception):
    """The traceback in the worker, as text."""

    def __str__(self) -> str:
        """Return the text."""
        return f"\n\n{self.args[0]}"


def report_exception(error: BaseException) -> ExceptionReport:
    """Return a report of `error` for another process; it holds `error` if that can be pickled."""
    text = "".join(traceback.format_exception_only(error)).strip()
    pickled = _pickle_exception(error, error)
    if pickled is None:  # a constructor with other arguments than `args`: do without it
        pickled = _pickle_exception(error, _Parts(type(error), error.args, vars(error)))
    return ExceptionReport(pickled, text, "".join(traceback.format_exception(error)))


class _Parts(NamedTuple):
    """An exception whose constructor cannot be called again with its `args`."""

    kind: type[BaseException]
    args: tuple[object, ...]
    attributes: dict[str, object]

    def assemble(self) -> BaseException:
        error = self.kind.__new__(self.kind)
        error.args = self.args
        vars(error).update(self.attributes)
        return error


def _pickle_exception(error: BaseException, value: BaseException | _Parts) -> bytes | None:
    """Return `value` pickled, if what comes out of it is like `error`."""
    try:
        pickled = pickle.dumps(value)
        again = _unpickle_exception(pickled)
        same = type(again) is type(error) and str(again) == str(error)
    except Exception:
        return None
    return pickled if same else None


def _unpickle_exception(pickled: bytes) -> BaseException:
    value: BaseException | _Parts = pickle.loads(pickled)
    return value.assemble() if isinstance(value, _Parts) else value


def revive_exception(report: ExceptionReport) -> BaseException:
    """Return the worker's exception, or a RuntimeError with its text if it did not pickle."""
    error: BaseException | None = None
    if report.pickled is not None:
        try:
            error = _unpickle_exception(report.pickled)
        except Exception:
            error = None  # its class cannot be imported here, say
    if error is None:
        error = RuntimeError(f"{report.text} (it cannot be raised as itself: it does not pickle)")
    with contextlib.suppress(Exception):  # some exceptions refuse to be changed
        error.__cause__ = WorkerTraceback(report.traceback) if report.traceback else None
    return error


def copy_of_error(error: Exception) -> Exception:
    """Return a copy of `error`, to raise in its place; `error` if it cannot be copied.

    Each raise adds frames to an exception, and all that they hold.
    """
    try:
        again = type(error).__new__(type(error), *error.args)
        vars(again).update(vars(error))
        again.__notes__ = list(getattr(error, "__notes__", ()))
        same = str(again) == str(error)
    except Exception:  # its class does not allow that
        return error
    return again.with_traceback(error.__traceback__) if same else error
