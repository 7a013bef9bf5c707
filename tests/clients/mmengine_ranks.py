# SPDX-License-Identifier: Apache-2.0
"""One rank of a training by mmengine, and of one that goes on from its checkpoint."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
from tests.clients import test_mmengine as one_process


def main() -> None:
    torch.distributed.init_process_group("gloo")  # mmengine by itself wants CUDA here
    train(Path(sys.argv[1]))
    gc.collect()  # see tests.distributed.launching.TORCHRUN
    torch.distributed.destroy_process_group()


def train(work_dir: Path) -> None:
    settings = one_process.config(work_dir, seed="runner", every=3, num_workers=1)
    settings |= {"launcher": "pytorch"}
    whole = one_process.trained(settings)
    rest = one_process.resumed(settings, work_dir / "iter_3.pth")
    assert type(whole.model).__name__ == "MMDistributedDataParallel"
    found = {
        "whole": whole.model.module.seen,
        "rest": rest.model.module.seen,
        "weights": [one_process.weights(run) for run in (whole, rest)],
    }
    (work_dir / f"rank{whole.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
