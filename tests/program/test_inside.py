# SPDX-License-Identifier: Apache-2.0
"""`install()` in a notebook's first cell, and the pytest plugin in a project's own tests."""

from __future__ import annotations

import pytest
from tests.program.running import PYTHON, ran, split, written

NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
CELLS = [
    "import penstock.torch; penstock.torch.install(num_workers=1)",
    "from torch.utils.data import DataLoader, Dataset",
    "class Squares(Dataset):\\n"
    "    def __len__(self): return 12\\n"
    "    def __getitem__(self, index): return index**2",
    "loader = DataLoader(Squares(), batch_size=4)",
    "print(sum(batch.sum().item() for batch in loader), loader.num_workers)",
    "print(type(loader).__module__, loader.stats().run.batches)",
    "penstock.torch.install(); penstock.torch.install(); print(DataLoader(range(2)).num_workers)",
    "penstock.torch.uninstall(); from torch.utils.data import DataLoader",
    "print(DataLoader.__module__)",
    "penstock.torch.install()",
]
shell = InteractiveShell.instance()
for cell in CELLS:
    shell.run_cell(cell).raise_error()
"""


def test_a_notebooks_first_cell_is_enough(tmp_path):
    pytest.importorskip("IPython")
    written(tmp_path / "notebook.py", NOTEBOOK)
    done = ran([*PYTHON, "notebook.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[:4] == [
        "506 1", "penstock.torch.loader 3", "0", "torch.utils.data.dataloader",
    ]  # fmt: skip
    # The notebook's own name was torch's by then.
    assert "__main__ imported torch's DataLoader before penstock.torch.install()" in done.stderr


def test_the_tests_of_ones_own_project_see_our_class(tmp_path):
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
    command = [
        *PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "penstock.testing.dropin",
        "-W",
        "error",
        "-n",
        "1",
    ]
    done = ran([*command, "-p", "no:cacheprovider"], tmp_path)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
    assert split(done.stderr) == ("", [])
