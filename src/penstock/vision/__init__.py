# SPDX-License-Identifier: Apache-2.0
"""Images and what is marked in them: datasets, decoding, augmentations, batches."""

from __future__ import annotations

from penstock.deprecation import removed_names
from penstock.images import decode_image
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.voc_arrays import VOCAnnotation, parse_voc
from penstock.vision.batches.detection_collate import DetectionCollate, detection_collate
from penstock.vision.crops import CenterCropResize, RandomResizedCrop, Resize
from penstock.vision.datasets.annotated import AnnotatedImages
from penstock.vision.datasets.annotation_rules import AnnotationRules
from penstock.vision.datasets.box_policy import BoxCounts
from penstock.vision.datasets.frame_votes import FrameCounts
from penstock.vision.datasets.image_folder import ImageFolder
from penstock.vision.datasets.image_list import ImageList
from penstock.vision.datasets.landmark_sets import ImglabDetection, LandmarkList
from penstock.vision.datasets.packed_annotations import PackedAnnotations
from penstock.vision.datasets.voc_detection import VOCDetection
from penstock.vision.datasets.yolo_detection import YOLODetection
from penstock.vision.drawing.contact_sheet import contact_sheet
from penstock.vision.drawing.objects import draw_objects
from penstock.vision.pipeline import IMAGENET_MEAN, IMAGENET_STD, ImagePipeline
from penstock.vision.samples import kept, num_objects
from penstock.vision.transforms.adapters import Albumentations, Torchvision
from penstock.vision.transforms.color_jitter import ColorJitter
from penstock.vision.transforms.compose import Compose
from penstock.vision.transforms.flips import HorizontalFlip, VerticalFlip
from penstock.vision.transforms.hsv import RandomHSV
from penstock.vision.transforms.letterbox import Letterbox
from penstock.vision.transforms.mixing import CutMix, MixUp
from penstock.vision.transforms.mosaic import Mosaic
from penstock.vision.transforms.object_crop import ObjectCrop
from penstock.vision.transforms.perspective import RandomPerspective

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
