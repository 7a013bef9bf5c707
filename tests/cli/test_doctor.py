# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor` says what it finds, and one broken thing does not keep it from the others."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("rich")

from penstock.cli.doctor import (
    Finding,
    _look_at_environment,
    _numbers,
    extras_of,
    look_at_cores,
    look_at_delivery,
    look_at_device,
    look_at_extra,
    look_at_memory,
    look_at_open_files,
    run_trial,
)
from penstock.optional import DISTRIBUTION, install_command

SCRIPT = Path(sysconfig.get_path("scripts")) / "penstock"
GB = 1_000_000_000
SECRET = "mongodb://ada:hunter2@h"
# A library that cannot be imported, and says a password; and files of the folder the user is in.
BROKEN = {"simplejpeg.py": f"raise RuntimeError('cannot reach {SECRET}/lab')"}
STRANGE = {
    "lmdb.py": "raise RuntimeError('of the user')",
    "lmdb-1.4.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: lmdb\nVersion: 1.4.1\n",
}


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def doctor(folder, *command):
    """Run it in a folder with files of the user's; return its exit status and stdout."""
    write(folder / "libraries", BROKEN)
    write(folder / "current", STRANGE)
    # An empty part of the path would be the folder that the user is in.
    path = filter(None, (f"{folder}/libraries", os.environ.get("PYTHONPATH")))
    secrets = {"MY_TOKEN": "hunter2", "MONGODB_URI": SECRET, "PYTHONPATH": os.pathsep.join(path)}
    environment = {**os.environ, **secrets}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=folder / "current",
        env=environment,
    )  # fmt: skip
    assert done.stderr == ""
    return done.returncode, done.stdout


def test_lines_and_json_have_the_same_facts_and_no_secret(tmp_path):
    pytest.importorskip("torch")
    status, text = doctor(tmp_path, sys.executable, "-m", "penstock", "doctor", "--json")
    as_lines = doctor(tmp_path, SCRIPT, "doctor")
    record = json.loads(text)
    found = {finding["name"]: finding for finding in record["findings"]}
    assert sys.executable in found["Python"]["found"]
    assert f"{len(os.sched_getaffinity(0))} by affinity" in found["cores"]["found"]
    for name, library in (("core", "numpy"), ("torch", "torch")):
        assert found[name]["found"] == f"{library} {metadata.version(library)}"
    assert found["trial"]["found"].startswith("2 workers delivered 4 batches in ")
    names = ("arrow", "lmdb", "mongo", "ray", "tensorboard", "trial")
    assert [found[name]["status"] for name in names] == ["ok"] * 6
    assert f"lmdb {metadata.version('lmdb')}" in found["lmdb"]["found"]
    problems = [name for name, finding in found.items() if finding["status"] == "problem"]
    assert (status, problems) == (1, ["coco", "vision"])  # the one needs the other
    assert "RuntimeError: cannot reach mongodb://ada:***@h/lab" in found["vision"]["found"]

    assert as_lines[0] == status
    rows = [line for line in as_lines[1].splitlines() if line[:2] == "  " != line[2:4]]
    shown = [(row[2:11].strip().lower(), row[11:26].strip()) for row in rows]
    assert shown == [(finding["status"], finding["name"]) for finding in record["findings"]]
    assert as_lines[1].splitlines()[-1].startswith(f"problems: {record['num_problems']}, advice: ")
    assert "hunter2" not in text + as_lines[1]


def test_another_projects_penstock_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert [finding.status for finding in _look_at_environment()] == ["ok"] * 3
    info = "Metadata-Version: 2.1\nName: penstock\nVersion: 9.1\n"
    write(tmp_path, {"penstock-9.1.dist-info/METADATA": info})
    (advice,) = (finding for finding in _look_at_environment() if finding.remedy)
    assert (advice.status, "penstock 9.1" in advice.found) == ("advice", True)
    assert f"pip uninstall penstock {DISTRIBUTION}, then " in advice.remedy


