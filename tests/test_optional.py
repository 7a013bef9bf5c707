# SPDX-License-Identifier: Apache-2.0
"""Something is called right after an import; what is missing is installed from the right place."""

import importlib
import importlib.util
import json
import sys

import pytest

from penstock.errors import MissingExtraError
from penstock.optional import install_command, missing_extra, when_imported


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


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (
            {"dir_info": {"editable": True}, "url": "file:///src/my%20clone"},
            'pip install -e "/src/my clone[cli,vision]"',
        ),
        (
            {"dir_info": {}, "url": "file:///clone"},
            'pip install "penstock[cli,vision] @ file:///clone"',
        ),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "abc"}, "url": "https://localhost/penstock"},
            'pip install "penstock[cli,vision] @ git+https://localhost/penstock@abc"',
        ),
        (None, 'pip install "penstock[cli,vision]"'),  # from an index
    ],
)
def test_an_extra_is_installed_from_where_penstock_came(tmp_path, monkeypatch, origin, command):
    info = tmp_path / "penstock-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: penstock\nVersion: 0.1.0\n")
    if origin is not None:
        (info / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("cli", "vision") == command


def test_the_extra_of_a_module_is_named_once():
    error = missing_extra(ModuleNotFoundError(name="rich.text"), "this command", "cli")
    assert isinstance(error, MissingExtraError)
    assert str(error) == (
        "this command needs rich, which is not installed. Install it with: "
        + install_command("cli")
    )
    error = missing_extra(ModuleNotFoundError(name="bson"), "this command", "cli")
    assert str(error).endswith(install_command("cli", "mongo"))
    unknown = ModuleNotFoundError(name="of_the_user")
    assert missing_extra(unknown, "this command") is unknown
