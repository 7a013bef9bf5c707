# SPDX-License-Identifier: Apache-2.0
"""docs/versioning.md says what is so: formats, refusals, what is tested, what is deprecated."""

from __future__ import annotations

import importlib
import importlib.util
import re
import tomllib

import numpy as np
import pytest
from tests.docs.pages import ROOT
from tests.docs.promised import promised_modules, promised_names

from penstock import Loader
from penstock.errors import StateError

TEXT = (ROOT / "docs/versioning.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("penstock.epochs", "_FORMAT"),
        ("penstock.sampling.samplers", "_FORMAT"),
        ("penstock.insight.recording", "_VERSION"),
        ("penstock.stores.records", "_VERSION"),
        ("penstock.stores.mongo.collection", "LAYOUT_VERSION"),
        ("penstock.text.layouts", "VERSION"),
    ],
)
def test_every_format_has_the_number_1(module, name):
    pytest.importorskip("msgspec")
    assert getattr(importlib.import_module(module), name) == 1


def test_a_state_of_a_newer_release_is_refused_as_the_page_says():
    loader = Loader(np.arange(4), seed=0)
    state = {**loader.state_dict(), "format": 99}
    with pytest.raises(StateError) as raised:
        loader.load_state_dict(state)
    (quoted,) = re.findall(r"`StateError: (.*?)`", TEXT)
    assert str(raised.value).startswith(quoted)


def test_the_modules_that_promise_names_have_a_list_of_them():
    modules = promised_modules()
    assert len(modules) == len(set(modules)) == 23
    for name in modules:
        assert importlib.util.find_spec(name)
        assert promised_names()[name]


def test_the_versions_of_python_are_those_of_the_metadata():
    classifiers = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if " 3." in c]
    floor = PROJECT["requires-python"].removeprefix(">=")
    assert f"| Python | {floor} and newer | {', '.join(classifiers)} |" in TEXT
