# SPDX-License-Identifier: Apache-2.0
"""Four ranks under torchrun and two that are started by hand, each set once for all tests."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import pytest
from tests.distributed.launching import environment, results_of, started, torchrun
from tests.support.processes import ended

if TYPE_CHECKING:
    from pathlib import Path

MAP_STYLE = ["dataset", "torch's", "weighted", "class balanced"]
PLAN = {
    **{kind: {"kind": kind} for kind in MAP_STYLE},
    "drop": {"kind": "dataset", "pad": "drop"},
    "none": {"kind": "dataset", "pad": "none"},
    "drop_last": {"kind": "dataset", "drop_last": True},
    "torch's, drop_last": {"kind": "torch's", "drop_last": True},
    "balanced batches": {"kind": "balanced batches"},
    "buckets": {"kind": "buckets"},
    "stream by batch": {"kind": "stream by batch"},
    "stream by item": {"kind": "stream by item"},
    "two workers": {"kind": "dataset", "num_workers": 2},
    "persistent workers": {
        "kind": "dataset",
        "pad": "none",
        "num_workers": 2,
        "persistent_workers": True,
    },
    "threads": {"kind": "own generators", "num_workers": 2, "backend": "thread"},
    "stream, two workers": {"kind": "stream by batch", "num_workers": 2},
    "stream, persistent workers": {
        "kind": "stream by batch",
        "num_workers": 2,
        "persistent_workers": True,
    },
    "stream by item, two workers": {"kind": "stream by item", "num_workers": 2},
}
# Streams and whole batches of a rank belong to the number of ranks that they were begun with.
GOING_ON = [
    name
    for name, run in PLAN.items()
    if run["kind"] != "balanced batches" and not run["kind"].startswith("stream")
]


@pytest.fixture(autouse=True, scope="session")
def no_rank():
    """This process trains alone, wherever the tests themselves run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RANK", raising=False)
        patch.delenv("WORLD_SIZE", raising=False)
        yield


def planned(folder, epochs):
    (folder / "plan.json").write_text(json.dumps({"epochs": epochs}))


@pytest.fixture(scope="session")
def four(tmp_path_factory):
    """What each of four ranks had, started by torchrun."""
    folder = tmp_path_factory.mktemp("four")
    planned(folder, PLAN)
    torchrun("rank_run", 4, folder, str(folder))
    return results_of(folder, 4)


@pytest.fixture(scope="session")
def two(four, tmp_path_factory):
    """What each of two ranks had, started by hand; those of `GOING_ON` go on where the four were.

    They have other numbers of workers than the four.
    """
    folder: Path = tmp_path_factory.mktemp("two")
    states = {name: result["state"] for name, result in four[0]["epochs"].items()}
    epochs = {name: dict(run) for name, run in PLAN.items()}
    for name, run in epochs.items():
        if name in GOING_ON:
            run |= {"state": states[name], "num_epochs": 1, "cut": 1}
            run["num_workers"] = int(name in ("dataset", "torch's", "weighted"))
            run.pop("persistent_workers", None)
            run.pop("backend", None)
    planned(folder, epochs)
    command = [sys.executable, "-m", "tests.distributed.rank_run", str(folder)]
    ranks = [
        started([*command, str(rank), "2"], folder=folder, name=f"rank{rank}", env=environment())
        for rank in range(2)
    ]
    assert ended(ranks) == [0, 0], [(folder / f"rank{r}.txt").read_text() for r in range(2)]
    return results_of(folder, 2)
