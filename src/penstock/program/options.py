# SPDX-License-Identifier: Apache-2.0
"""Options of `penstock run`, passed to the program's processes in an environment variable."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

_VARIABLE: Final = "PENSTOCK_RUN"
_STARTUP: Final = Path(__file__).parent / "startup"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of `penstock run`."""

    program: str = ""  # script or module, as it was named
    engine: str = "penstock"  # or "torch": torch's own loader, which is only measured
    # Arguments of loaders that the program makes without them, by name.
    settings: dict[str, Any] = field(default_factory=dict)
    report: str | None = None
    trace: str | None = None
    save: str | None = None  # for the figures that `penstock report` compares
    quiet: bool = False
    started: float = field(default_factory=time.time)
    pid: int = field(default_factory=os.getpid)  # of the program's first process

    @classmethod
    def of_environment(cls) -> Options:
        """Return the options of the `penstock run` that started this process."""
        return cls(**json.loads(os.environ[_VARIABLE]))

    def start(self, words: Sequence[str]) -> None:
        """Replace this process by `python` followed by `words`."""
        if sys.flags.ignore_environment or sys.flags.no_site:
            raise ConfigError(
                "`penstock run` needs PYTHONPATH and sitecustomize, which Python ignores under "
                "-E, -I and -S: leave out these options."
            )
        sys.stdout.flush()
        sys.stderr.flush()
        paths = [str(_STARTUP), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), _VARIABLE: json.dumps(asdict(self))}
        command = [sys.executable, *_interpreter_options(), *words]
        os.execve(sys.executable, command, {**os.environ, **own})


def _interpreter_options() -> list[str]:
    """Return the options between `python` and `-m penstock`, or the script `penstock`."""
    head = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]
    if sys.modules["__main__"].__spec__ is None:
        return head[:-1]
    joined = head[-1].startswith("-") and "m" in head[-1]  # -mpenstock
    flags = head[-1].partition("m")[0] if joined else head[-2].removesuffix("m")
    return [*head[: -1 if joined else -2], *([flags] if flags != "-" else [])]
