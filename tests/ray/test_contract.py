# SPDX-License-Identifier: Apache-2.0
"""Ray's workers pass the contract of all backends."""

from __future__ import annotations

import dataclasses

import pytest
from tests.contract.backends import BackendContract

from penstock.engine.backends.ray.backend import RayBackend
from penstock.options import Ray


class OnNode(BackendContract):
    num_workers = 2
    node = ""

    @pytest.fixture(autouse=True)
    def _connected(self, cluster):
        self.cluster = cluster

    def open(self, plan):
        # Of no CPUs: the contract adds more workers than a small machine has.
        options = Ray(num_cpus=0, resources={self.node: 1})
        return RayBackend(dataclasses.replace(plan, backend="ray", backend_options=options))

    def end_worker(self, backend, worker_id):
        self.cluster.ray.kill(backend._table.workers[worker_id].actor)
        return True


class TestOnTheSameNode(OnNode):
    node = "near"


class TestOnAnotherNode(OnNode):
    node = "far"
