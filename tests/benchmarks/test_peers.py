# SPDX-License-Identifier: Apache-2.0
"""The comparison with other loaders is complete, can fail, and says where a peer is ahead."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
FILES = sorted(path for path in (PEERS / "contenders").glob("*.py") if path.stem != "__init__")
FUNCTIONS = ("photos", "pack", "packed", "tiny", "transport", "paths", "resume")

sys.path[:0] = [str(PEERS), str(PEERS.parent)]
compare, contender, environments, measure, page, works = (
    importlib.import_module(name)
    for name in ("compare", "contender", "environments", "measure", "page", "works")
)
CONTENDERS = contender.contenders()
INSTALLATIONS = sorted((PEERS / "requirements").glob("*.txt"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PEERS / arguments[0]), *arguments[1:]]
    return subprocess.run(command, capture_output=True, text=True, timeout=110)


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


@pytest.mark.parametrize("one", CONTENDERS.values(), ids=lambda one: one.name)
def test_a_contender_has_an_environment(one) -> None:
    assert one.environment in environments.names()


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
    tops = [
        name
        for node in ast.parse(path.read_text("utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    ]
    allowed = {*sys.stdlib_module_names, "numpy", "contender", "contenders", "works"}
    assert not [name for name in tops if name.split(".")[0] not in allowed]


def test_penstock_and_torch_are_among_them() -> None:
    names = run("compare.py", "--list").stdout.splitlines()
    assert names == list(CONTENDERS)
    assert {"penstock (processes)", "penstock (threads)", "torch (simplejpeg, OpenCV)"} <= {*names}


# ---------------------------------------------------------------- checks that can fail


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Folders of 6 and 4 photos; the checks only count them."""
    for name, count in (("hat", 6), ("shoe", 4)):
        (tmp_path / name).mkdir()
        for number in range(count):
            (tmp_path / name / f"{number}.jpg").touch()
    return tmp_path


def photo_batches(labels=(0, 1, 0, 1, 0, 1, 0, 1, 0, 0), *, change=lambda images: images):
    images = np.random.default_rng(0).uniform(-1.7, 1.7, (len(labels), 3, 224, 224))
    images = images.astype(np.float32)
    yield change(images[:5]), np.array(labels[:5])
    yield change(images[5:]), np.array(labels[5:])


def test_right_photos_pass(photos: Path) -> None:
    consumer = works.PhotoConsumer(photos, 5)
    assert consumer.first(photo_batches()) == 10
    assert consumer.take(photo_batches()) == (10, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda images: images[:, :, :223], "the shape is"),
        (lambda images: images.transpose(0, 2, 3, 1), "the shape is"),
        (lambda images: images.astype(np.float64), "dtype"),
        (lambda images: np.flip(images, 3), "not in C order"),
        (lambda images: images * 100, "channel 0 go from"),
        (lambda images: images.tolist(), "list, no array"),
    ],
)
def test_wrong_photos_are_found(photos: Path, change, message: str) -> None:
    with pytest.raises(works.WrongDataError, match=message):
        works.PhotoConsumer(photos, 5).first(photo_batches(change=change))


@pytest.mark.parametrize(
    "labels", [(0, 1, 0, 1, 0, 1, 0, 1, 0), (0, 1, 0, 1, 0, 1, 0, 1, 1, 0), (0,) * 11]
)
def test_a_photo_that_is_missing_or_comes_twice_is_found_in_timed_epochs_too(
    photos: Path, labels
) -> None:
    with pytest.raises(works.WrongDataError, match=r"labels .* came"):
        works.PhotoConsumer(photos, 6).first(photo_batches(labels))
    with pytest.raises(works.WrongDataError, match=r"labels .* came"):
        works.PhotoConsumer(photos, 6).take(photo_batches(labels))


def test_photos_that_are_not_shuffled_are_found(photos: Path) -> None:
    with pytest.raises(works.WrongDataError, match="not shuffled"):
        works.PhotoConsumer(photos, 5).first(photo_batches((0,) * 6 + (1,) * 4))


def row_batches(order):
    rows = works.tiny_rows(100)[order]
    yield rows[:50]
    yield rows[50:]


def test_right_rows_pass() -> None:
    order = np.random.default_rng(0).permutation(100)
    assert works.RowConsumer(100, 50).first(row_batches(order)) == 100
    assert works.RowConsumer(100, 50).take(row_batches(order)) == (100, 2)


def test_wrong_rows_are_found() -> None:
    order = np.random.default_rng(0).permutation(100)
    twice = np.where(order == 7, 8, order)
    for consume in (works.RowConsumer(100, 50).first, works.RowConsumer(100, 50).take):
        with pytest.raises(works.WrongDataError, match="row 8 came 2 times"):
            consume(row_batches(twice))
        with pytest.raises(works.WrongDataError, match="99 rows of 100"):
            consume(row_batches(order[1:]))
        with pytest.raises(works.WrongDataError, match="not shuffled"):
            consume(row_batches(np.arange(100)))
    torn = works.tiny_rows(100)[order]
    torn[3, 16:] = torn[4, 16:]
    with pytest.raises(works.WrongDataError, match="torn"):
        works.RowConsumer(100, 100).first(iter([torn]))


