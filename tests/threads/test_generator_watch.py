# SPDX-License-Identifier: Apache-2.0
"""Who draws from generators of the whole process is named once; who does not, never."""

from __future__ import annotations

import cProfile
import pstats
import random
import sys
import threading
import warnings

import numpy as np
import pytest

from penstock import Loader, sample_rng
from penstock.data import IterableDataset, shard
from penstock.randomness import generator_watch
from penstock.randomness.generator_watch import GeneratorWatch


class Transformed:
    def __init__(self, transform, length=24):
        self.transform = transform
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.transform(float(index))


class Chain:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, x):
        for transform in self.transforms:
            x = transform(x)
        return x


def by_random():
    class Jitter:
        def __call__(self, x):
            return x + random.uniform(0, 1)

    return Jitter()


def by_shuffle():
    class Shuffled:
        def __call__(self, x):
            items = [x, 1.0, 2.0]
            random.shuffle(items)
            return items[0]

    return Shuffled()


def by_numpy():
    class Crop:
        def __call__(self, x):
            return x + np.random.randint(10)

    return Crop()


def by_torch():
    torch = pytest.importorskip("torch")

    class Flip:
        def __call__(self, x):
            return -x if torch.rand(1) < 0.5 else x

    return Flip()


def by_torch_in_place():
    torch = pytest.importorskip("torch")

    class Noisy:
        def __call__(self, x):
            return x + torch.empty(1).uniform_(0, 1).item()

    return Noisy()


WHO = {
    "random": (by_random, "Jitter", "random"),
    "shuffle": (by_shuffle, "Shuffled", "random"),
    "numpy": (by_numpy, "Crop", "numpy.random"),
    "torch": (by_torch, "Flip", "torch"),
    "in place": (by_torch_in_place, "Noisy", "torch"),
}


def epochs(dataset, num_epochs=1, **options):
    loader = Loader(dataset, 3, num_workers=2, backend="thread", **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_epochs):
            list(loader)
    return [w for w in caught if "generators of the whole process" in str(w.message)]


@pytest.mark.parametrize("case", WHO)
def test_a_transform_that_draws_from_a_shared_generator_is_named_once(case):
    make, name, generator = WHO[case]
    transform = make()
    dataset = Transformed(Chain([abs, transform]))
    (warning, *more) = epochs(dataset, num_epochs=3)
    assert not more
    text = str(warning.message)
    assert f"{name}.__call__ (test_generator_watch.py:" in text
    assert f"in the transform {name} uses {generator}." in text
    assert "sample_rng()" in text
    assert "backend='process'" in text
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert epochs(dataset) == []  # in another loader, too


def test_a_collate_function_is_watched_as_well_though_the_batch_is_long():
    def collate(samples):
        return np.array(samples) + random.random()

    dataset = Transformed(float, length=100)
    loader = Loader(dataset, 50, num_workers=2, backend="thread", collate_fn=collate)
    with pytest.warns(UserWarning, match="collate .* uses random"):
        list(loader)


class Shuffled(IterableDataset):
    def __init__(self, shuffle):
        self.shuffle = shuffle

    def __iter__(self):
        items = list(range(40))
        self.shuffle(items)
        return shard(items)


class ShuffledAsItGoes(Shuffled):
    def __iter__(self):
        yield from super().__iter__()


def shuffle_by_random(items):  # random.shuffle itself is pickled with a generator of its own
    random.shuffle(items)


def shuffle_by_numpy(items):
    np.random.shuffle(items)


def shuffle_by_torch(items):
    torch = pytest.importorskip("torch")
    items[:] = torch.randperm(len(items)).tolist()


@pytest.mark.parametrize("shuffle", [shuffle_by_random, shuffle_by_numpy, shuffle_by_torch])
@pytest.mark.parametrize("stream", [Shuffled, ShuffledAsItGoes])
def test_a_stream_that_shuffles_with_a_shared_generator_before_shard_is_named(shuffle, stream):
    generator_watch._warned_of.clear()
    shuffle([0, 1])  # which may import torch; that would use up all that is watched
    loader = Loader(stream(shuffle), 4, num_workers=2, backend="thread")
    with pytest.warns(UserWarning, match=rf"{shuffle.__name__} .* uses .*samples are lost"):
        list(loader)


def own(x):
    return x + sample_rng().random() + np.random.default_rng(3).random()


def a_generator_of_ones_own(x):
    return x + random.Random(x).random() + np.random.RandomState(int(x)).rand()


def only_the_state(x):
    return x + len(random.getstate()) + len(np.random.get_state()[1])


@pytest.mark.parametrize("transform", [float, own, a_generator_of_ones_own, only_the_state])
@pytest.mark.parametrize("seed", [0, 7])
def test_who_draws_from_generators_of_its_own_is_not_named(transform, seed):
    assert epochs(Transformed(transform), seed=seed) == []