def in_child(change, finding):
    """Change something of a new process, and return a finding of it."""
    program = (
        f"import json, os, resource\n{change}\nfrom penstock.cli.doctor import _DELIVERY\n"
        "from penstock.cli.doctor import *\n"
        f"print(json.dumps({finding}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Finding(*json.loads(done.stdout))


def test_few_open_files_are_a_problem_and_the_trial_meets_it():
    change = "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
    files = in_child(change, "look_at_open_files()")
    assert files.status == "problem"
    assert files.found.startswith("limit 20 (at most 20), ")
    assert "`ulimit -n 1024`" in files.remedy
    trial = in_child(change, "look_at_delivery(*run_trial(_DELIVERY, 60))")
    assert "num_workers=2 needs 20 more open files" in trial.found
    assert trial.status == "problem"


def test_affinity_counts():
    core = min(os.sched_getaffinity(0))
    cores = in_child(f"os.sched_setaffinity(0, {{{core}}})", "look_at_cores()")
    assert cores.found.startswith("1 usable: ")
    assert "1 by affinity" in cores.found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('built for another numpy')",
         "line 1: RuntimeError: built for another numpy"),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
         "its process was killed by SIGSEGV."),
        ("import sys\nsys.exit('no licence')", "line 2: SystemExit: no licence"),
        ("import os, sys\nprint('no disk', file=sys.stderr, flush=True)\nos._exit(7)",
         "its process exited with status 7. no disk"),
        ("import threading\nthreading.Event().wait()", "its process did not end within 3 s"),
        ("print('hello')", ""),
        # How a library ends a process does not matter.
        ("import atexit, os\natexit.register(lambda: os.kill(os.getpid(), 11))", ""),
        ("import threading\nthreading.Thread(target=threading.Event().wait).start()", ""),
    ],
    ids=["raises", "crashes", "exits", "leaves", "waits", "prints", "at exit", "thread"],
)  # fmt: skip
def test_a_trial_says_how_an_import_failed(tmp_path, monkeypatch, text, said):
    write(tmp_path, {"library.py": text})
    monkeypatch.syspath_prepend(tmp_path)
    _, failure = run_trial("import library", 3.0)
    assert failure.removeprefix(f"{tmp_path}/library.py, ") == said


