# SPDX-License-Identifier: Apache-2.0
"""Score a trained RetinaNet: mAP@0.5 and mAP@[.5:.95], by pycocotools.

python evaluate.py FOLDER --checkpoint runs/first/checkpoint.pt --split val
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import checkpoint
import numpy as np
import torch
from anchors import box_iou, decode
from data import evaluation_set, loader_for
from model import ModelOptions, RetinaNet
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from penstock.vision import Letterbox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from model import Outputs
    from torch import Tensor


class Detections(NamedTuple):
    """What was found in one image, best first."""

    boxes: Tensor  # (N, 4)
    scores: Tensor  # (N,)
    labels: Tensor  # (N,)


class Objects(NamedTuple):
    """What is in one image."""

    boxes: Any  # (N, 4)
    labels: Any  # (N,)
    difficult: Any  # (N,), True for what counts neither way


@dataclass(frozen=True)
class Scores:
    """Mean average precision; None where there is no object to find."""

    map_50: float | None
    map_50_95: float | None
    by_class_50: dict[str, float | None]
    by_class_50_95: dict[str, float | None]


def detect(
    outputs: Outputs,
    size: tuple[int, int],
    *,
    least_score: float = 0.05,
    iou_threshold: float = 0.5,
    most_candidates: int = 1000,
    most: int = 100,
) -> list[Detections]:
    """Return what the network found in each image of a batch.

    Args:
        outputs: Of `RetinaNet`.
        size: Height and width of the images that it got, in pixels: boxes are clipped to them,
            before they suppress each other.
        least_score: Probability below which nothing counts.
        iou_threshold: Two boxes of a class that overlap more are one object.
        most_candidates: Best pairs of anchor and class of an image that are looked at.
        most: Detections of an image; COCO counts 100.
    """
    height, width = size
    found = []
    num_classes = outputs.class_logits.shape[2]
    for logits, offsets in zip(outputs.class_logits, outputs.box_offsets, strict=True):
        scores = logits.sigmoid().flatten()
        scores, places = scores.topk(min(most_candidates, len(scores)))
        places, scores = places[scores >= least_score], scores[scores >= least_score]
        anchors, labels = places // num_classes, places % num_classes
        boxes = decode(offsets[anchors], outputs.anchors[anchors])
        boxes = torch.minimum(boxes.clamp(min=0), boxes.new_tensor([width, height] * 2))
        kept = non_maximum_suppression(boxes, scores, labels, iou_threshold)[:most]
        found.append(Detections(boxes[kept], scores[kept], labels[kept]))
    return found


def non_maximum_suppression(
    boxes: Tensor, scores: Tensor, labels: Tensor, iou_threshold: float
) -> Tensor:
    """Return the boxes that no better one of their class overlaps by more than the threshold.

    Greedy, as ever: what was suppressed suppresses nothing.

    Returns:
        int64, their numbers, best first; among equal scores in the order given.
    """
    order = scores.argsort(descending=True, stable=True)
    boxes, labels = boxes[order], labels[order]
    overlaps = (box_iou(boxes, boxes) > iou_threshold) & (labels[:, None] == labels)
    is_gone = np.zeros(len(order), dtype=bool)
    kept = []
    for number, row in enumerate(overlaps.cpu().numpy()):
        if not is_gone[number]:
            kept.append(number)
            is_gone |= row
    return order[kept]


class _Evaluation(COCOeval):
    """COCO's, with VOC's difficult objects for its crowds.

    To find a crowd is no fault, any number of times, nor is to miss it. But COCO takes a detection
    for found that lies somewhere inside of a crowd. An object is one thing, difficult or not: a
    detection of it overlaps it by intersection over union.
    """

    def computeIoU(self, imgId: int, catId: int) -> Any:  # noqa: ANN401 - their names
        crowds = [one for one in self._gts[imgId, catId] if one["iscrowd"]]
        for one in crowds:
            one["iscrowd"] = 0
        try:
            return super().computeIoU(imgId, catId)
        finally:
            for one in crowds:
                one["iscrowd"] = 1


def score(
    objects: Sequence[Objects],
    detections: Sequence[Detections],
    class_names: Sequence[str],
    *,
    most: int = 100,
) -> Scores:
    """Return COCO's scores; image k of one is image k of the other.

    An object marked as difficult counts neither way: to find it is no fault, nor is to miss it.

    Args:
        objects: Of each image.
        detections: Of each image.
        class_names: Of all classes, by number.
        most: Detections of an image and class that count, the best ones. Warns of images with more
            objects than that: some of them cannot be found.
    """
    counts = [np.count_nonzero(~np.asarray(one.difficult, bool)) for one in objects]
    if crowded := [count for count in counts if count > most]:
        warnings.warn(
            f"{len(crowded)} of {len(counts)} images have more than {most} objects, up to "
            f"{max(crowded)}, and {most} detections of an image count: the scores cannot get to 1. "
            f"Count more by --most {max(crowded)}, and say so beside the scores",
            stacklevel=2,
        )
    truth = COCO()
    truth.dataset = {
        "info": {},
        "images": [{"id": number} for number in range(len(objects))],
        "categories": [{"id": n, "name": name} for n, name in enumerate(class_names)],
        "annotations": list(_annotations(objects)),
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints how long it took
        truth.createIndex()
        found = COCO()
        found.dataset = {**truth.dataset, "annotations": list(_results(detections))}
        found.createIndex()
        evaluation = _Evaluation(truth, found, "bbox")
        evaluation.params.maxDets = [most]
        evaluation.evaluate()
        evaluation.accumulate()
    # (IoU thresholds, recalls, classes, areas, most detections); -1 for a class without objects
    precision = evaluation.eval["precision"][:, :, :, 0, -1]
    at_50 = [_mean(precision[0, :, k]) for k in range(len(class_names))]
    at_all = [_mean(precision[:, :, k]) for k in range(len(class_names))]
    return Scores(
        map_50=_mean(precision[0]),
        map_50_95=_mean(precision),
        by_class_50=dict(zip(class_names, at_50, strict=True)),
        by_class_50_95=dict(zip(class_names, at_all, strict=True)),
    )


def _mean(precision: np.ndarray) -> float | None:
    known = precision[precision > -1]
    return float(known.mean()) if known.size else None


def _annotations(objects: Iterable[Objects]) -> Iterable[dict[str, Any]]:
    number = 0
    for image, (boxes, labels, difficult) in enumerate(objects):
        for box, label, is_difficult in zip(boxes, labels, difficult, strict=True):
            number += 1  # from 1: COCOeval takes 0 for "not matched"
            yield {
                "id": number,
                **_placed(image, box, label),
                "iscrowd": int(is_difficult),  # see `_Evaluation`
            }


def _results(detections: Iterable[Detections]) -> Iterable[dict[str, Any]]:
    number = 0
    for image, (boxes, scores, labels) in enumerate(detections):
        for box, one_score, label in zip(boxes, scores, labels, strict=True):
            number += 1
            yield {"id": number, **_placed(image, box, label), "score": float(one_score)}


def _placed(image: int, box: Any, label: Any) -> dict[str, Any]:  # noqa: ANN401 - rows
    left, top, right, bottom = map(float, box)
    width, height = right - left, bottom - top
    return {
        "image_id": image,
        "category_id": int(label),
        "bbox": [left, top, width, height],
        "area": width * height,
    }


def restored(state: dict[str, Any], device: torch.device) -> RetinaNet:
    """Return the network of a checkpoint, ready to detect."""
    model = RetinaNet(ModelOptions(**state["model_options"]))
    model.load_state_dict(state["model"])
    return model.to(device, memory_format=torch.channels_last).eval()


@torch.inference_mode()
def detections_in(
    model: RetinaNet, loader: Iterable[Any], *, least_score: float = 0.05, most: int = 100
) -> Iterator[tuple[Detections, dict[str, Any]]]:
    """Yield what is found in each image, in pixels of the image as it is, and the image's target.

    Args:
        model: Of `restored`.
        loader: Its images are letterboxed.
        least_score: See `detect`.
        most: Detections of an image.
    """
    for images, targets in loader:
        detected = detect(
            model(images),
            images.shape[1:3],
            least_score=least_score,
            most_candidates=max(1000, 10 * most),
            most=most,
        )
        for found, target in zip(detected, targets, strict=True):
            boxes = Letterbox.undo(found.boxes.cpu().numpy(), target["letterbox"])
            yield found._replace(boxes=torch.from_numpy(boxes)), target


def evaluate(
    state: dict[str, Any],
    data: Path,
    split: str | None,
    *,
    batch_size: int = 8,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
    most: int = 100,
) -> Scores:
    """Score the network of a checkpoint on a split, in pixels of the images as they are.

    Of each image `most` detections count.
    """
    device = torch.device(device)
    dataset = evaluation_set(data, split, state["options"]["size"], state["class_names"])
    loader = loader_for(dataset, batch_size, seed=0, num_workers=num_workers, device=device)
    objects, detections = [], []
    for found, target in detections_in(restored(state, device), loader, most=most):
        detections.append(found)
        objects.append(_objects(target))
    return score(objects, detections, state["class_names"], most=most)


def _objects(target: dict[str, Any]) -> Objects:
    boxes = Letterbox.undo(target["boxes"].cpu().numpy(), target["letterbox"])
    difficult = target.get("difficult", torch.zeros(len(boxes), dtype=torch.bool))
    return Objects(boxes, target["labels"].tolist(), difficult.tolist())


def as_table(scores: Scores) -> str:
    """Return the scores as a table of Markdown."""
    rows = [("all classes", scores.map_50, scores.map_50_95)]
    for name, at_50 in scores.by_class_50.items():
        rows.append((name, at_50, scores.by_class_50_95[name]))
    lines = [f"| {name} | {_shown(at_50)} | {_shown(at_all)} |" for name, at_50, at_all in rows]
    return "\n".join(["| class | mAP@0.5 | mAP@[.5:.95] |", "|---|---|---|", *lines])


def _shown(score: float | None) -> str:
    return "-" if score is None else f"{score:.3f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="folder of Annotations, JPEGImages, ImageSets")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--split", default="val")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--most", type=int, default=100, help="detections of an image that count")
    parser.add_argument("--json", type=Path, help="write the scores to this file as well")
    given = parser.parse_args(arguments)
    scores = evaluate(
        checkpoint.load(given.checkpoint),
        given.data,
        given.split,
        num_workers=given.num_workers,
        device=given.device,
        most=given.most,
    )
    print(as_table(scores))
    if given.json:
        given.json.write_text(json.dumps(asdict(scores), indent=2), "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
