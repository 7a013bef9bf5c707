# SPDX-License-Identifier: Apache-2.0
"""Every page where the GPU path stands says that it has not run on one, until it has."""

from __future__ import annotations

import pytest
from tests.docs.pages import ROOT

PLACES = [
    "README.md", "benchmarks/device/gpu.py", "docs/benchmarks.md", "docs/design/device.md",
    "docs/guide/device.md", "docs/index.md", "docs/migrating-from-torch.md", "docs/quickstart.md",
    "docs/zh/migrating-from-torch.md", "docs/zh/quickstart.md",
    "src/penstock/torch/device/prefetcher.py", "src/penstock/torch/loader.py",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_it_says_whether_it_has_run_on_a_gpu_and_how_to_run_it(place):
    text = " ".join((ROOT / place).read_text(encoding="utf-8").split())
    has_run = (ROOT / "benchmarks/results/gpu.json").exists()  # `make gpu` writes it
    assert ("not yet run on a gpu" in text.lower()) is not has_run
    assert has_run or "`make gpu`" in text
