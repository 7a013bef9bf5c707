# SPDX-License-Identifier: Apache-2.0
"""Slots as they cross from a worker to the main process, in one process."""

from __future__ import annotations


def deliver(pool, arena, slots):
    """Return the bytes of leased slots, once the arena has got the pool's new ones."""
    for new in pool.take_new():
        arena.add([(new.slot, new.size_bytes)], [new.fd])
    leased = arena.lease(slots)
    arena.remove(pool.take_retired())
    return leased
