# SPDX-License-Identifier: Apache-2.0
"""Bad samples: left out, replaced, counted, named; the same who makes them."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
from collections import Counter

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import FaultPolicy, Loader, sample_rng
from penstock.data import ConcatDataset, IterableDataset, Subset
from penstock.data.labels.known import known_labels
from penstock.errors import ConfigError, TooManyFailures, WorkerDied
from penstock.faults import policy_of
from penstock.sampling import SubsetRandomSampler
from penstock.vision import ImageFolder

WAYS = ["sample", "get_batch", "getitems"]
pytestmark = pytest.mark.filterwarnings("ignore:epoch .* bad samples? (left|replaced):UserWarning")


class Numbers:
    """Sample i is (i, a draw); those in `bad` raise."""

    def __init__(self, length=40, bad=()):
        self.length = length
        self.bad = frozenset(bad)

    def __len__(self):
        return self.length

    def describe(self, index):
        return f"{index}.jpg"

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"cannot read {index}")
        return index, sample_rng().random()


class ByBatch(Numbers):
    def get_batch(self, indices, alloc):
        broken = sorted(self.bad & set(indices.tolist()))
        if broken:
            raise OSError(f"cannot read {broken[0]}")
        numbers = alloc((len(indices),), np.int64)
        numbers[:] = indices
        return [numbers, np.array([sample_rng(k).random() for k in range(len(indices))])]


class ByItems(Numbers):
    def __getitems__(self, indices):
        broken = sorted(self.bad & set(indices))
        if broken:
            raise OSError(f"cannot read {broken[0]}")
        return [(index, sample_rng(k).random()) for k, index in enumerate(indices)]


CLASSES = {"sample": Numbers, "get_batch": ByBatch, "getitems": ByItems}


def rows(loader):
    return [list(zip(batch[0].tolist(), batch[1].tolist(), strict=True)) for batch in loader]


def indices_of(batches):
    return [[index for index, _ in batch] for batch in batches]


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"on_error": "ignore"}, ConfigError),
        ({"max_failures": -1}, ConfigError),
        ({"max_failures": 1.5}, ConfigError),
        ({"max_failures": "few"}, TypeError),
        ({"max_failures": True}, TypeError),
        ({"max_respawns": -1}, ConfigError),
        ({"max_respawns": 1.0}, TypeError),
        ({"retries": -2}, ConfigError),
    ],
)
def test_a_policy_says_which_field_is_out_of_its_range(wrong, error):
    (name, value) = next(iter(wrong.items()))
    with pytest.raises(error, match=rf"{name}.*{re.escape(repr(value))}"):
        FaultPolicy(**wrong)


def test_the_plain_word_raise_replaces_no_worker_and_a_policy_does():
    assert policy_of("raise").max_respawns == 0
    assert FaultPolicy("raise").max_respawns == 3
    assert policy_of("skip") == FaultPolicy("skip")
    with pytest.raises(TypeError, match="FaultPolicy"):
        policy_of(True)
    with pytest.raises(ConfigError, match="ignore"):
        Loader([1], on_error="ignore")


@settings(max_examples=40, deadline=None)
@given(
    bad=st.sets(st.integers(0, 39), max_size=20),
    batch_size=st.integers(1, 9),
    way=st.sampled_from(WAYS),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
)
def test_skipping_leaves_out_the_bad_and_nothing_else(bad, batch_size, way, shuffle, seed):
    options = {"batch_size": batch_size, "shuffle": shuffle, "seed": seed}
    whole = rows(Loader(CLASSES[way](), **options))
    loader = Loader(
        CLASSES[way](bad=bad), **options, on_error=FaultPolicy("skip", max_failures=None)
    )
    left = [[row for row in batch if row[0] not in bad] for batch in whole]
    assert rows(loader) == [batch for batch in left if batch]
    missed = [index for batch in indices_of(whole) for index in batch if index in bad]
    assert [failure.index for failure in loader.failures] == missed
    assert all(failure.replaced_by is None for failure in loader.failures)


@settings(max_examples=40, deadline=None)
@given(
    bad=st.sets(st.integers(0, 39), max_size=20),
    batch_size=st.integers(1, 9),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 5),
)
def test_replacing_keeps_every_good_row_and_every_batch_size(bad, batch_size, way, seed):
    options = {"batch_size": batch_size, "shuffle": True, "seed": seed}
    whole = rows(Loader(CLASSES[way](), **options))
    policy = FaultPolicy("replace", max_failures=None)
    loader = Loader(CLASSES[way](bad=bad), **options, on_error=policy)
    replaced = rows(loader)
    assert list(map(len, replaced)) == list(map(len, whole))
    for batch, expected in zip(replaced, whole, strict=True):
        for row, wanted in zip(batch, expected, strict=True):
            assert row[0] not in bad
            if wanted[0] not in bad:
                assert row == wanted
    assert Counter(f.index for f in loader.failures) >= Counter(bad)
    again = Loader(CLASSES[way](bad=bad), **options, on_error=policy)
    assert rows(again) == replaced


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("way", WAYS)
def test_the_number_of_workers_does_not_show(way, on_error):
    bad = {3, 11, 12, 30}
    seen = []
    for num_workers in (0, 1, 3):
        loader = Loader(
            CLASSES[way](bad=bad),
            batch_size=5,
            shuffle=True,
            num_workers=num_workers,
            on_error=on_error,
        )
        epochs = [rows(loader), rows(loader)]
        noted = [(f.index, f.epoch, f.step, f.replaced_by, str(f)) for f in loader.failures]
        seen.append((epochs, noted))
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0][0] != seen[0][0][1]


def test_a_replacement_is_of_the_same_class_where_labels_are_known():
    class Labelled(Numbers):
        targets = np.arange(40) % 4

    loader = Loader(Labelled(bad={5, 6, 17}), batch_size=8, on_error="replace")
    batches = indices_of(rows(loader))
    for failure in loader.failures:
        assert failure.replaced_by % 4 == failure.index % 4
    assert sum(map(len, batches)) == 40


def test_a_sampler_that_keeps_to_a_part_of_the_data_gets_replacements_of_that_part():
    """A validation sample must never get into training because a training sample is broken."""
    train = list(range(0, 40, 2))
    for sampler in (SubsetRandomSampler(train), train):
        loader = Loader(Numbers(bad={4, 10, 22}), batch_size=5, sampler=sampler, on_error="replace")
        batches = indices_of(rows(loader))
        assert list(map(len, batches)) == [5] * 4
        assert {index for batch in batches for index in batch} == set(train) - {4, 10, 22}
        for failure in loader.failures:
            assert failure.replaced_by in train


def test_a_batch_without_another_sample_cannot_be_filled_up_and_says_so():
    loader = Loader(Numbers(bad={4}), batch_size=1, sampler=[2, 4, 6], on_error="replace")
    with pytest.raises(TooManyFailures, match=r"no other sample.*sample 4.*larger batches"):
        list(loader)


def test_when_nothing_can_be_made_replacing_ends_instead_of_trying_for_ever():
    policy = FaultPolicy("replace", max_failures=None)
    with pytest.raises(TooManyFailures, match="no replacement was found for sample 0"):
        list(Loader(Numbers(bad=range(40)), batch_size=4, on_error=policy))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_failures_end_the_epoch_and_list_the_first_ten(num_workers):
    loader = Loader(
        Numbers(length=100, bad=range(10, 40)),
        batch_size=4,
        num_workers=num_workers,
        on_error=FaultPolicy("skip", max_failures=12),
    )
    seen = []
    with pytest.raises(TooManyFailures) as caught:  # noqa: PT012 - which batch is the last
        for batch in loader:
            seen += batch[0].tolist()
    assert seen == list(range(10))
    message = str(caught.value)
    assert "max_failures=12" in message
    for index in range(10, 20):
        assert f"sample {index} ({index}.jpg): OSError: cannot read {index}" in message
    assert "sample 20" not in message


def test_a_share_is_of_the_samples_asked_for_so_far_and_of_a_hundred_at_first():
    policy = FaultPolicy("skip", max_failures=0.05)
    # 5 of 100, and three standard deviations: 11.7.
    first = Loader(Numbers(length=400, bad=range(11)), batch_size=10, on_error=policy)
    assert sum(map(len, rows(first))) == 389
    first = Loader(Numbers(length=400, bad=range(12)), batch_size=10, on_error=policy)
    with pytest.raises(TooManyFailures, match="12 of the 20 samples"):
        rows(first)
    later = Loader(Numbers(length=400, bad=range(300, 325)), batch_size=10, on_error=policy)
    assert sum(map(len, rows(later))) == 375


def test_a_budget_is_an_epochs_own():
    loader = Loader(
        Numbers(bad=range(3)), batch_size=4, on_error=FaultPolicy("skip", max_failures=3)
    )
    for epoch in range(3):
        assert sum(map(len, rows(loader))) == 37
        assert [f.epoch for f in loader.failures] == [e for e in range(epoch + 1) for _ in range(3)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_sample_that_fails_now_and_then_is_tried_again_and_is_the_same(num_workers, tmp_path):
    class Flaky(Numbers):
        def __getitem__(self, index):
            tries = tmp_path / str(index)
            with tries.open("a") as file:
                file.write("x")
            if index % 7 == 0 and tries.stat().st_size <= 2:
                sample_rng().random()  # what it drew before it failed does not show
                raise TimeoutError("the storage is busy")
            return super().__getitem__(index)

    policy = FaultPolicy("skip", retries=2)
    loader = Loader(Flaky(), batch_size=6, num_workers=num_workers, on_error=policy)
    assert rows(loader) == rows(Loader(Numbers(), batch_size=6))
    assert loader.failures == []


def test_a_name_that_cannot_be_had_does_not_hide_the_error():
    class Nameless(Numbers):
        def describe(self, index):
            raise RuntimeError("no names here")

    with pytest.raises(OSError, match="cannot read 7") as caught:
        list(Loader(Nameless(bad={7}), batch_size=4))
    assert any("sample 7 of" in note for note in caught.value.__notes__)


class Crop:
    def __call__(self, value):
        return self._cut(value)

    def _cut(self, value):
        raise ValueError("empty crop")


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, value):
        for transform in self.transforms:
            value = transform(value)
        return value


def double(value):
    return 2 * value


class Transformed(Numbers):
    def __init__(self, transform):
        super().__init__()
        self.transform = transform

    def __getitem__(self, index):
        return self.transform(index)


@pytest.mark.parametrize("dataset", [Transformed, lambda t: Subset(Transformed(t), range(5))])
def test_the_transform_that_raised_is_named(dataset):
    with pytest.raises(ValueError, match="empty crop") as caught:
        list(Loader(dataset(Compose([double, Crop()]))))
    assert any("in its transform Crop" in note for note in caught.value.__notes__)


class Odd(Numbers):
    def __getitem__(self, index):
        return np.full(4 if index in self.bad else 3, index)


def test_samples_that_fit_each_other_and_not_the_others_are_the_bad_ones():
    policy = FaultPolicy("skip", max_failures=10)
    loader = Loader(Odd(bad=range(5)), batch_size=20, on_error=policy)
    assert [len(batch) for batch in loader] == [15, 20]
    assert [f.index for f in loader.failures] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_a_sample_that_does_not_fit_the_others_is_the_bad_one(on_error, num_workers):
    loader = Loader(Odd(bad={6, 20}), batch_size=5, num_workers=num_workers, on_error=on_error)
    batches = [batch[:, 0].tolist() for batch in loader]
    assert [f.index for f in loader.failures] == [6, 20]
    assert all("shape" in str(f.error) for f in loader.failures)
    if on_error == "skip":
        assert sorted(index for batch in batches for index in batch) == sorted(
            set(range(40)) - {6, 20}
        )
    else:
        assert list(map(len, batches)) == [5] * 8


@pytest.mark.parametrize("cut", [1, 3, 5])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_an_epoch_with_bad_samples_goes_on_where_it_was(on_error, cut):
    bad = {0, 1, 2, 3, 13, 14, 33}

    def make(num_workers):
        policy = FaultPolicy(on_error, max_failures=40)
        return Loader(
            Numbers(bad=bad), batch_size=4, num_workers=num_workers, on_error=policy, seed=3
        )

    whole = rows(make(0))
    loader = make(2)
    batches = iter(loader)
    head = [rows([next(batches)])[0] for _ in range(cut)]
    state = json.loads(json.dumps(loader.state_dict()))
    del batches
    resumed = make(1)
    resumed.load_state_dict(state)
    assert head + rows(resumed) == whole


def test_a_resumed_epoch_has_spent_what_it_spent():
    def make():
        policy = FaultPolicy("skip", max_failures=4)
        return Loader(Numbers(bad={0, 1, 2, 30, 31}), batch_size=4, on_error=policy)

    loader = make()
    batches = iter(loader)
    next(batches)
    resumed = make()
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(TooManyFailures, match="5 of the 32 samples"):
        list(resumed)


class Counting(IterableDataset):
    """0, 1, 2 …; its iterator can go on after the exceptions that it raises."""

    def __init__(self, length=20, bad=()):
        self.length = length
        self.bad = frozenset(bad)

    def __iter__(self):
        return Steps(self)


class Steps:
    def __init__(self, dataset):
        self.dataset = dataset
        self.at = -1

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        if self.at >= self.dataset.length:
            raise StopIteration
        if self.at in self.dataset.bad:
            raise OSError(f"cannot read {self.at}")
        return self.at


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_iterator_that_can_go_on_loses_only_its_bad_samples(num_workers):
    options = {"batch_size": 4, "num_workers": num_workers}
    loader = Loader(Counting(bad={5, 10, 19}), **options, on_error="skip")
    assert [b.tolist() for b in loader] == [
        [0, 1, 2, 3], [4, 6, 7], [8, 9, 11], [12, 13, 14, 15], [16, 17, 18],
    ]  # fmt: skip
    loader = Loader(Counting(bad={5, 10, 19}), **options, on_error="replace")
    assert [b.tolist() for b in loader] == [
        [0, 1, 2, 3], [4, 6, 7, 8], [9, 11, 12, 13], [14, 15, 16, 17], [18],
    ]  # fmt: skip
    assert [f.index for f in loader.failures] == [None] * 3


class Ending:
    """Sample 9 raises what ends any loop."""

    def __len__(self):
        return 32

    def __getitem__(self, index):
        return next(iter([])) if index == 9 else index


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, {"num_workers": 2, "backend": "thread"}]
)
def test_a_sample_that_raises_stop_iteration_is_bad_and_does_not_end_the_epoch(options):
    batches = iter(Loader(Ending(), batch_size=4, **options))
    given = [next(batches).tolist() for _ in range(2)]
    with pytest.raises(
        RuntimeError, match="StopIteration was raised while reading sample 9"
    ) as raised:
        next(batches)
    assert isinstance(raised.value.__cause__, StopIteration)
    assert [*given, *(batch.tolist() for batch in batches)] == [
        list(range(k, k + 4)) for k in (0, 4, 12, 16, 20, 24, 28)
    ]
    loader = Loader(Ending(), batch_size=4, on_error="skip", **options)
    with pytest.warns(UserWarning, match="1 bad sample left out"):
        assert sum(len(batch) for batch in loader) == 31
    assert isinstance(loader.failures[0].error, StopIteration)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_an_iterator_that_raises_for_ever_is_given_up(on_error):
    policy = FaultPolicy(on_error, max_failures=None)
    loader = Loader(Counting(10**4, bad=range(3, 10**4)), batch_size=4, on_error=policy)
    with pytest.raises(OSError, match="cannot read") as caught:
        list(loader)
    assert any("100 times in a row" in note for note in caught.value.__notes__)
    scattered = Counting(340, bad=set(range(340)) - {50, 150, 250})  # 99 in a row
    loader = Loader(scattered, batch_size=4, on_error=policy)
    with pytest.warns(UserWarning, match="337 bad samples"):
        assert [int(i) for batch in loader for i in batch] == [50, 150, 250]


def test_failures_hold_no_frames_and_a_loader_pickles_without_them():
    loader = Loader(Numbers(bad={7}), batch_size=4, on_error="skip")
    list(loader)
    (failure,) = loader.failures
    assert failure.error.__traceback__ is None
    assert "cannot read 7" in failure.traceback
    assert (failure.name, failure.worker_id, failure.step) == ("7.jpg", None, 1)
    again = pickle.loads(pickle.dumps(loader))
    assert again.failures == []
    assert sum(map(len, rows(again))) == 39


class Pair:
    """A user's dataset around another: each sample is made of two of the other's."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index], self.dataset[(index + 1) % len(self)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_file_read_for_another_sample_is_the_one_that_is_named(num_workers, tmp_path):
    for name in "abcd":
        path = tmp_path / "cat" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        cv2.imwrite(str(path), np.zeros((4, 4, 3), np.uint8))
    broken = tmp_path / "cat" / "c.png"
    broken.write_bytes(broken.read_bytes()[:40])
    loader = Loader(Pair(ImageFolder(tmp_path)), on_error="skip", num_workers=num_workers)
    assert len(list(loader)) == 2
    assert [(f.index, f.name) for f in loader.failures] == [(1, str(broken)), (2, str(broken))]


