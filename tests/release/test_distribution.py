# SPDX-License-Identifier: Apache-2.0
"""What is released: a wheel and a source distribution that install and work in a clean environment.

`make dist` runs these on what it has built; it needs a package index. `make test` leaves them out.
"""

from __future__ import annotations

import email
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from tests.docs.test_quickstart_page import SECTIONS, follow

import penstock

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "constraints.txt"
# By itself, a run tries the interpreter that it runs in. torch is installed for that one alone: for
# others, some indexes have builds of gigabytes.
PYTHONS = re.split(r"[\s:]+", os.environ.get("PENSTOCK_PYTHONS", sys.executable).strip())
PROGRAM = """
from penstock import Loader
from penstock.stores import LMDBDataset
from penstock.vision import ImagePipeline

if __name__ == "__main__":
    photos = LMDBDataset("own.lmdb", transform=ImagePipeline.train(64))
    loader = Loader(photos, batch_size=32, shuffle=True, num_workers=2, seed=7)
    (shape,) = {images.shape[1:] for images, labels in loader}
    print(sum(len(labels) for images, labels in loader), shape, *photos.class_names)
"""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(command, *, status=0, **options):
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=500, **options
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done


def build(*what, source, out):
    environment = {**os.environ, "PIP_CONSTRAINT": str(CONSTRAINTS)}
    run([sys.executable, "-m", "build", *what, "--outdir", out, source], env=environment)


@pytest.fixture(scope="session")
def dist(tmp_path_factory):
    """The folder with both, of this source: what `make dist` has built, or built now."""
    if "PENSTOCK_DIST" in os.environ:
        return Path(os.environ["PENSTOCK_DIST"]).resolve()
    folder = tmp_path_factory.mktemp("dist")
    build(source=ROOT, out=folder)
    return folder


@pytest.fixture(scope="session")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(dist):
    (path,) = dist.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def unpacked(sdist, tmp_path_factory):
    """The source distribution, in a folder that is no checkout of git."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (inner,) = folder.iterdir()
    return inner


@pytest.fixture(scope="session")
def clean(wheel, tmp_path_factory):
    """The folder of programs of an environment with the wheel and numpy, nothing else."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    pip = [folder / "bin/python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS]
    run([*pip, wheel])
    return folder / "bin"


