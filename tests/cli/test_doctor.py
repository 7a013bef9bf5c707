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

pytest.importorskip("rich")

from penstock.cli import doctor_trials
from penstock.cli.doctor import (
    Finding,
    _numbers,
    extras_of,
    look_at_cores,
    look_at_delivery,
    look_at_device,
    look_at_extra,
    look_at_memory,
    look_at_open_files,
    look_at_shm,
    look_at_storage,
    modules_by_distribution,
)
from penstock.cli.doctor_trials import Device, Imported, deliver_batches, import_modules
from penstock.optional import install_command

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
        command, capture_output=True, text=True, timeout=60, cwd=folder / "current", env=environment
    )
    assert done.stderr == ""
    return done.returncode, done.stdout


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


def in_child(change, finding):
    """Change something of a new process, and return a finding of it."""
    program = (
        f"import json, os, resource\n{change}\nfrom penstock.cli.doctor import *\n"
        f"from penstock.cli.doctor import look_at_cores, look_at_delivery, look_at_open_files\n"
        f"from penstock.cli.doctor_trials import deliver_batches\n"
        f"print(json.dumps({finding}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Finding(*json.loads(done.stdout))


def test_it_tells_what_is_here(found):
    assert sys.executable in found["Python"]["found"]
    assert f"{len(os.sched_getaffinity(0))} by affinity" in found["cores"]["found"]
    assert found["core"]["found"] == f"numpy {metadata.version('numpy')}"
    assert found["torch"]["found"] == f"torch {metadata.version('torch')}"
    assert found["trial"]["found"].startswith("2 workers delivered 4 batches; the first after ")
    names = ("arrow", "mongo", "ray", "tensorboard", "trial")
    assert [found[name]["status"] for name in names] == ["ok"] * 5


def test_the_exit_status_says_whether_there_is_a_problem(as_json, found):
    problems = [name for name, finding in found.items() if finding["status"] == "problem"]
    assert (as_json[0], problems) == (1, ["vision"])
    assert "RuntimeError: cannot reach mongodb://ada:***@h/lab" in found["vision"]["found"]


def test_files_in_the_folder_that_the_user_is_in_are_left_alone(found):
    assert found["lmdb"]["status"] == "ok"
    assert f"lmdb {metadata.version('lmdb')}" in found["lmdb"]["found"]


def test_lines_and_json_have_the_same_facts_and_no_secret(as_json, as_lines):
    assert as_json[0] == as_lines[0]
    record = json.loads(as_json[1])
    rows = [line for line in as_lines[1].splitlines() if line[:2] == "  " != line[2:4]]
    shown = [(row[2:11].strip().lower(), row[11:26].strip()) for row in rows]
    assert shown == [(finding["status"], finding["name"]) for finding in record["findings"]]
    for finding in record["findings"]:
        if finding["topic"] == "extras" and finding["status"] == "ok":
            assert finding["found"] in as_lines[1]
    assert as_lines[1].splitlines()[-1].startswith(f"problems: {record['num_problems']}, advice: ")
    assert "hunter2" not in as_json[1] + as_lines[1]
    assert as_lines[1].count("mongodb://ada:***@h/lab") == 1


def test_few_open_files_are_a_problem_and_the_trial_meets_it():
    change = "resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))"
    files = in_child(change, "look_at_open_files()")
    assert files.status == "problem"
    assert files.found.startswith("limit 20 (at most 20), ")
    assert "`ulimit -n 1024`" in files.remedy
    trial = in_child(change, "look_at_delivery(*deliver_batches())")
    assert "num_workers=2 needs 20 more open files" in trial.found
    assert trial.status == "problem"


def test_affinity_counts():
    core = min(os.sched_getaffinity(0))
    cores = in_child(f"os.sched_setaffinity(0, {{{core}}})", "look_at_cores()")
    assert cores.found.startswith("1 usable: ")
    assert "1 by affinity" in cores.found


def reasons_of(tmp_path, monkeypatch, files):
    """Write modules and import them as the doctor does; return why it cannot be, by name."""
    write(tmp_path, files)
    monkeypatch.syspath_prepend(tmp_path)
    return import_modules([name.partition(".")[0].partition("/")[0] for name in files]).reasons


def test_a_broken_library_is_told_with_its_error_and_the_others_are_looked_at(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(doctor_trials, "_IMPORT_LIMIT_S", 10.0)
    crash = "import atexit, os\natexit.register(lambda: os.kill(os.getpid(), 11))"
    files = {
        "raises.py": "raise RuntimeError('built for another numpy')",
        "crashes.py": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)",
        "exits.py": "import sys\nsys.exit('no licence')",
        "is_gone.py": "import os\nos._exit(0)",
        "by_number.py": "import os\nos.kill(os.getpid(), 40)",  # a real-time signal has no name
        "speaks.py": "import os\nprint('no disk', flush=True)\nos._exit(7)",
        "much.py": "raise RuntimeError('x' * 300_000)",  # more than a pipe holds
        "fine.py": "print('hello')",
        # How a library ends a process is not asked.
        "at_exit.py": crash,
        "threads.py": "import threading\nthreading.Thread(target=threading.Event().wait).start()",
    }
    reasons = reasons_of(tmp_path, monkeypatch, files)
    assert reasons.pop("much").count("x") == 300_000
    assert reasons == {
        "raises": f"{tmp_path}/raises.py, line 1: RuntimeError: built for another numpy",
        "crashes": "its process was killed by SIGSEGV.",
        "exits": f"{tmp_path}/exits.py, line 2: SystemExit: no licence",
        "is_gone": "its process ended without a word.",
        "by_number": "its process was killed by signal 40.",
        "speaks": "its process exited with status 7. no disk",
        **dict.fromkeys(("fine", "at_exit", "threads"), ""),
    }


def test_a_library_that_never_ends_being_imported_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor_trials, "_IMPORT_LIMIT_S", 2.0)
    files = {"waits.py": "import threading\nthreading.Event().wait()", "fine.py": ""}
    reasons = reasons_of(tmp_path, monkeypatch, files)
    assert reasons == {"waits": "its process did not end within 2 s.", "fine": ""}


