# SPDX-License-Identifier: Apache-2.0
"""`penstock bench` compares the loaders on any folder of images, and says what is wrong with it."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock.cli import main
from penstock.errors import PenstockError, WorkerError
from penstock.optional import install_command

cv2 = pytest.importorskip("cv2")
pytest.importorskip("simplejpeg")
pytest.importorskip("torch")

SMALL = ["--workers", "1", "--batch-size", "4", "--size", "16", "--rounds", "2"]


def write_images(folder, number, suffix=".jpg"):
    noise = np.random.default_rng(0)
    for position in range(number):
        path = folder / f"class_{position % 2}" / f"{position}{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        height, width = noise.integers(20, 60, 2)
        assert cv2.imwrite(str(path), noise.integers(0, 255, (height, width, 3), np.uint8))


@pytest.fixture
def folder(tmp_path):
    write_images(tmp_path / "images", 10)
    return tmp_path / "images"


def test_both_loaders_give_every_image_in_every_epoch(folder, tmp_path, capsys):
    written = tmp_path / "figures.json"
    assert main(["bench", str(folder), *SMALL, "--json", str(written)]) == 0
    assert "bit-identical" in capsys.readouterr().out
    figures = json.loads(written.read_text())
    assert figures["num_images"] == 10
    assert figures["left_out"] == []
    assert list(figures["loaders"]) == ["torch", "penstock"]
    for loader in figures["loaders"].values():
        epochs = [*loader["checks"], *(epoch for r in loader["rounds"] for epoch in r)]
        assert [epoch["num_samples"] for epoch in epochs] == [10, 10, 10]
        assert len(loader["samples_per_s"]) == 2


def test_the_table_names_both_loaders_and_their_ratio(folder, capsys):
    assert main(["bench", str(folder), *SMALL, "--workers", "0", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("torch 2" in line and "1.00x" in line for line in lines)
    assert any("penstock 0" in line for line in lines)
    assert "Penstock keeps the memory of its batches" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize(
    "said",
    [
        "RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: No space left on "
        "device (28)",
        "RuntimeError: DataLoader worker (pid 1) is killed by signal: Bus error. It is possible "
        "that dataloader's workers are out of shared memory.",
    ],
)
def test_a_full_dev_shm_is_explained(said, tmp_path):
    from penstock.cli.benchmark_process import BenchmarkProcess, BenchmarkWork, _Failure

    process = BenchmarkProcess("torch", BenchmarkWork([], 224, 64, 2))
    ours, theirs = multiprocessing.Pipe()
    process._pipe = ours
    theirs.send(_Failure(f"Traceback\n{said}\n"))
    with pytest.raises(PenstockError, match=r"some 192\.7 MB .* of .* are free.*doctor") as caught:
        process.result()
    assert type(caught.value) is PenstockError  # which says all: no hint at WorkerError follows
    assert said in str(caught.value)
    theirs.send(_Failure("Traceback\nValueError: a defect\n"))
    with pytest.raises(WorkerError, match="a defect"):
        process.result()


def test_broken_files_are_named_and_left_out(folder, tmp_path, capsys):
    whole = (folder / "class_0" / "0.jpg").read_bytes()
    (folder / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "page.jpg").write_text("<html>404</html>")
    (folder / "notes.txt").write_text("no image, by its name")
    written = tmp_path / "figures.json"
    arguments = [*SMALL, "--workers", "0", "--rounds", "1", "--json", str(written)]
    assert main(["bench", str(folder), *arguments]) == 0
    assert "3 files cannot be decoded" in capsys.readouterr().out
    figures = json.loads(written.read_text())
    assert figures["num_images"] == 10
    named = {file["path"]: file["reason"] for file in figures["left_out"]}
    assert set(named) == {str(folder / name) for name in ("cut.jpg", "empty.png", "page.jpg")}
    assert all(named.values())


def test_real_broken_files_are_sorted_out_without_a_crash(data_dir):
    from penstock.cli.decoding import find_images, read_image, sort_out_broken

    paths = find_images(data_dir / "broken")
    good, broken = sort_out_broken(paths, num_threads=2)
    assert {*good, *(Path(file.name) for file in broken)} == set(paths)
    assert all(read_image(path).shape[2] == 3 for path in good)
    names = {Path(file.name).name for file in broken}
    assert {"bomb_65536-uint32-limit.png", "empty_zero_bytes.jpg", "lfs_pointer.jpg"} <= names
    assert {path.name for path in good} >= {"cmyk_pillow.jpg", "progressive_cat.jpg"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/nowhere"], r"nowhere does not exist\. Name a folder"),
        (["{tmp}/file.txt"], r"file\.txt is a file, not a folder"),
        (["{tmp}/empty"], r"no image in .*empty or below it\. Looked for files ending in \.bmp"),
        (["{tmp}/only_broken"], r"none of the 1 images in .*only_broken can be decoded"),
        (["{tmp}/images", "--json", "{tmp}/no/such/folder.json"], r"cannot write --json .*folder"),
    ],
)
def test_bad_input_is_refused_with_what_to_do(arguments, message, folder, tmp_path, capsys):
    (tmp_path / "file.txt").write_text("")
    (tmp_path / "empty").mkdir()
    (tmp_path / "only_broken").mkdir()
    (tmp_path / "only_broken" / "a.jpg").write_bytes(b"\xff\xd8\xff")
    assert main(["bench", *(part.format(tmp=tmp_path) for part in arguments)]) == 1
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    assert re.search(message, captured.err.replace("\n", " "))


@pytest.mark.parametrize("option", ["--batch-size", "--size", "--rounds", "--warmup"])
def test_a_number_below_its_range_is_a_wrong_option(option, folder):
    assert main(["bench", str(folder), option, "0"]) == 2


@pytest.mark.parametrize(("module", "extra"), [("typer", "cli"), ("cv2", "cli,vision")])
def test_a_missing_extra_is_named(module, extra, folder):
    script = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "from penstock.cli import main\n"
        f"sys.exit(main(['bench', {str(folder)!r}]))"
    )
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 1
    assert install_command(*extra.split(",")) in run.stderr
    assert "Traceback" not in run.stderr
