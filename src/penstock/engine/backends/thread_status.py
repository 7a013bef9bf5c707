# SPDX-License-Identifier: Apache-2.0
"""The status of a worker thread; and where it learns that its batch is no longer wanted.

A thread cannot be ended from outside. So it asks, whenever it begins another sample,
or to collate.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.plan import sample_key
from penstock.engine.status_page import Phase, StatusSnapshot, StatusWriter, seconds_since

if TYPE_CHECKING:
    from penstock.engine.recover import BatchItem
    from penstock.randomness.generator_watch import GeneratorWatch

__all__ = ["ThreadStatus", "Unwanted"]

_NOBODY: Final = -1  # wants anything of any generation
_MOST_WATCHED: Final = 16  # samples of a batch whose calls are followed; then its collate


class Unwanted(BaseException):
    """Nobody wants the batch that this thread is making.

    No `Exception`: neither fault policies nor the user's code are to take it for one.
    """


class ThreadStatus(StatusWriter):
    """The status of one worker thread.

    Concurrency:
        The worker's thread writes. Any thread may call `snapshot`, and say what is wanted.
    """

    __slots__ = (
        "_begun_ns",
        "_doing",
        "_generation",
        "_number",
        "_replacement",
        "_step",
        "_wanted",
        "_watch",
    )  # fmt: skip

    def __init__(self) -> None:
        """Begin as one that is starting, and wanted."""
        super().__init__(cpu_clock=time.thread_time_ns)
        self._wanted = 0
        self._generation = 0
        self._step = 0
        self._doing = Phase.STARTING
        self._number: int | None = None
        self._replacement: tuple[Any] | None = None
        self._begun_ns = 0
        self._watch: GeneratorWatch | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether the worker is to do anything at all."""
        return self._wanted != _NOBODY

    def want(self, generation: int) -> None:
        """Say that only what belongs to this generation is wanted."""
        self._wanted = generation

    def want_nothing(self) -> None:
        """Say that the worker is to end."""
        self._wanted = _NOBODY

    def is_of_now(self, generation: int) -> bool:
        """Return whether what belongs to `generation` is wanted."""
        return self._wanted == generation

    def begin_generation(self, generation: int) -> None:
        """Note that an epoch begins."""
        self._generation = generation
        self.phase(Phase.BEGINNING)

    def begin_task(self, generation: int, step: int, *, measures: bool = True) -> None:
        """Note that a task begins, and whether it is measured."""
        super().begin_task(generation, step, measures=measures)
        self._generation = generation
        self._step = step
        self._number = self._replacement = None
        self._begun_ns = time.monotonic_ns()
        self._doing = Phase.READING

    def watch(self, watch: GeneratorWatch | None) -> None:
        """Let the calls of this task be followed: of its first samples, and of its collate."""
        if self._watch is not None:
            self._watch.end()
        self._watch = watch
        if watch is not None:
            watch.begin()

    def phase(self, phase: Phase) -> None:
        """Note what is being done; see `StatusWriter.phase`.

        Raises:
            Unwanted: a batch of this generation is wanted no more.
        """
        if phase == Phase.COLLATING:
            self.check()
            if self._watch is not None:
                self._watch.begin()
        super().phase(phase)
        self._number = self._replacement = None
        self._doing = phase

    @property
    def follows_samples(self) -> bool:
        """Always: any thread may ask for a snapshot, and what is unwanted ends here."""
        return True

    def number_cell(self) -> None:
        """Return None: `sample` also looks whether the batch is still wanted."""
        return

    def sample(self, number: int) -> None:
        """Note which sample is being read; raises as `phase` does."""
        self.check()
        super().sample(number)
        self._number = number
        if number == _MOST_WATCHED and self._watch is not None:
            self._watch.end()

    def item(self, phase: Phase, item: BatchItem) -> None:
        """Note what is being done with the sample of one item; raises as `phase` does."""
        self.check()
        super().item(phase, item)
        self._replacement = (sample_key(item.index),) if item.attempt else None
        self._number = item.number
        self._doing = phase

    def check(self) -> None:
        """Return if the generation that was begun last is still wanted.

        Raises:
            Unwanted: it is not.
        """
        if self._wanted != self._generation:
            raise Unwanted

    def snapshot(self) -> StatusSnapshot:
        """Return the status of now."""
        replacement = self._replacement
        return StatusSnapshot(
            generation=self._generation,
            step=self._step,
            phase=self._doing,
            number=self._number,
            has_replacement=replacement is not None,
            replacement=None if replacement is None else replacement[0],
            peak_rss_bytes=0,
            task_s=seconds_since(self._begun_ns) or 0.0,
            still_s=seconds_since(self.at_it_since_ns),
        )
