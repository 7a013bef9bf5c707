# SPDX-License-Identifier: Apache-2.0
"""`import torchvision` where its compiled operators do not fit torch's build.

The package index has torchvision for CUDA alone, which a torch for the CPU cannot load; then
`import torchvision` fails, and with it torchmetrics and Lightning. Nothing here calls an operator
(non-maximum suppression and the like), so to name them is enough.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

__all__ = ["declare_missing"]


def declare_missing() -> None:
    """Declare the operators of torchvision, if it cannot be imported without."""
    spec = importlib.util.find_spec("torchvision")
    if spec is None:
        return
    try:
        importlib.import_module("torchvision")
    except RuntimeError:  # operator torchvision::nms does not exist
        import torch

        source = Path(spec.origin).with_name("_meta_registrations.py").read_text("utf-8")
        for name in sorted(set(re.findall(r'"torchvision::(\w+)"', source))):
            torch.library.define(f"torchvision::{name}", "(Tensor input) -> Tensor")
        importlib.import_module("torchvision")