def contents(wheel):
    """Digests of a wheel's files by name, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if not name.endswith("/RECORD")]
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}


def metadata_of(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_both_are_of_this_version_and_pass_the_indexs_own_check(wheel, sdist):
    assert wheel.name == f"penstock_loader-{penstock.__version__}-py3-none-any.whl"
    assert sdist.name == f"penstock_loader-{penstock.__version__}.tar.gz"
    run([sys.executable, "-m", "twine", "check", "--strict", wheel, sdist])


def test_the_wheel_has_the_package_its_types_its_licence_and_nothing_else(wheel):
    names = contents(wheel)
    assert "penstock/py.typed" in names
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    folders = {name.split("/")[0] for name in names}
    assert folders == {"penstock", f"penstock_loader-{penstock.__version__}.dist-info"}
    assert not [name for name in names if "test_" in name or "conftest" in name or ".pyc" in name]
    sources = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert sources == {name for name in names if name.endswith(".py")}


def test_the_readme_of_the_metadata_links_to_no_file_beside_it(wheel):
    metadata = metadata_of(wheel)
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload(decode=True).decode()
    readme = re.sub(r"!\[[^\]]*\]\(\S+\)\n\n", "", (ROOT / "README.md").read_text())
    links = re.findall(r"\[[^\]]*\]\([^)\s]+\)", re.sub(r"```.*?```", "", readme, flags=re.DOTALL))
    beside = [link for link in links if "](https://" not in link]
    assert len(beside) > 25
    for link in beside:
        words, path = link[1:-1].split("](")
        page = path.partition("#")[0]
        readme = readme.replace(link, page if words == page else f"{words} ({page})")
    assert text == f"{readme}\nThe pages that are named here are in the source distribution.\n"


def test_the_source_distribution_has_what_the_makefile_needs(unpacked):
    assert not (unpacked / ".git").exists()
    names = (
        ".ci/pythons", ".ci/run", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile",
        "README.md", "constraints.txt", "docs/versioning.md", "examples/README.md",
        "mkdocs.yml", "pyproject.toml", "tests/conftest.py",
    )  # fmt: skip
    assert [name for name in names if not (unpacked / name).is_file()] == []
    wanted = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    assert wanted == {path.relative_to(unpacked) for path in (unpacked / "tests").rglob("*.py")}
    for folder in (".venv", ".git", "dist", ".peers", "site"):
        assert not (unpacked / folder).exists()


def test_the_source_distribution_gives_the_same_wheel(unpacked, wheel, tmp_path):
    build("--wheel", source=unpacked, out=tmp_path)
    (again,) = tmp_path.glob("*.whl")
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_it_can_be_imported_with_numpy_alone_and_delivers_batches(clean, tmp_path):
    program = (
        "import sys, numpy as np, penstock\n"
        "batches = list(penstock.Loader(np.arange(10.0), batch_size=4, num_workers=2))\n"
        "print(penstock.__version__, [len(batch) for batch in batches], 'torch' in sys.modules)\n"
    )
    said = run([clean / "python", "-c", program], cwd=tmp_path).stdout
    assert said == f"{penstock.__version__} [4, 4, 2] False\n"
    listed = run([clean / "python", "-m", "pip", "list", "--format=freeze"]).stdout
    names = {line.split("==")[0] for line in listed.splitlines()}
    assert names - {"pip", "setuptools"} == {"numpy", "penstock-loader"}


def test_without_extras_the_command_names_the_one_that_it_needs(wheel, clean, tmp_path):
    said = run([clean / "penstock", "--version"], status=1, cwd=tmp_path).stderr
    assert said == (
        "penstock: this command needs typer, which is not installed. Install it with: pip install "
        '"penstock-loader[cli]"\n'
    )


def test_the_extra_cli_alone_has_version_help_and_doctor(wheel, clean, tmp_path):
    copy = tmp_path / "venv"
    venv.create(copy, with_pip=True)
    pip = [copy / "bin/python", "-m", "pip", "install", "-q", "-c", CONSTRAINTS]
    run([*pip, wheel])
    run([*pip, "penstock-loader[cli]"])  # as the message says: what is there stays
    program = copy / "bin/penstock"
    assert run([program, "--version"]).stdout == f"penstock {penstock.__version__}\n"
    assert "doctor" in run([program, "--help"]).stdout
    said = subprocess.run([program, "doctor"], capture_output=True, text=True, timeout=110).stdout
    assert "not looked for: no torch here" in said
    assert "not installed (torch missing); if you want it: pip install " in said
    assert 'pip install "penstock-loader[torch]"\n' in said
    assert "2 workers delivered 4 batches" in said
    module = run([copy / "bin/python", "-m", "penstock", "--version"], cwd=tmp_path)
    assert module.stdout == f"penstock {penstock.__version__}\n"
    shutil.rmtree(copy)


@pytest.fixture(scope="module", params=PYTHONS)
def installed(request, dist, tmp_path_factory):
    """The folder of programs of an environment in which pip has found the wheel by its name."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    run([request.param, "-m", "venv", folder])
    python = folder / "bin/python"
    version = run([python, "-c", "import sys; print(*sys.version_info[:2])"]).stdout
    extras = "torch," * (version.split() == [str(part) for part in sys.version_info[:2]])
    pip = [python, "-m", "pip", "install", "-q", "--no-compile", "-c", CONSTRAINTS]
    run([*pip, "--find-links", dist, f"penstock-loader[{extras}vision,cli,lmdb]"])
    yield folder / "bin"
    shutil.rmtree(folder)


def follow_quickstart(programs, monkeypatch, folder, sections):
    monkeypatch.setattr(sys, "executable", str(programs / "python"))
    for section in sections:
        follow(section, folder, time.monotonic() + 100)


def check_that_it_works(programs, monkeypatch, folder):
    printed = run([programs / "penstock", "--version"]).stdout
    assert printed == f"penstock {penstock.__version__}\n"
    follow_quickstart(programs, monkeypatch, folder, ["Photos"])
    run([programs / "penstock", "pack", "photos", "own.lmdb", "--resize", "64"], cwd=folder)
    (folder / "own.py").write_text(PROGRAM)
    printed = run([programs / "python", "own.py"], cwd=folder).stdout
    assert printed == "600 (3, 64, 64) circle cross square\n"


def test_an_interpreter_runs_the_wheel(installed, tmp_path, monkeypatch):
    assert "2 workers delivered 4 batches" in run([installed / "penstock", "doctor"]).stdout
    check_that_it_works(installed, monkeypatch, tmp_path)
    if list(installed.parent.glob("lib/*/site-packages/torch")):
        follow_quickstart(installed, monkeypatch, tmp_path, SECTIONS)


def test_an_interpreter_runs_the_source_distribution(installed, sdist, tmp_path, monkeypatch):
    pip = [installed / "python", "-m", "pip", "install", "-q", "--force-reinstall", "--no-deps"]
    run([*pip, sdist], env={**os.environ, "PIP_CONSTRAINT": str(CONSTRAINTS)})
    check_that_it_works(installed, monkeypatch, tmp_path)
