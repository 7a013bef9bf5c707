# SPDX-License-Identifier: Apache-2.0
"""`StatefulDataLoader` shows a program what torchdata's shows it, which runs beside it."""

from __future__ import annotations

import json

import pytest
from tests.torch.stateful_scenarios import (
    KeptRows,
    KeptStream,
    Rows,
    Stream,
    name_of,
    observe,
    plain,
    scenarios,
)
from torch.utils.data import Sampler
from torch.utils.data.datapipes.iter import IterableWrapper

from penstock.errors import ConfigError, StateError
from penstock.torch import DataLoader, StatefulDataLoader

torchdata = pytest.importorskip("torchdata.stateful_dataloader")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SCENARIOS = list(scenarios())
NUM_PARTS = 20  # of which one is run each time, in some 20 s


def named(moments, dataset, *settings, size=1, order="sequential"):
    for moment in moments:
        for setting in settings:
            yield f"{moment}: {dataset}, workers {setting}, {order}, batches of {size}"


# Where torchdata does otherwise, and why. Each has to differ, and ours to be right: `check`.
AGAIN = "resumed_twice", "state_of_loaded"
DIFFERENCES = {
    "what was given before the first resume is counted twice at the second, and as much left out": {
        *named(AGAIN, "Stream", "0", "2", "2, persistent", "3, prefetch 1", "2, init"),
        *named(AGAIN[1:], "Stream", "2, every 3"),
        *named(AGAIN, "Stream", "0", "2", size=None),
        *named(AGAIN, "Stream", "0", "2", size=3),
        *named(AGAIN, "EmptyShare", "2", "2, persistent"),
    },
    "a worker whose share has ended is asked once more: a dataset whose state is then that of its "
    "next epoch begins that, in the midst of this one": {
        *named(["last"], "KeptStream", "2", "2, persistent", "3, prefetch 1", "2, init"),
        *named(["last"], "KeptStream", "2, every 3", "2, persistent, every 5"),
        *named(["last"], "KeptStream", "2", size=None),
        *named(["middle", "late", "loaded_twice", "last", *AGAIN], "KeptStream", "2", size=3),
        *named(["end"], "KeptStream", "2, persistent, every 5"),
    },
}
# Batches are the same, but the dataset is asked for less: workers of an epoch that is over are not
# started to find that out.
NOT_STARTED = {
    *named(["middle", "late", AGAIN[0]], "KeptRows", "2", "2, every 3", size=3, order="list"),
    *named(["late"], "KeptRows", "2", "2, every 3", size=3, order="drop_last"),
    *named(["late"], "KeptRows", "2", "2, every 3", size=3, order="torch's BatchSampler"),
}


@pytest.fixture(params=["torchdata", "penstock"])
def kind_of_loader(request):
    return {"torchdata": torchdata.StatefulDataLoader, "penstock": StatefulDataLoader}[
        request.param
    ]


def check(scenario, folder):
    theirs = observe(torchdata.StatefulDataLoader, scenario, folder)
    ours = observe(StatefulDataLoader, scenario, folder)
    if name_of(scenario) in NOT_STARTED:
        assert theirs != ours, f"{name_of(scenario)}: torchdata starts no workers either"
        theirs, ours = (
            [one for one in seen if not isinstance(one, dict)] for seen in (theirs, ours)
        )
    reasons = [why for why, names in DIFFERENCES.items() if name_of(scenario) in names]
    if not reasons:
        assert theirs == ours, name_of(scenario)
        return
    assert theirs != ours, f"{name_of(scenario)}: torchdata does the same now, but {reasons[0]}"
    moment, dataset, *_ = scenario
    whole, *_ = observe(StatefulDataLoader, ("whole", *scenario[1:]), folder)
    if moment == "last":  # nothing, then an epoch
        assert ours[0] == []
        assert len(ours[1]) == len(whole)
    elif moment == "end":  # the second epoch, as the first loader gives it
        assert ours[2] == ours[1]
    elif moment == "resumed_twice":
        assert ours[0] + ours[1] + ours[2] == whole
    else:
        assert ours[0] + ours[1] == whole
        # A KeptStream that was loaded and not iterated yet returns another state.
        if (moment, dataset) != ("state_of_loaded", KeptStream):
            assert ours[2] == ours[1]


