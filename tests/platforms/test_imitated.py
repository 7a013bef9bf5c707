# SPDX-License-Identifier: Apache-2.0
"""Penstock on Windows and macOS, imitated: what they lack is taken away from Linux.

Nothing here was run on either of them. See imitated/sitecustomize.py, and docs/guide/platforms.md.
"""

from __future__ import annotations

import functools
import json
import os
import tarfile
from pathlib import Path

import pytest
from tests.support.processes import ROOT, python

IMITATED = Path(__file__).parent / "imitated"
LIBRARIES = "torch cv2 PIL.Image simplejpeg lmdb msgspec xxhash pyarrow.parquet asyncio"
SYSTEMS = ("win32", "darwin")


def run(system, *arguments, first="", **options):
    """Return what Python prints where a system is imitated, or here if it is None."""
    path = [ROOT / "src", ROOT] if system is None else [IMITATED, ROOT / "src", ROOT]
    environment = {"PYTHONPATH": os.pathsep.join(map(str, path)), "IMPORTED_FIRST": first}
    environment |= {} if system is None else {"IMITATED": system}
    done = python(*arguments, env=os.environ | environment, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def batches(tmp_path_factory):
    """Return a function that returns what the program prints on a system."""
    for library in LIBRARIES.split():
        pytest.importorskip(library)
    import pyarrow as pa
    import pyarrow.parquet as pq
    from tests.images.making import picture, saved

    from penstock.stores import pack

    folder = tmp_path_factory.mktemp("data")
    (folder / "photos/class").mkdir(parents=True)
    files = [saved(picture(90, 120, seed=number), "JPEG") for number in range(9)]
    files[4] = files[4][:300]
    with tarfile.open(folder / "photos.tar", "w") as tar:
        for number, file in enumerate(files):
            for name, content in ((f"{number}.jpg", file), (f"{number}.cls", b"0")):
                (path := folder / "photos/class" / name).write_bytes(content)
                tar.add(path, name)
    pq.write_table(pa.table({"image": pa.array(files, pa.binary())}), folder / "photos.parquet")
    pack(str(folder / "photos"), f"lmdb:{folder}/photos.lmdb")

    @functools.cache
    def on(system):
        kinds = ["none", "threads"] + ["processes"] * (system == "win32")
        program = "-m", "tests.platforms.batches", folder
        return json.loads(run(system, *program, *kinds, first=LIBRARIES))

    return on


@pytest.mark.parametrize("system", SYSTEMS)
def test_without_processes_batches_are_those_of_linux(system, batches):
    here = batches(None)
    assert {name: batches(system)[name] for name in here} == here
    assert all(whole == resumed for whole, resumed in here.values())


def test_windows_has_no_worker_processes_and_says_so_when_a_loader_is_made(batches):
    said = [text for name, text in batches("win32").items() if name.endswith("processes")]
    assert len(said) == 8
    (text,) = {*said}
    assert text.startswith('num_workers=2 with backend="process" is not for Windows: ')
    assert 'Give backend="thread" or num_workers=0, or run the program in WSL2' in text


def test_windows_runs_what_needs_no_process(tmp_path):
    code = """
        import numpy, penstock
        for how in {"num_workers": "auto"}, {"num_workers": 1, "multiprocessing_context": "spawn"}:
            try:
                penstock.Loader([0], **how)
            except penstock.errors.ConfigError as error:
                print(str(error).partition(":")[0])
        rows = numpy.arange(4000.0).reshape(1000, 4)
        loader = penstock.Loader(rows, 10, num_workers="auto", backend="thread", progress=True)
        print(sum(batch.sum() for _ in range(3) for batch in loader))
        for _ in range(2):
            loader.report("report.html")
        print(bool(loader.stats().verdict))
    """
    assert run("win32", "-c", code, first="tqdm", cwd=tmp_path).splitlines() == [
        'num_workers=auto with backend="process" is not for Windows',
        'num_workers=1 with backend="process" is not for Windows',
        "23994000.0",
        "True",
    ]
    assert "</html>" in (tmp_path / "report.html").read_text("utf-8")


def test_windows_writes_no_pack_and_says_where_to(tmp_path):
    code = """
        import penstock.stores
        try:
            penstock.stores.pack([("one", 1)], "lmdb:there.lmdb")
        except penstock.errors.StoreError as error:
            print(error)
    """
    for library in (libraries := ("lmdb", "msgspec", "xxhash")):
        pytest.importorskip(library)
    printed = run("win32", "-c", code, first=" ".join(libraries), cwd=tmp_path)
    assert "there.lmdb: this system has no flock(2) to keep other writers off. Pack on" in printed
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("system", "how"), [("win32", "(threads)"), ("darwin", "(start method spawn)")]
)
def test_the_doctor_says_that_the_system_is_untested(system, how):
    pytest.importorskip("rich")
    code = """
        import json
        from penstock.cli import doctor
        *_, system = doctor._look_at_environment()
        trial = doctor.look_at_delivery(*doctor.run_trial(doctor._DELIVERY, 60))
        found = system, doctor.look_at_cores(), doctor.look_at_open_files(), trial
        print(json.dumps([(finding.status, finding.found) for finding in found]))
    """
    findings = json.loads(run(system, "-c", code, first="typer rich"))
    assert [status for status, _ in findings] == ["advice", "ok", "ok", "ok"]
    assert findings[-1][1].endswith(how)


def test_macos_shares_segments_of_which_no_name_is_left(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run("darwin", "program.py", cwd=tmp_path) == "spawn, 4 segments, all there: True\n"
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("penstock-")]


# A worker dies, and another takes its place: one segment for each, and one for what all are given.
PROGRAM = """
import multiprocessing, os
import _posixshmem
import numpy as np
from penstock import Loader

class Large:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        if index == 7 and not os.path.exists("died"):
            open("died", "x").close()
            os._exit(3)
        return np.full(65_536, index)

if __name__ == "__main__":
    opened, real = [], _posixshmem.shm_open
    _posixshmem.shm_open = lambda *args, **how: opened.append(args) or real(*args, **how)
    batches = list(Loader(Large(), 4, num_workers=2, on_error="skip", timeout=60))
    is_there = [batch[:, 0].tolist() for batch in batches] == np.arange(40).reshape(-1, 4).tolist()
    method = multiprocessing.get_start_method()
    print(f"{method}, {len(opened)} segments, all there: {is_there}")
"""
