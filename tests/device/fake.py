# SPDX-License-Identifier: Apache-2.0
"""An accelerator whose queues go on when the test says so, and host memory that tells misuse.

A copy reads its host memory when the copies' queue comes to it, not before; memory that was let go
of is overwritten at once, on the host as on the device. So whatever is read too early, or after it
was used again, reads `POISON`.
"""

from __future__ import annotations

import collections
import contextlib
import weakref

import torch

POISON = -77.0
COPIES, CONSUMER = "copies", "consumer"


class HostMemory:
    """Gives batches in memory that is used again as soon as their last reference goes."""

    def __init__(self):
        self.num_held = 0

    def tensor(self, value: float) -> torch.Tensor:
        memory = torch.full((3,), value)
        tensor = memory[:]
        self.num_held += 1
        weakref.finalize(tensor, self._let_go, memory)
        return tensor

    def _let_go(self, memory):
        self.num_held -= 1
        memory.fill_(POISON)


class FakeMark:
    """A place in a queue of a `FakeAccelerator`; once `error` is set, it fails."""

    def __init__(self, accelerator, queue):
        self._accelerator = accelerator
        self.queue = queue
        self.is_reached = False
        self.error = None

    def query(self):
        self._raise()
        return self.is_reached

    def synchronize(self):
        """Run the queue up to here, as a device would while the thread waits."""
        self._accelerator.log.append((self.queue, "waited for", self))
        self._raise()
        while not self.is_reached:
            self._accelerator.advance(self.queue)

    def _raise(self):
        if self.error is not None:
            raise self.error("bad access")


class FakeAccelerator:
    """A device with a queue for copies and one for the main process; its memory is the host's.

    Attributes:
        log: What was asked for, as (queue, what, tensor's number or mark).
        marks: All that were made, the oldest first.
        trouble: Raised by the next copy, if it is no None.
        read: What the main process's queue has read, in its order.
    """

    device = torch.device("cuda", 0)
    has_queues = True

    def __init__(self):
        self.queues = {COPIES: collections.deque(), CONSUMER: collections.deque()}
        self.log = []
        self.marks = []
        self.trouble = None
        self.read = []
        self._queue = CONSUMER
        self._given = {}  # by id of a device tensor: whether the main process's queue has it

    @contextlib.contextmanager
    def copying(self):
        self._queue = COPIES
        try:
            yield
        finally:
            self._queue = CONSUMER

    def copy(self, tensor):
        trouble, self.trouble = self.trouble, None
        try:
            if trouble is not None:
                raise trouble
        finally:
            del trouble  # with its own traceback it would be a cycle
        assert self._queue == COPIES
        copy = torch.full_like(tensor, POISON)
        source, memory = tensor.detach(), copy.detach()  # as a device has them: by their address
        self.log.append((COPIES, "copy", id(copy)))
        self._push(COPIES, lambda: memory.copy_(source))
        given = self._given[id(copy)] = []
        weakref.finalize(copy, self._free, id(copy), memory, given)
        return copy

    def _free(self, number, memory, given):
        del self._given[number]
        if not given:
            memory.fill_(POISON)  # the next copy has it, which does not wait for the main process
        else:
            self._push(CONSUMER, lambda: memory.fill_(POISON))

    def mark_copies(self):
        return self._mark(COPIES)

    def mark_consumer(self):
        return self._mark(CONSUMER)

    def _mark(self, queue):
        mark = FakeMark(self, queue)
        self.marks.append(mark)
        self.log.append((queue, "mark", mark))

        def reach():
            mark.is_reached = True

        self._push(queue, reach)
        return mark

    def hand_over(self, mark, copies):
        assert mark.queue == COPIES
        self.log.append((CONSUMER, "wait", mark))
        self.queues[CONSUMER].append((lambda: mark.is_reached, lambda: None))
        for copy in copies:
            self.log.append((CONSUMER, "given", id(copy)))
            self._given[id(copy)].append(True)

    def use(self, tensor):
        """Read a tensor in the main process's queue, as a step would."""
        memory = tensor.detach()
        self._push(CONSUMER, lambda: self.read.append(memory.tolist()))

    def _push(self, queue, run):
        self.queues[queue].append((lambda: True, run))

    def advance(self, queue):
        """Do the next thing of a queue; where it waits for the other one, the next thing there."""
        if not self.queues[queue]:
            return
        is_possible, run = self.queues[queue][0]
        if is_possible():
            self.queues[queue].popleft()
            run()
        else:
            self.advance(COPIES)

    def drain(self):
        """Do everything."""
        while self.queues[COPIES] or self.queues[CONSUMER]:
            self.advance(COPIES)
            self.advance(CONSUMER)

    def asked(self, queue):
        """Return what one queue was asked for, without numbers."""
        return [what for where, what, _ in self.log if where == queue]
