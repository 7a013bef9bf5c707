# SPDX-License-Identifier: Apache-2.0
"""Images and what is marked in them: datasets, decoding, augmentations, batches."""

from __future__ import annotations

from penstock.deprecation import removed_names
from penstock.images import decode_image
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.voc import VOCAnnotation, parse_voc
from penstock.vision.batches import DetectionCollate, detection_collate
from penstock.vision.crops import CenterCropResize, RandomResizedCrop, Resize
from penstock.vision.datasets.annotated import AnnotatedImages, PackedAnnotations
from penstock.vision.datasets.classification import ImageFolder, ImageList
from penstock.vision.datasets.detection import (
    ImglabDetection,
    LandmarkList,
    VOCDetection,
    YOLODetection,
)
from penstock.vision.datasets.frames import FrameCounts
from penstock.vision.datasets.rules import AnnotationRules, BoxCounts
from penstock.vision.drawing.contact_sheet import contact_sheet
from penstock.vision.drawing.objects import draw_objects
from penstock.vision.pipeline import IMAGENET_MEAN, IMAGENET_STD, ImagePipeline
from penstock.vision.samples import kept, num_objects
from penstock.vision.transforms.adapters import Albumentations, Torchvision
from penstock.vision.transforms.color import ColorJitter, RandomHSV
from penstock.vision.transforms.compose import Compose
from penstock.vision.transforms.geometry import (
    HorizontalFlip,
    Letterbox,
    ObjectCrop,
    RandomPerspective,
    VerticalFlip,
)
from penstock.vision.transforms.mixing import CutMix, MixUp, Mosaic

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "Albumentations",
    "AnnotatedImage",
    "AnnotatedImages",
    "AnnotatedObject",
    "AnnotationRules",
    "BoxCounts",
    "CenterCropResize",
    "ColorJitter",
    "Compose",
    "CutMix",
    "DetectionCollate",
    "FrameCounts",
    "HorizontalFlip",
    "ImageFolder",
    "ImageList",
    "ImagePipeline",
    "ImglabDetection",
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
    "VOCAnnotation",
    "VOCDetection",
    "VerticalFlip",
    "YOLODetection",
    "contact_sheet",
    "decode_image",
    "detection_collate",
    "draw_objects",
    "kept",
    "num_objects",
    "parse_voc",
]

__getattr__ = removed_names(
    __name__,
    {"HSV": "RandomHSV", "ResizedCenterCrop": "CenterCropResize", "Squash": "Resize"},
)
