# SPDX-License-Identifier: Apache-2.0
"""The site that is tested: what `make docs` has just built, or one that is built for the tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.docs.pages import ROOT


def site_folder(tmp_path_factory):
    """Return the folder of the site, of this source."""
    if "PENSTOCK_SITE" in os.environ:
        return Path(os.environ["PENSTOCK_SITE"]).resolve()
    folder = tmp_path_factory.mktemp("built") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, f"the site cannot be built:\n{done.stdout}{done.stderr}"
    return folder
