# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor` says what it finds, and one broken thing does not keep it from the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from penstock.cli.doctor.children import Child
from penstock.cli.doctor.device import look_at_device
from penstock.cli.doctor.extras import (
    Extra,
    Imports,
    Library,
    installed,
    look_at_extras,
    parse_requirement,
    user_extras,
)
from penstock.cli.doctor.finding import Finding
from penstock.cli.doctor.machine import container_kind, look_at_limits, look_at_machine
from penstock.cli.doctor.machine import look_at_shared_memory as shared_memory
from penstock.cli.doctor.trial import start_trial, trial_finding

pytest.importorskip("rich")

SCRIPT = Path(sysconfig.get_path("scripts")) / "penstock"
GB = 1_000_000_000
# Set in the process that then becomes the doctor.
UNDER = "import os, resource, sys; {change}; os.execv(sys.argv[1], sys.argv[1:])"


def doctor(*options, change="pass", folder=None, path=None, **environ):
    """Run it; return its exit status and what it wrote to stdout."""
    environment = {**os.environ, **environ}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", UNDER.format(change=change), str(SCRIPT), "doctor", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=110, cwd=folder, env=environment
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


def findings_of(out):
    return {finding["name"]: finding for finding in json.loads(out)["findings"]}


@pytest.fixture
def in_json():
    """Return a function that runs it with --json and gives exit status and findings by name."""

    def run(**changes):
        status, out = doctor("--json", **changes)
        found = findings_of(out)
        problems = [name for name, each in found.items() if each["status"] == "problem"]
        assert status == bool(problems)
        return found

    return run


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def named(findings):
    return {finding.name: finding for finding in findings}


def test_lines_and_json_have_the_same_facts_and_no_secret():
    secret = {"MY_TOKEN": "hunter2", "MONGODB_URI": "mongodb://ada:hunter2@127.0.0.1/lab"}
    as_json, as_lines = doctor("--json", **secret), doctor(**secret)
    assert as_json[0] == as_lines[0]
    record = json.loads(as_json[1])
    rows = [line for line in as_lines[1].splitlines() if line[:2] == "  " != line[2:4]]
    shown = [(row[2:11].strip().lower(), row[11:26].strip()) for row in rows]
    load = {"load", "OOM killer"}  # which may change from one run to the next
    told = [(finding["status"], finding["name"]) for finding in record["findings"]]
    assert [row for row in shown if row[1] not in load] == [r for r in told if r[1] not in load]
    for finding in record["findings"]:
        if finding["topic"] in ("extras", "limits"):
            assert finding["found"] in as_lines[1]
    assert as_lines[1].splitlines()[-1].startswith(f"problems: {record['num_problems']}, advice: ")
    assert "hunter2" not in as_json[1] + as_lines[1]


def test_it_tells_what_is_here(in_json):
    found = in_json()
    assert found["Python"]["values"]["executable"] == sys.executable
    assert found["cores"]["values"]["affinity"] == len(os.sched_getaffinity(0))
    assert found["batches"]["status"] == "ok"
    assert found["numpy"]["values"]["version"] == metadata.version("numpy")
    assert found["torch"]["values"]["libraries"] == {"torch": metadata.version("torch")}
    assert found["GPU"]["values"]["cuda"] == __import__("torch").version.cuda
    assert found["trial"]["values"]["delivered"] == 4


def test_few_open_files_are_a_problem_and_the_trial_meets_it(in_json):
    limit = "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
    found = in_json(change=limit)
    assert found["open files"]["status"] == "problem"
    assert found["open files"]["values"]["soft"] == 20
    assert "`ulimit -n 1024`" in found["open files"]["remedy"]
    assert "num_workers=2 needs 20 more open files" in found["trial"]["found"]
    assert found["trial"]["status"] == "problem"


def test_limited_addresses_are_told_and_what_fails_for_them_is_told(in_json):
    found = in_json(change=f"resource.setrlimit(resource.RLIMIT_AS, ({GB}, {GB}))")
    assert found["address space"]["status"] == "advice"
    assert found["address space"]["found"] == "limited to 1.0 GB"
    assert found["lmdb"]["status"] == "ok"


