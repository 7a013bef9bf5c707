# SPDX-License-Identifier: Apache-2.0
"""docs/reference/names.md lists every promised name once, with a reason."""

import re

from tests.docs.pages import ROOT
from tests.docs.promised import promised_names


def listed():
    """Return module -> the names that the page lists for it."""
    text = (ROOT / "docs/reference/names.md").read_text(encoding="utf-8")
    names = {}
    for section in text.split("\n## ")[1:]:
        package, rows = section.split("\n", 1)
        for cell, reason in re.findall(r"^\| (`.*?) \| (.+) \|$", rows, re.MULTILINE):
            assert reason
            for name in re.findall(r"`([\w.]+)`", cell):
                module, _, name = f"{package}.{name}".rpartition(".")
                names.setdefault(module, []).append(name)
    return names


def test_the_page_lists_every_promised_name_once():
    torchs = "penstock.torch"  # its other names are torch's own
    promised = {module: sorted(names) for module, names in promised_names().items()}
    page = {module: sorted(names) for module, names in listed().items()}
    assert set(page.pop(torchs)) < set(promised.pop(torchs))
    assert page == promised
