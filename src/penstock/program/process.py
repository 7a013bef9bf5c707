# SPDX-License-Identifier: Apache-2.0
"""Setup of a process under `penstock run`, done once the process has imported torch."""

from __future__ import annotations

import atexit
import os

from penstock.insight import monitor
from penstock.program.book import Book
from penstock.program.options import Options

__all__ = ["begin"]


def begin() -> None:
    """Replace torch's `DataLoader`, or with `--engine torch` measure it."""
    options = Options.of_environment()
    book = Book(options)
    monitor.watchers.append(book.add)
    if os.getpid() == options.pid:
        atexit.register(book.say_what_is_missing)
    if options.engine == "penstock":
        from penstock.torch.replacement import install

        install(**options.settings)
    else:
        from penstock.program.stock import watch

        watch(book.add)