def test_affinity_counts(in_json):
    core = min(os.sched_getaffinity(0))
    found = in_json(change=f"os.sched_setaffinity(0, {{{core}}})")
    assert found["cores"]["found"].startswith("1 usable: ")
    assert found["cores"]["values"]["affinity"] == 1


def test_a_broken_library_is_told_with_its_error_and_the_others_are_looked_at(in_json, tmp_path):
    write(
        tmp_path,
        {
            "simplejpeg.py": "raise RuntimeError('built for another numpy')",
            "lmdb.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
            "plotly.py": "import sys\nsys.exit('no licence')",
        },
    )
    found = in_json(path=tmp_path)
    said = found["vision"]["found"]
    assert f"simplejpeg: {tmp_path}/simplejpeg.py, line 1: RuntimeError: built for ano" in said
    assert "import lmdb: its process was killed by SIGSEGV" in found["lmdb"]["found"]
    assert "SystemExit: no licence" in found["report"]["found"]
    assert "pip install --force-reinstall simplejpeg" in found["vision"]["remedy"]
    names = ("vision", "lmdb", "report")
    assert [found[name]["status"] for name in names] == ["problem"] * 3
    names = ("arrow", "mongo", "ray", "tensorboard", "trial")
    assert [found[name]["status"] for name in names] == ["ok"] * 5


def test_a_broken_torch_is_told(in_json, tmp_path):
    write(tmp_path, {"torch/__init__.py": "raise OSError('libcudart.so: no such file')"})
    found = in_json(path=tmp_path)
    assert found["torch"]["status"] == "problem"
    assert "OSError: libcudart.so: no such file" in found["torch"]["found"]
    assert found["GPU"]["found"] == "torch cannot be imported"
    assert found["trial"]["status"] == "ok"


def test_files_in_the_folder_that_the_user_is_in_are_left_alone(in_json, tmp_path):
    write(tmp_path, {"json.py": "raise RuntimeError", "torch.py": "raise RuntimeError"})
    assert in_json(folder=tmp_path)["torch"]["status"] == "ok"


