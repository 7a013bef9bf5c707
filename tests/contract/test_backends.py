# SPDX-License-Identifier: Apache-2.0
"""Every backend passes the same contract."""

from __future__ import annotations

import dataclasses
import multiprocessing

from tests.contract.backends import BackendContract

from penstock.engine.backends.process import ProcessBackend
from penstock.engine.backends.thread import ThreadBackend


class TestThread(BackendContract):
    num_workers = 2

    def end_worker(self, backend, worker_id):
        thread = backend._table.workers[worker_id].thread
        backend.kill(worker_id, "the contract says so")
        thread.join()
        return True

    def open(self, plan):
        return ThreadBackend(plan)


class TestFork(BackendContract):
    num_workers = 2
    start_method = "fork"

    def end_worker(self, backend, worker_id):
        process = backend.processes[worker_id]
        process.kill()
        process.join()
        return True

    def open(self, plan):
        context = multiprocessing.get_context(self.start_method)
        return ProcessBackend(dataclasses.replace(plan, context=context))


class TestSpawn(TestFork):
    start_method = "spawn"


class TestForkserver(TestFork):
    start_method = "forkserver"
