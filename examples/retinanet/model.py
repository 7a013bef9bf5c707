# SPDX-License-Identifier: Apache-2.0
"""RetinaNet: a ResNet, a feature pyramid on top of it, and two subnets that all levels share.

    image ── C1, C2 ── C3 ──── C4 ──── C5 ──┐        strides 8, 16, 32
                       │       │       │    │
                       P3 <─── P4 <─── P5   P6 ── P7        64, 128
                       └───────┴───┬───┴────┴─────┘
                  class subnet, box subnet at each place of each level

Reference: Lin and others, "Focal Loss for Dense Object Detection", arXiv 1708.02002, section 4;
He and others, "Deep Residual Learning", arXiv 1512.03385; Lin and others, "Feature Pyramid
Networks", arXiv 1612.03144. No weights are downloaded: it is trained from scratch, unless a file
has some for the ResNet. Hence the norms in the pyramid and the subnets, too (He and others,
"Rethinking ImageNet Pre-training", arXiv 1811.08883).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import checkpoint
import torch
from anchors import AnchorGrid
from torch import nn
from torch.nn import functional

from penstock.torch import NormalizeImages

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

Norm = Literal["group", "batch"]
_BLOCKS: Final = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
_CHANNELS_PER_GROUP: Final = 8
_PRIOR: Final = 0.01  # the probability that every anchor gives every class at first


@dataclass(frozen=True)
class ModelOptions:
    """What has to be known to build the network again.

    Attributes:
        num_classes: At least 1; background is none.
        depth: Of the ResNet: 18, 34, 50 or 101.
        width: Factor of the ResNet's channels: 1 is 64 in the first stage. Below 1 for tiny runs.
        pyramid_channels: Of the pyramid and the subnets; the paper has 256.
        num_convolutions: Of each subnet, before the last one; the paper has 4.
        norm: Of ResNet and pyramid: "batch", or "group" for batches of fewer than 8 images. The
            subnets, which see all levels, have "group" in any case.
        anchor_sides: See `AnchorGrid.sides_per_stride`.
    """

    num_classes: int
    depth: int = 18
    width: float = 1.0
    pyramid_channels: int = 256
    num_convolutions: int = 4
    norm: Norm = "batch"
    anchor_sides: float = 4.0

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        if self.depth not in _BLOCKS:
            raise ValueError(f"depth is one of {sorted(_BLOCKS)}; got {self.depth}")
        if self.num_classes < 1:
            raise ValueError(f"a detector needs classes; got num_classes={self.num_classes}")


class Outputs(NamedTuple):
    """What the network says of a batch, anchor by anchor, and what it says it of."""

    class_logits: Tensor  # (batch, A, classes)
    box_offsets: Tensor  # (batch, A, 4), see `anchors.encode`
    anchors: Tensor  # (A, 4)


class RetinaNet(nn.Module):
    """Images, uint8 (batch, height, width, 3), to `Outputs`. Height and width are 32 or more."""

    def __init__(self, options: ModelOptions) -> None:
        super().__init__()
        self.options = options
        self.grid = AnchorGrid(options.anchor_sides)
        self.normalize = NormalizeImages()  # by the mean of ImageNet, as torchvision's weights do
        self.backbone = ResNet(options.depth, options.width, options.norm)
        self.pyramid = Pyramid(self.backbone.out_channels, options.pyramid_channels, options.norm)
        self.class_subnet = subnet(options, len(self.grid) * options.num_classes)
        self.box_subnet = subnet(options, len(self.grid) * 4)
        nn.init.constant_(self.class_subnet[-1].bias, -math.log((1 - _PRIOR) / _PRIOR))

    def forward(self, images: Tensor) -> Outputs:
        levels = self.pyramid(self.backbone(self.normalize(images)))
        sizes = [(level.shape[2], level.shape[3]) for level in levels]
        return Outputs(
            _by_anchor([self.class_subnet(level) for level in levels], self.options.num_classes),
            _by_anchor([self.box_subnet(level) for level in levels], 4),
            self.grid.boxes(sizes, images.device),
        )


def _by_anchor(levels: list[Tensor], numbers: int) -> Tensor:
    """(batch, anchors x numbers, height, width) of each level to (batch, A, numbers)."""
    parts = [level.permute(0, 2, 3, 1).reshape(len(level), -1, numbers) for level in levels]
    return torch.cat(parts, dim=1)


def subnet(options: ModelOptions, out_channels: int) -> nn.Sequential:
    """Return convolutions of 3 x 3 over a level; the same weights see all levels."""
    channels = options.pyramid_channels
    layers: list[nn.Module] = []
    for _ in range(options.num_convolutions):
        # A batch norm would keep one mean for five levels, whose numbers are not alike.
        layers += [convolution(channels, channels, 3), norm_of(channels, "group"), nn.ReLU()]
    last = nn.Conv2d(channels, out_channels, 3, padding=1)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*layers, last)


class Pyramid(nn.Module):
    """C3, C4, C5 to P3, P4, P5, P6, P7."""

    def __init__(self, in_channels: tuple[int, int, int], channels: int, norm: Norm) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(normed(n, channels, 1, norm=norm) for n in in_channels)
        self.smooth = nn.ModuleList(normed(channels, channels, 3, norm=norm) for _ in in_channels)
        self.p6 = nn.Conv2d(in_channels[-1], channels, 3, stride=2, padding=1)
        self.p7 = nn.Conv2d(channels, channels, 3, stride=2, padding=1)

    def forward(self, features: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        p3, p4, p5 = (one(feature) for one, feature in zip(self.lateral, features, strict=True))
        # To the size of the lower level rather than by 2: an odd size was rounded up on its way.
        p4 = p4 + functional.interpolate(p5, size=p4.shape[2:])
        p3 = p3 + functional.interpolate(p4, size=p3.shape[2:])
        levels = [smooth(level) for smooth, level in zip(self.smooth, (p3, p4, p5), strict=True)]
        p6 = self.p6(features[-1])
        return [*levels, p6, self.p7(functional.relu(p6))]


class ResNet(nn.Module):
    """Images to C3, C4, C5.

    Parameters and buffers have torchvision's names, so that the state dicts of its ResNets fit.

    Attributes:
        out_channels: Of the three.
    """

    def __init__(self, depth: int, width: float, norm: Norm) -> None:
        super().__init__()
        block = Bottleneck if depth >= 50 else BasicBlock
        channels = [max(_CHANNELS_PER_GROUP, round(64 * 2**stage * width)) for stage in range(4)]
        channels = [-(-n // _CHANNELS_PER_GROUP) * _CHANNELS_PER_GROUP for n in channels]
        self.conv1 = convolution(3, channels[0], 7, stride=2)
        self.bn1 = norm_of(channels[0], norm)
        stages, before = [], channels[0]
        for stage, (own, num_blocks) in enumerate(zip(channels, _BLOCKS[depth], strict=True)):
            blocks = []
            for number in range(num_blocks):
                stride = 2 if stage > 0 and number == 0 else 1
                blocks.append(block(before, own, stride, norm))
                before = own * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        c3, c4, c5 = (n * block.expansion for n in channels[1:])
        self.out_channels = c3, c4, c5

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = functional.relu(self.bn1(self.conv1(images)))
        c2 = self.layer1(functional.max_pool2d(x, 3, stride=2, padding=1))
        c3 = self.layer2(c2)
        c4 = self.layer3(c3)
        return c3, c4, self.layer4(c4)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = convolution(before, channels, 3, stride=stride)
        self.bn1 = norm_of(channels, norm)
        self.conv2 = convolution(channels, channels, 3)
        self.bn2 = norm_of(channels, norm)
        self.downsample = _shortcut(before, channels, stride, norm)
        # The last norm of a block begins at 0: the block is the identity at first.
        nn.init.zeros_(self.bn2.weight)

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        return functional.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, before: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        wide = channels * self.expansion
        self.conv1 = convolution(before, channels, 1)
        self.bn1 = norm_of(channels, norm)
        self.conv2 = convolution(channels, channels, 3, stride=stride)
        self.bn2 = norm_of(channels, norm)
        self.conv3 = convolution(channels, wide, 1)
        self.bn3 = norm_of(wide, norm)
        self.downsample = _shortcut(before, wide, stride, norm)
        nn.init.zeros_(self.bn3.weight)  # as in BasicBlock

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.bn1(self.conv1(x)))
        out = functional.relu(self.bn2(self.conv2(out)))
        return functional.relu(self.bn3(self.conv3(out)) + self.downsample(x))


def load_backbone(backbone: ResNet, path: Path) -> None:
    """Put weights of a torchvision ResNet into a backbone: those of its `state_dict()`, in a file.

    Names and shapes are compared, numbers are not. The classifier, `fc`, is passed over.

    Raises:
        ValueError: the file is another network's or depth's, or holds more than tensors.
    """
    try:
        state = checkpoint.load(path)
        given = _shapes(state)
    except (AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or holds other things than the tensors of a state dict. Write it "
            "by torch.save(resnet.state_dict(), path)"
        ) from error
    needed = _shapes(backbone.state_dict())
    differing = [
        f"{name} is {given.get(name, 'absent')} in the file and {needed.get(name, 'absent')} here"
        for name in {**needed, **given}
        if given.get(name) != needed.get(name)
    ]
    if differing:
        raise ValueError(
            f"{path} does not fit this backbone: {len(differing)} names or shapes differ. "
            f"{'; '.join(differing[:3])}. Give the --depth of the file, with --width 1 and "
            "--norm batch"
        )
    backbone.load_state_dict(state, strict=False)


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return what has to agree: old files of torchvision do not count batches."""
    return {
        name: tuple(value.shape)
        for name, value in state.items()
        if not name.startswith("fc.") and not name.endswith(".num_batches_tracked")
    }


def _shortcut(before: int, channels: int, stride: int, norm: Norm) -> nn.Module:
    if before == channels and stride == 1:
        return nn.Identity()
    return normed(before, channels, 1, stride=stride, norm=norm)


def normed(before: int, channels: int, size: int, *, stride: int = 1, norm: Norm) -> nn.Sequential:
    return nn.Sequential(
        convolution(before, channels, size, stride=stride), norm_of(channels, norm)
    )


def convolution(before: int, channels: int, size: int, *, stride: int = 1) -> nn.Conv2d:
    """Return a convolution without a bias, as a norm follows it."""
    made = nn.Conv2d(before, channels, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


def norm_of(channels: int, norm: Norm) -> nn.Module:
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(math.gcd(channels, max(1, channels // _CHANNELS_PER_GROUP)), channels)
