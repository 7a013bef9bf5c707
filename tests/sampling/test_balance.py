# SPDX-License-Identifier: Apache-2.0
"""The report counts what a sampler shows, and says in words what that did to the balance."""

from __future__ import annotations

import collections
import math

import numpy as np
import pytest
import torch
import torch.utils.data as stock
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.loader import Loader
from penstock.sampling import (
    BalancedBatchSampler,
    BatchSampler,
    BucketBatchSampler,
    DistributedSampler,
    PackingSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from penstock.sampling.balance import balance_report
from penstock.sampling.class_balanced import ClassBalancedSampler
from penstock.sampling.repeat_factor import RepeatFactorSampler

# Every image has cells; a third has one rare thing.
CELLS = RaggedArray.of([[0] * 10 + ([1] if n % 3 == 0 else []) for n in range(300)])

rows = st.lists(st.lists(st.integers(-3, 4), max_size=5), min_size=1, max_size=12)


@given(rows, st.data())
def test_counts_are_those_of_going_through_the_epoch(images, data):
    order = data.draw(st.lists(st.integers(0, len(images) - 1), max_size=40))
    report = balance_report(order, RaggedArray.of(images))
    shown = [images[index] for index in order]
    for level, counted in (
        (report.images, lambda image: set(image)),
        (report.objects, lambda image: image),
    ):
        before = collections.Counter(c for image in images for c in counted(image))
        after = collections.Counter(c for image in shown for c in counted(image))
        assert report.classes.tolist() == sorted(before)
        assert level.before.tolist() == [before[c] for c in sorted(before)]
        assert level.after.tolist() == [after[c] for c in sorted(before)]
    assert report.num_shown == len(set(order)) == len(images) - report.num_never_shown
    assert report.num_unlabelled == images.count([])
    assert report.epoch_size == len(order)
    assert report.most_repeats == max(collections.Counter(order).values(), default=0)
    assert str(report)


@pytest.mark.parametrize(
    "labels",
    [
        np.array([5, -2, 5, 5], np.int8),
        np.array(["b", "a", "b", "b"]),
        np.array([True, False, True, True]),
        np.array([1 << 62, 0, 1 << 62, 1 << 62]),
        np.array([2**64 - 1, 0, 2**64 - 1, 2**64 - 1], np.uint64),
    ],
    ids=["int8", "text", "bool", "far apart", "uint64"],
)
def test_labels_of_any_kind_are_counted(labels):
    report = balance_report([0, 1, 1, 1], labels)
    assert report.classes.tolist() == sorted(set(labels.tolist()))
    assert report.images.before.tolist() == [1, 3]
    assert report.images.after.tolist() == [3, 1]
    assert report.objects is None
    assert report.class_names == tuple(map(str, sorted(set(labels.tolist()))))


def test_entropy_and_ratio():
    report = balance_report([0, 1, 2, 3], np.array([0, 0, 0, 1]))
    counts = report.images
    assert counts.ratio_before == 3
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert counts.effective_before == pytest.approx(math.exp(entropy))
    assert counts.progress == pytest.approx(0)
    even = balance_report([0, 3], np.array([0, 0, 0, 1])).images
    assert (even.ratio_after, even.progress) == (1, pytest.approx(1))
    assert even.effective_after == pytest.approx(2)
    lost = balance_report([0, 1], np.array([0, 0, 0, 1])).images
    assert (lost.ratio_after, lost.effective_after) == (math.inf, pytest.approx(1))


def test_a_sampler_is_counted_in_its_epoch_and_put_back_into_it():
    labels = np.repeat([0, 1], [90, 10])
    sampler = WeightedRandomSampler(np.ones(100), 50, seed=4)
    sampler.set_epoch(7)
    expected = np.bincount(labels[sampler.indices()])
    assert balance_report(sampler, labels).images.after.tolist() == expected.tolist()
    assert sampler.epoch == 7
    with pytest.raises(TypeError, match="no argument epochs= any more"):
        balance_report(sampler, labels, epochs=2)
    with pytest.raises(ConfigError, match="needs labels, and WeightedRandomSampler keeps none"):
        balance_report(sampler)


def test_a_state_that_was_loaded_is_still_there():
    labels = np.repeat([0, 1], [90, 10])

    def samplers():
        random = RandomSampler(labels, seed=2)
        yield random
        yield BatchSampler(RandomSampler(labels, seed=2), 8, False)
        yield BucketBatchSampler(labels, 8, seed=2)
        yield DistributedSampler(RandomSampler(labels, seed=2), 2, 1)

    for sampler, same in zip(samplers(), samplers(), strict=True):
        sampler.set_epoch(3)
        iterator = iter(sampler)
        for _ in range(4):
            next(iterator)
        state = sampler.state_dict()
        balance_report(sampler, labels)
        assert sampler.state_dict() == state
        rest = [np.asarray(item).tolist() for item in iterator]
        same.load_state_dict(state)
        balance_report(same, labels)
        assert [np.asarray(item).tolist() for item in same] == rest, same


def test_the_generators_of_others_stay_as_they_are():
    class Own(stock.Sampler):
        def __init__(self):
            self.rng = np.random.default_rng(5)
            self.num_asked = 0

        def __iter__(self):
            self.num_asked += 1
            return iter(self.rng.permutation(3).tolist())

    labels = [0, 0, 1]
    own = Own()
    balance_report(own, labels)
    balance_report(stock.BatchSampler(own, 2, False), labels)
    assert own.num_asked == 0
    assert list(own) == np.random.default_rng(5).permutation(3).tolist()
    generator = torch.Generator().manual_seed(3)
    for random in (stock.RandomSampler(labels, generator=generator), stock.RandomSampler(labels)):
        before = generator.get_state(), torch.get_rng_state()
        balance_report(random, labels)
        assert all(map(torch.equal, before, (generator.get_state(), torch.get_rng_state())))


class Uncopyable(list):
    def __deepcopy__(self, memo):
        raise AssertionError("the data was copied")


def test_a_sampler_under_any_name_is_copied_without_its_data_and_counted_as_a_whole():
    class Wrapper:
        def __init__(self):
            self.base = SequentialSampler(Uncopyable([0, 0, 1]))

        def __iter__(self):
            return iter(self.base)

    wrapper = Wrapper()
    next(iter(wrapper.base))
    state = wrapper.base.state_dict()
    wrapper.base.load_state_dict(state)
    assert balance_report(wrapper, [0, 0, 1]).epoch_size == 3
    assert wrapper.base.state_dict() == state


@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: stock.BatchSampler(s, 4, False)])
def test_behind_ranks_the_epoch_is_that_of_the_sampler_inside(wrap):
    labels = np.arange(100)
    inner = WeightedRandomSampler(np.ones(100), 50, seed=4)
    ranks = DistributedSampler(inner, 2, 0)
    inner.set_epoch(7)
    expected = np.bincount(inner.indices(), minlength=100)
    assert balance_report(wrap(ranks), labels).images.after.tolist() == expected.tolist()
    assert (ranks.epoch, inner.epoch) == (0, 7)


