# SPDX-License-Identifier: Apache-2.0
"""What to do about samples that cannot be made and workers that die, and the record of both."""

from __future__ import annotations

import contextlib
import math
import numbers
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

from penstock.errors import ConfigError

OnError = Literal["raise", "skip", "replace"]
_CHOICES: Final = ("raise", "skip", "replace")
_FEWEST_JUDGED: Final = 100  # samples; a share of fewer says little


@dataclass(frozen=True, slots=True)
class FaultPolicy:
    """How much goes wrong before an epoch ends, and what takes the place of what is lost.

    A *bad sample* is one whose making raised an exception, `retries` more times included, or ended
    its worker twice (three times by a signal that may also come from outside: SIGKILL, SIGTERM,
    SIGHUP, SIGINT, SIGQUIT).

    Attributes:
        on_error: What becomes of a bad sample. "raise" raises its exception. "skip" leaves it out:
            its batch is shorter, and one of which nothing is left is not given. "replace" puts
            another sample in its place, so batches keep their size and ranks stay in step. Which
            one is decided by the seed, the epoch and the place in it: a sample of the same class
            if the dataset has `labels` or `targets`, and one that the sampler could have drawn,
            that is: any of the dataset if the sampler goes over all of it, otherwise one of the
            same batch. In an iterable dataset the next sample takes the place.
        max_failures: How many bad samples an epoch may have (one counts once, however often it is
            drawn): an int is a number, a float (0 to 1) a
            share of the samples asked for so far (at least 100), with three standard deviations'
            room for chance. None is no bound.
        max_respawns: How many workers that died are replaced per epoch; their tasks are done again.
            After that `WorkerDied` is raised.
        retries: How often a sample that raised is tried again before it is bad, with the same
            random numbers: for storage that fails now and then. Not in an iterable dataset.

    Raises:
        ConfigError: a field is out of its range.
        TypeError: a field is of the wrong type.

    Example:
        >>> FaultPolicy("replace", max_failures=0.02, retries=1).on_error
        'replace'
    """

    on_error: OnError = "raise"
    max_failures: int | float | None = 0.1
    max_respawns: int = 3
    retries: int = 0

    def __post_init__(self) -> None:
        """Check the fields."""
        if self.on_error not in _CHOICES:
            raise ConfigError(f"on_error must be one of {_CHOICES}, got {self.on_error!r}")
        for name in ("max_respawns", "retries"):
            value = getattr(self, name)
            if not hasattr(value, "__index__") or isinstance(value, bool):
                raise TypeError(f"{name} must be an int, got {value!r}")
            if value < 0:
                raise ConfigError(f"{name} must be 0 or more, got {value}")
        if self.max_failures is not None:
            self._check_max_failures(self.max_failures)

    def _check_max_failures(self, bound: Any) -> None:  # noqa: ANN401 - it is being checked
        choices = (
            "an int of 0 or more (a number of samples), a float from 0 to 1 (a share), or None"
        )
        if isinstance(bound, bool) or not isinstance(bound, numbers.Real):
            raise TypeError(f"max_failures must be {choices}; got {bound!r}")
        if not 0 <= float(bound) <= (1 if self._is_share else float("inf")):
            raise ConfigError(f"max_failures must be {choices}; got {bound!r}")

    @property
    def _is_share(self) -> bool:
        return not isinstance(self.max_failures, numbers.Integral)

    @property
    def tolerates(self) -> bool:
        """Whether an epoch goes on without a bad sample."""
        return self.on_error != "raise"

    def allowed_failures(self, num_samples: int) -> float:
        """Return how many bad samples there may be among the first `num_samples` of an epoch.

        A share has room for chance, three standard deviations: a shuffle may bring the bad ones
        early.

        Example:
            >>> FaultPolicy("skip", max_failures=0.1).allowed_failures(10_000)
            1094.8683298050514
        """
        if self.max_failures is None:
            return float("inf")
        if self._is_share:
            expected = self.max_failures * max(num_samples, _FEWEST_JUDGED)
            return expected + 3 * math.sqrt(expected)
        return float(self.max_failures)


