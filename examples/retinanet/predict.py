# SPDX-License-Identifier: Apache-2.0
"""Draw what a trained RetinaNet finds in photos.

    python predict.py PHOTO-OR-FOLDER ... --checkpoint runs/first/checkpoint.pt --out found

OUT has a picture NAME.jpg of each photo, with boxes, classes and scores, and detections.json with
the same in numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import checkpoint
import torch
from data import loader_for, photo_set
from evaluate import detections_in, restored
from PIL import Image, ImageDraw, ImageFont

from penstock.errors import StoreError
from penstock.images import decode_image
from penstock.stores import open_store

if TYPE_CHECKING:
    from collections.abc import Sequence

    from evaluate import Detections

# Okabe and Ito, "Color Universal Design": colours that the colour-blind can tell apart.
COLOURS: Final = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#0072b2")


def photo_files(sources: Sequence[Path]) -> list[Path]:
    """Return the files that are named, and the images in the folders that are."""
    found = []
    for source in sources:
        if source.is_dir():
            names = open_store(f"folder:{source}", layout="flat").keys
            found += [source / name for name in names]
        else:
            found.append(source)
    return found


def predict(
    state: dict[str, Any],
    files: Sequence[Path],
    out: Path,
    *,
    least_score: float = 0.3,
    num_workers: int = 0,
    device: torch.device | str = "cpu",
) -> dict[str, list[dict[str, Any]]]:
    """Write a picture of each photo, with what the network of a checkpoint finds in it.

    Returns:
        By file: "class", "score" and "box" of each detection, best first. Boxes are left, top,
        right, bottom in pixels of the photo, 0-based and half-open.
    """
    if not isinstance(state, dict) or "model_options" not in state:
        raise ValueError("the checkpoint is none of train.py's")
    for file in files:  # a link in OUT leads to the photo, too
        if out.resolve() in (file.resolve().parent, file.parent.resolve()):
            raise ValueError(f"{file} lies in {out}: give another --out for the pictures")
    device = torch.device(device)
    photos = photo_set(files, state["options"]["size"])
    loader = loader_for(photos, 8, seed=0, num_workers=num_workers, device=device)
    found = detections_in(restored(state, device), loader, least_score=least_score)
    out.mkdir(parents=True, exist_ok=True)
    results = {}
    for file, (detections, target) in zip(files, found, strict=True):
        objects = as_dicts(detections, state["class_names"])
        picture = Image.fromarray(decode_image(file.read_bytes()))
        draw(picture, objects, state["class_names"])
        picture.save(out / f"{target['image_id']}.jpg", quality=90)
        results[str(file)] = objects
    return results


def as_dicts(detections: Detections, class_names: Sequence[str]) -> list[dict[str, Any]]:
    """Return detections as JSON can have them."""
    return [
        {"class": class_names[label], "score": round(score, 4), "box": [round(x, 1) for x in box]}
        for box, score, label in zip(*(column.tolist() for column in detections), strict=True)
    ]


def draw(
    picture: Image.Image, objects: Sequence[dict[str, Any]], class_names: Sequence[str]
) -> None:
    """Draw boxes, classes and scores; the best detections last, on top."""
    pen = ImageDraw.Draw(picture)
    text_px = max(11, min(picture.size) // 30)
    font = ImageFont.load_default(text_px)
    for one in reversed(objects):
        colour = COLOURS[class_names.index(one["class"]) % len(COLOURS)]
        left, top, right, bottom = map(round, one["box"])
        corners = (left, top, max(left, right - 1), max(top, bottom - 1))  # half-open: outermost
        pen.rectangle(corners, outline=colour, width=max(2, text_px // 8))
        text = f"{one['class']} {one['score']:.2f}"
        room_px = picture.width - round(pen.textlength(text, font))
        place = (max(0, min(left, room_px)), max(0, top - text_px - 2))
        pen.rectangle(pen.textbbox(place, text, font), fill=colour)
        pen.text(place, text, "black", font)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", type=Path, nargs="+", help="image files, and folders of them")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the pictures")
    parser.add_argument("--least-score", type=float, default=0.3, help="below it nothing is drawn")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    try:
        results = predict(
            checkpoint.load(given.checkpoint),
            photo_files(given.sources),
            given.out,
            least_score=given.least_score,
            num_workers=given.num_workers,
            device=given.device,
        )
    except (OSError, StoreError, ValueError) as error:  # the user's to mend: no traceback
        print(f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()), file=sys.stderr)
        return 1
    path = given.out / "detections.json"
    path.write_text(json.dumps(results, indent=1), "utf-8")
    print(f"{path}: {sum(map(len, results.values()))} objects in {len(results)} photos")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
