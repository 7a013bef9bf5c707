# SPDX-License-Identifier: Apache-2.0
"""What do balanced orders of millions of samples cost?

Question
    10 million samples of 1,000 classes, 1,300 to 1.3 million each (1 / k of the largest, as Zipf
    has it): seconds and memory to make a sampler, and seconds until an epoch's order is there.
    Then 50 million samples.

Method
    torch weighted          `WeightedRandomSampler(1 / count of the sample's class, n)`; the order
                            is `list(sampler)`, the integers that its loader goes through.
    torch multinomial       its core alone: `torch.multinomial`, the order left as a tensor.
    penstock weighted       `penstock.sampling.WeightedRandomSampler`, of the same weights.
    penstock weighted once  the same without replacement: every sample, heavy ones first.
    penstock balanced       `ClassBalancedSampler(labels)`: equal shares of the classes, each gone
                            through before a sample of it comes again.
    penstock balanced, equal classes
                            the same, of 1,000 classes that all have 10,000 samples.
    penstock exact          the same with `exact=True`: equal counts in each epoch.
    penstock share of 8     `DistributedSampler` over it, rank 3 of 8.
    penstock class-aware    `ClassBalancedSampler(labels, samples_per_class=1)`.
    penstock repeat factor  `RepeatFactorSampler(labels, 0.001)`, LVIS's threshold.
    penstock mixture        `MixtureSampler` of ten sources, their lengths 1 / k of the largest, in
                            equal shares; the order taken in blocks of 2^14, as a loader does.

    Penstock's orders are int64 arrays, which its loaders cut into batches without making Python
    integers. Labels are an int64 array in random order, weights a float64 array: both are there
    before anything is timed, and not counted. A tiny sampler warms up. Then one is made ("build
    s"), and the orders of two epochs, one after the other (the figure is the mean). "build MB" and
    "epoch MB" are how far the process's greatest resident size (ru_maxrss) rises above what it was
    before, until the sampler is there, and until the orders are: an order itself, 80 MB at 8 bytes
    an index, is in the latter. Of every order the counts of the classes must be what they should
    be, to six standard deviations or exactly, and the indices in range.

    Targets at 10 million: build < 2 s and < 200 MB, an epoch's order < 2 s.

Left out
    Finding the labels, and for the two weighted ones making the weights of them: `1 /
    counts[labels]` takes 0.1 s with numpy, and the usual list comprehension over a data set decodes
    every sample. Of torch 50 million: its limit is 2^24 weights.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6

Command
    python benchmarks/balanced_sampling.py --save

Result
    2026-11-22, 3 rounds in turn, medians (benchmarks/results/balanced_sampling.json):

                                         s/epoch  build s  build MB  epoch MB
    torch weighted, 10M                     6.31   0.0002         0       562
    torch multinomial, 10M                  4.63   0.0002         0       161
    penstock weighted, 10M                  1.15     0.27       101       242
    penstock weighted once, 10M             2.52     0.07       101       411
    penstock balanced, 10M                  1.02     0.32       103       224
    penstock balanced, equal classes, 10M   1.20     0.44       102       227
    penstock exact, 10M                     1.14     0.32       103       224
    penstock share of 8, 10M                1.12     0.32       103       224
    penstock class-aware, 10M               0.88     0.32       103       244
    penstock repeat factor, 10M             1.33     0.15        94       439
    penstock mixture, 10M                   1.25   0.0003         0        82
    penstock balanced, 50M                  7.70     2.36       343       945
    penstock weighted, 50M                  6.25     1.56       501      1202

    All targets are met; "weighted once", which has none, sorts its draws. Of the 7.7 s at 50
    million 3.4 are the shuffle of the sequence of classes, which no cache holds, and 2 the kernel's
    for the pages of new arrays.

What it does not show
    Reading samples in these orders. Several labels per sample. That draws are as they should be:
    tests/sampling does.
"""

from __future__ import annotations

import gc
import resource
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from _meter import Meter
from _runner import Benchmark, Reading, Target, check

if TYPE_CHECKING:
    from collections.abc import Callable

_SEED = 7
_NUM_RANKS = 8
_NUM_WARM = 2_000
_BLOCK = 1 << 14
_BATCH_SIZE = 256