def test_a_process_that_a_library_leaves_behind_is_not_waited_for(tmp_path, monkeypatch):
    note = tmp_path / "pid"
    starts = (
        "import os, pathlib, signal\n"
        "pid = os.fork()\n"
        "if pid == 0:\n    os.setsid()\n    signal.pause()\n"  # with all that it has open
        f"pathlib.Path({str(note)!r}).write_text(str(pid))"
    )
    try:
        reasons = reasons_of(tmp_path, monkeypatch, {"starts.py": starts, "fine.py": ""})
        assert reasons == {"starts": "", "fine": ""}
        assert psutil.pid_exists(int(note.read_text()))
    finally:
        os.kill(int(note.read_text()), signal.SIGKILL)


def test_a_process_is_gone_when_the_doctor_is_interrupted(tmp_path, monkeypatch):
    def interrupted(process, limit_s, real=subprocess.Popen.wait):
        if limit_s is None:
            return real(process)
        started.append(process)
        raise KeyboardInterrupt

    started = []
    monkeypatch.setattr(subprocess.Popen, "wait", lambda p, timeout=None: interrupted(p, timeout))
    with pytest.raises(KeyboardInterrupt):
        import_modules(["json"])
    assert started[0].returncode == -signal.SIGKILL


def test_ctrl_c_ends_an_import_that_hangs(tmp_path, monkeypatch):
    """A terminal sends it to all processes, of which one that is in C code does not hear it."""
    hangs = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    write(tmp_path, {"hangs.py": hangs})
    program = (
        "import os, signal, sys, threading\n"
        "from penstock.cli import doctor, main\n"
        "doctor.modules_by_distribution = lambda: {'numpy': 'hangs'}\n"
        "def look_at_environment():\n"
        "    threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "    return ()\n"
        "doctor.look_at_environment = look_at_environment\n"
        "sys.exit(main(['doctor']))\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, timeout=30
    )
    assert done.returncode == 130


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ({"executable": "/nowhere/python"}, "could not be started: [Errno 2]"),
        ({}, "WorkerTimeout: "),
    ],
)
def test_a_trial_without_batches_is_a_problem(monkeypatch, failing, said):
    for name, value in failing.items():
        monkeypatch.setattr(sys, name, value)
    finding = look_at_delivery(*deliver_batches(limit_s=0.001))
    assert finding.status == "problem"
    assert said in finding.found


def test_a_broken_torch_is_told(tmp_path, monkeypatch):
    files = {"torch/__init__.py": "raise OSError('libcudart.so: no such file')"}
    reasons = reasons_of(tmp_path, monkeypatch, files) | {"simplejpeg": "old"}
    modules = {"torch": "torch", "simplejpeg": "simplejpeg"}
    torch = look_at_extra("torch", [("torch", "1")], modules, reasons)
    vision = look_at_extra("vision", [("simplejpeg", "1")], modules, reasons)
    assert [torch.status, vision.status] == ["problem"] * 2
    assert "OSError: libcudart.so: no such file" in torch.found
    assert "pip install --force-reinstall torch." in torch.remedy
    assert "--index-url" in torch.remedy
    assert "--index-url" not in vision.remedy
    assert look_at_device(Imported(reasons, None), tmp_path).found == "torch cannot be imported"