def test_labels_are_found_through_subsets_and_concatenations():
    class Labelled(list):
        labels = np.array([5, 6, 7])

    whole = Labelled("abc")
    assert known_labels(whole).tolist() == [5, 6, 7]
    assert known_labels(Subset(whole, [2, 0])).tolist() == [7, 5]
    assert known_labels(ConcatDataset([whole, Subset(whole, [1])])).tolist() == [5, 6, 7, 6]
    assert known_labels(ConcatDataset([whole, [1, 2]])) is None
    assert known_labels([1, 2]) is None
    whole.labels = np.array([5, 6])  # not one for each
    assert known_labels(whole) is None


def pairs(samples):
    return [(a[0], b[0]) for a, b in zip(samples[::2], samples[1::2], strict=True)]


def test_a_collate_function_that_needs_two_samples_is_no_reason_to_leave_one_out():
    def collate(samples):
        if len(samples) < 2:
            raise AssertionError("no pair")
        if 6 in {index for index, _ in samples}:
            raise ValueError("six does not go with anything")
        return pairs(samples)

    loader = Loader(Numbers(length=12), batch_size=4, collate_fn=collate, on_error="replace")
    batches = list(loader)
    assert [len(batch) for batch in batches] == [2, 2, 2]
    assert batches[0] == [(0, 1), (2, 3)]
    assert batches[1][0] == (4, 5)
    assert [f.index for f in loader.failures] == [6]