@dataclass(frozen=True, slots=True)
class Size:
    """Samples of the data set, and of the large one; classes; epochs."""

    num_samples: int
    num_many: int
    num_classes: int
    num_epochs: int


@dataclass(frozen=True, slots=True)
class Data:
    """What is there beforehand."""

    labels: Any
    weights: Any
    counts: Any

    def __len__(self) -> int:
        return len(self.labels)


def zipf_counts(total: int, num_parts: int) -> Any:  # noqa: ANN401 - a numpy array
    """Return parts of `total` that are 1 / k of the first one, up to rounding."""
    import numpy as np

    ranks = 1.0 / np.arange(1, num_parts + 1)
    counts = np.maximum(total * ranks / ranks.sum(), 1).astype(np.int64)
    counts[0] += total - counts.sum()
    return counts


def make_data(num_samples: int, num_classes: int, *, equal: bool = False) -> Data:
    """Return labels in random order; in place, so that memory does not rise above what stays."""
    import numpy as np

    alike = np.full(num_classes, num_samples // num_classes)
    counts = alike if equal else zipf_counts(num_samples, num_classes)
    labels = np.repeat(np.arange(num_classes), counts)
    np.random.default_rng(_SEED).shuffle(labels)
    return Data(labels, (1.0 / counts)[labels], counts)


def torch_weighted(data: Data) -> Any:  # noqa: ANN401
    from torch.utils.data import WeightedRandomSampler

    return WeightedRandomSampler(data.weights, len(data))


def weighted(data: Data, *, replacement: bool = True) -> Any:  # noqa: ANN401
    from penstock.sampling.samplers import WeightedRandomSampler

    return WeightedRandomSampler(data.weights, len(data), replacement, seed=_SEED)


def balanced(data: Data, *, exact: bool = False) -> Any:  # noqa: ANN401
    from penstock.sampling.class_balanced import ClassBalancedSampler

    return ClassBalancedSampler(data.labels, exact=exact, seed=_SEED)


def share(data: Data) -> Any:  # noqa: ANN401
    from penstock.sampling.distributed import DistributedSampler

    return DistributedSampler(balanced(data), _NUM_RANKS, 3)


def class_aware(data: Data) -> Any:  # noqa: ANN401
    from penstock.sampling.class_balanced import ClassBalancedSampler

    return ClassBalancedSampler(data.labels, samples_per_class=1, seed=_SEED)


def repeat_factor(data: Data) -> Any:  # noqa: ANN401
    from penstock.sampling.repeat_factor import RepeatFactorSampler

    return RepeatFactorSampler(data.labels, 0.001, seed=_SEED)


def mixture(data: Data) -> Any:  # noqa: ANN401
    from penstock.sampling.mixture import MixtureSampler

    return MixtureSampler(zipf_counts(len(data), 10), [1] * 10, len(data), seed=_SEED)


def as_list(sampler: Any) -> Any:  # noqa: ANN401
    return list(sampler)


def as_tensor(sampler: Any) -> Any:  # noqa: ANN401
    import torch

    return torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement)


def as_array(sampler: Any) -> Any:  # noqa: ANN401
    """Return an order, taken in blocks where it is not stored."""
    import numpy as np

    order = sampler.indices()
    if isinstance(order, np.ndarray):
        return order
    taken = np.empty(len(order), np.int64)
    for start in range(0, len(order), _BLOCK):
        taken[start : start + _BLOCK] = order[start : start + _BLOCK]
    return taken


def are_equal_shares(data: Data, order: Any, sampler: Any, *, exact: bool = False) -> None:  # noqa: ANN401
    """Check that every class came as often, exactly or to six standard deviations."""
    import numpy as np

    found = np.bincount(data.labels[order], minlength=len(data.counts))
    mean = len(order) / len(data.counts)
    slack = 1 if exact else 6 * mean**0.5
    check(len(order) == len(sampler), f"{len(order)} indices of {len(sampler)}")
    check(abs(found - mean).max() <= slack, f"classes came {found.min()} to {found.max()} times")


def are_all_samples(data: Data, order: Any, sampler: Any) -> None:  # noqa: ANN401
    import numpy as np

    check((np.bincount(order, minlength=len(data)) == 1).all(), "not every sample came once")