RAISES: Final = FaultPolicy("raise", max_respawns=0)
"""What the plain word "raise" means: the first death of a worker raises too, as torch has it."""


def policy_of(on_error: str | FaultPolicy) -> FaultPolicy:
    """Return the policy that a loader's argument `on_error` means.

    The plain word "raise" also raises at the first death of a worker, as torch does; a policy says
    itself how many it replaces.

    Raises:
        ConfigError: an unknown word.
        TypeError: neither a word nor a policy.
    """
    if isinstance(on_error, FaultPolicy):
        return on_error
    if not isinstance(on_error, str):
        raise TypeError(f"on_error must be one of {_CHOICES} or a FaultPolicy, got {on_error!r}")
    if on_error == "raise":
        return RAISES
    return FaultPolicy(on_error)  # type: ignore[arg-type]  # it checks


@dataclass(frozen=True, slots=True)
class Failure:
    """A bad sample that an epoch went on without.

    Attributes:
        index: What the sampler gave; of a partner, what the dataset drew. None in an iterable
            dataset.
        name: Its file or key, as the dataset that could not read it says, or else the loader's
            (`describe(index)`). None if neither does.
        error: What was raised; `WorkerDied` if it ended its worker. Without traceback frames.
        traceback: The traceback as text. If the worker died, what is known of its end: memory, and
            the Python stack of a crash.
        worker_id: Who tried to make it; None without workers.
        epoch: In which epoch.
        step: For which batch of it.
        replaced_by: The index of the sample that took its place; None if none did.
        partner_of: The index of the sample that it was drawn for, as `Mosaic`, `MixUp` and `CutMix`
            draw; that one was made with other partners. None if it was asked for itself.
    """

    index: Any
    name: str | None
    error: BaseException
    traceback: str = field(repr=False)  # or a list of failures would fill screens
    worker_id: int | None = None
    epoch: int = 0
    step: int = 0
    replaced_by: Any = None
    partner_of: Any = None

    def __str__(self) -> str:
        """Return one line."""
        which = "a sample" if self.index is None else f"sample {self.index!r}"
        name = "" if self.name is None else f" ({self.name})"
        notes = getattr(self.error, "__notes__", ())
        is_of_collate = any(str(note).startswith("while collating") for note in notes)
        where = ", while collating" if is_of_collate else ""
        if self.partner_of is not None:
            where = f", a partner of sample {self.partner_of!r}"
        return f"{which}{name}{where}: {text_of(self.error)}"


def text_of(error: BaseException) -> str:
    """Return type and message in one line, whatever the exception makes of it."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own __str__ fails
        text = "(it has no message that can be shown)"
    return f"{type(error).__name__}: {text}"


class UnreadSample(NamedTuple):
    """The sample that a dataset could not read; it may differ from the requested one.

    Attributes:
        index: As that dataset numbers its samples.
        name: Its file or key; None if it has none.
        is_partner: Whether it was drawn by chance for another sample, which can be made without it.
    """

    index: Any
    name: str | None
    is_partner: bool = False


_UNREAD: Final = "_penstock_unread"


def note_unread(error: BaseException, sample: UnreadSample) -> None:
    """Store in `error` which sample could not be read, if the error can be changed.

    The innermost dataset gives the name. A dataset that drew it as a partner gives the number.
    """
    known = unread_sample(error)
    if known is not None:
        if known.is_partner or not sample.is_partner:
            return
        sample = sample._replace(name=known.name)
    with contextlib.suppress(Exception):
        setattr(error, _UNREAD, sample)


def unread_sample(error: BaseException) -> UnreadSample | None:
    """Return the sample that could not be read; None if it is the requested one."""
    return getattr(error, _UNREAD, None)


def annotate(error: BaseException, note: str) -> None:
    """Add a note to `error`, if it lets itself be changed (a frozen dataclass does not)."""
    with contextlib.suppress(Exception):
        error.add_note(note)