def test_a_version_below_the_metadatas_floor_is_told(tmp_path, monkeypatch):
    info = "Metadata-Version: 2.1\nName: lmdb\nVersion: 1.4.1\n"
    write(tmp_path, {"lmdb-1.4.1.dist-info/METADATA": info, "lmdb.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    finding = look_at_extra("lmdb", [("lmdb", "2.3")], {"lmdb": "lmdb"}, {"lmdb": ""})
    assert (finding.status, finding.found) == ("advice", "lmdb 1.4.1")
    assert finding.remedy == "Penstock needs lmdb>=2.3: `pip install -U`."


def test_an_extra_that_is_not_installed_is_no_fault():
    finding = look_at_extra("x", [("penstock-has-no-such-library", "1")], {}, {})
    assert finding.status == "ok"
    assert finding.found.endswith(f"; if you want it: {install_command('x')}")


def test_any_of_opencvs_distributions_will_do(tmp_path, monkeypatch):
    info = "Metadata-Version: 2.1\nName: opencv-contrib-python\nVersion: 4.10.0.84\n"
    folder = "opencv_contrib_python-4.10.0.84.dist-info"
    write(tmp_path, {f"{folder}/METADATA": info, f"{folder}/top_level.txt": "cv2\n"})
    monkeypatch.syspath_prepend(tmp_path)
    assert modules_by_distribution()["opencv-contrib-python"] == "cv2"
    modules = {"opencv-contrib-python": "cv2"}
    finding = look_at_extra("vision", [("opencv-python-headless", "4.9")], modules, {})
    assert finding.found == "opencv-contrib-python 4.10.0.84"


def test_all_of_penstocks_own_requirements_are_understood():
    extras = extras_of(metadata.requires("penstock"))
    assert {"core", "torch", "vision", "cli", "lmdb", "mongo", "arrow", "records"} <= set(extras)
    assert not {"dev", "docs", "clients", "all"} & set(extras)
    assert extras["torch"] == [("torch", "2.6")]
    installed = modules_by_distribution()
    for name in {name for needed in extras.values() for name, _ in needed}:
        assert name in installed
    assert (installed["pillow"], installed["pyyaml"]) == ("PIL", "yaml")


@pytest.mark.parametrize(
    ("version", "floor", "is_old"),
    [
        ("2.3", "2.3", False),
        ("2.3.0.post1", "2.3", False),
        ("2.10", "2.3", False),
        ("2.2.9", "2.3", True),
        ("2.13.0+cpu", "2.6", False),
        ("6", "0", False),
    ],
)
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


def test_a_machine_without_dev_shm_is_told(tmp_path):
    assert look_at_shm(tmp_path).status == "advice"


def test_no_limit_of_open_files_is_fine(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    assert look_at_open_files() == Finding("machine", "open files", "no limit")


def test_storage_is_read_for_as_long_as_it_takes(tmp_path, monkeypatch):
    assert look_at_storage(tmp_path).found == f"{tmp_path} has no file with content"
    write(tmp_path, {"a/1.jpg": "x" * 1000, "2.jpg": "x" * 2_000_000})
    os.mkfifo(tmp_path / "fifo")  # would wait for a writer
    finding = look_at_storage(tmp_path)
    assert finding.found.startswith(f"{tmp_path}: 2 files at ")
    assert look_at_storage(tmp_path / "2.jpg").found.startswith(f"{tmp_path}/2.jpg: 1 file at ")
    monkeypatch.setattr("penstock.cli.doctor._TOO_SHORT_S", 0.0)
    monkeypatch.setattr("penstock.cli.doctor._SLOW_FILE_S", 0.0)
    monkeypatch.setattr("penstock.cli.doctor._SLOW_BYTES_PER_S", 1e15)
    assert "`penstock pack`" in look_at_storage(tmp_path).remedy


def test_a_file_that_cannot_be_read_is_a_problem(tmp_path, monkeypatch):
    def refused(*_):
        raise PermissionError(13, "Permission denied")

    write(tmp_path, {"1.jpg": "x"})
    monkeypatch.setattr("penstock.cli.doctor._read", refused)
    finding = look_at_storage(tmp_path)
    assert finding.status == "problem"
    assert finding.found == f"{tmp_path}/1.jpg cannot be read: Permission denied"


CPU = Device("the CPU", [], "")
CUDA = Device("CUDA 13.0", [], "No CUDA GPUs are available")
GPU = Device("CUDA 13.0", ["cuda: NVIDIA H100 (85.0 GB)"], "")


@pytest.mark.parametrize(
    ("device", "has_driver", "visible", "status", "words"),
    [
        (None, True, None, "ok", "not looked for: no torch here"),
        (CPU, False, None, "ok", "none: torch is built for the CPU"),
        (CPU, True, None, "advice", "none: torch is built for the CPU"),
        (CPU, True, "", "ok", "none: torch is built for the CPU (CUDA_VISIBLE_DEVICES='')"),
        (CUDA, False, None, "ok", "none: No CUDA GPUs are available"),
        (CUDA, True, None, "advice", "none: No CUDA GPUs are available"),
        (CUDA, True, "-1", "ok", "(CUDA_VISIBLE_DEVICES='-1')"),
        (CUDA, True, "7", "advice", "(CUDA_VISIBLE_DEVICES='7')"),
        (GPU, True, None, "ok", "NVIDIA H100 (85.0 GB); torch is built for CUDA 13.0; a comp"),
        (GPU._replace(error="no kernel image"), True, None, "problem", "13.0; no kernel image"),
    ],
)
def test_what_torch_says_of_a_gpu_is_judged(
    tmp_path, monkeypatch, device, has_driver, visible, status, words
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if has_driver:
        write(tmp_path, {"proc/driver/nvidia/version": "NVRM"})
    finding = look_at_device(Imported({}, device), tmp_path)
    assert finding.status == status
    assert words in finding.found
