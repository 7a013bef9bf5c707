# SPDX-License-Identifier: Apache-2.0
"""One call seeds every global generator; a block puts back all that it found."""

import json
import logging
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.processes import python

from penstock.errors import ConfigError
from penstock.randomness.everything import seed_everything, seeded
from penstock.randomness.samples import fallback_state, restore_fallback, sample_rng

VARIABLES = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG", "RANK", "WORLD_SIZE")


@pytest.fixture(autouse=True)
def restore_process():
    """The environment and `sample_rng` are after each test as before; it begins without a rank."""
    environment, fallback = dict(os.environ), fallback_state()
    for name in VARIABLES:
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(environment)
    restore_fallback(fallback)


def as_rank(rank, world_size):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))


def draws():
    return {
        "random": [random.random() for _ in range(4)],
        "numpy": np.random.random(4).tolist(),
        "torch": torch.rand(4).tolist(),
        "sample_rng": sample_rng().random(4).tolist(),
    }


def draws_after_plain_calls(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    plain = draws()
    del plain["sample_rng"]
    return plain


def draws_after_seeding(seed):
    seed_everything(seed)
    return draws()


def result_of(code, **environment):
    """Run a script in a fresh process; what it prints is JSON."""
    done = python("-c", code, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


# --- what is seeded


@given(st.integers(0, (1 << 32) - 1))
@settings(max_examples=25, deadline=None)
def test_the_numbers_are_those_of_the_plain_calls(seed):
    plain = draws_after_plain_calls(seed)
    assert draws_after_seeding(seed).items() >= plain.items()


def test_seeds_beyond_32_bits_count_as_a_whole_where_the_library_can():
    small, large, larger = (draws_after_seeding(seed) for seed in (5, (1 << 32) + 5, (1 << 33) + 5))
    for name in ("random", "numpy", "sample_rng"):
        assert small[name] != large[name] != larger[name] != small[name]
    assert torch.initial_seed() == (1 << 33) + 5
    assert small["torch"] == large["torch"]  # torch's Mersenne twister takes 32 bits of a seed


@pytest.mark.parametrize("seed", [0, 5, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
def test_children_hash_strings_with_the_seed(seed):
    seed_everything(seed)
    value = os.environ["PYTHONHASHSEED"]
    assert 0 <= int(value) < 1 << 32
    assert (value == str(seed)) == (seed < 1 << 32)
    code = "import json; print(json.dumps(hash('penstock')))"
    inherited = result_of(code)
    assert inherited == result_of(code, PYTHONHASHSEED=value)
    assert inherited != result_of(code, PYTHONHASHSEED="1")


def test_the_log_says_what_was_seeded(caplog):
    as_rank(0, 2)
    with caplog.at_level(logging.INFO, logger="penstock"):
        seed_everything(7)
    assert caplog.messages == [
        "seed 7 on rank 0 of 2: random and torch got 7, numpy got 7, children get PYTHONHASHSEED=7"
    ]


@pytest.mark.parametrize(
    ("seed", "error", "message"),
    [
        (-1, ConfigError, "seed should be 0 or more, but got seed=-1."),
        (1 << 64, ConfigError, "seed should be below 2**64, but got seed=18446744073709551616."),
        (1.5, TypeError, "seed should be an integer, but got seed=1.5."),
        (True, TypeError, "seed should be an integer, but got seed=True."),
        ("7", TypeError, "seed should be an integer, but got seed='7'."),
        (None, TypeError, "seed should be an integer, but got seed=None."),
    ],
)
def test_a_wrong_seed_is_refused_before_anything_is_seeded(seed, error, message):
    expected = draws_after_plain_calls(3)
    for enter in (seed_everything, lambda seed: seeded(seed).__enter__()):
        random.seed(3)
        np.random.seed(3)
        torch.manual_seed(3)
        with pytest.raises(error) as caught:
            enter(seed)
        assert str(caught.value) == message
        assert draws().items() >= expected.items()
        assert "PYTHONHASHSEED" not in os.environ


# --- ranks


def test_rank_0_draws_what_a_process_alone_draws():
    alone = draws_after_seeding(7)
    as_rank(0, 8)
    assert draws_after_seeding(7) == alone


def test_every_rank_draws_numbers_of_its_own_and_none_of_a_neighbouring_seed():
    drawn = []
    for seed in (7, 8, 9):
        for rank in range(3):
            as_rank(rank, 3)
            assert seed_everything(seed) == seed
            drawn.append(draws())
            assert os.environ["PYTHONHASHSEED"] == str(seed)
    for name in ("random", "numpy", "torch", "sample_rng"):
        assert len({tuple(one[name]) for one in drawn}) == 9


# --- torch that is imported later


def test_torch_is_seeded_by_the_last_call_before_its_import():
    code = """
import json, sys
from penstock.randomness.everything import seed_everything
seed_everything(5)
seed_everything(6)
assert "torch" not in sys.modules
import torch
print(json.dumps(torch.rand(4).tolist()))
"""
    torch.manual_seed(6)
    assert result_of(code) == torch.rand(4).tolist()


def test_seeding_does_not_import_torch():
    code = """
import json, sys
from penstock.randomness.everything import seed_everything, seeded
seed_everything(7, deterministic=True)
with seeded(8, deterministic=True):
    is_loaded = "torch" in sys.modules
    import torch
modes = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic
print(json.dumps([is_loaded, *modes]))
"""
    assert result_of(code) == [False, True, True]
    code = code.replace("seed_everything(7, deterministic=True)", "")
    assert result_of(code) == [False, False, False]


# --- the block


def half_used_states():
    """Draw so that every generator has a normal number in store."""
    random.seed(1)
    random.gauss(0, 1)
    np.random.seed(2)
    np.random.randn()
    torch.manual_seed(3)
    torch.randn(1)
    sample_rng().random()


def normal_draws():
    return random.gauss(0, 1), np.random.randn(), torch.randn(1).item(), draws()


def leave_by_an_exception():
    def fail():
        with seeded(7):
            normal_draws()
            raise KeyError("out")

    with pytest.raises(KeyError, match="out"):
        fail()


def nest():
    with seeded(7):
        first = normal_draws()
        with seeded(8):
            second = normal_draws()
        third = normal_draws()
    with seeded(7):
        assert normal_draws() == first
        assert normal_draws() == third
    with seeded(8):
        assert normal_draws() == second


def seed_anew_inside():
    with seeded(7):
        seed_everything(9)


@pytest.mark.parametrize("use", [leave_by_an_exception, nest, seed_anew_inside])
def test_after_a_block_the_generators_go_on_as_if_it_had_not_been(use):
    sample_rng()
    fallback = fallback_state()
    half_used_states()
    expected = normal_draws()
    restore_fallback(fallback)
    half_used_states()
    use()
    assert normal_draws() == expected


def test_sample_rng_that_was_not_used_before_a_block_is_unseeded_after_it():
    restore_fallback(None)
    with seeded(7):
        inside = sample_rng().random()
    assert fallback_state() is None
    assert sample_rng().random() != inside


@pytest.mark.parametrize("found", [None, "0", "random"])
def test_a_block_puts_environment_variables_back(found):
    names = ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG")
    if found is not None:
        os.environ.update(dict.fromkeys(names, found))
    before = [os.environ.get(name) for name in names]
    with seeded(7, deterministic=True):
        assert os.environ["PYTHONHASHSEED"] == "7"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (found or ":4096:8")  # the user's is kept
    assert [os.environ.get(name) for name in names] == before


def flags():
    return (
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def set_flags(cudnn_deterministic, cudnn_benchmark, mode, warn_only):
    torch.backends.cudnn.deterministic = cudnn_deterministic
    torch.backends.cudnn.benchmark = cudnn_benchmark
    torch.use_deterministic_algorithms(mode, warn_only=warn_only)


@pytest.mark.parametrize(
    "found",
    [
        (False, False, False, False),
        (False, True, True, True),
        (True, False, False, True),
        (True, True, True, False),
    ],
)
def test_a_deterministic_block_sets_the_flags_and_puts_them_back(found):
    original = flags()
    try:
        set_flags(*found)
        with seeded(7):
            assert flags() == found  # left alone
        with seeded(7, deterministic=True):
            assert flags() == (True, False, True, False)
            with pytest.raises(RuntimeError, match="deterministic implementation"):
                torch.zeros(2).put_(torch.tensor([0]), torch.ones(1))
        assert flags() == found
        with seeded(7):
            set_flags(*(not flag for flag in found))
        assert flags() == found
    finally:
        set_flags(*original)


def test_a_device_that_is_not_initialised_stays_so_and_waits_for_the_users_seed(monkeypatch):
    assert not torch.cuda.is_initialized()
    asked_for = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", asked_for.append)
    torch.manual_seed(3)
    with seeded(7):
        assert asked_for == [3, 7]
    assert asked_for == [3, 7, 3]
    assert not torch.cuda.is_initialized()