def test_a_collate_function_that_changes_samples_is_tried_on_copies():
    def collate(samples):
        indices = [sample.pop("index") for sample in samples]
        if 6 in indices:
            raise ValueError("six")
        return indices

    class Dicts(Numbers):
        def __getitem__(self, index):
            return {"index": index}

    loader = Loader(Dicts(length=12), batch_size=4, collate_fn=collate, on_error="skip")
    assert list(loader) == [[0, 1, 2, 3], [4, 5, 7], [8, 9, 10, 11]]
    assert [f.index for f in loader.failures] == [6]


class Misfits(IterableDataset):
    """Sample 5 does not fit the others."""

    def __iter__(self):
        return iter([np.full(2 if index == 5 else 1, index) for index in range(16)])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_sample_of_a_stream_takes_the_place_of_one_that_does_not_fit(num_workers):
    def make():
        return Loader(Misfits(), batch_size=4, num_workers=num_workers, on_error="replace")

    whole = [batch[:, 0].tolist() for batch in make()]
    assert whole == [[0, 1, 2, 3], [4, 8, 6, 7], [9, 10, 11, 12], [13, 14, 15]]
    loader = make()
    batches = iter(loader)
    head = [next(batches)[:, 0].tolist() for _ in range(2)]
    state = loader.state_dict()
    del batches
    resumed = make()
    with pytest.warns(UserWarning, match="read once more"):
        resumed.load_state_dict(state)
    assert head + [batch[:, 0].tolist() for batch in resumed] == whole


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    reason: str


