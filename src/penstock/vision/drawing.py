# SPDX-License-Identifier: Apache-2.0
"""`contact_sheet`: samples of any usual form, or those of a batch, drawn into one image."""

from __future__ import annotations

import contextlib
import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from penstock.errors import ConfigError
from penstock.vision.samples import as_array, is_tensor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_PAPER: Final = (245, 245, 245)
_GAP_PX: Final = 8
_TEXT_PX: Final = 12
LINE_PX: Final = 16  # of text
_CHIP_PX: Final = 12  # side of a colour in the legend
_MOST_CLASSES: Final = 60  # of the legend
_MOST_PX: Final = 200_000_000  # of a sheet: 600 MB; few programs open more
_COARSE: Final = 3.0  # enlarged more than this, pixels stay pixels
_MOST_CHANNELS: Final = 4

# Colours that the colour-blind can tell apart (Okabe and Ito, "Color Universal Design"), RGB.
_COLOURS: Final = (
    (230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66),
    (0, 114, 178), (213, 94, 0), (204, 121, 167),
)  # fmt: skip
_SHADES: Final = (1.0, 0.62, 0.35)  # of further classes
_NO_CLASS: Final = (160, 160, 160)
_DARK: Final = (20, 20, 20)
_SHADE: Final = np.uint8(110)  # of 255: how much of its colour a mask has
_WHITE: Final = (255, 255, 255)
_BRIGHT: Final = 140.0  # of 255; on brighter grounds black can be read better than white
_FAR: Final = 1e5  # pixels
_HIDDEN: Final = 1  # visibility of a landmark that is marked, but covered
_MOST_NAMED: Final = 0.1  # of an image, by one name; else the legend has to do
_SMALL_PX: Final = 24  # boxes below this get no dark edge, which would leave nothing to be seen
_MANY_SCRIPTS: Final = (
    "NotoSansCJK-Regular.ttc", "wqy-microhei.ttc", "wqy-zenhei.ttc", "msyh.ttc", "PingFang.ttc",
    "Arial Unicode.ttf", "DejaVuSans.ttf",
)  # fmt: skip

