# SPDX-License-Identifier: Apache-2.0
"""`penstock run` covers the processes that a program starts: workers, ranks, subprocesses."""

from __future__ import annotations

import subprocess
import sys

import pytest
from tests.distributed.launching import TORCHRUN
from tests.distributed.launching import environment as of_ranks
from tests.program.running import RUN, environment, ran, split, written
from tests.support.processes import completed

CHILDREN = """
import multiprocessing, subprocess, sys, torch.multiprocessing
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return index**2

def in_child(rank, name):
    loader = DataLoader(Squares(), batch_size=rank + 1)
    print(name, rank, len(list(loader)), type(loader).__module__, flush=True)

if __name__ == "__main__":
    for method in ("fork", "forkserver", "spawn"):
        loader = DataLoader(Squares(), num_workers=2, multiprocessing_context=method)
        print(method, [batch.item() for batch in loader], type(loader).__module__, flush=True)
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=in_child, args=(1, method))
        child.start()
        child.join()
        print(child.exitcode, flush=True)
    torch.multiprocessing.spawn(in_child, ("a rank",), nprocs=2)
    print(subprocess.run([sys.executable, "other.py", "--seed"]).returncode)
"""
OTHER = """
import sys
from torch.utils.data import DataLoader
print(sys.argv, len(list(DataLoader(range(9)))), DataLoader.__module__)
sys.exit(6)
"""


@pytest.fixture(scope="module")
def children(tmp_path_factory):
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("children")
    written(folder / "train.py", CHILDREN)
    written(folder / "other.py", OTHER)
    done = ran([*RUN, "train.py"], folder)
    assert done.returncode == 0, done.stderr
    return done


def test_loaders_made_in_children_are_ours(children):
    ours, lines = "penstock.torch.loader", children.stdout.splitlines()
    assert sorted(lines[7:9]) == [f"a rank 0 4 {ours}", f"a rank 1 2 {ours}"]
    assert lines[:7] == [
        *(f"{method} [0, 1, 4, 9] {ours}" for method in ("fork", "forkserver", "spawn")),
        *(f"fork 1 2 {ours}", "0", f"spawn 1 2 {ours}", "0"),
    ]
    assert lines[9:] == [f"['other.py', '--seed'] 9 {ours}", "6"]


def test_each_process_says_once_what_its_own_loaders_waited_for(children):
    program, said = split(children.stderr)
    assert program == ""
    shown = [line.split(" Waited ")[0] for line in said if line.startswith("penstock run: ")]
    in_child = "penstock run: train.py:13: a loader of Squares, 0 workers,"
    assert sorted(shown) == [
        "penstock run: other.py:4: a loader of range, 0 workers, 9 batches.",
        *[f"{in_child} 2 batches."] * 3,  # forked, spawned, rank 1
        f"{in_child} 4 batches.",
        "penstock run: train.py:18: 3 loaders of Squares, 2 workers, 12 batches.",
    ]


@pytest.fixture
def elsewhere(tmp_path):
    """A Python without Penstock, and with a torch of its own."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    packages = next(venv.glob("lib/python*/site-packages"))
    (packages / "torch").mkdir()
    written(packages / "torch" / "__init__.py", "name = 'another'")
    return venv / "bin" / "python"


def test_a_python_without_penstock_goes_on_and_says_so(elsewhere, tmp_path):
    written(tmp_path / "other.py", "import torch; print(torch.name)")
    written(
        tmp_path / "program.py",
        """
        import os, subprocess, sys
        ours = os.environ["PYTHONPATH"].split(os.pathsep)[0]
        command = [sys.argv[1], "other.py"]
        print(subprocess.run(command, env={**os.environ, "PYTHONPATH": ours}).returncode)
        """,
    )
    done = ran([*RUN, "program.py", elsewhere], tmp_path)
    assert (done.returncode, done.stdout) == (0, "another\n0\n")
    assert done.stderr == (
        f"penstock run: {elsewhere} keeps torch's own loader, because Penstock cannot be used "
        "there: ModuleNotFoundError: No module named 'penstock'\n"
    )


def test_a_torch_that_does_not_suit_is_left_alone(tmp_path):
    (tmp_path / "torch.py").write_text("name = 'of my own'")
    (tmp_path / "program.py").write_text("import torch; print(torch.name)")
    done = ran([*RUN, "program.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "of my own\n")
    assert "keeps torch's own loader" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_run_within_a_run_has_its_own_options(tmp_path):
    written(tmp_path / "inner.py", "import sys; print([p for p in sys.path if 'startup' in p])")
    written(
        tmp_path / "program.py",
        """
        import subprocess, sys
        subprocess.run([sys.executable, "-m", "penstock", "run", "inner.py"], check=True)
        """,
    )
    done = ran([*RUN, "program.py"], tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


RANKS = """
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.manual_seed(0)
dataset = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
model = torch.nn.Linear(4, 1)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=4, sampler=sampler, num_workers=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.data -= 0.1 * parameter.grad
            parameter.grad = None
        print(f"{dist.get_rank()} {epoch} {loss.item().hex()}\\n", end="", flush=True)
dist.destroy_process_group()
"""
LAUNCHED = (*TORCHRUN, "--standalone", "--nproc-per-node=2")


def test_ranks_of_torchrun_have_the_losses_of_torch_and_rank_0_speaks(tmp_path):
    pytest.importorskip("torch")
    written(tmp_path / "train.py", RANKS)
    own = {"PYTHONPATH": environment().get("PYTHONPATH", "")}

    def losses(*command):
        done = completed(command, cwd=tmp_path, env=of_ranks(**own))
        assert done.returncode == 0, done.stderr
        return sorted(done.stdout.splitlines()), done.stderr

    stock, _ = losses(*LAUNCHED, "train.py")
    assert len(stock) == 2 * 2 * 4
    each_rank = losses(*LAUNCHED, *RUN[1:], "train.py")
    launcher = losses(*RUN, *LAUNCHED[1:], "train.py")
    for got, stderr in (each_rank, launcher):
        assert got == stock
        shown = [line for line in split(stderr)[1] if line.startswith("penstock run: ")]
        assert len(shown) == 1
        assert shown[0].startswith(
            "penstock run: train.py:12: a loader of TensorDataset, 1 worker, 8 batches. Waited "
        )