def test_large_batches_are_counted_by_their_stamps() -> None:
    consumer = works.BigBatchConsumer(2)
    assert consumer.first(works.big_batch(k) for k in (1, 0)) == 2
    with pytest.raises(works.WrongDataError, match=r"stamps are \[1, 1\]"):
        consumer.take(works.big_batch(1) for _ in range(2))
    with pytest.raises(works.WrongDataError, match="other numbers"):
        consumer.first(np.zeros(works.BATCH_SHAPE, np.float32) for _ in range(2))


def test_a_large_batch_that_is_still_held_is_not_written_to() -> None:
    held = works.big_batch(0)[0]
    for number in (1, 2, 3):
        works.big_batch(number)
    assert held[0, 0, 0] == 0


def test_paths_that_come_twice_or_in_order_are_found() -> None:
    numbers = np.random.default_rng(0).permutation(1000)
    works.check_numbers(numbers[:500], 1000)
    with pytest.raises(works.WrongDataError, match="twice"):
        works.check_numbers(np.append(numbers, numbers[0]), 1000)
    with pytest.raises(works.WrongDataError, match="not shuffled"):
        works.check_numbers(np.arange(500), 1000)
    assert works.number_in(works.path_of(4_999_999)) == 4_999_999


# ---------------------------------------------------------------- what a process did

TOLD = "PROGRESS {{'at_s': 5.0, 'started': true}}\\nPROGRESS {{'at_s': 6.0, 'labels': {labels}}}\\n"


@pytest.mark.parametrize(
    ("labels", "end", "expected"),
    [
        ([0] * 6 + [1] * 4, "done", {"kind": "goes on", "lost": 0, "too many": 0, "seconds": 3.0}),
        ([0] * 5 + [1] * 4, "done", {"kind": "goes on", "lost": 1, "too many": 0}),
        ([0] * 7 + [1] * 4, "done", {"kind": "goes on", "lost": 0, "too many": 1}),
        ([0] * 5, "error", {"kind": "error", "lost": 5, "line": "ValueError: no JPEG"}),
        ([0] * 5, "crash", {"kind": "ends", "lost": 5, "line": "it crashed", "exit status": -9}),
        ([0] * 5, "hang", {"kind": "hangs", "lost": 5}),
    ],
)
def test_what_a_process_did_is_told(photos: Path, monkeypatch, labels, end, expected) -> None:
    monkeypatch.setattr(measure, "_HANG_S", 1.0)
    text = TOLD.format(labels=labels).replace("'", '"')
    deeds = {
        "done": 'print(\'PROGRESS {"at_s": 8.0, "done": true}\', flush=True)',
        "error": 'print(\'PROGRESS {"at_s": 8.0, "error": "ValueError: no JPEG"}\', flush=True)',
        "crash": "print('it crashed', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
        "hang": "sys.stdin.read()",
    }
    code = f"import os, sys; print('{text}', end='', flush=True); {deeds[end]}"
    task = SimpleNamespace(work="corrupt", photos=photos, size=works.Size(5))
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        outcome = measure._watch(process, task)
        process.kill()
    assert outcome.items() >= expected.items()


def test_a_corrupt_photo_is_expected_by_nobody(tmp_path: Path) -> None:
    works.prepare(tmp_path, smoke=True)
    expected = works.PhotoConsumer(tmp_path / "corrupt", 8).expected
    assert expected == works.PhotoConsumer(tmp_path / "photos", 8).expected
    assert len(works.labelled_files(tmp_path / "corrupt")) == expected.total() + 1


# ---------------------------------------------------------------- runs


def test_a_small_comparison_runs_in_this_environment(tmp_path: Path) -> None:
    arguments = ("--here", "--smoke", "--data", str(tmp_path), "--works", "tiny", "transport")
    done = run("compare.py", *arguments, "--only", "penstock*", "torch (simple*")
    assert done.returncode == 0, done.stderr
    for name in ("penstock (processes)", "torch (simplejpeg, OpenCV)"):
        assert len([line for line in done.stdout.splitlines() if line.startswith(name)]) == 2
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
    done = run("compare.py", *arguments, "--only", pattern, "torch (batch*")
    assert done.returncode == 1
    assert f"{broken.name} " in done.stdout
    assert "FAILED" in done.stdout
    assert "ModuleNotFoundError: No module named" in done.stdout
    assert "torch (batch sampler)" in done.stdout


def test_what_pip_said_is_kept_without_where_it_looked() -> None:
    output = (
        "WARNING: Location 'x'\nERROR: No matching distribution found for y==1\nnote: an error\n"
    )
    assert environments.reasons(output) == ["ERROR: No matching distribution found for y==1"]


# ---------------------------------------------------------------- the page

MACHINE = {
    **{"date": "2026-01-02", "commit": "x", "processor": "Abacus", "cores": 2},
    **{"memory_gib": 4.0, "system": "Linux 6"},
}