_NAMES: Final = ("image", "images", "img", "pixel_values")  # of images in a dict
_SLACK: Final = 0.02  # beyond 0..1 of rounding, and of a resampling that overshoots
# The usual normalisations, for images that no known one fits.
_USUAL: Final = (((0.5,), (0.5,)), ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

Colour = tuple[int, int, int]


def contact_sheet(
    samples: Sequence[Any],
    class_names: Sequence[str] = (),
    *,
    columns: int | None = None,
    tile_px: int = 360,
) -> NDArray[np.uint8]:
    """Return one image of many samples, scaled to tiles, with what is marked in them.

    Below an image stand its class, or what it is called; below all, the colours of the classes.
    Landmarks are white; those that are marked as hidden are hollow.

    Args:
        samples: At least one. Each is a dict with "image" and, as far as there are any, "boxes"
            (N, 4), "labels" (N,), "landmarks" (N, K, 2), "visibility" (N, K) and "masks" (N, H, W);
            or (image, dict of these); or (image, class). Images may be uint8 or floats, with the
            channels last or first. Tensors are taken, too.
        class_names: Name of class 0, 1, 2 …; numbers are shown without.
        columns: Tiles in a row; as many as make about a square if not given.
        tile_px: Width of a tile, and the most height of its image.

    Returns:
        uint8 of shape (height, width, 3), RGB; a fresh array.

    Raises:
        ConfigError: there is no sample, or one without an image; a number is out of range; the
            sheet would have more than 200 million pixels.

    Example:
        >>> cell = {"image": np.zeros((48, 64, 3), np.uint8), "image_id": "a"}
        >>> contact_sheet([cell] * 6, columns=3, tile_px=100).shape
        (206, 332, 3)
    """
    if not samples or tile_px < 32 or (columns is not None and columns < 1):
        raise ConfigError(
            f"a contact sheet needs a sample, tile_px of 32 or more and columns of 1 or more, but "
            f"got {len(samples)} samples, tile_px={tile_px}, columns={columns}"
        )
    made = list(map(sample_of, samples))
    # Classes without numbers are numbered here. Otherwise two might have the same colour.
    labels = [label for sample in made for label in sample.get("labels", ())]
    texts = {str(label) for label in labels if isinstance(label, str)}
    class_names = [*class_names, *sorted(texts.difference(class_names))]
    columns = min(len(made), columns or math.ceil(math.sqrt(len(made))))
    rows = [made[start : start + columns] for start in range(0, len(made), columns)]
    heights = [max(_size_in_tile(one, tile_px)[1] for one in row) + LINE_PX for row in rows]
    width = columns * (tile_px + _GAP_PX) + _GAP_PX
    height = sum(heights) + (len(rows) + 1) * _GAP_PX
    if width * height > _MOST_PX:  # before anything is drawn, rather than fill the memory
        raise ConfigError(
            f"a sheet of {len(samples):,} images would be {width:,} x {height:,} pixels, and "
            f"{_MOST_PX:,} is the most: show fewer images, or smaller ones (tile_px, --tile)."
        )
    sheet = Image.new("RGB", (width, height), _PAPER)
    top = _GAP_PX
    for row, row_px in zip(rows, heights, strict=True):
        for number, sample in enumerate(row):
            left = _GAP_PX + number * (tile_px + _GAP_PX)
            sheet.paste(_tile(sample, class_names, tile_px), (left, top))
        top += row_px + _GAP_PX
    return np.concatenate([np.asarray(sheet), *_legend(labels, class_names, width)])


def _size_in_tile(sample: dict[str, Any], tile_px: int) -> tuple[int, int]:
    """Return width and height of an image, scaled to a tile."""
    height, width = sample["image"].shape[:2]
    scale = tile_px / max(height, width)
    return max(1, round(width * scale)), max(1, round(height * scale))


def _tile(sample: dict[str, Any], class_names: Sequence[str], tile_px: int) -> Image.Image:
    """Return an image, scaled and drawn into, with its caption."""
    size = _size_in_tile(sample, tile_px)
    tile = Image.new("RGB", (tile_px, size[1] + LINE_PX), _PAPER)
    image = Image.fromarray(sample["image"])
    scale = size[0] / image.width, size[1] / image.height
    how = Image.Resampling.BILINEAR if max(scale) <= _COARSE else Image.Resampling.NEAREST
    picture = image.resize(size, Image.Resampling.BOX if min(scale) < 1 else how)
    _draw_objects(picture, sample, class_names)
    tile.paste(picture, ((tile_px - size[0]) // 2, 0))
    names = [str(sample["image_id"])] if "image_id" in sample else []
    names += [class_text(sample["label"], class_names)] if "label" in sample else []
    caption = fitted("  ".join(names), tile_px)
    _write(tile, caption, ((tile_px - text_width(caption)) // 2, size[1] + 1), _PAPER)
    return tile


def _legend(
    labels: list[Any], class_names: Sequence[str], width: int
) -> Iterator[NDArray[np.uint8]]:
    """Yield lines with the colour, the name and the number of the objects of each class."""
    plain = [label for label in labels if isinstance(label, str) or not np.ndim(label)]
    numbers = (_class_of(label, class_names) for label in plain)
    counts = Counter(number for number in numbers if number is not None)
    left, line = width, None
    for label in sorted(counts)[:_MOST_CLASSES]:
        text = fitted(f"{class_text(label, class_names)} ({counts[label]})", width // 2)
        needed = _CHIP_PX + 4 + text_width(text) + 3 * _GAP_PX
        if line is None or left + needed > width:
            if line is not None:
                yield np.asarray(line)
            line, left = Image.new("RGB", (width, LINE_PX + _GAP_PX), _PAPER), _GAP_PX
        line.paste(class_colour(label), (left, 2, left + _CHIP_PX, 2 + _CHIP_PX))
        _write(line, text, (left + _CHIP_PX + 4, 0), _PAPER)
        left += needed
    if line is not None:
        yield np.asarray(line)


def _draw_objects(picture: Image.Image, sample: dict[str, Any], class_names: Sequence[str]) -> None:
    """Draw what is marked in a sample into its image, which was scaled to a tile."""
    height, width = sample["image"].shape[:2]
    scale = picture.width / width, picture.height / height
    line_px = 2 if max(picture.size) >= 200 else 1
    labels = list(sample.get("labels", ()))
    colours = {n: class_colour(_class_of(label, class_names)) for n, label in enumerate(labels)}
    masks = np.asarray(sample.get("masks", ()))
    for n, mask in enumerate(masks if masks.ndim == 3 else ()):
        shade = Image.fromarray(np.where(mask, _SHADE, np.uint8(0))).resize(picture.size)
        picture.paste(colours.get(n, class_colour(0)), (0, 0), shade)
    draw = ImageDraw.Draw(picture)
    boxes = np.asarray(sample.get("boxes", ()), np.float64).reshape(-1, 4) * np.tile(scale, 2)
    boxes = boxes.clip(-_FAR, _FAR)
    areas = np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    # Small ones last: they would vanish under the lines of large ones.
    order = [n for n in np.argsort(-areas, kind="stable").tolist() if np.isfinite(boxes[n]).all()]
    for n in order:
        left, top, right, bottom = np.rint(boxes[n]).astype(int).tolist()
        right, bottom = max(right - 1, left), max(bottom - 1, top)  # half-open: outermost pixels
        if min(right - left, bottom - top) >= _SMALL_PX:  # dark lines on both sides for any ground
            outline = (left - 1, top - 1, right + 1, bottom + 1)
            draw.rectangle(outline, outline=_DARK, width=line_px + 2)
        colour = colours.get(n, class_colour(0))
        draw.rectangle((left, top, right, bottom), outline=colour, width=line_px)
    points = np.asarray(sample.get("landmarks", ()), np.float64)
    if points.ndim == 3 and points.shape[-1] == 2:
        visibility = np.asarray(sample.get("visibility", np.full(points.shape[:2], -1)))
        radius = line_px + 1 if points.shape[1] <= 10 else 0  # many would cover each other
        is_there = np.isfinite(points).all(axis=2) & (np.abs(points) < _FAR).all(axis=2)
        centres = np.rint((points + 0.5) * scale - 0.5)[is_there].astype(int).tolist()
        for (x, y), seen in zip(centres, visibility[is_there].tolist(), strict=True):
            for size, colour in ((radius + 1, _DARK), (radius, _WHITE)):
                place = x - size, y - size, x + size, y + size
                draw.ellipse(place, None if seen == _HIDDEN else colour, colour)
    for n in order:  # again, so that no box lies over a name
        if n < len(labels):
            _draw_tag(picture, boxes[n], class_text(labels[n], class_names), colours[n])


def _draw_tag(picture: Image.Image, box: NDArray[np.float64], name: str, colour: Colour) -> None:
    """Draw the name above its box, within the image."""
    name = fitted(name, picture.width - 4)
    width, height = text_width(name) + 4, LINE_PX
    if not name or width * height > _MOST_NAMED * picture.width * picture.height:
        return
    left, bottom = np.rint(box[:2]).astype(int).tolist()
    left = min(max(left, 0), picture.width - width)
    top = min(max(bottom - height, 0), picture.height - height)
    picture.paste(colour, (left, top, left + width, top + height))
    _write(picture, name, (left + 2, top), colour)


def class_colour(number: int | None) -> Colour:
    """Return the colour of a class by its number; grey for None, which is no class."""
    if number is None:
        return _NO_CLASS
    shade = _SHADES[number // len(_COLOURS) % len(_SHADES)]
    red, green, blue = (round(shade * part) for part in _COLOURS[number % len(_COLOURS)])
    return red, green, blue


def _class_of(label: Any, class_names: Sequence[str]) -> int | None:  # noqa: ANN401
    """Return the number of a class, of a mixture that of its largest part; None for no class."""
    if isinstance(label, str):
        return class_names.index(label)
    weights = np.asarray(label)
    if weights.dtype.kind not in "biuf" or not weights.size or not np.isfinite(weights).all():
        return None
    return int(weights.argmax()) if weights.ndim else int(weights)


def class_text(label: Any, class_names: Sequence[str]) -> str:  # noqa: ANN401
    """Return what a class is called; of a mixture, its largest part."""
    if isinstance(label, str):
        return label.partition("\n")[0]  # a packed VOC folder has whole files here
    number = _class_of(label, class_names)
    if number is None:
        return ""
    return class_names[number] if 0 <= number < len(class_names) else str(number)


@functools.cache
def _font(is_ascii: bool) -> ImageFont.FreeTypeFont | ImageFont.ImageFont | None:
    """Return Pillow's own font, which has ASCII; or a font of the system that has more, or None."""
    if is_ascii:
        return ImageFont.load_default(_TEXT_PX)
    for name in _MANY_SCRIPTS:
        with contextlib.suppress(OSError):
            return ImageFont.truetype(name, _TEXT_PX)
    return None


def _lettered(text: str) -> tuple[str, Any]:
    """Return a text as it can be written, and the font."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    font = _font(text.isascii())
    if font is None:
        return text.encode("ascii", "replace").decode(), _font(True)
    return text, font


def text_width(text: str) -> int:
    """Return how many pixels a text takes from left to right."""
    text, font = _lettered(text)
    return math.ceil(float(font.getlength(text)))


def fitted(text: str, width_px: int) -> str:
    """Return a text, or as much of it as fits into a width, with an ellipsis."""
    if len(text) <= width_px and text_width(text) <= width_px:
        return text
    text = text[: max(width_px, 0)]  # no letter is narrower than a pixel
    while text and text_width(text + "…") > width_px:
        text = text[:-1]
    return text + "…" if text else ""


def _write(picture: Image.Image, text: str, place: tuple[int, int], ground: Colour) -> None:
    """Write a text, black or white as can be read on `ground`."""
    text, font = _lettered(text)
    light = 0.299 * ground[0] + 0.587 * ground[1] + 0.114 * ground[2]
    ImageDraw.Draw(picture).text(place, text, "black" if light > _BRIGHT else "white", font)


def sample_of(sample: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return a sample as a dict with an "image", uint8 (height, width, 3), and arrays."""
    if isinstance(sample, Mapping):
        found = dict(sample)
    elif isinstance(sample, (tuple, list)) and len(sample) > 1:
        marked = sample[1] if isinstance(sample[1], Mapping) else {"label": sample[1]}
        found = {**marked, "image": sample[0]}
    else:
        found = {"image": sample[0] if isinstance(sample, (tuple, list)) and sample else sample}
    if "image" not in found:
        raise ConfigError(f'a sample has no "image", but {", ".join(map(repr, found))}')
    found = {key: as_array(value) if is_tensor(value) else value for key, value in found.items()}
    found["image"] = shown_image(found["image"])
    return found


def shown_image(image: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    """Return an array, a tensor or Pillow's image as uint8 (height, width, 3), a copy."""
    if hasattr(image, "convert"):
        image = image.convert("RGB")
    pixels = as_array(image)
    if pixels.dtype.kind not in "buif" or pixels.ndim not in (2, 3) or not pixels.size:
        raise ConfigError(
            f"an image should be an array of 2 or 3 axes, but got {type(image).__name__} of shape "
            f"{pixels.shape}, dtype {pixels.dtype}"
        )
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] > _MOST_CHANNELS >= pixels.shape[0]:
        pixels = pixels.transpose(1, 2, 0)
    pixels = pixels[..., : 3 if pixels.shape[2] >= 3 else 1]  # neither alpha, nor grey's
    if pixels.dtype != np.uint8:
        values = np.nan_to_num(pixels.astype(np.float64))
        least, most = values.min(), values.max()
        full = 1.0 if pixels.dtype.kind == "f" else 255.0
        if least >= 0 and most <= full:
            least, most = 0.0, full
        pixels = np.rint((values - least) * (255 / max(most - least, 1e-12))).astype(np.uint8)
    return np.array(np.broadcast_to(pixels, (*pixels.shape[:2], 3)), order="C")


def samples_of_batch(
    batch: Any,  # noqa: ANN401 - of any loader
    normalized: Sequence[tuple[Any, Any]] = (),
) -> list[dict[str, Any]]:
    """Return the samples of a batch, as `contact_sheet` takes them.

    Images are an array of the batch or a list, alone, first in a tuple, or in a dict. Of
    `normalized`, pairs of mean and standard deviation in units of 0..1, the first that fits is
    undone, then the usual ones are tried.

    Raises:
        ConfigError: there are no images in the batch; the message names its leaves.
    """
    images, others = _parted(batch)
    scaled = _unnormalized([_on_host(image) for image in images], normalized)
    return [{**_marked(others, n, len(scaled)), "image": image} for n, image in enumerate(scaled)]


def _parted(batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return the images of a batch, and the rest: a dict of fields, targets, or None."""
    if isinstance(batch, Mapping):
        for name in _NAMES:
            if name in batch and _are_images(batch[name]):
                return batch[name], {key: value for key, value in batch.items() if key != name}
    elif _are_images(batch):
        return batch, None
    elif isinstance(batch, Sequence) and len(batch) and _are_images(batch[0]):
        return batch[0], batch[1] if len(batch) > 1 else None
    names = " or ".join(map(repr, _NAMES))
    raise ConfigError(
        f"no images in the batch: {_described(batch)}. Images are an array of "
        f"shape (batch, channels, height, width) or (batch, height, width, channels), or a list of "
        f"images; alone, first in a tuple, or in a dict as {names}."
    )


def _are_images(leaf: Any, num_axes: int = 4) -> bool:  # noqa: ANN401
    if isinstance(leaf, (list, tuple)):
        return num_axes == 4 and bool(leaf) and all(_are_images(image, 3) for image in leaf)
    shape: tuple[int, ...] = getattr(leaf, "shape", ())
    return len(shape) == num_axes and 0 not in shape and min(shape[-3], shape[-1]) <= _MOST_CHANNELS


def _described(batch: Any) -> str:  # noqa: ANN401
    """Return the shape or the type of each leaf of a batch."""
    leaves = {"": batch}
    if isinstance(batch, (Mapping, list, tuple)):
        pairs = batch.items() if isinstance(batch, Mapping) else enumerate(batch[:_MOST_CHANNELS])
        leaves = {f"[{key!r}]": leaf for key, leaf in pairs}
    said = {key: getattr(leaf, "shape", type(leaf).__qualname__) for key, leaf in leaves.items()}
    return ", ".join(f"batch{key} is {shape}" for key, shape in said.items())


def _on_host(leaf: Any) -> Any:  # noqa: ANN401
    """Return a tensor as an array, and anything else as it is; numpy has no bfloat16."""
    if not is_tensor(leaf):
        return leaf
    leaf = leaf.detach().cpu()
    return as_array(leaf.float() if leaf.is_floating_point() else leaf)


def _unnormalized(
    images: list[NDArray[Any]], normalized: Sequence[tuple[Any, Any]]
) -> list[NDArray[Any]]:
    """Return images within 0..1 if their normalisation is known, or a usual one fits."""
    if images[0].dtype.kind != "f":
        return images
    least = min(float(image.min()) for image in images)
    most = max(float(image.max()) for image in images)
    if not np.isfinite([least, most]).all() or (least >= 0 and most <= 1):
        return images
    if least >= 0 and most <= 255:
        return [image / 255 for image in images]
    is_first = images[0].shape[2] > _MOST_CHANNELS
    num_channels = images[0].shape[0 if is_first else 2]
    for pair in (*normalized, *_USUAL):
        mean, std = map(np.ravel, pair)
        if {len(mean), len(std)} <= {1, num_channels}:
            shape = (-1, 1, 1) if is_first else (1, 1, -1)
            undone = [image * std.reshape(shape) + mean.reshape(shape) for image in images]
            if all(one.min() >= -_SLACK and one.max() <= 1 + _SLACK for one in undone):
                return [np.clip(one, 0, 1) for one in undone]
    return images


def _marked(others: Any, number: int, num_images: int) -> dict[str, Any]:  # noqa: ANN401
    """Return what the batch says of one of its images."""
    if isinstance(others, Mapping):
        rows = {key: row for key, leaf in others.items() for row in _row(leaf, number, num_images)}
        if "boxes" not in rows and np.ndim(rows.get("labels", ())) == 0:
            rows["label"] = rows.pop("labels")  # one class for the image
        return rows
    for row in _row(others, number, num_images):
        if isinstance(row, Mapping):
            return {key: _on_host(value) for key, value in row.items()}
        if isinstance(row, np.ndarray) and row.ndim == 2 and row.shape[1] == 5:
            return {"boxes": row[:, :4], "labels": row[:, 4].astype(np.int64)}
        return {"label": row}
    return {}


def _row(leaf: Any, number: int, num_images: int) -> Iterator[Any]:  # noqa: ANN401
    """Yield the row of an image, where a leaf has one for each."""
    has_rows = isinstance(leaf, (list, tuple)) or getattr(leaf, "ndim", 0) > 0
    if has_rows and len(leaf) == num_images:
        yield _on_host(_on_host(leaf)[number])
