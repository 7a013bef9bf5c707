# SPDX-License-Identifier: Apache-2.0
"""`python -m penstock`: the command line, where the script is not on the path."""

from __future__ import annotations

import sys

from penstock.cli import main

if __name__ == "__main__":  # not in a spawned worker, which imports this module again
    sys.exit(main())
