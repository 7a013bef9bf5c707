# SPDX-License-Identifier: Apache-2.0
"""Shares of classes: powers of their counts, or by effective numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.sampling.class_balanced import ClassBalancedSampler, class_shares

counts_of_classes = st.lists(st.integers(1, 10**9), min_size=1, max_size=20)


@given(counts_of_classes, st.floats(0, 2))
def test_a_share_is_a_power_of_the_count(counts, alpha):
    expected = [count ** (1 - alpha) for count in counts]
    expected = [part / math.fsum(expected) for part in expected]
    assert class_shares(counts, alpha) == pytest.approx(expected, rel=1e-9)


@given(counts_of_classes, st.sampled_from([0.0, 0.5, 0.9, 0.999, 0.9999999]))
def test_effective_shares_divide_the_natural_ones_by_the_effective_number(counts, beta):
    # The effective number as a sum: 1 + beta + ... + beta ** (count - 1).
    counts = [min(count, 2000) for count in counts]
    numbers = [math.fsum(beta**power for power in range(count)) for count in counts]
    expected = [count / number for count, number in zip(counts, numbers, strict=True)]
    expected = [part / math.fsum(expected) for part in expected]
    assert class_shares(counts, "effective", beta) == pytest.approx(expected, rel=1e-6)


def test_effective_shares_go_from_natural_to_equal_as_beta_rises():
    counts = [1000, 100, 10]
    assert class_shares(counts, "effective", 0.0) == pytest.approx(class_shares(counts, 0.0))
    nearly = class_shares(counts, "effective", 1 - 1e-9)
    assert nearly == pytest.approx([1 / 3] * 3, rel=1e-6)
    ratios = [
        class_shares(counts, "effective", beta)[0] / class_shares(counts, "effective", beta)[2]
        for beta in (0.0, 0.9, 0.99, 0.999, 0.9999)
    ]
    assert ratios == sorted(ratios, reverse=True)


def test_the_largest_alpha_turns_the_order_of_classes_round():
    shares = class_shares([1, 10**18], alpha=2.0)
    assert shares == pytest.approx([1.0, 1e-18], rel=1e-9)
    assert class_shares([1, 2, 4], 2.0) == pytest.approx(class_shares([4, 2, 1], 0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, "alpha=-0.1"),
        ({"alpha": math.nan}, "alpha=nan"),
        ({"alpha": math.inf}, "alpha=inf"),
        ({"alpha": 445}, "but got alpha=445. The size of an epoch is num_samples"),
        ({"alpha": True}, "alpha=True"),
        ({"alpha": "balanced"}, "alpha='balanced'"),
        ({"alpha": "effective", "beta": 1.0}, r"below 1, but got beta=1\.0"),
        ({"alpha": "effective", "beta": -0.5}, r"beta=-0\.5"),
    ],
)
def test_what_makes_no_sense_is_an_error(options, message):
    with pytest.raises(ConfigError, match=message):
        ClassBalancedSampler([1, 2], **options)