def entry(run_name: str, *values: float, cpu_ms: float = 1.0, errors=(), **more):
    readings = [
        {"value": value, "unit": "", "wall_s": 1.0, "cpu_s": 1.0, "batches": 1, "import_s": 1.0}
        | {"more": {"CPU ms/sample": cpu_ms}}
        | more
        for value in values
    ]
    return {
        **{"machine": MACHINE, "packages": {"Python": "3.11.7"}, "size": {}, "rounds": 3},
        **{"runs": {run_name: readings} if readings else {}, "errors": list(errors)},
        "peak_mb": 100.0,
    }


def fake(name: str):
    absent = dict.fromkeys(FUNCTIONS, f"{name} cannot do it")
    return contender.Contender(name, "abacus", (), "as it comes", photos=print, absent=absent)


def rendered(results, names, *, not_installed=None, remarks=None) -> str:
    known = {name: fake(name) for name in names}
    return page.render(results, known, not_installed or {}, remarks or {})


def test_the_page_names_who_is_ahead_of_penstock_and_in_what() -> None:
    known = {
        name: contender.Contender(name, "abacus", (), "as it comes", tiny=print)
        for name in ("fast", "penstock (threads)", "torch (simplejpeg, OpenCV)")
    }
    for one in known.values():
        one.absent.update(dict.fromkeys(FUNCTIONS, "it cannot"))
        del one.absent["tiny"]
    results = {
        "tiny": {
            "fast": entry("tiny", 3e6, 3.1e6, 2.9e6, cpu_ms=2e-3),
            "penstock (threads)": entry("tiny", 2e6, cpu_ms=1e-3),
            "torch (simplejpeg, OpenCV)": entry("tiny", 1e6, cpu_ms=4e-3),
        }
    }
    text = page.render(results, known, {}, {"tiny": "It counts on its fingers."})
    ahead = "*M rows/s*: fast 3.00 (2.90 - 3.10); Penstock's best 2.00. *CPU µs/row*: nobody."
    assert text.count(ahead) == 2  # in the list on top, and below the table
    rows = [line for line in text.splitlines() if line.startswith(("| fast", "| **p", "| torch"))]
    assert [row.split(" | ")[:3] for row in rows[:3]] == [
        ["| fast", "3.00 (2.90 - 3.10)", "3.00"],
        ["| **penstock (threads)**", "2.00", "2.00"],
        ["| torch", "1.00", "1.00"],
    ]
    assert "It counts on its fingers." in text
    assert "2 cores of an Abacus, 4.0 GiB" in text


def test_ranges_that_overlap_are_said_to() -> None:
    results = {
        "tiny": {
            "fast": entry("tiny", 2.4e6, 1.9e6, 2.3e6),
            "penstock (threads)": entry("tiny", 2e6, 2.1e6, 2.2e6),
        }
    }
    assert "fast 2.30 (1.90 - 2.40) (their ranges overlap)" in rendered(
        results, ["fast", "penstock (threads)"]
    )


def test_the_page_shows_what_failed_what_is_absent_and_what_could_not_be_installed() -> None:
    results = {"tiny": {"slow": entry("tiny", errors=["tiny: ValueError: out of | fingers"])}}
    fact = {"date": "2026-01-02", "reason": ["ERROR: no abacus"]}
    text = rendered(results, ["slow"], not_installed={"abacus": fact})
    assert "| slow | failed |" in text
    assert r"- slow, `tiny: ValueError: out of \| fingers`" in text
    assert "- slow: slow cannot do it" in text
    assert "- slow (`requirements/abacus.txt`, 2026-01-02): `ERROR: no abacus`" in text


def test_the_page_shows_a_wrong_batch_after_resuming() -> None:
    one = entry("resume-restore", 0.1, right=True)
    other = entry("resume-restore", 0.1, right=False)
    text = rendered({"resume": {"a": one, "b": other}}, ["a", "b"])
    assert "**Another batch than the right one** came from: b." in text


def test_the_page_tells_outcomes_in_words() -> None:
    def outcome(kind: str, came: int, lost: int, line: str = ""):
        facts = {"kind": kind, "expected": 10, "came": came, "lost": lost, "too many": 0}
        return entry("killed", 0.0, outcome={**facts, "seconds": 1.5, "line": line})

    results = {
        "killed": {
            "a": outcome("goes on", 10, 0),
            "b": outcome("goes on", 8, 2),
            "c": outcome("error", 4, 6, "ValueError: `x`"),
            "d": outcome("hangs", 4, 6),
        }
    }
    text = rendered(results, ["a", "b", "c", "d"])
    assert "| a | goes on, nothing lost |" in text
    assert "| b | **goes on without 2 samples**, and says nothing |" in text
    assert "| c | error after 1.5 s, 4 of 10 samples: `ValueError: 'x'` |" in text
    assert "| d | **hangs**, after 4 of 10 samples |" in text


def test_the_page_is_up_to_date() -> None:
    done = run("page.py", "--check")
    assert done.returncode == 0, done.stderr
