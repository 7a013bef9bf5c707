# SPDX-License-Identifier: Apache-2.0
"""The Tab key, in the shells themselves where they are installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig

import pytest

pytest.importorskip("rich")

SCRIPTS = sysconfig.get_path("scripts")


def run(command, **environ):
    """Return what a command wrote to stdout, `penstock` being on the path."""
    path = f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, **environ}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=True
    )
    assert done.stderr == ""
    return done.stdout


def script_for(shell):
    return run([f"{SCRIPTS}/penstock"], _PENSTOCK_COMPLETE=f"source_{shell}")


def shell_or_skip(name):
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here")
    return found


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("penstock st", {"state", "stats"}),
        ("penstock p", {"pack"}),
        ("penstock doctor --j", {"--json"}),
        ("penstock check --im", {"--image-field", "--image-column"}),
        ("penstock no-such", set()),
    ],
)
def test_bash_completes_commands_and_options(tmp_path, line, completed):
    bash = shell_or_skip("bash")
    (tmp_path / "completion.sh").write_text(script_for("bash"))
    # What bash does when Tab is pressed: it sets these, and calls the function that was named.
    program = (
        f"source {tmp_path}/completion.sh\n"
        f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))\n"
        "_penstock_completion penstock\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    assert set(run([bash, "--norc", "-c", program]).split()) == completed


def test_the_script_for_the_shell_in_use_is_shown():
    bash = shell_or_skip("bash")
    shown = run([bash, "--norc", "-c", "penstock --show-completion; true"])
    assert shown.strip() == script_for("bash").strip()
