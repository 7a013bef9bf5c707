# SPDX-License-Identifier: Apache-2.0
"""Workers on any machine of a Ray cluster, behind the same Protocol as all other backends.

backend.py         the main process's side
remote_worker.py   its view of one actor: what is under way, and how it ended
worker.py          the actor: takes tasks, makes batches, answers
cluster.py         what the user asks Ray for, the connection, and what the cluster says of itself
parcels.py         batches and datasets as Ray's object store takes them
"""
