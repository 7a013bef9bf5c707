# SPDX-License-Identifier: Apache-2.0
"""What docs/guide/jax.md shows runs, and prints what it says."""

from __future__ import annotations

from tests.clients.programs import run_page

IN_PROGRAMS = ("jax",)  # it has threads, so this process had better not import it


def test_the_python_of_the_page_runs_and_prints_what_it_says(tmp_path):
    printed, said = run_page(
        "jax.md",
        tmp_path,
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="--xla_force_host_platform_device_count=4",
    )
    assert printed == said
    assert len(said) == 2
