# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor` says what it finds, and one broken thing does not keep it from the others."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from penstock.cli.doctor.children import Child
from penstock.cli.doctor.command import _record
from penstock.cli.doctor.device import look_at_device
from penstock.cli.doctor.extras import (
    Extra,
    Imports,
    InstalledLibrary,
    installed,
    look_at_extras,
    parse_requirement,
    user_extras,
)
from penstock.cli.doctor.finding import Finding
from penstock.cli.doctor.machine import container_kind, look_at_limits, look_at_machine
from penstock.cli.doctor.machine import look_at_shared_memory as shared_memory
from penstock.cli.doctor.trial import start_trial, trial_finding
from penstock.optional import install_command

pytest.importorskip("rich")

SCRIPT = Path(sysconfig.get_path("scripts")) / "penstock"
GB = 1_000_000_000
SECRET = "mongodb://ada:hunter2@h"
# A library that cannot be imported, and says a password.
BROKEN = {"simplejpeg.py": f"raise RuntimeError('cannot reach {SECRET}/lab')"}
# In the folder that the user is in.
STRANGE = {
    "lmdb.py": "raise RuntimeError('of the user')",
    "lmdb-1.4.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: lmdb\nVersion: 1.4.1\n",
}


def output_of(command, **options):
    """Run it; return its exit status, stdout and stderr. It ends, and all it started with it."""
    process = psutil.Popen(
        list(map(str, command)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            for each in (*process.children(recursive=True), process):
                each.kill()
            process.communicate()
    return process.returncode, out, err


def doctor(folder, *command):
    """Run it in a folder with files of the user's; return its exit status and stdout."""
    write(folder / "libraries", BROKEN)
    write(folder / "current", STRANGE)
    secrets = {"MY_TOKEN": "hunter2", "MONGODB_URI": SECRET, "PYTHONPATH": f"{folder}/libraries"}
    status, out, err = output_of(command, cwd=folder / "current", env={**os.environ, **secrets})
    assert err == ""
    return status, out


@pytest.fixture(scope="module")
def as_json(tmp_path_factory):
    """What `python -m penstock doctor --json` writes."""
    command = [sys.executable, "-m", "penstock", "doctor", "--json"]
    return doctor(tmp_path_factory.mktemp("doctor"), *command)


@pytest.fixture(scope="module")
def as_lines(tmp_path_factory):
    """What `penstock doctor` writes."""
    return doctor(tmp_path_factory.mktemp("doctor"), SCRIPT, "doctor")


@pytest.fixture
def found(as_json):
    return {finding["name"]: finding for finding in json.loads(as_json[1])["findings"]}


def test_it_can_be_called_where_the_path_begins_with_no_folder():
    program = (
        "import sys; assert sys.path[0] == ''\n"
        "from penstock.__main__ import main; main(['doctor', '--json'])"
    )
    status, out, err = output_of([sys.executable, "-c", program])
    assert err == ""
    assert json.loads(out)["findings"]
    assert status in (0, 1)


def in_child(change, look):
    """Change something of a new process, and return findings of it by name."""
    program = (
        f"import dataclasses, json, os, resource\n{change}\n"
        f"from penstock.cli.doctor.machine import look_at_limits, look_at_machine\n"
        f"from penstock.cli.doctor.trial import start_trial, trial_finding\n"
        f"with start_trial() as trial:\n"
        f"    print(json.dumps([dataclasses.asdict(each) for each in {look}]))\n"
    )
    status, out, err = output_of([sys.executable, "-c", program])
    assert status == 0, err
    return {finding["name"]: finding for finding in json.loads(out)}


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def named(findings):
    return {finding.name: finding for finding in findings}


def test_it_tells_what_is_here(found):
    assert found["Python"]["values"]["executable"] == sys.executable
    assert found["cores"]["values"]["affinity"] == len(os.sched_getaffinity(0))
    assert found["batches"]["status"] == "ok"
    assert found["numpy"]["values"]["version"] == metadata.version("numpy")
    assert found["torch"]["values"]["libraries"] == {"torch": metadata.version("torch")}
    assert found["GPU"]["values"]["cuda"] == __import__("torch").version.cuda
    assert found["trial"]["values"]["delivered"] == 4
    names = ("arrow", "mongo", "ray", "tensorboard", "trial")
    assert [found[name]["status"] for name in names] == ["ok"] * 5


def test_the_exit_status_says_whether_there_is_a_problem(as_json, found):
    problems = [name for name, finding in found.items() if finding["status"] == "problem"]
    assert (as_json[0], problems) == (1, ["vision"])
    assert "RuntimeError: cannot reach mongodb://ada:***@h/lab" in found["vision"]["found"]


def test_files_in_the_folder_that_the_user_is_in_are_left_alone(found):
    assert found["lmdb"]["status"] == "ok"
    assert found["lmdb"]["values"]["libraries"]["lmdb"] == metadata.version("lmdb")


def test_lines_and_json_have_the_same_facts_and_no_secret(as_json, as_lines):
    assert as_json[0] == as_lines[0]
    record = json.loads(as_json[1])
    rows = [line for line in as_lines[1].splitlines() if line[:2] == "  " != line[2:4]]
    shown = [(row[2:11].strip().lower(), row[11:26].strip()) for row in rows]
    load = {"load", "OOM killer"}  # which may change from one run to the next
    told = [(finding["status"], finding["name"]) for finding in record["findings"]]
    assert [row for row in shown if row[1] not in load] == [r for r in told if r[1] not in load]
    for finding in record["findings"]:
        if finding["topic"] in ("extras", "limits") and finding["status"] == "ok":
            assert finding["found"] in as_lines[1]
    assert as_lines[1].splitlines()[-1].startswith(f"problems: {record['num_problems']}, advice: ")
    assert "hunter2" not in as_json[1] + as_lines[1]
    assert as_lines[1].count("mongodb://ada:***@h/lab") == 1


def test_no_part_of_the_json_has_a_secret():
    values = {"failed": SECRET, "warnings": [SECRET, {"error": (SECRET, 3, None)}], "n": 2}
    record = _record([Finding("limits", "x", SECRET, SECRET, "advice", values)])
    assert "hunter2" not in json.dumps(record)
    masked = "mongodb://ada:***@h"
    assert record["findings"][0]["values"] == {
        "failed": masked,
        "warnings": [masked, {"error": [masked, 3, None]}],
        "n": 2,
    }


def test_few_open_files_are_a_problem_and_the_trial_meets_it():
    change = "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
    found = in_child(change, "[*look_at_limits(), trial_finding(trial)]")
    assert found["open files"]["status"] == "problem"
    assert found["open files"]["values"]["soft"] == 20
    assert "`ulimit -n 1024`" in found["open files"]["remedy"]
    assert "num_workers=2 needs 20 more open files" in found["trial"]["found"]
    assert found["trial"]["status"] == "problem"


def test_limited_addresses_are_told():
    change = f"resource.setrlimit(resource.RLIMIT_AS, ({GB}, {GB}))"
    found = in_child(change, "look_at_limits()")
    assert found["address space"]["status"] == "advice"
    assert found["address space"]["found"] == "limited to 1.0 GB"


def test_affinity_counts():
    core = min(os.sched_getaffinity(0))
    found = in_child(f"os.sched_setaffinity(0, {{{core}}})", "look_at_machine()")
    assert found["cores"]["found"].startswith("1 usable: ")
    assert found["cores"]["values"]["affinity"] == 1


def reasons_of(tmp_path, monkeypatch, files):
    """Write modules and import them as the doctor does; return why it cannot be, by name."""
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    modules = [name.partition(".")[0].partition("/")[0] for name in files]
    with Imports([InstalledLibrary(module, "1", module) for module in modules]) as imports:
        return imports.reasons()


def test_a_broken_library_is_told_with_its_error_and_the_others_are_looked_at(
    tmp_path, monkeypatch
):
    files = {
        "raises.py": "raise RuntimeError('built for another numpy')",
        "crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "exits.py": "import sys\nsys.exit('no licence')",
        "is_gone.py": "import os\nos._exit(0)",
        "by_number.py": "import os\nos.kill(os.getpid(), 40)",  # a real-time signal has no name
        "speaks.py": "import os\nprint('no disk', flush=True)\nos._exit(7)",
        "fine.py": "print('hello')",
    }
    assert reasons_of(tmp_path, monkeypatch, files) == {
        "raises": f"{tmp_path}/raises.py, line 1: RuntimeError: built for another numpy",
        "crashes": "its process was killed by SIGSEGV.",
        "exits": f"{tmp_path}/exits.py, line 2: SystemExit: no licence",
        "is_gone": "its process exited with status 0.",
        "by_number": "its process was killed by signal 40.",
        "speaks": "its process exited with status 7. no disk",
        "fine": "",
    }


def test_how_a_library_ends_a_process_is_not_asked(tmp_path, monkeypatch):
    crash = "import atexit, os\natexit.register(lambda: os.kill(os.getpid(), 11))"
    wait = "import threading\nthreading.Thread(target=threading.Event().wait).start()"
    files = {"crash.py": crash, "wait.py": wait, "fine.py": ""}
    assert set(reasons_of(tmp_path, monkeypatch, files).values()) == {""}


def test_a_process_that_a_library_leaves_behind_is_not_waited_for(tmp_path, monkeypatch):
    note = tmp_path / "pid"
    starts = (
        "import os, pathlib, signal\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.setsid()\n    signal.pause()\n"  # with all that it has open
        f"pathlib.Path({str(note)!r}).write_text(str(pid))"
    )
    monkeypatch.setattr("penstock.cli.doctor.extras._IMPORT_LIMIT_S", 60.0)
    try:
        assert reasons_of(tmp_path, monkeypatch, {"starts.py": starts, "fine.py": ""}) == {
            "starts": "",
            "fine": "",
        }
        assert psutil.pid_exists(int(note.read_text()))
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_more_than_a_pipe_holds_can_be_told(tmp_path, monkeypatch):
    files = {"raises.py": "raise RuntimeError('x' * 300_000)", "fine.py": ""}
    reasons = reasons_of(tmp_path, monkeypatch, files)
    assert reasons["fine"] == ""
    assert reasons["raises"].count("x") == 300_000


def test_a_broken_torch_is_told(tmp_path, monkeypatch):
    files = {"torch/__init__.py": "raise OSError('libcudart.so: no such file')"}
    reasons = reasons_of(tmp_path, monkeypatch, files)
    extras = [
        Extra(name, [parse_requirement(f"{library}>=1; extra == {name!r}")])
        for name, library in (("torch", "torch"), ("vision", "simplejpeg"))
    ]
    libraries = {name: InstalledLibrary(name, "2.6", name) for name in ("torch", "simplejpeg")}
    found = named(look_at_extras(extras, libraries, reasons | {"simplejpeg": "old"}))
    assert [finding.status for finding in found.values()][:2] == ["problem"] * 2
    assert "OSError: libcudart.so: no such file" in found["torch"].found
    assert "pip install --force-reinstall torch)" in found["torch"].remedy
    assert "--index-url" in found["torch"].remedy
    assert "pip install --force-reinstall simplejpeg)" in found["vision"].remedy
    assert "--index-url" not in found["vision"].remedy
    assert look_at_device(None, "2.6", tmp_path).found == "torch cannot be imported"


def test_a_version_below_the_metadatas_bound_is_told(tmp_path, monkeypatch):
    info = "Metadata-Version: 2.1\nName: lmdb\nVersion: 1.4.1\n"
    write(tmp_path, {"lmdb-1.4.1.dist-info/METADATA": info, "lmdb.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    extra = Extra("lmdb", [parse_requirement("lmdb>=2.3; extra == 'lmdb'")])
    libraries = {"lmdb": installed("lmdb")}
    (finding,) = look_at_extras([extra], libraries, {"lmdb": ""})
    assert (finding.status, finding.found) == ("advice", "lmdb 1.4.1")
    assert finding.remedy == f"Penstock needs lmdb>=2.3: {install_command('lmdb')} -U"


def test_an_extra_that_is_not_installed_is_no_fault(monkeypatch):
    extra = Extra("x", [parse_requirement("penstock-has-no-such-library>=1; extra == 'x'")])
    name = extra.requirements[0].name
    (finding,) = look_at_extras([extra], {name: installed(name)}, {})
    assert finding.status == "ok"
    assert finding.found.endswith(f"; if you want it: {install_command('x')}")


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
    wanted = InstalledLibrary("opencv-python", "4.10.0.84", "cv2")
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
    libraries = [InstalledLibrary("waits", "1", "waits"), InstalledLibrary("fine", "1", "fine")]
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
    assert "Set OMP_NUM_THREADS=2. Of workers that compute take 2 at most; " in cores.remedy
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert machine(tmp_path, **files)["cores"].status == "ok"


@pytest.mark.parametrize(
    ("used_bytes", "status"), [(1 * GB, "ok"), (3 * GB, "advice"), (4 * GB, "advice")]
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


@pytest.mark.parametrize(
    ("uid", "limit", "left", "status"),
    [
        (1000, 120, 80, "advice"),
        (1000, 140, 100, "ok"),
        (1000, 30, 0, "advice"),
        (1000, -1, None, "ok"),
        (0, 120, None, "ok"),  # whom the limit does not hold
    ],
)
def test_few_processes_left_to_the_user_are_told(tmp_path, monkeypatch, uid, limit, left, status):
    real = resource.getrlimit

    def getrlimit(which):
        return (limit, limit) if which == resource.RLIMIT_NPROC else real(which)

    monkeypatch.setattr(resource, "getrlimit", getrlimit)
    monkeypatch.setattr(os, "getuid", lambda: uid)
    files = {
        "proc/7/status": "Name:\ta\nUid:\t1000\t1000\t1000\t1000\nThreads:\t38\n",
        "proc/8/status": "Name:\tb\nUid:\t1000\t0\t0\t0\nThreads:\t2\n",
        "proc/9/status": "Name:\tc\nUid:\t0\t1000\t1000\t1000\nThreads:\t5\n",
    }
    processes = machine(tmp_path, **files)["processes"]
    assert (processes.status, processes.values["left_of_user"]) == (status, left)
    assert ("`ulimit -u`" in processes.remedy) == (status == "advice")
    assert "pids.max" not in processes.remedy


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
        (CUDA_BUILD | {"error": "too old"}, True, "advice", "built for CUDA 13.0: too old"),
        (GPU, True, "ok", "cuda: NVIDIA H100 (85.0 GB), torch is built for CUDA 13.0; a comp"),
        (GPU | {"error": "no kernel image"}, True, "problem", "13.0; no kernel image"),
        (GPU | {"warnings": ["sm_120 is new"]}, True, "advice", "torch warns: sm_120 is new"),
    ],
)
def test_what_torch_says_of_a_gpu_is_judged(
    tmp_path, monkeypatch, facts, has_driver, status, words
):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if has_driver:
        write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    finding = look_at_device(facts, "2.13.0" if facts else None, tmp_path)
    assert finding.status == status
    assert words in finding.found


HIP_BUILD = CPU_BUILD | {"hip": "6.2", "error": "no device"}
NO_DEVICE = CUDA_BUILD | {"error": "No CUDA GPUs are available"}


@pytest.mark.parametrize(
    ("facts", "variable", "value", "status", "words"),
    [
        (NO_DEVICE, "CUDA_VISIBLE_DEVICES", "", "ok", "hidden by CUDA_VISIBLE_DEVICES=''"),
        (NO_DEVICE, "CUDA_VISIBLE_DEVICES", "-1", "ok", "hidden by CUDA_VISIBLE_DEVICES='-1'"),
        (CPU_BUILD, "CUDA_VISIBLE_DEVICES", "", "ok", "none: hidden by CUDA_VISIBLE_DEVICES=''"),
        (HIP_BUILD, "HIP_VISIBLE_DEVICES", "", "ok", "hidden by HIP_VISIBLE_DEVICES=''"),
        (NO_DEVICE, "HIP_VISIBLE_DEVICES", "", "advice", "No CUDA GPUs are available"),
        (NO_DEVICE, "CUDA_VISIBLE_DEVICES", "7", "advice", "(CUDA_VISIBLE_DEVICES='7')"),
    ],
)
def test_a_gpu_that_is_hidden_on_purpose_is_no_fault(
    tmp_path, monkeypatch, facts, variable, value, status, words
):
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    finding = look_at_device(facts, "2.13.0", tmp_path)
    assert finding.status == status
    assert words in finding.found


def test_a_finding_that_is_not_fine_has_a_remedy():
    with pytest.raises(AssertionError):
        Finding("limits", "open files", "limit 3", status="problem")
