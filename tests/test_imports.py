# SPDX-License-Identifier: Apache-2.0
"""Something is called right after the first import of a module, whoever looks for it before."""

import importlib
import importlib.util
import sys

import pytest

from penstock.imports import when_imported


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "imported_late"
    sys.modules.pop("imported_late", None)
    assert sys.meta_path == finders


def test_to_look_whether_there_is_a_module_does_not_lose_the_call(late_module):
    calls = []
    when_imported(late_module, lambda: calls.append(sys.modules[late_module].value))
    for _ in range(2):
        assert importlib.util.find_spec(late_module).name == late_module
    assert calls == []
    importlib.import_module(late_module)
    assert calls == [1]


def test_the_last_one_to_ask_is_called_last(late_module):
    calls = []
    when_imported(late_module, lambda: calls.append("first"))
    when_imported(late_module, lambda: calls.append("second"))
    importlib.import_module(late_module)
    assert calls == ["first", "second"]
    when_imported(late_module, lambda: calls.append("loaded"))
    assert calls == ["first", "second", "loaded"]
