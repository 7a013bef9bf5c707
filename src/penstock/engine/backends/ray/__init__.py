# SPDX-License-Identifier: Apache-2.0
"""Workers on any machine of a Ray cluster, behind the same Protocol as all other backends.

backend.py   the main process's side, and its view of each actor
worker.py    the actor: takes tasks, makes batches, answers; packing, for both sides
cluster.py   the user's options for Ray, the connection, and the cluster's resources
"""
