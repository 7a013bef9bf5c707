# SPDX-License-Identifier: Apache-2.0
"""Imports torchvision, also where its compiled operators do not fit torch's build.

The package index has torchvision for CUDA alone. Under a torch for the CPU its import fails, as
operators are missing that no transform of an image calls; to name them is enough.
"""

import importlib.util
import re
from pathlib import Path

import torch

try:
    import torchvision
except RuntimeError:  # operator torchvision::nms does not exist
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise
    source = Path(spec.origin).with_name("_meta_registrations.py").read_text("utf-8")
    for name in sorted(set(re.findall(r'"torchvision::(\w+)"', source))):
        torch.library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")
    import torchvision

import torchvision.datasets
import torchvision.transforms.v2  # noqa: F401