def test_of_ranks_the_whole_epoch_is_counted_and_the_report_says_so():
    labels = np.repeat([0, 1], [90, 10])
    inner = ClassBalancedSampler(labels, exact=True)
    report = balance_report(DistributedSampler(inner, 3, 2))
    assert report.images.after.tolist() == [50, 50]
    assert report.sampler == "DistributedSampler of ClassBalancedSampler, all 3 ranks"
    foreign = DistributedSampler(stock.RandomSampler(labels), 3, 2)
    assert balance_report(foreign, labels).images.after.tolist() == [90, 10]
    for batches in (
        BatchSampler(DistributedSampler(inner, 2, 1), 5, False),
        BalancedBatchSampler(labels, 2, 5, num_batches=10, num_replicas=2, rank=1),
        BucketBatchSampler(labels, 5, num_replicas=2, rank=0),
        PackingSampler([9] * 100, 20, 5, num_replicas=2, rank=1),
    ):
        report = balance_report(batches, labels)
        assert report.epoch_size == 100
        assert report.sampler == f"{type(batches).__name__}, all 2 ranks"
    alone = balance_report(stock.DistributedSampler(labels, 2, 1), labels)
    assert (alone.epoch_size, alone.sampler) == (50, "DistributedSampler, rank 1 of 2")


