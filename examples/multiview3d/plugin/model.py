# SPDX-License-Identifier: Apache-2.0
"""A detector with the structure of DETR3D, small enough for a CPU.

Queries stand for objects. Each has a point in space, which is projected into all cameras; where it
is seen, the image's features are fetched, and the query learns from them what is there. Predictions
and boxes are matched one to one, so that nothing has to be suppressed afterwards.

Reference:
    Wang et al., DETR3D: 3D Object Detection from Multi-view Images via 3D-to-2D Queries, CoRL 2021.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

__all__ = ["TinyDETR3D", "decode_boxes", "encode_boxes", "sample_views"]

STRIDE = 8  # of the backbone, in pixels
MIN_DEPTH_M = 0.1  # nearer points lie in the camera itself; their pixels mean nothing


def sample_views(
    features: Tensor, points: Tensor, lidar2img: Tensor, image_sizes: Tensor, stride: int
) -> tuple[Tensor, Tensor]:
    """Return what the cameras see at points in space, bilinear between cells of features.

    Args:
        features: (B, N, C, h, w). The centre of cell (i, j) is pixel (i, j) times `stride`, as it
            is after convolutions with kernels of 2 k + 1 and a padding of k.
        points: (B, Q, 3), in metres, in the lidar's frame.
        lidar2img: (B, N, 4, 4), to pixels of the images.
        image_sizes: (B, N, 2), height and width before padding.
        stride: From cell to cell, in pixels.

    Returns:
        (B, N, Q, C); and whether the camera sees the point, (B, N, Q). Not: behind it, or beside,
        where the image was padded too.
    """
    batch, cameras, channels, height, width = features.shape
    homogeneous = F.pad(points, (0, 1), value=1.0)
    # Not einsum: autocast does it in float16, to which a column times its depth is infinite.
    seen = (lidar2img.unsqueeze(2) * homogeneous[:, None, :, None]).sum(dim=-1)
    depth = seen[..., 2:3]
    pixels = seen[..., :2] / depth.clamp(min=MIN_DEPTH_M)
    # Whole numbers are centres of pixels, so an image begins half a pixel before the first.
    edges = image_sizes.flip(-1).unsqueeze(2) - 0.5
    is_within = ((pixels >= -0.5) & (pixels <= edges)).all(dim=-1)
    is_seen = (depth[..., 0] > MIN_DEPTH_M) & is_within
    # grid_sample's -1 and 1 are the centres of the first and the last cell; what lies beyond (up to
    # a stride, at the right and bottom) is taken from the nearest.
    last = pixels.new_tensor([max(1, width - 1), max(1, height - 1)])
    sampled = F.grid_sample(
        features.flatten(0, 1),
        (pixels * (2 / stride) / last - 1).flatten(0, 1).unsqueeze(2),
        padding_mode="border",
        align_corners=True,
    )
    return sampled.view(batch, cameras, channels, -1).transpose(2, 3), is_seen


def encode_boxes(boxes: Tensor) -> Tensor:
    """Return boxes (..., 7) as the network has them: centre, log sizes, sine and cosine of yaw."""
    yaw = boxes[..., 6:]
    return torch.cat([boxes[..., :3], boxes[..., 3:6].log(), yaw.sin(), yaw.cos()], dim=-1)


def decode_boxes(codes: Tensor) -> Tensor:
    """Return the boxes (..., 7) of codes (..., 8)."""
    yaw = torch.atan2(codes[..., 6:7], codes[..., 7:8])
    return torch.cat([codes[..., :3], codes[..., 3:6].exp(), yaw], dim=-1)


class DecoderLayer(nn.Module):
    """Queries look at each other, then at the images, and move their points."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(channels, 4, batch_first=True)
        self.of_views = nn.Linear(channels, channels)
        self.feed_forward = nn.Sequential(
            nn.Linear(channels, 2 * channels), nn.ReLU(), nn.Linear(2 * channels, channels)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(3))

    def forward(self, queries: Tensor, sampled: Tensor, is_seen: Tensor) -> Tensor:
        queries = self.norms[0](queries + self.attention(queries, queries, queries)[0])
        weights = is_seen.unsqueeze(-1).to(sampled.dtype)
        mean = (sampled * weights).sum(1) / weights.sum(1).clamp(min=1)
        queries = self.norms[1](queries + self.of_views(mean))
        return self.norms[2](queries + self.feed_forward(queries))


