# SPDX-License-Identifier: Apache-2.0
"""`penstock.torch.install`: the drop-in under torch's own names."""

from __future__ import annotations

import sys
import types

import numpy as np
import pytest
import torch

from penstock import Auto
from penstock.errors import ConfigError
from penstock.torch import DataLoader, install, uninstall

STOCK = torch.utils.data.DataLoader


@pytest.fixture(autouse=True)
def put_back(monkeypatch):
    # What other tests have imported is not this one's concern, as torchdata.
    roots = ("torch", "penstock")
    kept = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in roots}
    monkeypatch.setattr("penstock.torch.replacement.sys", types.SimpleNamespace(modules=kept))
    yield
    uninstall()


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(4))


def test_torchs_names_are_ours_until_it_is_undone():
    install()
    assert torch.utils.data.DataLoader is DataLoader
    assert torch.utils.data.dataloader.DataLoader is DataLoader
    uninstall()
    assert torch.utils.data.DataLoader is STOCK
    assert torch.utils.data.dataloader.DataLoader is STOCK
    uninstall()
    assert torch.utils.data.DataLoader is STOCK


def test_a_subclass_made_under_torchs_name_runs_on_our_engine():
    install()

    class Repeated(torch.utils.data.DataLoader):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)

    loader = Repeated(range(5), batch_size=2)
    assert isinstance(loader, STOCK)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]
    assert loader.stats().run.batches == 3


def test_settings_are_for_loaders_that_do_not_say_otherwise():
    install(num_workers=2, seed=7, on_error="skip")
    plain = DataLoader(range(4))
    assert (plain.num_workers, plain.seed, plain.on_error) == (2, 7, "skip")
    own = DataLoader(range(4), num_workers=0, seed=None, on_error="raise")
    assert (own.num_workers, own.seed, own.on_error) == (0, None, "raise")
    by_position = DataLoader(range(4), 2, False, None, None, 1)
    assert by_position.num_workers == 1


@pytest.mark.parametrize(
    ("settings", "arguments", "added"),
    [
        ({"seed": 1}, {"generator": torch.Generator()}, {}),
        ({"backend": "thread"}, {"multiprocessing_context": "fork", "num_workers": 1}, {}),
        ({"num_workers": "auto"}, {"dataset": Stream()}, {}),
        ({"num_workers": 2}, {"dataset": Stream()}, {"num_workers": 2}),
        ({"num_workers": np.int64(2)}, {"dataset": Stream()}, {"num_workers": 2}),
        ({"num_workers": Auto(cpu=1)}, {"dataset": Stream()}, {}),
        ({"num_workers": "auto", "backend": "thread"}, {"backend": "ray"}, {}),
    ],
)
def test_a_setting_that_contradicts_what_the_program_gives_is_left_out(settings, arguments, added):
    if arguments.get("backend") == "ray":
        pytest.importorskip("ray")
    install(**settings)
    loader = DataLoader(**{"dataset": range(4), **arguments})
    taken = {name: value for name, value in settings.items() if getattr(loader, name) == value}
    assert taken == added


def test_a_second_call_changes_the_settings():
    install(seed=7)
    install(seed=8)
    assert DataLoader(range(4)).seed == 8
    uninstall()
    assert DataLoader(range(4)).seed is None


def test_the_constructors_own_error_is_raised():
    install(seed=7)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shuffel'"):
        DataLoader(range(4), shuffel=True)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"num_workers": "many"}, TypeError),
        ({"num_workers": -1}, ConfigError),
        ({"backend": "gpu"}, ConfigError),
        ({"num_workers": "auto", "backend": "ray"}, ConfigError),
        ({"seed": -1}, ValueError),
        ({"on_error": "ignore"}, ConfigError),
    ],
)
def test_a_wrong_setting_is_refused_at_once(settings, error):
    with pytest.raises(error):
        install(**settings)
    assert torch.utils.data.DataLoader is STOCK


def test_modules_that_imported_torchs_class_before_are_named(monkeypatch):
    module = types.ModuleType("their_training")
    module.Loader = STOCK
    known = {"their_training": module}
    monkeypatch.setattr("penstock.torch.replacement.sys", types.SimpleNamespace(modules=known))
    with pytest.warns(UserWarning, match="^their_training imported torch's DataLoader before"):
        install()
