# SPDX-License-Identifier: Apache-2.0
"""The drop-in is torch's class by all that can be seen of it, and says clearly what is wrong."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch.utils.data as theirs
from tests.support.processes import but_of_forks
from tests.torch.datasets_for_tests import Rows, SizedStream, Stream

import penstock.torch as ours
from penstock import Loader, sampling
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

LEFT_OUT = {  # DataPipes and what belongs to them, deprecated in torch; and one private name
    "DFIterDataPipe",
    "DataChunk",
    "IterDataPipe",
    "MapDataPipe",
    "_DatasetKind",
    "argument_validation",
    "functional_datapipe",
    "guaranteed_datapipes_determinism",
    "non_deterministic",
    "runtime_validation",
    "runtime_validation_disabled",
}
NAMES = sorted(set(theirs.__all__) - LEFT_OUT)
# Parameters in torch 2.6 to 2.15. The engine draws these orders and reads these datasets by itself:
# a newer torch's parameter would be passed over.
KNOWN = {
    "Dataset": "args kwargs", "IterableDataset": "args kwargs", "StackDataset": "args kwargs",
    "ChainDataset": "datasets", "ConcatDataset": "datasets", "TensorDataset": "tensors",
    "Subset": "dataset indices", "random_split": "dataset lengths generator",
    "default_collate": "batch", "default_convert": "data", "get_worker_info": "",
    "Sampler": "args kwargs data_source", "BatchSampler": "sampler batch_size drop_last",
    "RandomSampler": "data_source replacement num_samples generator",
    "SequentialSampler": "data_source", "SubsetRandomSampler": "indices generator",
    "WeightedRandomSampler": "weights num_samples replacement generator",
    "DistributedSampler": "dataset num_replicas rank shuffle seed drop_last",
}  # fmt: skip
BEYOND = set(inspect.signature(ours.DataLoader).parameters) - set(
    inspect.signature(theirs.DataLoader).parameters
)


# What it looks like


def test_a_loader_is_an_instance_of_torchs_class() -> None:
    assert isinstance(ours.DataLoader(Rows()), theirs.DataLoader)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_of_torch_is_there(name: str) -> None:
    assert name in ours.__all__
    assert hasattr(ours, name)


def parameters_of(thing: Any) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(thing).parameters.values()]


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"DataLoader"}))
def test_the_engine_knows_all_parameters_of_what_it_takes_from_the_installed_torch(name: str):
    theirs_ = getattr(theirs, name)
    assert getattr(ours, name) is theirs_
    taken = inspect.signature(theirs_.__init__ if inspect.isclass(theirs_) else theirs_).parameters
    assert taken.keys() - {"self"} <= set(KNOWN[name].split())


def test_the_loader_takes_torchs_parameters_and_beyond_them_only_keywords() -> None:
    expected = parameters_of(theirs.DataLoader.__init__)
    got = parameters_of(ours.DataLoader.__init__)
    assert [p for p in got if p in expected] == expected
    assert all(kind is inspect.Parameter.KEYWORD_ONLY for _, kind, _ in got[len(expected) :])


def collate(samples: list[Any]) -> list[Any]:
    return samples


def init(worker_id: int) -> None:
    del worker_id


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 3, "drop_last": True, "shuffle": True},
        {"batch_size": None, "collate_fn": collate},
        {"sampler": [1, 2]},
        {"batch_sampler": [[1, 2], [3]]},
        {"num_workers": 2},
        {
            "num_workers": 1,
            "timeout": 7.5,
            "worker_init_fn": init,
            "multiprocessing_context": "spawn",
            "prefetch_factor": 5,
            "persistent_workers": True,
            "in_order": False,
        },
        {"pin_memory": True, "pin_memory_device": "cuda", "generator": torch.Generator()},
    ],
    ids=lambda o: ", ".join(o) or "defaults",
)
def test_every_argument_is_stored_under_its_name_as_torch_stores_it(options: dict) -> None:
    dataset = Rows()
    expected, got = theirs.DataLoader(dataset, **options), ours.DataLoader(dataset, **options)
    assert vars(got).keys() >= {k for k in vars(expected) if not k.startswith("_")}
    for name in inspect.signature(theirs.DataLoader.__init__).parameters:
        if name in ("self", "shuffle"):
            continue
        a, b = getattr(expected, name), getattr(got, name)
        if name in ("sampler", "batch_sampler") and name not in options:
            assert type(b).__name__ == type(a).__name__
        else:
            assert a is b or a == b, name


def test_every_argument_of_ours_is_an_attribute_by_which_a_loader_is_made_anew() -> None:
    """As Lightning makes it: of what `vars` has by the names of the parameters."""
    options: dict[str, Any] = {
        "seed": 7,
        "on_error": "skip",
        "backend": "thread",
        "num_workers": "auto",
        "progress": False,
        "device": "cpu",
        "device_transform": float,
    }
    loader = ours.DataLoader(Rows(), **options)
    assert vars(loader).keys() >= BEYOND
    assert {name: getattr(loader, name) for name in options} == {
        **options,
        "device": torch.device("cpu"),
    }
    assert loader.prefetch_factor is None  # the tuner's to choose, in the next loader as well


def test_a_subclass_may_have_attributes_and_properties_of_these_names() -> None:
    class Mine(ours.DataLoader[Any]):
        device = "mine"  # type: ignore[assignment]

        def __init__(self) -> None:
            self.seed = 3
            self._rank = 1
            super().__init__(Rows(), seed=7)

        @property
        def backend(self) -> str:  # type: ignore[override]
            return "nccl"

    loader = Mine()
    assert (loader.device, loader.seed, loader.backend) == ("mine", 3, "nccl")
    assert loader.state_dict()["seed"] == 7


@pytest.mark.parametrize("name", sorted(BEYOND))
def test_our_arguments_are_frozen_too_but_not_a_subclass_s_attributes(name: str) -> None:
    class Mine(ours.DataLoader[Any]):
        pass

    loader = ours.DataLoader(Rows(), seed=7)
    before = getattr(loader, name)
    with pytest.raises(ConfigError, match=f"{name} attribute should not be set after DataLoader"):
        setattr(loader, name, 8)
    assert getattr(loader, name) is before
    mine = Mine(Rows(), seed=7)
    setattr(mine, name, 8)
    assert getattr(mine, name) == 8
    assert mine.state_dict()["seed"] == 7


def test_a_subclass_that_passes_keywords_on_names_ours_in_its_signature() -> None:
    class Passing(ours.DataLoader[Any]):
        def __init__(self, *args: Any, seed: int = 5, **kwargs: Any) -> None:
            super().__init__(*args, seed=seed, **kwargs)

    class Fixed(Passing):
        def __init__(self, dataset: Any, size: int, *, on_error: str = "skip") -> None:
            super().__init__(dataset, batch_size=size, on_error=on_error)

    class FromFixed(Fixed):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)

    class Inheriting(Passing):
        pass

    def names(cls: type) -> list[str]:
        return list(inspect.signature(cls).parameters)

    assert set(names(Passing)) == BEYOND | {"args", "kwargs"}
    assert names(Passing)[:2] == ["args", "seed"]
    assert inspect.signature(Passing).parameters["seed"].default == 5
    assert inspect.signature(Passing).parameters["on_error"].default == "raise"
    assert names(Inheriting) == names(Passing)
    assert names(Fixed) == ["dataset", "size", "on_error"]
    assert names(FromFixed) == ["args", "on_error", "kwargs"]  # all that Fixed would take
    loader = FromFixed(Rows(), 4)
    assert (loader.batch_size, loader.seed, loader.on_error) == (4, 5, "skip")


def test_the_sampler_of_a_batch_sampler_is_the_loader_s_where_it_is_penstock_s() -> None:
    data = Rows()
    order = sampling.RandomSampler(data, seed=1)
    torchs = theirs.SequentialSampler(data)
    for batches in (
        sampling.BatchSampler(order, 4, False),
        sampling.BatchSampler(torchs, 4, False),
        theirs.BatchSampler(order, 4, False),
    ):
        for seed in (None, 7):
            loader = ours.DataLoader(data, batch_sampler=batches, seed=seed)
            assert loader.sampler is batches.sampler
            assert [len(batch[0]) for batch in loader] == [4, 4, 4, 4, 4, 3]
    batches = theirs.BatchSampler(torchs, 4, False)
    assert ours.DataLoader(data, batch_sampler=batches).sampler is not torchs  # as torch's loader


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_decides_the_batches_is_frozen_after_construction(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader"):
        setattr(ours.DataLoader(Rows()), name, None)


def test_the_multiprocessing_context_can_be_set_later_and_is_checked_then() -> None:
    loader = ours.DataLoader(Rows(), num_workers=1)
    loader.multiprocessing_context = "fork"
    assert loader.multiprocessing_context.get_start_method() == "fork"
    with pytest.raises(ValueError, match="bogus"):
        loader.multiprocessing_context = "bogus"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 23),
        ({"batch_size": 4}, 6),
        ({"batch_size": 4, "drop_last": True}, 5),
        ({"batch_size": None}, 23),
        ({"sampler": [1, 2, 3], "batch_size": 2}, 2),
        ({"batch_sampler": [[1], [2]]}, 2),
    ],
)
def test_len_counts_the_batches(options: dict, expected: int) -> None:
    assert len(ours.DataLoader(Rows(), **options)) == expected


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_that_is_pickled_and_back_gives_the_same(num_workers: int) -> None:
    loader = ours.DataLoader(Rows(6), batch_size=2, num_workers=num_workers)
    again = pickle.loads(pickle.dumps(loader))
    assert type(again) is ours.DataLoader
    for (a, i), (b, j) in zip(loader, again, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(i, j)


@pytest.mark.parametrize("loader_class", [theirs.DataLoader, ours.DataLoader])
def test_kept_workers_have_one_iterator_which_a_second_iter_begins_anew(loader_class) -> None:
    loader = loader_class(range(6), batch_size=2, num_workers=1, persistent_workers=True)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert second is first
    assert [batch.tolist() for batch in first] == [[0, 1], [2, 3], [4, 5]]
    assert isinstance(second._base_seed, int)


@pytest.mark.parametrize("refused", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(
    "options", [{}, {"seed": 1}, {"num_workers": 1, "persistent_workers": True}], ids=str
)
def test_an_iterator_is_neither_pickled_nor_copied_as_torchs_is_not(
    options: dict[str, Any], refused: Callable[[Any], object]
) -> None:
    def refuse(make: Any, **more: Any) -> None:
        batches = iter(make(range(3), **options, **more))
        with pytest.raises(NotImplementedError, match="cannot be pickled"):
            refused(batches)
        assert len(list(batches)) == 3

    if "seed" not in options:
        refuse(theirs.DataLoader)
    refuse(ours.DataLoader)
    refuse(Loader)
    if "num_workers" in options:
        refuse(ours.DataLoader, seed=1)  # its persistent iterator is another one


# Wrong arguments


# Arguments; what the message names; the type of torch's error, None where torch finds it later.
BAD_ARGUMENTS: list[tuple[dict[str, Any], str, type[Exception] | None]] = [
    ({"num_workers": -1}, "-1", ValueError),
    ({"num_workers": 1.5}, "1.5", None),
    ({"num_workers": "2"}, "'2'", TypeError),
    ({"timeout": -1}, "-1", ValueError),
    ({"timeout": -0.5, "num_workers": 1}, "-0.5", ValueError),
    ({"timeout": "7", "num_workers": 1}, "str", TypeError),
    ({"timeout": None, "num_workers": 1}, "NoneType", TypeError),
    ({"prefetch_factor": 2}, "2", ValueError),
    ({"prefetch_factor": 0, "num_workers": 1}, "0", None),
    ({"prefetch_factor": -1, "num_workers": 1}, "-1", ValueError),
    ({"persistent_workers": True}, "num_workers", ValueError),
    ({"batch_size": 0}, "0", ValueError),
    ({"batch_size": -1}, "-1", ValueError),
    ({"batch_size": 1.5}, "1.5", ValueError),
    ({"batch_size": True}, "True", ValueError),
    ({"batch_size": "4"}, "4", ValueError),
    ({"drop_last": 3}, "3", ValueError),
    ({"sampler": [0], "shuffle": True}, "shuffle", ValueError),
    ({"batch_sampler": [[0]], "batch_size": 2}, "batch_size", ValueError),
    ({"batch_sampler": [[0]], "shuffle": True}, "shuffle", ValueError),
    ({"batch_sampler": [[0]], "sampler": [0]}, "sampler", ValueError),
    ({"batch_sampler": [[0]], "drop_last": True}, "drop_last", ValueError),
    ({"batch_size": None, "drop_last": True}, "drop_last", ValueError),
    ({"dataset": Stream(), "shuffle": True}, "True", ValueError),
    ({"dataset": Stream(), "sampler": [0, 1]}, r"\[0, 1\]", ValueError),
    ({"dataset": Stream(), "batch_sampler": [[0, 1]]}, r"\[\[0, 1\]\]", ValueError),
    (
        {"multiprocessing_context": "bogus", "num_workers": 1},
        "valid start.*bogus",
        ValueError,
    ),
    ({"multiprocessing_context": 3, "num_workers": 1}, "3", TypeError),
    ({"multiprocessing_context": "fork"}, "num_workers=0", ValueError),
    ({"dataset": Rows(0), "shuffle": True, "sampler": [0]}, "shuffle", ValueError),
]


@pytest.mark.parametrize(
    ("options", "named", "expected"),
    BAD_ARGUMENTS,
    ids=[", ".join(f"{k}={v!r:.20}" for k, v in o.items()) for o, _, _ in BAD_ARGUMENTS],
)
def test_a_wrong_argument_raises_at_construction_and_is_named(
    options: dict[str, Any], named: str, expected: type[Exception] | None
) -> None:
    options = {"dataset": Rows(), **options}
    if expected is not None:
        with pytest.raises(expected):  # the table itself is held to what torch does
            theirs.DataLoader(**options)
    with pytest.raises(expected or (ValueError, TypeError), match=named):
        ours.DataLoader(**options)


# Warnings


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stream_longer_than_it_said_warns(num_workers: int) -> None:
    class Liar(SizedStream):
        def __len__(self) -> int:
            return 2

    loader = ours.DataLoader(Liar(4), batch_size=1, num_workers=num_workers)
    assert len(loader) == 2
    batches = iter(loader)
    next(batches)
    next(batches)
    with pytest.warns(UserWarning, match="was reported to be 2 .* but 3 samples have been fetched"):
        next(batches)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
@pytest.mark.skipif(torch.__version__ < (2, 7), reason="torch 2.6 is silent")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinning_without_an_accelerator_warns_as_torch_does(num_workers: int) -> None:
    said = []
    for lib in (theirs, ours):
        loader = lib.DataLoader(Rows(2), pin_memory=True, num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batches = list(loader)
        assert not batches[0][0].is_pinned()
        said.append({(w.category, str(w.message)) for w in caught})
    assert said[0] == said[1] != set()  # programs filter it by its words


# Errors out of workers


class Growing(Rows):
    """Sample `at` has another shape than all others."""

    def __init__(self, at: int = 5) -> None:
        super().__init__()
        self.at = at

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(3, 7 if index == self.at else 4)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_of_another_shape_is_named_with_both_shapes(num_workers: int) -> None:
    loader = ours.DataLoader(Growing(), batch_size=4, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(RuntimeError) as caught:
        next(batches)
    message = str(caught.value)
    for word in ("sample 4", "sample 5", "4", "7"):
        assert word in message
    assert "(3, 4)" in message or "[3, 4]" in message
    assert "(3, 7)" in message or "[3, 7]" in message


class Lacking(Rows):
    """Samples 1, 5 and 6 are None; every sample is of a file."""

    def __init__(self, make: Callable[[int], object]) -> None:
        super().__init__(8)
        self.make = make

    def __getitem__(self, index: int) -> object:
        return None if index in (1, 5, 6) else self.make(3)

    def describe(self, index: int) -> str:
        return f"photo{index}.jpg"


def raised_by(loader: Any) -> Exception:
    """Return what the first batch raises, without its traceback, whose frames hold the iterator.

    A worker of torch's whose iterator the garbage collector ends takes 5 s for it.
    """
    try:
        next(iter(loader))
    except (TypeError, RuntimeError, AttributeError) as error:
        return error.with_traceback(None)
    raise AssertionError("nothing was raised")


SAMPLES = {"number": int, "array": np.zeros, "tensor": torch.zeros}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("sampler", [[1, 2, 3, 5], [2, 1, 3, 5]], ids=["first", "later"])
@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_that_is_none_is_named_and_torchs_error_stays(
    make: Callable[[int], object], sampler: list[int], num_workers: int
) -> None:
    options = {"batch_size": 4, "sampler": sampler, "num_workers": num_workers}
    of_torch = raised_by(theirs.DataLoader(Lacking(make), **options))
    message = str(of_torch).splitlines()[-1]  # from a worker it is a traceback
    with pytest.raises(type(of_torch)) as caught:
        next(iter(ours.DataLoader(Lacking(make), **options)))
    assert str(caught.value).startswith(message.removeprefix(f"{type(of_torch).__name__}: "))
    note = caught.value.__notes__[0]
    assert "returned None for sample 1 (photo1.jpg), sample 5 (photo5.jpg): return a" in note
    assert "on_error='skip'" in note


class OddError(Exception):
    """Its constructor does not take what it gives to its base."""

    def __init__(self, *, code: int, where: str) -> None:
        super().__init__(f"{where}: {code}")
        self.code = code


class Failing(Rows):
    """Sample 3 fails."""

    def __init__(self, kind: str) -> None:
        super().__init__(8)
        self.kind = kind

    def __getitem__(self, index: int) -> int:
        if index == 3:
            if self.kind == "OddError":
                raise OddError(code=42, where="shelf")
            if self.kind == "KeyError":
                raise KeyError("no such picture")
            raise ValueError("not a picture")
        return index


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [(ValueError, "not a picture"), (KeyError, "no such picture"), (OddError, "shelf: 42")],
)
def test_an_error_of_the_user_keeps_its_type_and_the_loader_goes_on(
    kind: type[Exception], words: str, num_workers: int
) -> None:
    loader = ours.DataLoader(Failing(kind.__name__), batch_size=2, num_workers=num_workers)
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(kind, match=words) as caught:
        next(batches)
    if num_workers:
        notes = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
        assert "worker" in notes
        assert "sample 3" in notes
        assert [batch.tolist() for batch in batches] == [[4, 5], [6, 7]]


class EndingAt9(theirs.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return next(iter([])) if index == 9 else index


@pytest.mark.parametrize("options", [{}, {"num_workers": 2}, {"num_workers": 2, "seed": 3}])
def test_stop_iteration_of_a_sample_ends_the_epoch_as_in_torch_and_is_warned_of_once(options):
    loader = ours.DataLoader(EndingAt9(), batch_size=4, **options)
    with pytest.warns(
        UserWarning, match="StopIteration was raised while reading sample 9"
    ) as caught:
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    assert len(but_of_forks(caught)) == 1
    torchs = theirs.DataLoader(EndingAt9(), batch_size=4)
    assert (
        epochs == [[batch.tolist() for batch in torchs]] * 2 == [[[0, 1, 2, 3], [4, 5, 6, 7]]] * 2
    )