def test_a_version_below_the_metadatas_bound_is_told(tmp_path, monkeypatch):
    info = "Metadata-Version: 2.1\nName: lmdb\nVersion: 1.4.1\n"
    write(tmp_path, {"lmdb-1.4.1.dist-info/METADATA": info, "lmdb.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    extra = Extra("lmdb", [parse_requirement("lmdb>=2.3; extra == 'lmdb'")])
    libraries = {"lmdb": installed("lmdb")}
    (finding,) = look_at_extras([extra], libraries, {"lmdb": ""})
    assert (finding.status, finding.found) == ("advice", "lmdb 1.4.1")
    assert finding.remedy == 'Penstock needs lmdb>=2.3: pip install "penstock[lmdb]" -U'


def test_an_extra_that_is_not_installed_is_no_fault(monkeypatch):
    extra = Extra("x", [parse_requirement("penstock-has-no-such-library>=1; extra == 'x'")])
    name = extra.requirements[0].name
    (finding,) = look_at_extras([extra], {name: installed(name)}, {})
    assert finding.status == "ok"
    assert 'if you want it: pip install "penstock[x]"' in finding.found


def test_any_of_opencvs_distributions_will_do(tmp_path, monkeypatch):
    def hidden(name, real=metadata.distribution):
        if name == "opencv-python-headless":
            raise metadata.PackageNotFoundError(name)
        return real(name)

    info = "Metadata-Version: 2.1\nName: opencv-python\nVersion: 4.10.0.84\n"
    write(tmp_path, {"opencv_python-4.10.0.84.dist-info/METADATA": info})
    write(tmp_path, {"opencv_python-4.10.0.84.dist-info/top_level.txt": "cv2\n"})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "distribution", hidden)
    wanted = Library("opencv-python", "4.10.0.84", "cv2")
    assert installed("opencv-python-headless") == wanted


def test_two_opencvs_of_different_versions_are_told(tmp_path, monkeypatch):
    pytest.importorskip("cv2")
    info = "Metadata-Version: 2.1\nName: opencv-contrib-python\nVersion: 4.10.0.84\n"
    write(tmp_path, {"opencv_contrib_python-4.10.0.84.dist-info/METADATA": info})
    monkeypatch.syspath_prepend(tmp_path)
    (finding,) = look_at_extras([], {}, {})
    assert finding.status == "advice"
    assert "opencv-contrib-python 4.10.0.84" in finding.found


def test_all_of_penstocks_own_requirements_are_understood():
    requirements = list(map(parse_requirement, metadata.requires("penstock")))
    extras = {extra.name: extra.requirements for extra in user_extras(requirements)}
    assert {"torch", "vision", "cli", "lmdb", "mongo", "arrow", "ray", "records"} <= set(extras)
    assert not {"dev", "docs", "clients", "all"} & set(extras)
    assert [str(each) for each in extras["torch"]] == ["torch>=2.6"]
    for name in {each.name for needed in extras.values() for each in needed}:
        assert installed(name).version is not None


@pytest.mark.parametrize(
    ("line", "version", "is_allowed"),
    [
        ("lmdb>=2.3", "2.3", True),
        ("lmdb>=2.3", "2.3.0.post1", True),
        ("lmdb>=2.3", "2.10", True),
        ("lmdb>=2.3", "2.2.9", False),
        ("albumentations<2.1,>=2.0; extra == 'dev'", "2.0.8", True),
        ("albumentations<2.1,>=2.0; extra == 'dev'", "2.1.0", False),
        ("six (>=1.16)", "1.15", False),
        ("types-pyyaml; extra == 'dev'", "6", True),
    ],
)
def test_versions_are_compared_by_their_numbers(line, version, is_allowed):
    assert parse_requirement(line).allows(version) is is_allowed


def test_a_library_that_never_ends_being_imported_is_told(tmp_path, monkeypatch):
    write(tmp_path, {"waits.py": "import threading\nthreading.Event().wait()", "fine.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("penstock.cli.doctor.extras._IMPORT_LIMIT_S", 2.0)
    libraries = [Library("waits", "1", "waits"), Library("fine", "1", "fine")]
    with Imports(libraries) as imports:
        reasons = imports.reasons()
    assert reasons == {"waits": "its process did not end within 2 s.", "fine": ""}


def test_a_child_is_gone_when_the_doctor_is_interrupted(tmp_path, monkeypatch):
    write(tmp_path, {"waits.py": "import threading\nthreading.Event().wait()"})
    monkeypatch.syspath_prepend(tmp_path)
    child = Child("import", "waits", limit_s=60)
    with pytest.raises(KeyboardInterrupt), child:
        raise KeyboardInterrupt
    assert child._process.returncode == -signal.SIGKILL


def test_a_trial_whose_batch_does_not_come_in_time_is_a_problem():
    with start_trial(limit_s=0.001) as trial:
        finding = trial_finding(trial)
    assert finding.status == "problem"
    assert finding.found.startswith("WorkerTimeout: ")


def test_a_process_that_cannot_be_started_is_told(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with start_trial() as trial:
        finding = trial_finding(trial)
    assert finding.status == "problem"
    assert "could not be started: [Errno 2]" in finding.found


MEMINFO = "MemTotal:       16000000 kB\nMemAvailable:    5000000 kB\n"


def machine(tmp_path, **files):
    cgroup = {"proc/self/cgroup": "0::/\n", "proc/meminfo": MEMINFO}
    root = write(tmp_path, cgroup | {name.replace("__", "/"): t for name, t in files.items()})
    return named([*look_at_machine(root), *shared_memory(root), *look_at_limits(root)])


def test_a_quota_below_the_affinity_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    files = {"sys/fs/cgroup/cpu.max": "150000 100000\n"}
    cores = machine(tmp_path, **files)["cores"]
    assert (cores.status, cores.values["quota"]) == ("advice", 1.5)
    assert "Set OMP_NUM_THREADS=2, and num_workers to 2 at most." in cores.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine(tmp_path, **files)["cores"].status == "ok"


@pytest.mark.parametrize(
    ("used_bytes", "status"), [(1 * GB, "ok"), (3 * GB, "advice"), (4 * GB, "problem")]
)
def test_what_a_container_has_left_counts(tmp_path, used_bytes, status):
    group = "sys/fs/cgroup/"
    files = {group + "memory.max": f"{4 * GB + 1}\n", group + "memory.current": f"{used_bytes}\n"}
    files[group + "memory.events"] = "oom_kill 2\n"
    found = machine(tmp_path, **files)
    assert found["memory"].status == status
    assert "5.1 GB of 16.4 GB available; the control group has " in found["memory"].found
    assert "ended 2 processes" in found["OOM killer"].found


def test_few_processes_left_in_the_group_are_told(tmp_path):
    group = "sys/fs/cgroup/"
    files = {group + "pids.max": "128\n", group + "pids.current": "100\n"}
    processes = machine(tmp_path, **files)["processes"]
    assert (processes.status, processes.values["left_in_group"]) == ("advice", 28)


def test_strict_overcommit_is_told(tmp_path):
    assert "overcommit" not in machine(tmp_path)
    files = {"proc/sys/vm/overcommit_memory": "2\n"}
    assert "forkserver" in machine(tmp_path, **files)["overcommit"].remedy


def test_a_machine_without_dev_shm_is_told(tmp_path):
    found = machine(tmp_path)
    assert (found["/dev/shm"].status, found["batches"].status) == ("advice", "ok")


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        (".dockerenv", "", "Docker"),
        ("run/.containerenv", "", "Podman"),
        ("proc/self/cgroup", "0::/kubepods.slice/pod1\n", "Kubernetes"),
        ("proc/self/cgroup", "0::/user.slice\n", None),
    ],
)
def test_the_kind_of_container_is_told(tmp_path, monkeypatch, name, text, kind):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert container_kind(write(tmp_path, {name: text})) == kind


CPU_BUILD = {"cuda": None, "hip": None, "kind": None, "devices": [], "error": None, "warnings": []}
CUDA_BUILD = CPU_BUILD | {"cuda": "13.0"}
GPU = CUDA_BUILD | {"kind": "cuda", "devices": [{"name": "NVIDIA H100", "total_bytes": 85 * GB}]}


@pytest.mark.parametrize(
    ("facts", "has_driver", "status", "words"),
    [
        (None, True, "ok", "not looked for: no torch here"),
        (CPU_BUILD, False, "ok", "none: torch 2.13.0 is a build for the CPU"),
        (CPU_BUILD, True, "advice", "is a build for the CPU alone"),
        (CUDA_BUILD | {"error": "no driver"}, False, "ok", "built for CUDA 13.0: no driver"),
        (CUDA_BUILD | {"error": "too old"}, True, "problem", "built for CUDA 13.0: too old"),
        (GPU, True, "ok", "cuda: NVIDIA H100 (85.0 GB), torch is built for CUDA 13.0; a comp"),
        (GPU | {"error": "no kernel image"}, True, "problem", "13.0; no kernel image"),
        (GPU | {"warnings": ["sm_120 is new"]}, True, "advice", "torch warns: sm_120 is new"),
    ],
)
def test_what_torch_says_of_a_gpu_is_judged(tmp_path, facts, has_driver, status, words):
    if has_driver:
        write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    finding = look_at_device(facts, "2.13.0" if facts else None, tmp_path)
    assert finding.status == status
    assert words in finding.found


def test_a_finding_that_is_not_fine_has_a_remedy():
    with pytest.raises(AssertionError):
        Finding("limits", "open files", "limit 3", status="problem")
