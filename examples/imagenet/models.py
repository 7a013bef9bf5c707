# SPDX-License-Identifier: Apache-2.0
"""Residual networks of basic blocks (He and others, 2015, table 1), and a tiny one."""

from __future__ import annotations

from torch import Tensor, nn

# Blocks in each of the four stages, and channels of the first.
ARCHITECTURES = {
    "tiny": ((1, 1, 1, 1), 16),
    "resnet18": ((2, 2, 2, 2), 64),
    "resnet34": ((3, 4, 6, 3), 64),
}


def convolution(channels: int, out: int, size: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out))


class BasicBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        first, second = convolution(channels, out, 3, stride), convolution(out, out, 3)
        self.residual = nn.Sequential(first, nn.ReLU(inplace=True), second)
        is_same = stride == 1 and channels == out
        self.shortcut = nn.Identity() if is_same else convolution(channels, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.residual(x) + self.shortcut(x))


def make_model(arch: str, num_classes: int) -> nn.Sequential:
    """Return a network from images (N, 3, H, W) to logits (N, classes)."""
    blocks, width = ARCHITECTURES[arch]
    layers: list[nn.Module] = [
        convolution(3, width, 7, stride=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
    ]
    channels = width
    for stage, count in enumerate(blocks):
        out = width * 2**stage
        for number in range(count):
            layers.append(BasicBlock(channels, out, 2 if stage and not number else 1))
            channels = out
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)
    )