class Unreadable:
    labels = (0, 0, 1)
    class_names = ("cat", "dog")

    def __len__(self):
        return 3

    def __getitem__(self, index):
        raise AssertionError("a sample was read")


def test_what_is_no_sampler_is_refused_without_reading_or_showing_it():
    for samples in (Unreadable(), Loader(Unreadable(), batch_size=2)):
        with pytest.raises(ConfigError, match=f"but {type(samples).__name__} gives samples"):
            balance_report(samples, [0, 0, 1])
    images = [(np.arange(999, dtype=np.uint8), 0)] * 3
    for samples in ([image for image, _ in images], [np.ones((3, 3), int)] * 3):
        with pytest.raises(ConfigError) as refusal:
            balance_report(samples, [0, 0, 1])
        assert len(str(refusal.value)) < 200


def test_every_kind_of_sampler_is_counted():
    labels = np.array([0, 0, 1])
    times = [2, 1]
    for sampler in (
        SequentialSampler(labels),
        RandomSampler(labels),
        RandomSampler(range(3), num_samples=3),
        stock.SequentialSampler(labels),
        stock.RandomSampler(labels),
        stock.DistributedSampler(labels, 1, 0),
        BatchSampler(SequentialSampler(labels), 2, False),
        stock.BatchSampler(stock.SequentialSampler(labels), 2, False),
        range(3),
        (0, 1, 2),
        np.arange(3, dtype=np.uint64),
        [[], [0, 1, 2]],
        stock.default_collate([0, 1, 2]),
    ):
        assert balance_report(sampler, labels).images.after.tolist() == times, sampler


def test_names_come_from_the_dataset_or_as_given():
    class Pets(list):
        class_names = ("cat", "dog", "cow")
        labels = (2, 0, 2)

    pets = Pets("abc")
    assert balance_report([0, 1], pets).class_names == ("cat", "cow")
    assert balance_report([0], pets, class_names={2: "C"}).class_names == ("0", "C")
    for names in ("a", "b", "c"), np.array(["a", "b", "c"]):
        assert balance_report([0], pets, class_names=names).class_names == ("a", "c")
    sampler = RepeatFactorSampler(pets, 0.5)
    assert balance_report(sampler).class_names == ("cat", "cow")
    assert balance_report(BatchSampler(sampler, 2, False)).class_names == ("cat", "cow")
    assert balance_report(sampler, [2, 0, 2]).class_names == ("0", "2")  # may be other classes


def test_labels_of_bytes_are_texts():
    report = balance_report([0, 0], np.array([b"cat", b"dog\xff"]))
    assert report.class_names == ("cat", "dog\\xff")


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ([0, 5], "do not fit: it gave index 5, of 3 samples"),
        ([-1], "do not fit: it gave index -1"),
        (np.array([0.5]), "counts integers, indices of samples, but the sampler gave"),
        (["a"], "counts integers"),
    ],
)
def test_what_are_no_indices_of_these_samples_is_refused(sampler, said):
    with pytest.raises(ConfigError, match=said):
        balance_report(sampler, np.array([0, 1, 1]))


def test_what_was_even_and_is_ruined_gets_worse():
    labels = np.repeat([0, 1, 2], 30)
    report = balance_report(np.r_[np.zeros(80, int), 30, 60], labels)
    assert report.images.progress == pytest.approx(-1)
    assert "Balance over samples gets worse (largest to smallest 1.0 : 1 -> 80.0 : 1" in (
        report.verdict
    )
    half = balance_report([0] * 9 + [3], np.array([0, 0, 0, 1])).images
    assert -1 < half.progress < 0


def test_the_verdict_says_that_boxes_do_not_follow_images_and_why():
    report = balance_report(ClassBalancedSampler(CELLS, exact=True), class_names=["cell", "rare"])
    assert report.images.progress > 0.3
    assert report.objects.progress < 0.2
    assert "Balance over images improves (" in report.verdict
    assert "Balance over objects improves a little (" in report.verdict
    assert "Class cell is in 100.0% of the images shown and has 9" in report.verdict
    assert "penstock.vision.ObjectCrop with class_weights" in report.verdict


