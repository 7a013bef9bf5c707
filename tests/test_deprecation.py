# SPDX-License-Identifier: Apache-2.0
"""What docs/versioning.md says of deprecated names: they work as before, and warn at the line."""

import importlib

import pytest

MESSAGE = "{} is deprecated, use {}; it is removed in penstock 0.3"


def imported(package):
    if package == "penstock.vision":
        pytest.importorskip("cv2")
    return importlib.import_module(package)


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        ("penstock.data", "Empty", "Allocator"),
        ("penstock.insight.stats", "Source", "SourceTiming"),
        ("penstock.vision", "HSV", "RandomHSV"),
        ("penstock.vision", "ResizedCenterCrop", "CenterCropResize"),
        ("penstock.vision", "Squash", "Resize"),
    ],
)
def test_an_old_name_is_the_new_one_and_warns(package, old, new):
    module = imported(package)
    for _ in range(2):  # each time, though Python shows one of a line alone
        with pytest.warns(DeprecationWarning, match="is deprecated") as caught:
            assert getattr(module, old) is getattr(module, new)
        assert [(str(w.message), w.filename) for w in caught] == [
            (MESSAGE.format(f"{package}.{old}", f"{package}.{new}"), __file__)
        ]
    assert old not in module.__all__
    assert new in module.__all__


def test_an_import_warns_at_its_line():
    with pytest.warns(DeprecationWarning, match="Empty is deprecated") as caught:
        from penstock.data import Empty  # noqa: F401
    assert {w.filename for w in caught} == {__file__}


@pytest.mark.parametrize("package", ["penstock.data", "penstock.vision"])
def test_what_there_is_not_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        imported(package).nothing  # noqa: B018


@pytest.mark.parametrize("of", ["RandomResizedCrop", "ImagePipeline.train"])
def test_the_old_argument_does_what_the_new_one_does_and_warns(of):
    vision = imported("penstock.vision")
    make = vision.RandomResizedCrop if of == "RandomResizedCrop" else vision.ImagePipeline.train
    with pytest.warns(DeprecationWarning, match="area= is deprecated") as caught:
        old = make(8, area=(0.2, 0.4))
    assert [(str(w.message), w.filename) for w in caught] == [
        (MESSAGE.format("area=", "scale="), __file__)
    ]
    assert repr(old) == repr(make(8, scale=(0.2, 0.4)))
    assert "scale=(0.2, 0.4)" in repr(old)
    with pytest.raises(TypeError, match="area= is the old name of scale=: give one of them"):
        make(8, area=(0.2, 0.4), scale=(0.2, 0.4))
