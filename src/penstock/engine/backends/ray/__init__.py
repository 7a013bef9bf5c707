# SPDX-License-Identifier: Apache-2.0
"""Workers on any machine of a Ray cluster, behind the same Protocol as all other backends.

options.py    what the user asks Ray for
cluster.py    the connection, and what the cluster says of itself
crew.py       where the actors come from: a loader's own, or those of a pool
worker.py     the actor: sessions of trainers, their tasks in fair turns
session.py    one trainer's work in an actor
parcels.py    batches and datasets as Ray's object store takes them
clock.py      another machine's clock, told by ours
backend.py    the trainer's side
pool.py       the keeper of a pool that several trainers feed from
"""