def test_what_the_main_process_draws_meanwhile_is_not_put_down_to_the_dataset():
    drawn, sampled = threading.Event(), threading.Event()

    def slow(x):
        sampled.set()
        assert drawn.wait(30)
        return x + sample_rng().random()

    loader = Loader(Transformed(slow), 3, num_workers=2, backend="thread")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batches = iter(loader)
        assert sampled.wait(30)
        random.random(), np.random.random()
        if (torch := sys.modules.get("torch")) is not None:
            torch.rand(3)
        drawn.set()
        list(batches)


def test_a_watch_changes_neither_samples_nor_the_profile_function():
    seen = []

    def mine(frame, event, arg):
        seen.append(event)

    def call():
        return random.Random(3).random()

    expected = call()
    watch = GeneratorWatch(None)
    sys.setprofile(mine)
    try:
        watch.begin()
        call()
        watch.end()
        assert sys.getprofile() is mine
    finally:
        sys.setprofile(None)
    assert seen
    assert watch.found == []
    watch.begin()
    assert call() == expected
    watch.end()
    assert sys.getprofile() is None


def test_python_s_own_profiler_goes_on_counting_beside_a_watch():
    def call():
        return random.Random(3).random()

    watch = GeneratorWatch(None)
    with cProfile.Profile() as profiler:
        watch.begin()
        call()
        watch.end()
        call()
    counts = pstats.Stats(profiler).get_stats_profile().func_profiles
    assert counts["call"].ncalls == "2"


def names_of(function, *arguments):
    """Generators that a call of `function` is said to draw from."""
    watch = GeneratorWatch(None)
    watch.begin()
    try:
        function(*arguments)
    finally:
        watch.end()
    return [drawing.rpartition(" uses ")[2] for drawing in watch.found]


class SomebodyElse:
    """Draws from numpy's generator while a function runs, unseen, as another thread does."""

    __enter__ = staticmethod(np.random.random)

    def __exit__(self, *_):
        pass


OWN = np.random.default_rng(5)


def test_a_generator_of_ones_own_is_not_taken_for_the_shared_one_that_changes_meanwhile():
    def innocent(own):
        with SomebodyElse():
            return own.normal() + OWN.normal() + np.random.default_rng(3).random()

    for own in (np.random.default_rng(1), np.random.RandomState(2)):
        assert names_of(innocent, own) == []


def test_who_draws_from_the_samples_own_is_not_taken_for_somebody_else():
    def innocent():
        with SomebodyElse():
            return np.float64(sample_rng().random())

    assert names_of(innocent) == []


def test_each_function_is_named_though_they_call_the_same_one_of_a_library():
    def first():
        return random.uniform(0, 1) + random.uniform(0, 2)

    def second():
        return random.uniform(0, 1)

    assert names_of(lambda: (first(), second(), first())) == ["random"] * 2


class Holder:
    def __init__(self, held):
        self.held = held

    def draw(self):
        return self.held.uniform()


def test_numpys_generator_is_found_under_any_name():
    from numpy import random as other_name
    from numpy.random import randint

    assert names_of(lambda: randint(3)) == ["numpy.random"]
    assert names_of(lambda: other_name.rand()) == ["numpy.random"]
    assert names_of(lambda: np.random.seed(3)) == ["numpy.random"]
    assert names_of(Holder(np.random).draw) == ["numpy.random"]
    assert names_of(Holder(np.random.mtrand._rand).draw) == ["numpy.random"]
    assert names_of(Holder(np.random.default_rng(2)).draw) == []


def test_a_call_that_is_given_a_generator_of_torch_is_not_named(monkeypatch):
    torch = pytest.importorskip("torch")
    own = torch.Generator()

    assert names_of(lambda: torch.rand(2, generator=own)) == []
    assert names_of(lambda: own.manual_seed(3)) == []
    assert names_of(lambda: torch.default_generator.manual_seed(3)) == ["torch"]
    # As if another thread drew during each call.
    monkeypatch.setattr(generator_watch, "_state_of_torch", object)
    assert names_of(lambda: torch.rand(2, generator=own)) == []
    assert names_of(lambda: torch.rand(2)) == ["torch"]


def test_a_watch_ends_after_a_number_of_calls():
    def step():
        pass

    def late(num_calls):
        for _ in range(num_calls):
            step()
        return random.random()

    assert names_of(late, 100) == ["random"]
    assert names_of(late, 10_000) == []


def test_a_dataset_is_watched_in_one_epoch_only():
    class Profiled:
        def __init__(self):
            self.profiled = []

        def __len__(self):
            return 4

        def __getitem__(self, index):
            self.profiled.append(sys.getprofile() is not None)
            return index

    dataset = Profiled()
    loader = Loader(dataset, 2, num_workers=1, backend="thread")
    list(loader)
    assert dataset.profiled == [True, True, False, False]
    list(loader)
    list(Loader(dataset, 2, num_workers=1, backend="thread"))
    assert not any(dataset.profiled[4:])
