# SPDX-License-Identifier: Apache-2.0
"""Images and what is marked in them: datasets, augmentations, batches.

`penstock.images` decodes the files, `penstock.torch.images` normalises batches on a device.

Datasets, transforms and collate functions may be used by any thread or process, and pickle if what
they are given does.
"""

from __future__ import annotations

from penstock.deprecation import removed_names
from penstock.vision.annotations.lists import LandmarkColumns
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.voc import parse_voc
from penstock.vision.batches import DetectionCollate, detection_collate
from penstock.vision.crops import CenterCropResize, RandomResizedCrop, Resize
from penstock.vision.datasets.annotated import AnnotatedImages, PackedAnnotations
from penstock.vision.datasets.classification import ImageFolder, ImageList
from penstock.vision.datasets.detection import (
    COCODetection,
    ImglabDetection,
    LandmarkList,
    VOCDetection,
    YOLODetection,
)
from penstock.vision.datasets.rules import AnnotationRules
from penstock.vision.drawing import contact_sheet
from penstock.vision.pipeline import ImagePipeline
from penstock.vision.transforms.adapters import Albumentations, Compose, Torchvision
from penstock.vision.transforms.color import ColorJitter, RandomHSV
from penstock.vision.transforms.geometry import (
    HorizontalFlip,
    Letterbox,
    ObjectCrop,
    RandomPerspective,
    VerticalFlip,
)
from penstock.vision.transforms.mixing import CutMix, MixUp, Mosaic

__all__ = [
    "Albumentations",
    "AnnotatedImage",
    "AnnotatedImages",
    "AnnotatedObject",
    "AnnotationRules",
    "COCODetection",
    "CenterCropResize",
    "ColorJitter",
    "Compose",
    "CutMix",
    "DetectionCollate",
    "HorizontalFlip",
    "ImageFolder",
    "ImageList",
    "ImagePipeline",
    "ImglabDetection",
    "LandmarkColumns",
    "LandmarkList",
    "Letterbox",
    "MixUp",
    "Mosaic",
    "ObjectCrop",
    "PackedAnnotations",
    "RandomHSV",
    "RandomPerspective",
    "RandomResizedCrop",
    "Resize",
    "Torchvision",
    "VOCDetection",
    "VerticalFlip",
    "YOLODetection",
    "contact_sheet",
    "detection_collate",
    "parse_voc",
]

__getattr__ = removed_names(
    __name__,
    {
        "BoxCounts": "penstock.vision.datasets.rules.BoxCounts",
        "HSV": "RandomHSV",
        "IMAGENET_MEAN": "penstock.vision.pipeline.IMAGENET_MEAN",
        "IMAGENET_STD": "penstock.vision.pipeline.IMAGENET_STD",
        "ResizedCenterCrop": "CenterCropResize",
        "Squash": "Resize",
        "VOCAnnotation": "penstock.vision.annotations.voc.VOCAnnotation",
        "decode_image": "penstock.images.decode_image",
        "draw_objects": "contact_sheet",
        "kept": "penstock.vision.samples.kept",
        "num_objects": "penstock.vision.samples.num_objects",
    },
)
