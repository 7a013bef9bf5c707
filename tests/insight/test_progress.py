# SPDX-License-Identifier: Apache-2.0
"""The progress bar, as it is written to a terminal."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import types

import pytest
from tests.insight.batches import batch

from penstock import FaultPolicy, Loader
from penstock.errors import MissingExtraError
from penstock.insight import progress
from penstock.insight.progress import open_progress
from penstock.optional import install_command

pytest.importorskip("tqdm")

BAR = re.compile(r"\s*\d+%\|.*?\| (\d+/\d+) \[[\d:]+<[\d:?]+(.*)\]")


class Terminal(io.StringIO):
    """Keeps what is written; `lines` is what stands there, without bars and times."""

    def isatty(self):
        return True

    @property
    def lines(self):
        shown = [line.split("\r")[-1].rstrip() for line in self.getvalue().split("\n")]
        return [BAR.sub(r" \1\2", line) for line in shown if line]


@pytest.fixture
def terminal(monkeypatch):
    made = Terminal()
    # Of the module alone: pytest sets that of `sys` anew for the test itself.
    fake = types.SimpleNamespace(stderr=made, modules=sys.modules)
    monkeypatch.setattr(progress, "sys", fake)
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    for name in ("CI", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return made


def record(n, **fields):
    """Batch n of 32 samples: 1/4 s after the one before; for half of that it was waited for."""
    asked_ns = 10**9 + n * 250_000_000 + 125_000_000
    given = {"asked_ns": asked_ns, "given_ns": asked_ns + 125_000_000, "num_samples": 32, **fields}
    return batch(step=n, **given).row


def in_ms(n):
    return record(0, asked_ns=n * 10**6, given_ns=(n + 1) * 10**6)


def test_the_last_line_says_what_the_epoch_was(terminal):
    bar = open_progress("train")
    bar.begin(3, 8)
    for n in range(8):
        bar.advance(record(n, num_failed=n // 3))
    bar.end()
    assert terminal.lines == ["train epoch 3: 8/8, 137 samples/s, 53 % waiting, 7 bad"]
    assert "\x1b[?" not in terminal.getvalue()  # neither the cursor nor any mode is touched


def test_while_it_goes_the_line_is_of_the_last_seconds_of_a_resumed_epoch(terminal):
    bar = open_progress()
    bar.begin(0, 4000, done=1000)
    for n in range(1000):
        bar.advance(record(n))
    # 4 batches of 32 samples per second, half of the time waiting.
    assert terminal.lines == ["epoch 0: 2000/4000, 128 samples/s, 50 % waiting"]


def test_an_epoch_of_unknown_length_has_no_bar(terminal):
    bar = open_progress("stream")
    bar.begin(0, None)
    for n in range(4):
        bar.advance(record(n))
    bar.end()
    (line,) = terminal.lines
    assert re.fullmatch(r"stream epoch 0: 4 \[[\d:]+, 146 samples/s, 57 % waiting\]", line)


def test_it_is_drawn_at_most_ten_times_a_second_and_goes_on_when_batches_come_slowly(terminal):
    bar = open_progress()
    bar.begin(0, 10_000)
    for n in range(3000):
        bar.advance(in_ms(n))
    assert 25 <= terminal.getvalue().count("samples/s") <= 32
    for n in range(3000, 8000, 1000):
        bar.advance(in_ms(n))
    assert terminal.lines[-1].startswith("epoch 0: 3005/10000, ")


def test_a_forked_process_draws_nothing(terminal):
    bar = open_progress()
    bar.begin(0, 100)
    bar.advance(record(0))
    written = terminal.getvalue()
    bar._pid += 1  # as it is in a child
    bar.advance(record(9))
    bar.end()
    bar.begin(1, 100)
    assert terminal.getvalue() == written


@pytest.mark.parametrize(
    ("environment", "is_seen"),
    [
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "CI": "false"}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"CI": "true"}, False),
    ],
    ids=str,
)
def test_it_is_quiet_where_it_would_not_be_seen(terminal, monkeypatch, environment, is_seen):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (open_progress() is not None) is is_seen


def test_nothing_is_written_where_stderr_is_no_terminal(capfd):
    assert sum(1 for _ in Loader(list(range(8)), batch_size=4, progress=True)) == 2
    assert capfd.readouterr() == ("", "")


def test_a_name_is_one_line(terminal):
    bar = open_progress("tr\nain")
    bar.begin(3, 8)
    bar.end()
    assert terminal.lines == ["tr ain epoch 3: 0/8"]


def test_a_terminal_that_hangs_up_does_not_end_the_training(terminal, monkeypatch):
    bar = open_progress()
    bar.begin(0, 100)

    def full(text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(terminal, "write", full)
    for n in range(4):
        bar.advance(record(n))
    bar.end()


def test_without_tqdm_the_error_names_the_extra(terminal, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(MissingExtraError, match="progress=True needs tqdm") as caught:
        open_progress()
    assert install_command("progress") in str(caught.value)


def test_a_bar_leaves_the_start_method_of_multiprocessing_open():
    program = (
        "import sys, multiprocessing\n"
        "sys.stderr.isatty = lambda: True\n"
        "from penstock.insight.progress import open_progress\n"
        "bar = open_progress()\n"
        "bar.begin(0, 8)\n"
        "bar.end()\n"
        "print(multiprocessing.get_start_method(allow_none=True))\n"
    )
    environment = {**os.environ, "TERM": "xterm", "CI": ""}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True
    )
    assert done.stdout == "None\n"


class Samples:
    def __len__(self):
        return 40

    def __getitem__(self, index):
        if index in (3, 17):
            raise ValueError(f"bad sample {index}")
        return float(index)


def shown(terminal):
    """Return the lines without what depends on the clock."""
    return [re.sub(r", [\d,.]+ samples/s, \d+ % waiting", "", line) for line in terminal.lines]


@pytest.mark.filterwarnings("ignore:.*2 bad samples")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("on_error", ["skip", "replace"])
def test_bar_stats_and_failures_of_a_loader_count_the_same(terminal, num_workers, on_error):
    drawn = [3, 17, *range(8), 3, 3, 17, 20] * 2  # as samplers with replacement do
    loader = Loader(
        Samples(), batch_size=4, sampler=drawn, on_error=on_error, num_workers=num_workers,
        progress=True,
    )  # fmt: skip
    for _ in range(2):
        list(loader)
    assert [line[-7:] for line in shown(terminal)] == [", 2 bad"] * 2
    assert (len(loader.failures), loader.stats().run.failed) == (4, 4)


def test_break_and_errors_end_the_line(terminal):
    loader = Loader(list(range(40)), batch_size=4, num_workers=2, progress=True)
    for number, _ in enumerate(loader, 1):
        if number == 6:
            break
    with pytest.raises(ValueError, match="bad sample 3"):
        list(Loader(Samples(), batch_size=4, progress=True))
    assert shown(terminal)[0] == "epoch 0: 6/10"
    assert terminal.getvalue().endswith("\n")


def test_a_loader_within_the_epoch_of_another_has_a_line_of_its_own(terminal):
    train = Loader(list(range(40)), batch_size=20, num_workers=1, progress=True)
    val = Loader(list(range(8)), batch_size=4, progress="val")
    for _ in train:
        for _ in val:
            pass
    written = " ".join(shown(terminal))
    assert all(line in written for line in ("val epoch 0: 2/2", "val epoch 1: 2/2"))
    assert written.endswith("epoch 0: 2/2")


def test_samples_of_batches_of_which_nothing_is_left_count_too():
    class Halves(Samples):
        def __getitem__(self, index):
            if index >= 4:
                raise ValueError(index)
            return index

    loader = Loader(Halves(), 2, sampler=range(8), on_error=FaultPolicy("skip", max_failures=None))
    with pytest.warns(UserWarning, match="4 bad samples left out"):
        assert len(list(loader)) == 2
    assert loader.stats().run.failed == len(loader.failures) == 4
