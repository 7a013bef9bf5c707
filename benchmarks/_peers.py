# SPDX-License-Identifier: Apache-2.0
"""Peers in an environment of their own: the option --peers, and which modules are missing there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

_PEERS: Final = "PENSTOCK_BENCH_PEERS"  # for the contenders' processes, too


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    parser.add_argument("--peers", metavar="PYTHON", help="that has the peers' packages")


def use_peers(options: argparse.Namespace) -> None:
    """Take the interpreter that the option names."""
    if options.peers:
        os.environ[_PEERS] = options.peers


def peers_python() -> str:
    """Return the peers' interpreter; it is this one unless another is named."""
    return os.environ.get(_PEERS, sys.executable)


def missing_modules(python: str, modules: Iterable[str]) -> list[str]:
    """Return those modules that an interpreter lacks."""
    code = (
        "import importlib.util, sys\n"
        "print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n.split('.')[0]) is None))"
    )
    command = [python, "-c", code, *modules]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
