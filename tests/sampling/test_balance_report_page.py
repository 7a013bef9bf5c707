# SPDX-License-Identifier: Apache-2.0
"""docs/guide/balance-report.md has the options that there are, and the figures of the data."""

import re
from pathlib import Path

import pytest

from penstock.cli.sampler_options import SamplerChoice, SamplerKind
from penstock.errors import ConfigError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "balance-report.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def test_the_table_of_samplers_and_their_options_is_what_the_command_takes():
    rows = re.findall(
        r"^\| `([a-z][a-z-]+)` \|.*\| ([^|]*)\|$", PAGE.read_text("utf-8"), re.MULTILINE
    )
    assert [name for name, _ in rows] == [str(kind) for kind in SamplerKind]
    values = {"alpha": 0.5, "beta": 0.5, "threshold": 0.5, "num_samples": "9", "seed": 1}
    for name, takes in rows:
        kind = SamplerKind(name)
        needed = {"threshold": 0.1} if kind == SamplerKind.repeat_factor else {}
        for option, value in {**values, "exact": True}.items():
            choice = SamplerChoice(kind, **{**needed, option: value})
            if f"--{option.replace('_', '-')}" in takes:
                choice.check()
            else:
                with pytest.raises(ConfigError):
                    choice.check()


def test_the_figures_of_the_page_are_those_of_the_data(data_dir, capsys):
    pytest.importorskip("cv2")
    from penstock.cli import main

    clothes, cells = data_dir / "clothing" / "train", data_dir / "bccd"
    figures = re.findall(r"```\n(class.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    asked = (
        ["stats", str(clothes), "--sampler", "balanced", "--exact"],
        ["stats", str(cells), "--sampler", "repeat-factor", "--threshold", "0.95"],
    )
    for figure, arguments in zip(figures, asked, strict=True):
        assert main(arguments) == 0
        assert figure in capsys.readouterr().out
