# SPDX-License-Identifier: Apache-2.0
"""What docs/versioning.md says of names that are gone: an error says what to use instead."""

import importlib

import pytest


def imported(package):
    if package == "penstock.vision":
        pytest.importorskip("cv2")
    return importlib.import_module(package)


GONE = [
    ("penstock.data", "Empty", "Allocator"),
    ("penstock.vision", "HSV", "RandomHSV"),
    ("penstock.vision", "ResizedCenterCrop", "CenterCropResize"),
    ("penstock.vision", "Squash", "Resize"),
]


@pytest.mark.parametrize(("package", "old", "new"), GONE)
def test_a_name_that_is_gone_says_what_to_use(package, old, new):
    module = imported(package)
    with pytest.raises(ImportError, match=f"^{package}.{old} is gone: use {new}"):
        exec(f"from {package} import {old}")
    with pytest.raises(ImportError, match=f"use {new}"):
        getattr(module, old)
    assert old not in module.__all__
    assert new in module.__all__


UNPROMISED = [
    ("penstock", "Failure"),
    ("penstock", "WorkerInfo"),
    ("penstock.data", "register_batch_reader"),
    ("penstock.stores", "PackReport"),
    ("penstock.vision.convert", "ConvertReport"),
    ("penstock.vision.convert", "FORMATS"),
]


@pytest.mark.parametrize(("package", "name"), UNPROMISED)
def test_a_name_that_is_no_longer_promised_says_where_it_is(package, name):
    pytest.importorskip("cv2")
    with pytest.raises(ImportError, match=f"^{package}.{name} is gone: use (penstock.*)") as caught:
        getattr(importlib.import_module(package), name)
    home = str(caught.value).rpartition(" ")[2].rpartition(".")[0]
    assert hasattr(importlib.import_module(home), name)


@pytest.mark.parametrize("package", ["penstock.data", "penstock.vision"])
def test_what_there_is_not_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        imported(package).nothing  # noqa: B018


@pytest.mark.parametrize("of", ["RandomResizedCrop", "ImagePipeline.train"])
def test_an_argument_that_is_gone_says_what_to_use(of):
    vision = imported("penstock.vision")
    make = vision.RandomResizedCrop if of == "RandomResizedCrop" else vision.ImagePipeline.train
    with pytest.raises(TypeError, match=rf"^{of}\(\) has no argument area= any more: use scale="):
        make(8, area=(0.2, 0.4))
    assert "scale=(0.2, 0.4)" in repr(make(8, scale=(0.2, 0.4)))
