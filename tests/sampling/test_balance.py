# SPDX-License-Identifier: Apache-2.0
"""The report counts what a sampler shows, and says in words what that did to the balance."""

from __future__ import annotations

import collections
import json
import math

import numpy as np
import pytest
import torch.utils.data as stock
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.ragged import RaggedArray
from penstock.errors import ConfigError
from penstock.sampling import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)
from penstock.sampling.balance import balance_report
from penstock.sampling.class_balanced import ClassBalancedSampler
from penstock.sampling.label_blocks import LabelBlocks
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
    different = collections.Counter(c for index in set(order) for c in set(images[index]))
    assert report.num_different.tolist() == [different[c] for c in report.classes.tolist()]
    assert report.num_shown == len(set(order)) == len(images) - report.num_never_shown
    assert report.num_unlabelled == images.count([])
    assert report.epoch_size == len(order)
    assert report.most_repeats == max(collections.Counter(order).values(), default=0)
    assert str(report)
    json.dumps(report.record(), allow_nan=False)


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


def test_more_samples_than_a_block_are_counted_as_one_block_is():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 50, 600_000)
    order = rng.integers(0, len(labels), 700_000)
    report = balance_report(order, labels)
    assert report.images.before.tolist() == np.bincount(labels).tolist()
    assert report.images.after.tolist() == np.bincount(labels[order]).tolist()
    offsets = np.sort(np.append(rng.integers(0, 600_000, 299_999), [0, 600_000]))
    several = balance_report(order[:1000] % 300_000, RaggedArray(labels, offsets))
    assert several.objects.before.tolist() == np.bincount(labels).tolist()


def test_a_block_has_one_sample_at_least_however_many_labels_that_has():
    labels = RaggedArray.of([[0], np.zeros(1 << 19, int), [], [1]])
    blocks = list(LabelBlocks(labels))
    assert [(block.start, block.stop) for block in blocks] == [(0, 1), (1, 2), (2, 4)]
    assert sum(len(block.codes) for block in blocks) == len(labels.values)


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
    sampler.set_epoch(8)
    expected = (expected + np.bincount(labels[sampler.indices()])) / 2
    sampler.set_epoch(7)
    mean = balance_report(sampler, labels, epochs=2)
    assert mean.images.after.tolist() == expected.tolist()
    assert (mean.epoch_size, mean.num_epochs, sampler.epoch) == (50, 2, 7)


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
        np.arange(3, dtype=np.int32),
        stock.default_collate([0, 1, 2]),
    ):
        assert balance_report(sampler, labels).images.after.tolist() == times, sampler


def test_an_order_that_is_not_stored_is_counted():
    sampler = RandomSampler(range(1_100_000))
    report = balance_report(sampler, np.arange(1_100_000) % 7)
    assert np.array_equal(report.images.after, report.images.before)
    assert report.most_repeats == 1


def test_labels_are_the_samplers_own_if_none_are_given():
    labels = np.repeat([0, 1], [90, 10])
    sampler = ClassBalancedSampler(labels, exact=True)
    assert balance_report(sampler).images.after.tolist() == [50, 50]
    rank = DistributedSampler(sampler, 2, 0)
    assert balance_report(rank).images.after.sum() == 50
    with pytest.raises(ConfigError, match=r"needs labels, and RandomSampler keeps none .*: the cl"):
        balance_report(RandomSampler(labels))


def test_names_come_from_the_dataset_or_as_given():
    class Pets(list):
        class_names = ("cat", "dog", "cow")
        labels = (2, 0, 2)

    pets = Pets("abc")
    assert balance_report([0, 1], pets).class_names == ("cat", "cow")
    assert balance_report([0], pets, class_names={2: "C"}).class_names == ("0", "C")
    assert balance_report([0], pets, class_names=["a"]).class_names == ("a", "2")


@pytest.mark.parametrize(
    ("sampler", "said"),
    [
        ([0, 5], "the sampler gave index 5, but there are labels of 3 samples"),
        ([-1], "the sampler gave index -1, but"),
        (np.array([0.5]), "counts integers, indices of samples, but the sampler gave"),
        (["a"], "counts integers"),
    ],
)
def test_what_are_no_indices_of_these_samples_is_refused(sampler, said):
    with pytest.raises(ConfigError, match=said):
        balance_report(sampler, np.array([0, 1, 1]))


