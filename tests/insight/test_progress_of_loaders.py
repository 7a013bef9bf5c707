# SPDX-License-Identifier: Apache-2.0
"""`Loader(progress=True)` in real pseudo-terminals."""

from __future__ import annotations

import re

import pytest
from tests.insight.screen import run, without_bar

from penstock import FaultPolicy, Loader

LOADER = """
    from penstock import Loader

    class Samples:
        def __len__(self):
            return 40
        def __getitem__(self, index):
            if index in (3, 17):
                raise ValueError(f"bad sample {index}")
            return float(index)
"""


def shown(got):
    """Return the lines without what hangs on the clock: the bar, rates, and the time."""
    return [
        re.sub(r", [\d,.]+ samples/s, \d+ % waiting", "", without_bar(line)) for line in got.lines
    ]


def test_an_epoch_with_workers_ends_with_its_counts():
    got = run(
        LOADER
        + """
    import warnings
    warnings.simplefilter("ignore")
    loader = Loader(Samples(), batch_size=4, num_workers=2, on_error="skip", progress=True)
    for epoch in range(2):
        for batch in loader:
            print(len(batch))
    """
    )
    sizes = ["3", "4", "4", "4", "3", "4", "4", "4", "4", "4"]
    assert shown(got) == [*sizes, "epoch 0: 10/10, 2 bad", *sizes, "epoch 1: 10/10, 2 bad"]
    assert got.returncode == 0


def test_ctrl_c_between_two_batches_leaves_the_terminal_as_it_was():
    got = run(
        LOADER
        + """
    loader = Loader(list(range(40)), batch_size=4, num_workers=2, progress=True)
    for number, batch in enumerate(loader, 1):
        if number == 4:
            print("begun")
            wait_for_ctrl_c()
    """,
        press_ctrl_c=True,
    )
    assert got.returncode == -2
    # The iterator goes, and ends its line, before Python prints the traceback.
    begun, bar, traceback = shown(got)[:3]
    assert (begun, traceback) == ("begun", "Traceback (most recent call last):")
    assert bar.startswith("epoch 0: 4/10 ")
    assert got.lines[-1] == "KeyboardInterrupt"
    assert "\x1b[?" not in got.written


def test_an_error_of_a_sample_ends_the_training_and_the_line():
    got = run(
        LOADER
        + """
    for batch in Loader(Samples(), batch_size=4, num_workers=2, progress=True):
        print("one batch")
    """
    )
    lines = shown(got)
    assert got.returncode == 1
    assert any(line.startswith("ValueError: bad sample 3") for line in lines)
    assert "epoch 0: 0/10" in lines


def test_a_loader_within_the_epoch_of_another_has_a_line_of_its_own():
    got = run(
        LOADER
        + """
    train = Loader(list(range(40)), batch_size=20, num_workers=1, progress=True)
    val = Loader(list(range(8)), batch_size=4, progress=True)
    for batch in train:
        for other in val:
            print("val batch")
    """
    )
    each = [["val batch"] * 2 + [f"epoch {n}: 2/2"] for n in range(2)]
    assert shown(got) == [*each[0], *each[1], "epoch 0: 2/2"]


def test_threads_as_workers_print_above_it():
    got = run(
        LOADER
        + """
    class Talking(Samples):
        def __getitem__(self, index):
            print(f"sample {index}\\n", end="", flush=True)
            return index

    loader = Loader(Talking(), batch_size=4, num_workers=2, backend="thread", progress=True)
    assert sum(len(batch) for batch in loader) == 40
    """
    )
    assert got.returncode == 0, got.written
    *printed, last = shown(got)
    assert sorted(printed) == sorted(f"sample {n}" for n in range(40))
    assert last == "epoch 0: 10/10"


def test_nothing_is_drawn_in_a_test(capfd):
    assert sum(1 for _ in Loader(list(range(8)), batch_size=4, progress=True)) == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bar_stats_warning_and_failures_count_the_same(num_workers, on_error):
    got = run(
        LOADER
        + f"""
    import warnings
    drawn = [3, 17, *range(8), 3, 3, 17, 20] * 2  # as samplers with replacement do
    loader = Loader(Samples(), batch_size=4, sampler=drawn, on_error={on_error!r},
                    num_workers={num_workers}, progress=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(2):
            list(loader)
    print([str(warning.message).split(". ")[0] for warning in caught])
    print(len(loader.failures), loader.stats().run.failed)
    """
    )
    what = "left out" if on_error == "skip" else "replaced by others"
    told = [f"epoch {epoch}: 2 bad samples {what}" for epoch in (0, 1)]
    *bars, warned, counts = shown(got)
    assert [line[-7:] for line in bars] == [", 2 bad"] * 2
    assert (warned, counts) == (str(told), "4 4")


def test_samples_of_batches_of_which_nothing_is_left_count_too():
    loader = Loader(Halves(), batch_size=2, on_error=FaultPolicy("skip", max_failures=None))
    with pytest.warns(UserWarning, match="4 bad samples left out"):
        assert len(list(loader)) == 2
    assert loader.stats().run.failed == len(loader.failures) == 4


class Halves:
    """The second half fails."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if index >= 4:
            raise ValueError(index)
        return index
