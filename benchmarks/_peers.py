# SPDX-License-Identifier: Apache-2.0
"""Peers in an environment of their own: the option --peers, and which modules are missing there."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

from _runner import Benchmark, write

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence

S = TypeVar("S")

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


@dataclass(frozen=True, slots=True)
class PeersBenchmark(Benchmark[S]):
    """Leaves out the peers that are not installed.

    Attributes:
        needs: The modules that contenders need, by their names up to a comma.
    """

    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run from the command line."""
        options = self._parser().parse_args(arguments)
        if options.contender or options.list:
            return super(PeersBenchmark, self).main(arguments)
        use_peers(options)
        found = dict(self.contenders)
        for way, needs in self.needs.items():
            if missing := missing_modules(peers_python(), needs):
                write(f"left out: {way}, for want of {', '.join(missing)}", to=sys.stderr)
                found = {n: run for n, run in found.items() if n.split(",")[0] != way}
        return super(PeersBenchmark, replace(self, contenders=found)).main(arguments)

    def _parser(self) -> argparse.ArgumentParser:
        parser = super(PeersBenchmark, self)._parser()
        add_peers(parser)
        return parser