def test_indices_have_one_epoch():
    with pytest.raises(ConfigError, match=r"indices are one epoch, but got epochs=2"):
        balance_report([0], np.array([0]), epochs=2)
    with pytest.raises(ConfigError, match=r"epochs should be a positive integer"):
        balance_report([0], np.array([0]), epochs=0)


def test_the_verdict_says_that_boxes_do_not_follow_images_and_why():
    report = balance_report(ClassBalancedSampler(CELLS, exact=True), class_names=["cell", "rare"])
    assert report.images.progress > 0.3
    assert report.objects.progress < 0.2
    assert "Balance over images improves (" in report.verdict
    assert "Balance over objects improves a little (" in report.verdict
    assert "Class cell is in 100.0% of the images shown and has 9" in report.verdict
    assert "penstock.vision.ObjectCrop" in report.verdict


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
    verdict = balance_report(RepeatFactorSampler(tags, 0.15), tags).verdict
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
    assert "Each of the 10 samples of the rarest class, 1, comes 9.0 times an e" in over.verdict
    lost = balance_report(np.arange(90), labels)
    assert "gets worse" in lost.verdict
    assert "Classes never shown: 1 (1)." in lost.verdict


def test_a_sampler_that_goes_by_nothing_is_not_blamed():
    verdict = balance_report(SequentialSampler(CELLS), CELLS).verdict
    assert verdict.count("does not change") == 2
    assert "ObjectCrop" not in verdict


def test_nothing_to_balance_is_said():
    report = balance_report([0, 1], RaggedArray.of([[], []]))
    assert report.verdict == "No sample has a class: there is nothing to balance."
    assert report.verdict in str(report)
    assert report.record()["classes"] == []


def test_the_table_of_two_levels():
    order = np.r_[np.arange(300), np.arange(0, 300, 3)]
    text = str(balance_report(order, CELLS, class_names=["cell", "a thing that is rare"]))
    assert text.splitlines()[:5] == [
        "2 classes, 300 samples, before and after indices: an epoch of 400",
        "",
        "class               images  shown  of all  -> after  |  objects  shown  share  -> after",
        "-" * 87,
        "cell                   300    400  100.0%    100.0%  |    3,000  4,000  96.8%     95.2%",
    ]
    assert "a thing that is...     100    200   33.3%     50.0%  |      100    200" in text


@pytest.mark.parametrize("several", [False, True])
def test_a_thousand_classes_stay_a_page(several):
    labels = np.repeat(np.arange(1000), np.arange(1000, 0, -1))
    known = RaggedArray(labels, np.arange(len(labels) + 1)) if several else labels
    names = [f"class number {n} of the list" for n in range(1000)]
    report = balance_report(SequentialSampler(labels), known, class_names=names)
    lines = str(report).splitlines()
    assert len(lines) < 50
    assert max(map(len, lines)) <= 100
    table = lines[4 : lines.index("", 4)]
    assert table[15].startswith("... 975 more")
    assert len(table) == 26
    shares = [float(line.split()[-1].rstrip("%")) for line in table]
    assert sum(shares) == pytest.approx(100, abs=0.02)


def test_names_stay_in_their_line_and_column():
    names = ["two\nlines", "細胞細胞細胞細胞細胞細胞細胞細胞細胞細胞"]
    report = balance_report([0, 1], np.array([0, 1]), class_names=names)
    _, _, _, rule, first, second, *_ = str(report).splitlines()
    assert first.startswith("two?lines ")
    assert len(second) + sum(c in "細胞" for c in second) == len(first) == len(rule)


def test_what_is_kept_is_what_json_has():
    report = balance_report([0, 0, 2], RaggedArray.of([[7, 7], [8], [8]]))
    record = json.loads(json.dumps(report.record()))
    assert record["classes"][0] == {
        "class": 7,
        "name": "7",
        "images_before": 1,
        "images_after": 2.0,
        "different_images": 1,
        "objects_before": 2,
        "objects_after": 4.0,
    }
    assert record["images"]["largest_to_smallest_before"] == 2.0
    assert record["objects"]["total_after"] == 5.0
    assert (record["num_never_shown"], record["most_repeats"]) == (1, 2)
    assert record["verdict"] == report.verdict
    lost = balance_report([0], np.array([0, 1])).record()
    assert lost["images"]["largest_to_smallest_after"] is None
