# SPDX-License-Identifier: Apache-2.0
"""Runs the program that is named, where torchvision is built for another torch.

mmengine's list of versions imports torchvision, whether or not anything needs it.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.clients.torchvision_operators import declare_missing

if __name__ == "__main__":
    declare_missing()
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
