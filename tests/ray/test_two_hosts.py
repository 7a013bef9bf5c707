# SPDX-License-Identifier: Apache-2.0
"""The program on one host, its workers on another, and the link between them breaks in mid-epoch.

Hosts are network namespaces with a switch between them, see `tests.ray.hosts`. Whatever happens to
the link, the program gets the batches of num_workers=0, each once.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest
from tests.ray.hosts import Hosts, why_not
from tests.ray.trainer_on_host import (
    BATCH_SIZE,
    KINDS,
    NUM_STEPS,
    digest_of,
    open_loader,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

PROGRAM = Path(__file__).with_name("trainer_on_host.py")
CUT_AFTER = 30  # steps, far from the end
NUM_IN_FLIGHT = 2 * 4 + 2  # steps that may be on their way: prefetch of 2 workers, and ours
CUT_S = 5.0
PATIENCE_S = 60.0


# An object whose way was cut is asked for again after 1 s instead of 10. gRPC gives a silent
# connection up after 2 s instead of 20, so that after a cut of seconds Ray sends calls again that
# were done already; the machine is not declared dead meanwhile.
BREAKS_SOON = {
    "RAY_object_manager_pull_timeout_ms": "1000",
    "RAY_grpc_keepalive_time_ms": "1000",
    "RAY_grpc_keepalive_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "100",
}


@functools.cache
def expected(kind: str) -> list[str]:
    return [digest_of(batch) for batch in open_loader(kind, num_workers=0)]


class Program:
    """The program on its host, as seen through what it writes.

    Attributes:
        digests: Of the batches, as far as they were taken.
        is_done: Whether the epoch is over.
        said: What it and Ray have printed.
    """

    def __init__(self, hosts: Hosts, kind: str, log: Path) -> None:
        self.digests: list[str] = []
        self.is_done = False
        self.said: list[str] = []
        self._log = log
        self._lines: queue.SimpleQueue[tuple[IO[str], str]] = queue.SimpleQueue()
        reading, writing = os.pipe()
        command = [sys.executable, str(PROGRAM), hosts.ray_address, kind, str(log), str(writing)]
        try:
            self._process = hosts.popen("program", command, pass_fds=[writing])
        finally:
            os.close(writing)
        self._steps = os.fdopen(reading)
        assert self._process.stdout is not None
        self._words = self._process.stdout
        self._readers = [
            threading.Thread(target=self._read, args=[source])
            for source in (self._steps, self._words)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, source: IO[str]) -> None:
        for line in source:
            self._lines.put((source, line))
        self._lines.put((source, ""))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()
        self._steps.close()
        self._words.close()

    def take(self, timeout_s: float) -> bool:
        """Take what it writes next; return False when it was silent for so long."""
        try:
            source, line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            return False
        if source is self._words:
            self.said.append(line)
        elif not line and not self.is_done:
            self.take_for(1.0)
            self.fail("the program has ended")
        elif line.startswith("step "):
            _, step, digest = line.split()
            assert int(step) == len(self.digests)
            self.digests.append(digest)
        elif line:
            self.is_done = True
        return True

    def take_until(self, num_steps: int) -> None:
        while len(self.digests) < num_steps:
            if not self.take(PATIENCE_S):
                self.fail(f"no step {len(self.digests)} in {PATIENCE_S} s")

    def take_for(self, duration_s: float) -> None:
        """Take whatever comes in this time: what had arrived before the link was cut."""
        deadline = time.monotonic() + duration_s
        while (left := deadline - time.monotonic()) > 0:
            self.take(left)

    def take_rest(self) -> None:
        while not self.is_done:
            if not self.take(PATIENCE_S):
                self.fail(f"no step {len(self.digests)} in {PATIENCE_S} s")
        assert self._process.wait(PATIENCE_S) == 0

    def fail(self, why: str) -> None:
        pytest.fail(f"{why}; the program said:\n{''.join(self.said)}")

    def num_reads(self) -> collections.Counter[int]:
        """How many times each sample was read."""
        return collections.Counter(map(int, self._log.read_text().split()))


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    """Skip all tests where hosts cannot be simulated."""
    if (reason := why_not()) is None:
        return
    if os.environ.get("PENSTOCK_REQUIRE_NETNS") == "1":
        pytest.fail(f"{reason}. PENSTOCK_REQUIRE_NETNS=1 forbids to skip.")
    pytest.skip(reason)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts("program", "far", env=BREAKS_SOON) as hosts:
        hosts.start_head("program")
        hosts.start_node("far", num_cpus=2, resources={"far": 2})
        yield hosts


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_breaks_and_comes_back_loses_nothing_and_doubles_nothing(hosts, kind, tmp_path):
    with contextlib.closing(Program(hosts, kind, tmp_path / "log")) as program:
        program.take_until(CUT_AFTER)
        hosts.cut("far")
        try:
            while program.take(0.0):
                pass
            num_at_cut = len(program.digests)
            program.take_for(CUT_S)
        finally:
            hosts.restore("far")
        assert not program.is_done
        assert len(program.digests) <= num_at_cut + 3 * NUM_IN_FLIGHT, "the program did not wait"
        program.take_rest()
        assert program.digests == expected(kind)
        num_reads = program.num_reads()
    assert len(num_reads) == NUM_STEPS * BATCH_SIZE
    if kind == "iterable":  # its workers have not gone on twice
        assert set(num_reads.values()) == {1}
    else:  # without this the test shows nothing: no call was sent again
        assert max(num_reads.values()) > 1