def test_each_known_difference_is_a_scenario():
    known = [name for names in DIFFERENCES.values() for name in names]
    assert {*known, *NOT_STARTED} < set(map(name_of, SCENARIOS))
    assert (len(SCENARIOS), len(known), len(NOT_STARTED)) == (
        1846,
        37,
        10,
    )  # as docs/resume.md says


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
    newer = stateful.state_dict()
    newer["_penstock"]["format"] = 2
    with pytest.raises(StateError, match="of format 2, and this release of Penstock reads 1"):
        stateful.load_state_dict(newer)


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
    with pytest.raises(ConfigError, match="takes no seed=3: "):
        StatefulDataLoader([1], seed=3)
    with pytest.raises(ConfigError, match="takes no num_workers='auto': "):
        StatefulDataLoader([1], num_workers="auto")
    with pytest.raises(ConfigError, match=r"snapshot_every_n_steps.*-1"):
        StatefulDataLoader([1], snapshot_every_n_steps=-1)
    loader = StatefulDataLoader(Rows(tmp_path / "calls"), on_error="skip", num_workers=1)
    assert len(list(loader)) == 14


class OwnOrder(Sampler):
    """Is its own iterator, which `iter` begins anew; the iterator keeps its place."""

    def __init__(self, size):
        self.place, self.size = 0, size

    def __len__(self):
        return 12 // abs(self.size)

    def __iter__(self):
        self.place = 0
        return self

    def __next__(self):
        if self.place == 12:
            raise StopIteration
        self.place += self.size
        return self.place - 1 if self.size == 1 else list(range(self.place - self.size, self.place))

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class WithoutIter:
    """An iterator that has `__next__` alone."""

    place = 0
    __next__, size = OwnOrder.__next__, 1


class OfBareIterators(OwnOrder):
    state_dict = None

    def __iter__(self):
        return WithoutIter()


ODD_ORDERS = {
    "batches of its own iterator": lambda: {"sampler": OwnOrder(1), "batch_size": 5},
    "its own iterator": lambda: {"sampler": OwnOrder(1), "batch_size": None},
    "batch sampler": lambda: {"batch_sampler": OwnOrder(3)},
    "iterators without iter": lambda: {"sampler": OfBareIterators(1), "batch_size": 5},
}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", ODD_ORDERS)
def test_an_iterator_of_a_sampler_is_asked_for_the_next_index_alone(name, num_workers):
    def seen(kind):
        loader = kind(range(12), num_workers=num_workers, **ODD_ORDERS[name]())
        batches = iter(loader)
        first = [plain(next(batches)), plain(next(batches))]
        state = loader.state_dict()
        del batches
        loader = kind(range(12), num_workers=num_workers, **ODD_ORDERS[name]())
        loader.load_state_dict(state)
        return first, *([plain(batch) for batch in loader] for _ in range(2))

    assert seen(StatefulDataLoader) == seen(torchdata.StatefulDataLoader)


def test_without_workers_a_sampler_is_asked_for_its_state_with_the_loaders_alone():
    def asked(kind):
        sampler, calls = OwnOrder(1), []
        sampler.state_dict = lambda: calls.append(sampler.place) or {"place": sampler.place}
        loader = kind(range(12), batch_size=5, sampler=sampler)
        for _ in loader:
            loader.state_dict()
        return calls

    assert asked(StatefulDataLoader) == asked(torchdata.StatefulDataLoader)
    assert len(asked(StatefulDataLoader)) == 2 * 3  # as sampler and as its iterator


def test_an_empty_state_changes_nothing_that_was_loaded(kind_of_loader):
    loader = kind_of_loader(range(4))
    batches = iter(loader)
    next(batches)
    loader.load_state_dict(loader.state_dict())
    loader.load_state_dict({})
    assert [batch.item() for batch in loader] == [1, 2, 3]
    next(iter(loader))
    loader.load_state_dict({})
    assert [batch.item() for batch in loader] == [0, 1, 2, 3]


def test_a_state_of_an_object_that_has_none_now_is_refused(tmp_path):
    before = StatefulDataLoader(KeptRows(tmp_path / "calls"))
    after = StatefulDataLoader(Rows(tmp_path / "calls"))
    after.load_state_dict(before.state_dict())
    with pytest.raises(StateError, match=r"Rows has no such method.*Use the class"):
        iter(after)


def test_a_datapipe_is_loaded_without_a_state():
    loader = StatefulDataLoader(IterableWrapper(range(4)), batch_size=2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    with pytest.raises(ConfigError, match=r"is a DataPipe.*which has no state"):
        loader.state_dict()
