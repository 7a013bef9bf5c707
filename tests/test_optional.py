# SPDX-License-Identifier: Apache-2.0
"""Something is called right after an import; what is missing is named with its extra."""

import importlib
import importlib.util
import sys

import pytest

from penstock.errors import MissingExtraError
from penstock.optional import missing_extra, when_imported


@pytest.fixture
def late_module(tmp_path, monkeypatch):
    (tmp_path / "imported_late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield "imported_late"
    sys.modules.pop("imported_late", None)
    assert sys.meta_path == finders


def test_calls_come_in_their_order_after_the_import_and_not_when_it_is_looked_for(late_module):
    calls = []
    when_imported(late_module, lambda: calls.append(sys.modules[late_module].value))
    when_imported(late_module, lambda: calls.append("second"))
    for _ in range(2):
        assert importlib.util.find_spec(late_module).name == late_module
    assert calls == []
    importlib.import_module(late_module)
    assert calls == [1, "second"]
    when_imported(late_module, lambda: calls.append("loaded"))
    assert calls == [1, "second", "loaded"]


def test_the_extra_of_a_module_is_named_once():
    error = missing_extra(ModuleNotFoundError(name="rich.text"), "this command", "cli")
    assert isinstance(error, MissingExtraError)
    assert str(error) == (
        "this command needs rich, which is not installed. Install it with: "
        'pip install "penstock-loader[cli]"'
    )
    error = missing_extra(ModuleNotFoundError(name="bson"), "this command", "cli")
    assert str(error).endswith('pip install "penstock-loader[cli,mongo]"')
    unknown = ModuleNotFoundError(name="of_the_user")
    assert missing_extra(unknown, "this command") is unknown
