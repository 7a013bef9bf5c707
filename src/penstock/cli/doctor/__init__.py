# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: what this machine gives a loader, what stands in its way, and what to do.

    command ── machine      cores, memory, shared memory, limits: read, 0.1 s
            ── interpreter  versions, threads, start method
            ── extras       what Penstock's own metadata asks for, against what is installed
            ── device       what torch says of a GPU
            ── trial        two workers deliver batches
                 │
               children     processes that import libraries and run the trial: one may crash or hang

Every finding says what was found; one that is not fine says what to do.
"""

from __future__ import annotations

from penstock.cli.doctor.command import doctor

__all__ = ["doctor"]