def test_on_blood_cells_images_get_more_even_and_boxes_hardly(data_dir):
    vision = pytest.importorskip("penstock.vision")
    cells = vision.VOCDetection(data_dir / "bccd")
    for sampler in (RepeatFactorSampler(cells, 0.95), ClassBalancedSampler(cells)):
        report = balance_report(sampler, cells)
        assert report.class_names == ("Platelets", "RBC", "WBC")
        assert report.objects.before.tolist() == [361, 4153, 372]
        assert report.images.before.tolist() == [201, 349, 358]
        assert report.images.progress > 0.3
        assert report.objects.progress < 0.1
        assert "Class RBC is in 96." in report.verdict


def test_the_verdict_of_tags_speaks_of_no_boxes():
    tags = RaggedArray.of([[0, 1] if n % 9 == 0 else [0] for n in range(90)])
    report = balance_report(RepeatFactorSampler(tags, 0.15), tags)
    verdict = report.verdict
    assert "objects" not in str(report)
    assert "labels: effective classes" in str(report)
    assert "labels" in verdict
    assert "ObjectCrop" not in verdict
    assert "objects" not in verdict


def test_the_verdict_names_the_price():
    labels = np.repeat([0, 1], [90, 10])
    under = balance_report(ClassBalancedSampler(labels, num_samples="undersample", exact=True))
    assert "is even now" in under.verdict
    assert "80.0% of the samples are never shown in an epoch." in under.verdict
    over = balance_report(ClassBalancedSampler(labels, num_samples="oversample", exact=True))
    assert "never shown" not in over.verdict
    assert "The rarest class, 1, has 10 samples, shown 9.0 times an epoch" in over.verdict
    lost = balance_report(np.arange(90), labels)
    assert "gets worse" in lost.verdict
    assert "Class never shown: 1." in lost.verdict
    several = balance_report([0], np.arange(6), class_names=["a", "t-shirt", "b", "c", "d", "e"])
    assert "Classes never shown: t-shirt, b, c and 2 more." in several.verdict


def test_a_sampler_that_goes_by_nothing_is_not_blamed():
    verdict = balance_report(SequentialSampler(CELLS), CELLS).verdict
    assert verdict.count("does not change") == 2
    assert "ObjectCrop" not in verdict
    even = np.repeat([0, 1], 450)
    drawn = balance_report(WeightedRandomSampler(np.ones(900), 900, seed=1), even)
    assert "was even and stays so" in drawn.verdict


def test_nothing_to_balance_is_said():
    report = balance_report([0, 1], RaggedArray.of([[], []]))
    assert report.verdict == "No sample has a class: there is nothing to balance."
    assert report.verdict in str(report)
    assert report.classes.size == 0


def test_the_table_of_two_levels():
    order = np.r_[np.arange(300), np.arange(0, 300, 3)]
    text = str(balance_report(order, CELLS, class_names=["cell", "a thing that is rare"]))
    assert text.splitlines()[:5] == [
        "2 classes, 300 samples, before and after indices: an epoch of 400",
        "",
        "class                 images  shown  of all  -> after  objects  shown  share  -> after",
        "-" * 86,
        "cell                     300    400  100.0%    100.0%    3,000  4,000  96.8%     95.2%",
    ]
    assert "a thing that is rare     100    200   33.3%     50.0%      100    200" in text


@pytest.mark.parametrize("several", [False, True])
def test_a_thousand_classes_stay_a_page(several):
    labels = np.repeat(np.arange(1000), np.arange(1000, 0, -1))
    known = RaggedArray(labels, np.arange(len(labels) + 1)) if several else labels
    names = [f"class number {n} of the list" for n in range(1000)]
    report = balance_report(SequentialSampler(labels), known, class_names=names)
    lines = str(report).splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 110
    table = lines[4 : lines.index("", 4)]
    assert table[15].startswith("... 975 more")
    assert len(table) == 26


def test_names_stay_in_their_line_and_column():
    names = ["two\nlines", "細胞細胞細胞細胞細胞細胞細胞細胞細胞細胞"]
    report = balance_report([0, 1], np.array([0, 1]), class_names=names)
    _, _, _, rule, first, second, *_ = str(report).splitlines()
    assert first.startswith("two?lines ")
    assert len(second) + sum(c in "細胞" for c in second) == len(first) == len(rule)
