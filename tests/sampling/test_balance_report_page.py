# SPDX-License-Identifier: Apache-2.0
"""docs/guide/balance-report.md has the figures of the data."""

import re
from pathlib import Path

import pytest

from penstock import labels_of
from penstock.sampling import ClassBalancedSampler, RepeatFactorSampler, balance_report

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "balance-report.md"
pytestmark = pytest.mark.skipif(not PAGE.exists(), reason="the pages are not there")


def test_the_figures_of_the_page_are_those_of_the_data(data_dir):
    pytest.importorskip("cv2")
    from penstock.vision import AnnotationRules, ImageFolder, VOCDetection

    clothes = ImageFolder(data_dir / "clothing" / "train")
    cells = VOCDetection(data_dir / "bccd", rules=AnnotationRules(bad_boxes="keep"))
    figures = re.findall(r"```\n(class.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    labels = labels_of(clothes), labels_of(cells)
    samplers = (
        ClassBalancedSampler(labels[0], exact=True),
        RepeatFactorSampler(labels[1], threshold=0.95),
    )
    for figure, sampler, dataset in zip(figures, samplers, (clothes, cells), strict=True):
        assert figure in f"{balance_report(sampler, class_names=dataset.class_names)}\n"
