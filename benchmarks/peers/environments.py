# SPDX-License-Identifier: Apache-2.0
"""Makes an environment of its own for each peer: .peers/ENVIRONMENT.

    python benchmarks/peers/environments.py [ENVIRONMENT ...]

For each requirements/ENVIRONMENT.txt that has not been installed as it stands, or only for those
that are named: the Debian packages of its lines `# apt:` (as root), a virtual environment, and
`pip install -r`. One that cannot be installed is no failure of the comparison:
.peers/ENVIRONMENT/failed.txt keeps what pip said of errors, and the page shows it. A later run
tries it again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["failure", "folder", "is_made", "make", "names", "python"]

ROOT: Final = Path(__file__).resolve().parents[2]
_REQUIREMENTS: Final = Path(__file__).parent / "requirements"
_NUM_LINES: Final = 6


def names() -> list[str]:
    """Return the environments that there are to be."""
    return sorted(path.stem for path in _REQUIREMENTS.glob("*.txt"))


def folder(name: str) -> Path:
    """Return where an environment is made."""
    return ROOT / ".peers" / name


def python(name: str) -> Path:
    """Return the interpreter of an environment."""
    return folder(name) / "bin" / "python"


def requirements(name: str) -> Path:
    """Return the file with the packages of an environment."""
    return _REQUIREMENTS / f"{name}.txt"


def failure(name: str) -> str | None:
    """Return what pip said at the end where it could not install an environment, else None."""
    file = folder(name) / "failed.txt"
    return file.read_text("utf-8").strip() if file.exists() else None


def is_installed(name: str) -> bool:
    """Return whether an environment has been made of its file as it stands."""
    return is_made(folder(name), requirements(name))


def is_made(target: Path, requirements: Path) -> bool:
    """Return whether the environment `target` has been made of the file as it stands."""
    stamp = target / "installed.txt"
    return stamp.exists() and stamp.read_bytes() == requirements.read_bytes()


def install(name: str) -> bool:
    """Make an environment; return whether it could be made."""
    install_system_packages(name)
    return make(folder(name), requirements(name))


def make(target: Path, requirements: Path) -> bool:
    """Make the environment `target` of a file; return whether it could be made."""
    interpreter = target / "bin" / "python"
    (target / "failed.txt").unlink(missing_ok=True)
    if not interpreter.exists():
        shutil.rmtree(target, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    command = [str(interpreter), "-m", "pip", "install", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "-r", str(requirements)],
        cwd=ROOT,  # the project itself is installed from where it lies
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode != 0:
        (target / "failed.txt").write_text("\n".join(reasons(done.stdout)) + "\n", "utf-8")
        return False
    shutil.copyfile(requirements, target / "installed.txt")
    return True


def system_packages(name: str) -> list[str]:
    """Return the Debian packages that the lines `# apt: PACKAGE ...` of an environment name."""
    lines = requirements(name).read_text("utf-8").splitlines()
    marked = [line.removeprefix("# apt:") for line in lines if line.startswith("# apt:")]
    return " ".join(marked).split()


def install_system_packages(name: str) -> None:
    """Install the Debian packages of an environment where this user may; else name them."""
    packages = system_packages(name)
    if not packages:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        print(f"{name}: needs the Debian packages {' '.join(packages)}; they are not installed now")
        return
    command = ["apt-get", "install", "-y", "--no-install-recommends", *packages]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:  # they may be there from elsewhere; if not, pip says so
        last = "\n".join(done.stdout.splitlines()[-_NUM_LINES:])
        print(f"{name}: apt-get could not install {' '.join(packages)}\n{last}")


def reasons(output: str) -> list[str]:
    """Return the lines of pip's output that say why, without those that say where to look."""
    lines = [line.strip() for line in output.splitlines()]
    said = [line for line in lines if "error" in line.lower() and not line.startswith("note:")]
    return said[-_NUM_LINES:] or [line for line in lines if line][-_NUM_LINES:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make environments; return 0 also where one could not be made, as the page then says so."""
    parser = argparse.ArgumentParser(prog="environments.py")
    parser.add_argument("names", nargs="*", metavar="ENVIRONMENT", help="all if none is named")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names()):
        parser.error(f"no requirements/*.txt for {sorted(unknown)}; there are: {names()}")
    for name in options.names or names():
        if is_installed(name):
            print(f"{name}: there already")
        elif install(name):
            print(f"{name}: installed")
        else:
            print(f"{name}: could not be installed\n{failure(name)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
