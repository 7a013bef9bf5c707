# SPDX-License-Identifier: Apache-2.0
"""Trial of `penstock doctor`: whether two workers deliver batches on this machine."""

from __future__ import annotations

from typing import Final

from penstock.cli.doctor.children import Child
from penstock.cli.doctor.finding import Finding
from penstock.cli.doctor.tasks import TRIAL_WORKERS
from penstock.system_limits import format_bytes

__all__ = ["TRIAL_LIMIT_S", "start_trial", "trial_finding"]

# A batch takes milliseconds and the start of two workers below a second; a machine under heavy load
# may take ten times as long.
TRIAL_LIMIT_S: Final = 30.0
_TOPIC: Final = "workers"
_NAME: Final = "trial"


def start_trial(limit_s: float = TRIAL_LIMIT_S) -> Child:
    """Start a process whose two workers make batches.

    Args:
        limit_s: Seconds that a batch may take.
    """
    # The loader's own time limit comes first: its error says where a worker is stuck.
    return Child("deliver", f"{limit_s}", limit_s=limit_s + TRIAL_LIMIT_S)


def trial_finding(trial: Child) -> Finding:
    """Wait for the trial's end, and return how it went."""
    ended = trial.result()
    told = ended.lines[-1] if ended.lines else {}
    if "delivered" in told and not ended.how:
        size, first_s = format_bytes(told["num_bytes"]), told["first_s"]
        found = (
            f"{TRIAL_WORKERS} workers delivered {told['delivered']} batches, {size}, through "
            f"shared memory; the first after {first_s:.2f} s"
        )
        return Finding(_TOPIC, _NAME, found, values=told)
    reason = told.get("failed") or f"the loader's process {ended.how}; {ended.last_words}"
    remedy = (
        "See the limits and shared memory above. num_workers=0 does without workers, "
        'backend="thread" without processes.'
    )
    return Finding(_TOPIC, _NAME, reason, remedy, "problem", {**told, "ended": ended.how})
