# SPDX-License-Identifier: Apache-2.0
"""Tests of `penstock.integrations.mindspore`; test_mindspore.py runs them.

In a process of their own: MindSpore's threads make every later fork a hazard.
"""

from __future__ import annotations

import gc
import json

import mindspore
import mindspore.dataset
import numpy as np
import pytest
from tests.clients.reused import ROWS, Reused

from penstock import Loader
from penstock.data import IterableDataset
from penstock.errors import ConfigError
from penstock.integrations.mindspore import to_mindspore


class Samples:
    """Row i is full of i."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return {"x": np.full(1024, index, np.float32), "y": index, "name": f"sample {index}"}


def loader(num_workers=0, dataset=None, **options):
    if num_workers and options.get("backend") != "thread":
        options.update(multiprocessing_context="forkserver", persistent_workers=True)
    options = {"batch_size": 8, "shuffle": True, "seed": 3, **options}
    return Loader(Samples() if dataset is None else dataset, num_workers=num_workers, **options)


def ys(batches, column=1):
    return [batch[column].asnumpy().tolist() for batch in batches]


def epochs_of(source, count):
    return [[batch["y"].tolist() for batch in source] for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_columns_hold_what_the_loader_gives_also_when_held(num_workers):
    source = loader(num_workers)
    batches = to_mindspore(source, ["x", "y", "name"])
    assert len(batches) == 6
    held = [batch for _ in range(5) for batch in batches]  # 30 batches, of few that are under way
    plain = loader()
    expected = [batch for _ in range(5) for batch in plain]
    for (x, y, name), batch in zip(held, expected, strict=True):
        assert x.dtype == mindspore.float32
        assert y.dtype == mindspore.int64
        np.testing.assert_array_equal(x.asnumpy(), batch["x"])
        np.testing.assert_array_equal(y.asnumpy(), batch["y"])
        assert name.tolist() == batch["name"]
    del source, batches, held, x, y, name
    gc.collect()


def test_arrays_of_the_dataset_itself_are_copied_because_mindspore_copies_nothing():
    plain = Loader(Reused(), batch_size=8)
    rows = mindspore.dataset.GeneratorDataset(((batch,) for batch in plain), ["x"], shuffle=False)
    firsts = [x.asnumpy()[0, 0] for (x,) in list(rows.create_tuple_iterator(num_epochs=1))]
    assert firsts == [40.0] * 6  # all are the one array
    batches = list(to_mindspore(Loader(Reused(), batch_size=8), "x"))
    assert [x.asnumpy()[0, 0] for (x,) in batches] == [0.0, 8.0, 16.0, 24.0, 32.0, 40.0]


@pytest.mark.parametrize(("num_workers", "num_given"), [(0, 0), (0, 1), (0, 6), (2, 2)])
def test_the_state_counts_what_the_loop_was_given_and_nothing_that_was_fetched(
    num_workers, num_given
):
    expected = epochs_of(loader(), 3)
    source = loader(num_workers)
    batches = to_mindspore(source, ["x", "y"])
    assert ys(batches) == expected[0]
    taken = iter(batches)
    for _ in range(num_given):
        next(taken)
    state = json.loads(json.dumps(batches.state_dict()))
    assert (state["epoch"], state["batches"]) == (1, num_given)
    assert ys(taken) == expected[1][num_given:]
    assert batches.state_dict()["epoch"] == 2
    again = to_mindspore(loader(), ["x", "y"])
    again.load_state_dict(state)
    assert ys(again) == expected[1][num_given:]
    assert ys(again) == expected[2]
    again.set_epoch(0)
    assert ys(again) == expected[0]
    again.load_state_dict(state)
    if num_given == 6:
        with pytest.raises(ConfigError, match="no batches are left"):
            again.dataset()
        return
    rest = again.dataset()
    assert rest.get_dataset_size() == 6 - num_given
    assert ys(rest.create_tuple_iterator(num_epochs=1)) == expected[1][num_given:]
    assert again.dataset().get_dataset_size() == 6
    del source, batches, taken
    gc.collect()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_is_left_early_goes_on_with_the_next_epoch(num_workers):
    source = loader(num_workers)
    batches = to_mindspore(source, ["y"])
    expected = epochs_of(loader(), 2)
    for (y,) in batches:
        assert y.asnumpy().tolist() == expected[0][0]
        break
    assert batches.state_dict()["batches"] == 1
    assert ys(batches, 0) == expected[1]
    del source, batches
    gc.collect()


class Broken(Samples):
    """Sample 17 cannot be read."""

    def __getitem__(self, index):
        if index == 17:
            raise LookupError("a page is missing")
        return super().__getitem__(index)


def test_a_samples_error_comes_out_as_it_is():
    with pytest.raises(LookupError, match="a page is missing") as caught:
        list(to_mindspore(loader(dataset=Broken()), ["x"]))
    assert any("sample 17" in note for note in caught.value.__notes__)


def test_what_does_not_fit_the_columns_is_refused():
    for options, message in (
        (
            {"column_names": ["x", "z"]},
            r"has \['x', 'y', 'name'\], and the columns are \['x', 'z'\]",
        ),
        (
            {"column_names": ["x", "y"], "transform": lambda batch: (batch["x"],)},
            "has 1 members",
        ),
        (
            {"column_names": ["x"], "transform": lambda batch: {"x": list(batch["x"])}},
            "is a list and no array.*pad=",
        ),
        (
            {"column_names": ["x"], "transform": lambda batch: {"x": {1: 2}}},
            "is a dict and no array",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            list(to_mindspore(loader(), **options))


class Boxes:
    """Image i has i boxes."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        boxes = np.full((index, 4), index, np.float32)
        return np.zeros((3, 8, 8), np.uint8), {"boxes": boxes, "labels": np.full(index, index)}


