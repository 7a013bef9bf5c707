# SPDX-License-Identifier: Apache-2.0
"""What the guides of other libraries show runs, and prints what they say."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from tests.clients.programs import GUIDE, run_page

# Some have threads, and all change the process, so this one does not import them.
IN_PROGRAMS = (
    "accelerate", "datasets", "ignite", "jax", "lightning", "mindspore", "mmengine", "torchvision",
    "transformers",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
# Written by the libraries themselves, and different from run to run.
NOISE = ("{'train_runtime'", "Loads checkpoint by")
PAGES = {  # how many lines each says that it prints
    "accelerate.md": 2,
    "huggingface-datasets.md": 4,
    "jax.md": 2,
    "lightning.md": 3,
    "mindspore.md": 3,
    "mmengine.md": 4,
    "torchvision.md": 3,
    "transformers.md": 2,
}


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs_and_prints_what_it_says(page, tmp_path):
    # Python imports it first: several ask for torchvision, perhaps of another build than torch.
    (tmp_path / "sitecustomize.py").write_text(
        "from tests.clients.torchvision_operators import declare_missing\ndeclare_missing()\n"
    )
    printed, said = run_page(
        page,
        tmp_path,
        PYTHONPATH=f"{tmp_path}:{ROOT}:{ROOT / 'src'}",
        TMPDIR=str(tmp_path),
        OMP_NUM_THREADS="1",
        GLOG_v="3",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert [line for line in printed if not any(noise in line for noise in NOISE)] == said
    assert len(said) == PAGES[page]


def test_opencv_is_there_once():
    names = {each.name for each in importlib.metadata.distributions()}
    assert {name for name in names if name.startswith("opencv")} == {"opencv-python-headless"}


@pytest.mark.parametrize("name", ["accelerate", "mmengine", "transformers"])
def test_a_page_names_the_version_that_it_is_true_of(name):
    version = importlib.metadata.version(name)
    assert f"Tested with {name} {version}" in (GUIDE / f"{name}.md").read_text()
