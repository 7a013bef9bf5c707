# SPDX-License-Identifier: Apache-2.0
"""Every error says where it is explained: once, below its message, wherever it has been."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback

import pytest

import penstock.errors
from penstock import Loader
from penstock.engine.task import copy_of_error, report_exception, revive_exception
from penstock.errors import CollateError, ConfigError, MissingExtraError, PenstockError, StoreError

CLASSES = [getattr(penstock.errors, name) for name in penstock.errors.__all__]


def made(kind):
    if kind is CollateError:
        error = CollateError("{first} and {other} differ", (0, 1))
        error.name_samples([7, 8])
        return error
    return kind("what happened")


def note_on(name):
    return f"Help: `penstock explain {name}`, or docs/troubleshooting.md#{name.lower()}"


class OfTheUser(StoreError):
    pass


class OfSystem(StoreError, OSError):
    pass


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize(
    "again",
    [
        lambda error: error,
        lambda error: pickle.loads(pickle.dumps(error)),
        copy.copy,
        copy.deepcopy,
        copy_of_error,
        lambda error: revive_exception(report_exception(error)),
    ],
    ids=["as it is", "pickled", "copied", "deep-copied", "raised anew", "sent by a worker"],
)
def test_an_error_has_its_note_on_help_once_whatever_becomes_of_it(kind, again):
    error = made(kind)
    assert error.__notes__ == [note_on(kind.__name__)]
    error.add_note("while reading sample 7")
    found = again(again(error))
    assert type(found) is kind
    assert str(found) == str(error)
    assert "Help" not in str(found)
    assert [note for note in found.__notes__ if note.startswith("Help")] == error.__notes__[-1:]
    assert found.__notes__[0] == "while reading sample 7"


def test_the_note_on_help_comes_after_those_that_say_where():
    error = ConfigError("wrong")
    for number in range(3):
        error.add_note(f"place {number}")
    assert error.__notes__ == ["place 0", "place 1", "place 2", note_on("ConfigError")]
    text = "".join(traceback.format_exception_only(error))
    assert text == "\n".join(["penstock.errors.ConfigError: wrong", *error.__notes__, ""])


def test_notes_that_were_replaced_do_not_hinder_another():
    error = ConfigError("wrong")
    error.__notes__ = []
    error.add_note("one")
    error.add_note("two")
    assert error.__notes__ == ["one", "two"]


@pytest.mark.parametrize("make", [lambda: OfTheUser(3), lambda: OfSystem(2, "no such file")])
def test_a_class_of_the_user_is_explained_as_the_nearest_of_ours(make):
    for error in (make(), pickle.loads(pickle.dumps(make())), copy.copy(make())):
        assert error.args == make().args
        assert error.__notes__ == [note_on("StoreError")]


def test_a_cause_keeps_its_own_note():
    def fail():
        raise MissingExtraError("effect", name="cv2") from StoreError("cause")

    with pytest.raises(MissingExtraError) as caught:
        fail()
    assert caught.value.name == "cv2"
    assert caught.value.__notes__ == [note_on("MissingExtraError")]
    assert caught.value.__cause__.__notes__ == [note_on("StoreError")]


class Odd:
    """Samples of which one raises an error of ours, or has another length."""

    def __init__(self, kind=CollateError):
        self.kind = kind

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index == 5 and self.kind is not CollateError:
            raise self.kind(3)
        return [0] * (2 if index == 5 else 1)


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", [CollateError, OfTheUser])
def test_an_error_that_a_worker_raised_has_its_note_once_and_last(kind, num_workers, backend):
    loader = Loader(Odd(kind), batch_size=4, num_workers=num_workers, backend=backend)
    with pytest.raises(kind) as caught:
        list(loader)
    notes = caught.value.__notes__
    assert notes[-1] == note_on(caught.value.help_topic)
    assert sum(note.startswith("Help") for note in notes) == 1
    assert any("step 1" in note for note in notes)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_failure_that_was_logged_has_the_note_and_does_not_print_it(num_workers):
    loader = Loader(Odd(StoreError), batch_size=4, num_workers=num_workers, on_error="skip")
    with pytest.warns(UserWarning, match="1 bad sample left out") as warned:
        list(loader)
    (failure,) = loader.failures
    assert failure.error.__notes__[-1] == note_on("StoreError")
    assert "Help" not in str(failure)
    assert "Help" not in str(warned[0].message)


def test_the_tree_that_is_drawn_is_that_of_the_classes():
    drawn = re.findall(r"── (\w+)", inspect.getdoc(penstock.errors))
    assert sorted([*drawn, "PenstockError"]) == sorted(penstock.errors.__all__)
    assert all(issubclass(kind, PenstockError) for kind in CLASSES)