def together(samples):
    return {
        "image": np.stack([image for image, _ in samples]),
        "boxes": [target["boxes"] for _, target in samples],
        "labels": [target["labels"] for _, target in samples],
    }


def test_ragged_boxes_are_padded():
    source = Loader(Boxes(), batch_size=3, collate_fn=together)
    names = ["image", "boxes", "labels"]
    first, last = to_mindspore(source, names, pad={"boxes": 0, "labels": -1})
    assert [column.shape for column in first] == [(3, 3, 8, 8), (3, 2, 4), (3, 2)]
    assert [column.shape for column in last] == [(3, 3, 8, 8), (3, 5, 4), (3, 5)]
    assert first[2].asnumpy().tolist() == [[-1, -1], [1, -1], [2, 2]]
    assert first[1].asnumpy()[:, :, 0].tolist() == [[0, 0], [1, 0], [2, 2]]
    first, last = to_mindspore(source, names, pad={"boxes": 0, "labels": -1}, pad_to=5)
    assert first[1].shape == last[1].shape == (3, 5, 4)
    with pytest.raises(ValueError, match="could not broadcast"):
        list(to_mindspore(source, names, pad={"boxes": 0, "labels": -1}, pad_to=4))
    with pytest.raises(ConfigError, match="'boxes' is a list and no array"):
        list(to_mindspore(source, names))


class Counted(IterableDataset):
    """A stream, without a length."""

    def __iter__(self):
        return iter(range(10))


def test_a_stream_ends_when_it_does():
    batches = to_mindspore(Loader(Counted(), batch_size=4), ["y"])
    for _ in range(2):
        assert ys(batches, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_a_dataset_of_mindspore_goes_through_the_epochs():
    expected = epochs_of(loader(), 2)
    dataset = to_mindspore(loader(), ["x", "y"]).dataset()
    assert dataset.get_dataset_size() == 6
    dataset = dataset.map(lambda y: y + 100, input_columns=["y"])
    rows = dataset.create_dict_iterator(num_epochs=2, output_numpy=True)
    for epoch in expected:
        assert [(row["y"] - 100).tolist() for row in rows] == epoch