def test_a_trial_that_cannot_start_is_a_problem(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    finding = look_at_delivery(*run_trial("", 1.0))
    assert finding.status == "problem"
    assert "could not be started: [Errno 2]" in finding.found


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A function that installs a distribution of one module, and looks at it as an extra."""
    monkeypatch.syspath_prepend(tmp_path)

    def look(name, version, text="", floor="2.3"):
        info = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        write(tmp_path, {f"{name}-{version}.dist-info/METADATA": info, f"{name}.py": text})
        return look_at_extra("x", [(name, floor)])

    return look


def test_libraries_are_judged(library, tmp_path, monkeypatch):
    broken = library("torch", "9", "raise OSError('libcudart.so: no such file')")
    assert broken.status == "problem"
    assert "OSError: libcudart.so: no such file" in broken.found
    assert "pip install --force-reinstall torch. Give pip the --index-url" in broken.remedy
    old = library("lmdb", "1.4.1")
    assert (old.status, old.found) == ("advice", "lmdb 1.4.1")
    assert old.remedy == "Penstock needs lmdb>=2.3: `pip install -U`."
    (tmp_path / "half-2.4.dist-info").mkdir()  # as pip leaves it when it is cut short
    write(tmp_path, {"half.py": ""})
    half = look_at_extra("x", [("half", "2.3")])
    assert (half.status, half.found) == ("advice", "half 0")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "simplejpeg", None)
        vision = look_at_extra("vision", [("numpy", "1.26"), ("simplejpeg", "1.7")])
    assert vision.status == "advice"
    assert vision.found.endswith("; OpenCV decodes JPEG files, as simplejpeg is missing")
    absent = look_at_extra("lmdb", [("penstock-has-no-such-library", "1")])
    assert absent.status == "ok"
    assert absent.found.endswith(f"; if you want it: {install_command('lmdb')}")


def test_all_of_penstocks_own_requirements_are_understood():
    extras = extras_of(metadata.requires(DISTRIBUTION))
    assert {"core", "torch", "vision", "cli", "lmdb", "mongo", "arrow", "records"} <= set(extras)
    assert not {"dev", "dev-torch", "docs", "clients", "all"} & set(extras)
    assert extras["torch"] == [("torch", "2.6")]


@pytest.mark.parametrize(
    ("version", "floor", "is_old"),
    [("2.3", "2.3", False), ("2.10", "2.3", False), ("2.2.9", "2.3", True),
     ("2.13.0+cpu", "2.6", False), ("6", "0", False)],
)  # fmt: skip
def test_versions_are_compared_by_their_numbers(version, floor, is_old):
    assert (_numbers(version) < _numbers(floor)) is is_old


MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    5000000 kB\n"


def machine(tmp_path, files):
    group = {"proc/self/cgroup": "0::/\n", "proc/meminfo": MEMINFO}
    return write(tmp_path, group | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})


def test_a_quota_below_the_affinity_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    root = machine(tmp_path, {"cpu.max": "150000 100000\n"})
    cores = look_at_cores(root)
    assert cores.status == "advice"
    assert "a CPU quota of 1.5" in cores.found
    assert "Set OMP_NUM_THREADS=2. Of workers that compute take 2 at most; " in cores.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert look_at_cores(root).status == "ok"


@pytest.mark.parametrize(
    ("used_bytes", "kills", "status"),
    [(1 * GB, 0, "ok"), (3 * GB, 0, "advice"), (4 * GB, 0, "advice"), (1 * GB, 2, "advice")],
)
def test_what_a_container_has_left_counts(tmp_path, used_bytes, kills, status):
    files = {"memory.max": f"{4 * GB + 1}\n", "memory.current": f"{used_bytes}\n"}
    files["memory.events"] = f"oom_kill {kills}\n"
    memory = look_at_memory(machine(tmp_path, files))
    assert memory.status == status
    assert "5.1 GB of 16.4 GB available; the control group has " in memory.found
    assert ("ended 2 processes" in memory.found) == bool(kills)


def test_a_machine_without_limits(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert look_at_open_files() == Finding("machine", "open files", "no limit")


CPU = ["the CPU", [], ""]
CUDA = ["CUDA 13.0", [], "No CUDA GPUs are available"]
GPU = ["CUDA 13.0", ["NVIDIA H100"], ""]


@pytest.mark.parametrize(
    ("device", "has_driver", "visible", "status", "words"),
    [
        (CPU, False, None, "ok", "none: torch is built for the CPU"),
        (CPU, True, None, "advice", "none: torch is built for the CPU"),
        (CPU, True, "", "ok", "none: torch is built for the CPU (CUDA_VISIBLE_DEVICES='')"),
        (CUDA, False, None, "ok", "none: No CUDA GPUs are available"),
        (CUDA, True, None, "advice", "none: No CUDA GPUs are available"),
        (CUDA, True, "7", "advice", "(CUDA_VISIBLE_DEVICES='7')"),
        (GPU, True, None, "ok", "NVIDIA H100; torch is built for CUDA 13.0; a comp"),
        ([*GPU[:2], "no kernel image"], True, None, "problem", "13.0; no kernel image"),
    ],
)
def test_what_torch_says_of_a_gpu_is_judged(
    tmp_path, monkeypatch, device, has_driver, visible, status, words
):
    pytest.importorskip("torch")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if has_driver:
        write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    finding = look_at_device(json.dumps(device), "", tmp_path)
    assert finding.status == status
    assert words in finding.found
    assert look_at_device("", "it crashed").found == "torch cannot be imported"