def are_repeat_factors(data: Data, order: Any, sampler: Any) -> None:  # noqa: ANN401
    import numpy as np

    factors = np.maximum(1, np.sqrt(0.001 / (data.counts / len(data))))
    found = np.bincount(data.labels[order], minlength=len(data.counts)) / data.counts
    slack = 6 * 0.5 / data.counts**0.5 + 1e-6
    check((abs(found - factors) <= slack).all(), "classes came more or less often than r says")


def are_sources(data: Data, order: Any, sampler: Any) -> None:  # noqa: ANN401
    import numpy as np

    stops = np.cumsum(zipf_counts(len(data), 10))
    found = np.bincount(np.searchsorted(stops, order, side="right"), minlength=10)
    check((found == sampler.quotas).all(), f"sources came {found} times")


def order_epochs(
    size: Size,
    make: Callable[[Data], Any],
    take: Callable[[Any], Any] = as_array,
    agree: Callable[..., None] = are_equal_shares,
    *,
    many: bool = False,
    equal: bool = False,
) -> Reading:
    """Make one sampler and the orders of some epochs."""
    take(make(make_data(_NUM_WARM, 10)))
    num_samples = size.num_many if many else size.num_samples
    data = make_data(num_samples, size.num_classes, equal=equal)
    gc.collect()
    before_bytes = peak_bytes()
    start_s = time.perf_counter()
    sampler = make(data)
    more = {"build s": time.perf_counter() - start_s}
    more["build MB"] = (peak_bytes() - before_bytes) / 1e6
    total_s = 0.0
    for epoch in range(size.num_epochs):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        with Meter() as meter:
            order = take(sampler)
        total_s += meter.wall_s
        if epoch == 0:  # before checking it takes more
            more["epoch MB"] = (peak_bytes() - before_bytes) / 1e6
        agree(data, order, sampler)
        del order
    num_batches = -(-len(sampler) // _BATCH_SIZE)
    return Reading.of(meter, total_s / size.num_epochs, num_batches, more)


def peak_bytes() -> int:
    """Return the greatest resident size that this process has had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


_OURS = {
    "weighted": partial(order_epochs, make=weighted),
    "weighted once": partial(
        order_epochs, make=partial(weighted, replacement=False), agree=are_all_samples
    ),
    "balanced": partial(order_epochs, make=balanced),
    "balanced, equal classes": partial(order_epochs, make=balanced, equal=True),
    "exact": partial(
        order_epochs,
        make=partial(balanced, exact=True),
        agree=partial(are_equal_shares, exact=True),
    ),
    "share of 8": partial(order_epochs, make=share),
    "class-aware": partial(
        order_epochs, make=class_aware, agree=partial(are_equal_shares, exact=True)
    ),
    "repeat factor": partial(order_epochs, make=repeat_factor, agree=are_repeat_factors),
    "mixture": partial(order_epochs, make=mixture, agree=are_sources),
}
_LIMITED = [f"penstock {name}, 10M" for name in _OURS if name != "weighted once"]

BENCHMARK = Benchmark(
    file=__file__,
    unit="s/epoch",
    better="lower",
    contenders={
        "torch weighted, 10M": partial(order_epochs, make=torch_weighted, take=as_list),
        "torch multinomial, 10M": partial(order_epochs, make=torch_weighted, take=as_tensor),
        **{f"penstock {name}, 10M": contender for name, contender in _OURS.items()},
        "penstock balanced, 50M": partial(order_epochs, make=balanced, many=True),
        "penstock weighted, 50M": partial(order_epochs, make=weighted, many=True),
    },
    full=Size(num_samples=10_000_000, num_many=50_000_000, num_classes=1000, num_epochs=2),
    smoke=Size(num_samples=20_000, num_many=50_000, num_classes=20, num_epochs=2),
    targets=(
        *(Target(name, at_most=2) for name in _LIMITED),
        *(Target(name, at_most=2, figure="build s") for name in _LIMITED),
        *(Target(name, at_most=200, figure="build MB") for name in _LIMITED),
        Target("penstock weighted, 10M", "torch weighted, 10M"),
        Target("penstock weighted, 10M", "torch multinomial, 10M"),
        Target("penstock balanced, 10M", "torch weighted, 10M"),
        Target("penstock balanced, 50M"),
        Target("penstock weighted, 50M"),
    ),
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