def test_replacements_that_are_known_to_be_bad_are_not_tried_again():
    loader = Loader(
        Numbers(length=12, bad={0, 1}), batch_size=3, sampler=list(range(12)), on_error="replace"
    )
    assert indices_of(rows(loader))[0] == [2, 2, 2]
    assert len(loader.failures) <= 4


def test_a_bad_sample_counts_once_however_often_it_is_drawn():
    class OneClass(Numbers):
        targets = np.zeros(40, int)

    policy = FaultPolicy("replace", max_failures=30)
    loader = Loader(OneClass(bad=range(30)), batch_size=5, on_error=policy)
    batches = indices_of(rows(loader))
    assert sum(map(len, batches)) == 40
    assert sorted(f.index for f in loader.failures) == list(range(30))
    given = {index for batch in batches for index in batch}
    assert {f.replaced_by for f in loader.failures} <= given


def test_a_replaced_worker_is_told_to_the_log(caplog):
    class Quits(Numbers):
        def __getitem__(self, index):
            if index == 7:
                os._exit(3)
            return super().__getitem__(index)

    policy = FaultPolicy("skip", max_respawns=1)
    with pytest.raises(WorkerDied, match=r"Before it, 1 died .* max_respawns=1"):
        list(Loader(Quits(), batch_size=4, num_workers=1, on_error=policy))
    (record,) = caplog.records
    assert "code 3 while reading sample 7 (7.jpg)" in record.getMessage()
    assert record.name == "penstock"
