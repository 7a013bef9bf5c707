# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin in a project's own tests."""

from __future__ import annotations

import pytest
from tests.program.running import PYTHON, ran, split, written


def test_the_tests_of_ones_own_project_see_our_class(tmp_path):
    pytest.importorskip("torch")
    written(tmp_path / "project.py", "from torch.utils.data import DataLoader")
    written(tmp_path / "conftest.py", "import project\nfrom torch.utils.data import DataLoader")
    written(
        tmp_path / "test_project.py",
        """
        import conftest
        import project
        import torch

        def test_loader():
            for where in (project, conftest, torch.utils.data, torch.utils.data.dataloader):
                assert where.DataLoader.__module__ == "penstock.torch.loader"
            assert len(list(project.DataLoader(range(6), batch_size=2, num_workers=1))) == 3
        """,
    )
    options = ("-p", "no:cacheprovider", "-p", "penstock.testing.dropin", "-W", "error", "-n", "1")
    done = ran([*PYTHON, "-m", "pytest", *options], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert split(done.stderr) == ("", [])
