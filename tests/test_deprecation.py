# SPDX-License-Identifier: Apache-2.0
"""What docs/versioning.md says of deprecated names: they work as before, and warn at the line."""

import importlib

import pytest

MESSAGE = "{} is deprecated, use {}; it is removed in penstock 0.3"


@pytest.mark.parametrize(("package", "old", "new"), [("penstock.data", "Empty", "Allocator")])
def test_an_old_name_is_the_new_one_and_warns(package, old, new):
    module = importlib.import_module(package)
    for _ in range(2):  # each time, though Python shows one of a line alone
        with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
            assert getattr(module, old) is getattr(module, new)
        assert [(str(w.message), w.filename) for w in caught] == [
            (MESSAGE.format(f"{package}.{old}", f"{package}.{new}"), __file__)
        ]
    assert old not in module.__all__
    assert new in module.__all__


def test_an_import_warns_at_its_line():
    with pytest.warns(DeprecationWarning, match="Empty is deprecated") as caught:
        from penstock.data import Empty  # noqa: F401
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize("package", ["penstock.data"])
def test_what_there_is_not_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        importlib.import_module(package).nothing  # noqa: B018
