# SPDX-License-Identifier: Apache-2.0
"""`StatefulDataLoader` shows a program what torchdata's shows it, which runs beside it."""

from __future__ import annotations

import json

import pytest
from tests.torch.stateful_scenarios import KeptRows, Rows, Stream, name_of, observe, scenarios

from penstock.errors import ConfigError, StateError
from penstock.torch import DataLoader, StatefulDataLoader

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SCENARIOS = list(scenarios())
NUM_PARTS = 20  # of which one is run each time, in some 20 s

# Where torchdata does otherwise: start of a scenario's name -> why. What is compared there is that
# ours gives each sample of the rest once.
DIFFERENCES = {
    ("resumed_twice: Stream", "resumed_twice: EmptyShare"): "torchdata counts twice what was given "
    "of a dataset without a state before its first resume, and leaves out as much",
    ("state_of_loaded: Stream,", "state_of_loaded: EmptyShare"): "as above",
    tuple(f"{m}: KeptStream" for m in (
        "middle", "late", "last", "end", "loaded_twice", "resumed_twice", "state_of_loaded",
        "iterator_alive", "stopped",
    )): "torchdata asks a worker whose share has ended once more: a dataset whose state is then "
    "that of its next epoch begins that, in the midst of this one",
}  # fmt: skip


def without_calls(seen):
    """A worker of an epoch that has ended is not started, so its dataset is asked for less."""
    return [one for one in seen if not isinstance(one, dict)]


def check(scenario, folder):
    theirs = observe(torchdata.StatefulDataLoader, scenario, folder)
    ours = observe(StatefulDataLoader, scenario, folder)
    if theirs == ours:
        return
    is_known = name_of(scenario).startswith(tuple(name for names in DIFFERENCES for name in names))
    assert is_known or without_calls(theirs) == without_calls(ours), name_of(scenario)


@pytest.mark.parametrize("scenario", SCENARIOS[::NUM_PARTS], ids=name_of)
def test_a_scenario_shows_what_it_shows_with_torchdata(scenario, tmp_path):
    check(scenario, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(1, NUM_PARTS))
def test_all_scenarios_show_what_they_show_with_torchdata(part, tmp_path):
    for number, scenario in enumerate(SCENARIOS[part::NUM_PARTS]):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(scenario, folder)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_of_torchdata_is_refused_with_what_to_do(num_workers):
    theirs = torchdata.StatefulDataLoader([1, 2, 3], num_workers=num_workers)
    loader = StatefulDataLoader([1, 2, 3], num_workers=num_workers)
    with pytest.raises(StateError, match=r"by torchdata.*to the end of the epoch"):
        loader.load_state_dict(theirs.state_dict())


def test_each_loader_says_whose_state_it_got():
    stateful, plain = StatefulDataLoader([1, 2]), DataLoader([1, 2])
    with pytest.raises(StateError, match=r"a state of penstock\.torch\.DataLoader"):
        stateful.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match="a state of a StatefulDataLoader"):
        plain.load_state_dict(stateful.state_dict())
    with pytest.raises(StateError, match="not a state of a StatefulDataLoader"):
        stateful.load_state_dict({"epoch": 3})


@pytest.mark.parametrize("numbers", [(0, 2), (2, 0), (2, 3)])
@pytest.mark.parametrize("kind", [Stream, KeptRows])
def test_another_number_of_workers_is_refused_where_they_have_states(kind, numbers, tmp_path):
    before, after = (StatefulDataLoader(kind(tmp_path / "calls"), num_workers=n) for n in numbers)
    after.load_state_dict(before.state_dict())
    for error in (ValueError, AssertionError):  # the latter is torchdata's
        with pytest.raises(error, match=f"in {numbers[0]} workers.*num_workers={numbers[1]}"):
            iter(after)


@pytest.mark.parametrize("numbers", [(0, 2), (2, 0), (2, 3)])
def test_a_map_style_dataset_without_a_state_goes_on_with_other_workers(numbers):
    before, after = (StatefulDataLoader(range(6), num_workers=n) for n in numbers)
    for batch in before:
        if batch == 1:
            break
    after.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [batch.item() for batch in after] == [2, 3, 4, 5]


def test_what_torchdata_has_not_is_refused_or_goes_with_it(tmp_path):
    with pytest.raises(ConfigError, match="takes no seed"):
        StatefulDataLoader([1], seed=3)
    with pytest.raises(ConfigError, match="a number of workers"):
        StatefulDataLoader([1], num_workers="auto")
    loader = StatefulDataLoader(Rows(tmp_path / "calls"), on_error="skip", num_workers=1)
    assert len(list(loader)) == 14