@MODELS.register_module()
class TinyDETR3D(BaseModel):
    """See above.

    Args:
        num_classes: Of the data set.
        num_queries: More than any sample has boxes.
        channels: Of features and queries; a multiple of 8.
        num_layers: Of the decoder.
        range_m: Half the side of the square around the car, and how far points lie in x and y.
        heights_m: Lowest and highest centre.
    """

    def __init__(
        self,
        num_classes: int = 10,
        num_queries: int = 100,
        channels: int = 32,
        num_layers: int = 2,
        range_m: float = 51.2,
        heights_m: tuple[float, float] = (-3.0, 3.0),
        data_preprocessor: dict[str, Any] | None = None,
        init_cfg: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(data_preprocessor, init_cfg)
        self.backbone = nn.Sequential(
            *(
                layer
                for before, after in ((3, 16), (16, 24), (24, channels))
                for layer in (
                    nn.Conv2d(before, after, 3, stride=2, padding=1),
                    nn.GroupNorm(8, after),
                    nn.ReLU(),
                )
            )
        )
        self.queries = nn.Embedding(num_queries, channels)
        self.points = nn.Linear(channels, 3)
        self.layers = nn.ModuleList(DecoderLayer(channels) for _ in range(num_layers))
        self.classes = nn.ModuleList(nn.Linear(channels, num_classes) for _ in range(num_layers))
        self.boxes = nn.ModuleList(nn.Linear(channels, 8) for _ in range(num_layers))
        for classes in self.classes:
            nn.init.constant_(classes.bias, -4.0)  # most queries are nothing
        nn.init.uniform_(self.points.weight, -0.5, 0.5)  # so that the points lie all over the range
        low, high = heights_m
        self.register_buffer("lowest", torch.tensor([-range_m, -range_m, low]))
        self.register_buffer("extent", torch.tensor([2 * range_m, 2 * range_m, high - low]))

    def forward(
        self,
        images: Tensor,
        lidar2img: Tensor,
        boxes: Tensor,
        labels: Tensor,
        num_boxes: Tensor,
        metas: list[dict[str, Any]],
        mode: str = "tensor",
        **_: Tensor,
    ) -> Any:  # noqa: ANN401 - by mode, as mmengine has it
        sizes = images.new_tensor([meta["img_shapes"] for meta in metas])
        *others, last = self.predict(images, lidar2img, sizes)
        if mode == "loss":
            counts = num_boxes.tolist()
            truth = boxes.split(counts), labels.split(counts)
            losses = self.loss(*last, *truth)
            for number, of_layer in enumerate(others):
                for name, value in self.loss(*of_layer, *truth).items():
                    losses[f"d{number}.{name}"] = value
            return losses
        logits, codes = last
        if mode == "predict":
            scores, classes = logits.sigmoid().max(dim=-1)
            found = zip(decode_boxes(codes), scores, classes, metas, strict=True)
            return [
                {"boxes": b, "scores": s, "labels": c, "token": meta["token"]}
                for b, s, c, meta in found
            ]
        return logits, codes

    def predict(
        self, images: Tensor, lidar2img: Tensor, sizes: Tensor
    ) -> list[tuple[Tensor, Tensor]]:
        """Return class logits (B, Q, classes) and box codes (B, Q, 8) of each decoder layer.

        Args:
            images: (B, N, 3, H, W), padded.
            lidar2img: (B, N, 4, 4).
            sizes: (B, N, 2), height and width before padding.
        """
        batch, cameras = images.shape[:2]
        features = self.backbone(images.flatten(0, 1)).unflatten(0, (batch, cameras))
        queries = self.queries.weight.expand(batch, -1, -1)
        # Between 0 and 1, as inverse sigmoids, so that layers can move them by adding.
        # In float32 under autocast, too: float16 has steps of 5 cm here.
        places = self.points(queries).float()
        found = []
        for layer, to_classes, to_boxes in zip(self.layers, self.classes, self.boxes, strict=True):
            points = self.lowest + self.extent * places.sigmoid()
            sampled, is_seen = sample_views(features, points, lidar2img, sizes, STRIDE)
            queries = layer(queries, sampled, is_seen)
            codes = to_boxes(queries).float()
            places = places + codes[..., :3]
            centres = self.lowest + self.extent * places.sigmoid()
            found.append((to_classes(queries), torch.cat([centres, codes[..., 3:]], dim=-1)))
            places = places.detach()  # each layer learns its own step, by its own loss
        return found

    def loss(
        self,
        logits: Tensor,
        codes: Tensor,
        boxes: tuple[Tensor, ...],
        labels: tuple[Tensor, ...],
    ) -> dict[str, Tensor]:
        """Return the focal loss of the classes and the L1 loss of matched boxes, of one layer."""
        wanted = torch.zeros_like(logits)
        scale = torch.cat([self.extent, self.extent.new_ones(5)])  # metres to parts of the range
        box_losses = []
        for sample, (of_sample, classes) in enumerate(zip(boxes, labels, strict=True)):
            truth = encode_boxes(of_sample)
            cost = torch.cdist(codes[sample] / scale, truth / scale, p=1)
            cost = 5 * cost - 2 * logits[sample].sigmoid()[:, classes]
            rows, columns = linear_sum_assignment(cost.detach().cpu().numpy())
            wanted[sample, rows, classes[columns]] = 1.0
            box_losses.append(((codes[sample, rows] - truth[columns]) / scale).abs().sum())
        total = max(1, sum(map(len, boxes)))
        focal = focal_loss(logits, wanted).sum() / total
        return {"loss_cls": 2 * focal, "loss_bbox": 5 * torch.stack(box_losses).sum() / total}


def focal_loss(logits: Tensor, wanted: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Return the focal loss of each logit, of the shape of `logits`.

    Reference:
        Lin et al., Focal Loss for Dense Object Detection, ICCV 2017.
    """
    cross_entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    missed = (wanted - logits.sigmoid()).abs()
    weight = torch.where(wanted > 0, alpha, 1 - alpha)
    return weight * missed**gamma * cross_entropy
