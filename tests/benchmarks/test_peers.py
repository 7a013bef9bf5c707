# SPDX-License-Identifier: Apache-2.0
"""The comparison with other loaders is complete and can fail, and its page is current."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.support.processes import python
from tests.support.sources import imported_at_top

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
FILES = sorted(path for path in (PEERS / "contenders").glob("*.py") if path.stem != "__init__")


FUNCTIONS = ("photos", "pack", "packed", "tiny", "transport", "paths", "resume")

sys.path[:0] = [str(PEERS), str(PEERS.parent)]
contender, works = map(importlib.import_module, ("contender", "works"))
CONTENDERS = contender.contenders()
INSTALLATIONS = sorted((PEERS / "requirements").glob("*.txt"))


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize("one", CONTENDERS.values(), ids=lambda one: one.name)
def test_a_contender_does_each_work_or_says_why_not(one) -> None:
    missing = [
        name for name in FUNCTIONS if getattr(one, name) is None and not one.absent.get(name)
    ]
    assert not missing
    known = {*FUNCTIONS, "first", "killed", "corrupt", "tolerant"}
    assert set(one.absent) <= known
    assert one.settings.strip()
    assert (one.pack is None) == (one.packed is None)


@pytest.mark.parametrize("path", INSTALLATIONS, ids=lambda path: path.stem)
def test_packages_are_pinned(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    assert lines[0] == "# SPDX-License-Identifier: Apache-2.0"
    pins = [line for line in lines if line.strip() and line[0] != "#"]
    own = {"-e .[torch,vision,lmdb]"} if path.stem == "penstock" else set()
    loose = [
        line
        for line in pins
        if not re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.+!-]+( *;.*)?", line) and line not in own
    ]
    assert not loose
    assert {"numpy", "psutil"} <= {line.partition("==")[0].lower() for line in pins}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_contender_file_imports_no_peer_at_its_top(path: Path) -> None:
    # All contenders are listed from environments that have one of these libraries, or none.
    allowed = {*sys.stdlib_module_names, "numpy", "contender", "contenders", "works"}
    assert imported_at_top(path) <= allowed


# ---------------------------------------------------------------- checks that can fail


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photos, each alone in its class; of the files only the colours are read."""
    colours = np.random.default_rng(0).uniform(-1.5, 1.5, (10, 3))
    np.save(tmp_path / "colours.npy", colours)
    for number in range(10):
        (tmp_path / "photos" / f"{number:04}").mkdir(parents=True)
    return tmp_path / "photos"


ORDER = (3, 1, 4, 0, 5, 9, 2, 6, 8, 7)


def photo_batches(photos: Path, labels=ORDER, *, epoch=0, change=lambda images: images):
    colours = np.load(photos.with_name("colours.npy"))[np.minimum(labels, 9)]
    noise = np.random.default_rng(epoch).uniform(-0.2, 0.2, (len(labels), 3))
    images = np.repeat(colours + noise, 224 * 224, axis=1).reshape(-1, 3, 224, 224)
    images = images.astype(np.float32)
    images[:, :, 0, 0] = 0
    yield change(images[:5]), np.array(labels[:5])
    yield change(images[5:]), np.array(labels[5:])


def test_right_photos_pass(photos: Path) -> None:
    consumer = works.PhotoConsumer(photos, 5)
    assert consumer.first(photo_batches(photos)) == 10
    consumer.second(photo_batches(photos, epoch=1))
    assert consumer.take(photo_batches(photos)) == (10, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:, :, :223], "the shape is"),
        (lambda images: images.transpose(0, 2, 3, 1), "the shape is"),
        (lambda images: images * 100, "channel 0 go from"),
        (lambda images: np.ascontiguousarray(images[::-1]), "correlates"),
    ],
)
def test_wrong_photos_are_found(photos: Path, change, message: str) -> None:
    with pytest.raises(works.WrongDataError, match=message):
        works.PhotoConsumer(photos, 5).first(photo_batches(photos, change=change))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (ORDER[1:], "9 photos came of 10; 1 are missing, 0 came more"),
        ((*ORDER[1:], 4), "10 photos came of 10; 1 are missing, 1 came more"),
        ((*ORDER, 10), "11 photos came of 10; 0 are missing"),
        (tuple(range(10)), "not shuffled"),
    ],
)
def test_a_photo_that_is_missing_or_comes_twice_is_found_in_timed_epochs_too(
    photos: Path, labels, message: str
) -> None:
    for consume in (works.PhotoConsumer(photos, 6).first, works.PhotoConsumer(photos, 6).take):
        with pytest.raises(works.WrongDataError, match=message):
            consume(photo_batches(photos, labels))


# ---------------------------------------------------------------- runs


def test_a_small_comparison_runs_in_this_environment(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    arguments = ("--here", "--smoke", "--data", tmp_path, "--works", "tiny")
    names = ("penstock (processes)", "torch (simplejpeg, OpenCV)")
    done = python(PEERS / "compare.py", *arguments, "--only", *names)
    assert done.returncode == 0, done.stderr
    for name in names:
        assert len([line for line in done.stdout.splitlines() if line.startswith(name)]) == 1
    assert "not saved" in done.stderr


def test_a_contender_that_fails_is_named_with_its_error_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    broken = next(
        one
        for one in CONTENDERS.values()
        if one.tiny and importlib.util.find_spec(one.libraries[0].split(".")[0]) is None
    )
    arguments = ("--here", "--smoke", "--data", str(tmp_path), "--works", "tiny")
    pattern = broken.name.replace("[", "?")
    done = python(PEERS / "compare.py", *arguments, "--only", pattern, "torch (batch*")
    assert done.returncode == 1
    assert f"{broken.name} " in done.stdout
    assert "FAILED" in done.stdout
    assert "ModuleNotFoundError: No module named" in done.stdout
    assert "torch (batch sampler)" in done.stdout


# ---------------------------------------------------------------- the page


def test_the_page_is_up_to_date() -> None:
    done = python(PEERS / "page.py", "--check")
    assert done.returncode == 0, done.stderr
