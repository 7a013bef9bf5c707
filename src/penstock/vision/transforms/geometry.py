# SPDX-License-Identifier: Apache-2.0
"""Flips, letterbox, crops and perspective of images, with what is marked in them.

Boxes count the edges of pixels, landmarks their centres:

    box          0   1   2   3        a map x -> a x + b of edges moves a landmark
    pixels       | 0 | 1 | 2 |        x -> a (x + 0.5) + b - 0.5
    landmark       0   1   2

A landmark that is cut off with its part of the image becomes NaN: not marked; its "visibility", if
the sample has that, becomes 0, which says the same. What moves pixels drops "letterbox". Masks are
moved as the image is, with the same interpolation.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any, Final, Literal

import cv2
import numpy as np

from penstock.deprecation import removed_arguments
from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import (
    ShownByArguments,
    checked_number,
    checked_size,
    checked_whole,
    shown,
)
from penstock.vision.crops import checked_crop
from penstock.vision.samples import image_of, kept, num_objects, with_image, without_letterbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from penstock.vision.crops import Crop, Cut

_CENTRE: Final = 0.5  # from the edge of a pixel to its centre


def moved(
    sample: dict[str, Any], scale: tuple[float, float], shift_px: tuple[float, float]
) -> dict[str, Any]:
    """Return a sample with boxes and landmarks scaled, then shifted."""
    num_objects(sample)
    result: dict[str, Any] = dict(without_letterbox(sample))
    factors, offsets = np.asarray(scale, np.float64), np.asarray(shift_px, np.float64)
    if "boxes" in sample:
        corners = np.asarray(sample["boxes"], np.float64).reshape(-1, 2, 2) * factors + offsets
        # Ends change places where the axis is mirrored. Not sorted: what was inverted stays so.
        corners = np.where(factors < 0, corners[:, ::-1], corners)
        result["boxes"] = corners.reshape(-1, 4).astype(np.float32)
    if "landmarks" in sample:
        points = (sample["landmarks"] + _CENTRE) * factors + offsets - _CENTRE
        result["landmarks"] = points.astype(np.float32)
    return result


def warped(sample: dict[str, Any], matrix: NDArray[np.float64]) -> dict[str, Any]:
    """Return a sample with boxes and landmarks under a projective map."""
    num_objects(sample)
    result: dict[str, Any] = dict(without_letterbox(sample))
    if "boxes" in sample:
        corners = np.asarray(sample["boxes"])[:, [[0, 1], [2, 1], [2, 3], [0, 3]]]
        corners = _mapped(corners, matrix)
        ends = [corners.min(axis=1), corners.max(axis=1)]
        result["boxes"] = np.concatenate(ends, axis=1).astype(np.float32)
    if "landmarks" in sample:
        points = _mapped(sample["landmarks"] + _CENTRE, matrix) - _CENTRE
        result["landmarks"] = points.astype(np.float32)
    return hidden_where_unmarked(result)


def _mapped(points: NDArray[Any], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    mapped = points @ matrix[:, :2].T + matrix[:, 2]
    depth = np.where(mapped[..., 2:] > 0, mapped[..., 2:], np.nan)
    return np.asarray(mapped[..., :2] / depth, np.float64)


def clipped(
    sample: dict[str, Any], region_px: tuple[float, float, float, float], min_side_px: float = 0.0
) -> dict[str, Any]:
    """Return a sample cut at a region of its image."""
    result = dict(sample)
    if "landmarks" in sample:
        edges = sample["landmarks"] + _CENTRE
        is_seen = ((edges >= region_px[:2]) & (edges < region_px[2:])).all(axis=-1)
        result["landmarks"] = np.where(is_seen[..., None], sample["landmarks"], np.float32("nan"))
    result = hidden_where_unmarked(result)
    if "boxes" not in sample:
        return result
    left, top, right, bottom = region_px
    boxes = np.asarray(sample["boxes"])
    result["boxes"] = np.clip(boxes, [left, top, left, top], [right, bottom, right, bottom])
    result["boxes"] = result["boxes"].astype(np.float32)
    sides = result["boxes"][:, 2:] - result["boxes"][:, :2]
    return kept(result, (sides > min_side_px).all(axis=1))


def hidden_where_unmarked(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a new dict with a "visibility" of 0 for each landmark that is NaN."""
    landmarks, visibility = sample.get("landmarks"), sample.get("visibility")
    if not isinstance(landmarks, np.ndarray) or not isinstance(visibility, np.ndarray):
        return sample
    if visibility.shape != landmarks.shape[:2]:
        return sample
    hidden = np.array(visibility)
    hidden[np.isnan(landmarks).any(axis=-1)] = 0
    return {**sample, "visibility": hidden}


def areas_px(boxes: NDArray[Any]) -> NDArray[np.float64]:
    """Return the area of each box in square pixels, shape (N,); 0 for an inverted one."""
    sides = np.maximum(np.asarray(boxes, np.float64)[:, 2:] - boxes[:, :2], 0)
    return np.asarray(sides.prod(axis=1), np.float64)


_BY_LANDMARK: Final = ("landmarks", "visibility")  # arrays (N, K, …)
_MIRRORED_BY_CV2: Final = tuple(map(np.dtype, ("uint8", "float32", "float64")))


class Flip(ShownByArguments):
    """Along one axis of the image, x or y."""

    is_across: bool  # along x

    @removed_arguments(p="probability=")
    def __init__(
        self, probability: float = 0.5, landmark_order: Sequence[int] | Literal[False] | None = None
    ) -> None:
        """Say how often to mirror.

        Args:
            probability: Of a mirror image, 0 to 1.
            landmark_order: What each landmark is in the mirror image: landmark k of the result is
                landmark `landmark_order[k]` of the source. A left eye becomes a right eye: for
                (left eye, right eye, nose) it is (1, 0, 2). "visibility", (N, K), goes along.
                False: the landmarks have no sides, and their order stays. None will do for samples
                with at most one landmark for each object.
        """
        self.probability = checked_number("probability", probability, 0, 1)
        self.landmark_order = _checked_order(landmark_order)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample, or its mirror image; a bare image likewise."""
        if isinstance(sample, dict):
            self._check_landmarks(sample)
        if sample_rng().random() >= self.probability:
            return without_letterbox(sample)
        image = image_of(sample)
        mirror = functools.partial(_mirrored, is_across=self.is_across)
        if isinstance(sample, dict):
            height, width = image.shape[:2]
            scale, shift = ((-1, 1), (width, 0)) if self.is_across else ((1, -1), (0, height))
            sample = moved(sample, scale, shift)
            if self.landmark_order and len(sample.get("landmarks", ())):
                order = list(self.landmark_order)
                sample |= {key: sample[key][:, order] for key in _BY_LANDMARK if key in sample}
        return with_image(sample, mirror(image), mirror)

    def _check_landmarks(self, sample: dict[str, Any]) -> None:
        # Of every sample, mirrored or not: an error should not be a matter of chance.
        landmarks, order = sample.get("landmarks"), self.landmark_order
        if not isinstance(landmarks, np.ndarray) or landmarks.ndim != 3:
            return
        num_landmarks = landmarks.shape[1]
        if order is None and num_landmarks > 1:
            name = type(self).__name__
            raise ConfigError(
                f"{name} makes a left eye a right one, and the sample has {num_landmarks} "
                f"landmarks for each object: say which change sides by {name}(landmark_order=…), "
                "(1, 0, 2) for (left eye, right eye, nose); or landmark_order=False if none does"
            )
        if isinstance(order, tuple) and len(landmarks) and num_landmarks != len(order):
            raise ConfigError(
                f"landmark_order has {len(order)} numbers, but the sample has "
                f"{num_landmarks} landmarks for each object"
            )


def _checked_order(order: Any) -> tuple[int, ...] | Literal[False] | None:  # noqa: ANN401
    if order is None or order is False:
        return order
    numbers = tuple(order) if np.ndim(order) == 1 else None
    if numbers is None or sorted(numbers) != list(range(len(numbers))):
        raise ConfigError(
            "landmark_order has each number from 0 to the number of landmarks - 1 once, or is "
            f"False; got {shown(order)}"
        )
    return numbers


def _mirrored(image: NDArray[Any], *, is_across: bool) -> NDArray[Any]:
    """Left and right exchanged: OpenCV takes a tenth of numpy's time. Or top and bottom."""
    if image.dtype in _MIRRORED_BY_CV2 and image.shape[2:] in ((), (1,), (2,), (3,), (4,)):
        return np.asarray(cv2.flip(image, int(is_across))).reshape(image.shape)
    return np.ascontiguousarray(image[:, ::-1] if is_across else image[::-1])


class HorizontalFlip(Flip):
    """Exchanges left and right, now and then.

    Example:
        >>> sample = {"image": np.zeros((4, 10, 3), np.uint8), "boxes": np.array([[0, 0, 2, 4]])}
        >>> HorizontalFlip(probability=1)(sample)["boxes"]
        array([[ 8.,  0., 10.,  4.]], dtype=float32)
    """

    is_across = True


class VerticalFlip(Flip):
    """Exchanges top and bottom, now and then.

    Example:
        >>> VerticalFlip(probability=1)(np.array([[1], [2]], np.uint8)).ravel()
        array([2, 1], dtype=uint8)
    """

    is_across = False


class Letterbox(ShownByArguments):
    """Scales an image until it fits, and pads what is left, half on either side.

    A sample gets an entry "letterbox", a tuple that `undo` takes: what a detector finds in the
    padded image is brought back by it.

    Example:
        >>> sample = {
        ...     "image": np.zeros((240, 320, 3), np.uint8),
        ...     "boxes": np.array([[10, 20, 30, 40]], np.float32),
        ... }
        >>> padded = Letterbox(640)(sample)
        >>> padded["image"].shape, padded["boxes"].tolist(), padded["letterbox"]
        ((640, 640, 3), [[20.0, 120.0, 60.0, 160.0]], (2.0, 2.0, 0, 80, 240, 320))
        >>> Letterbox.undo(padded["boxes"], padded["letterbox"]).tolist()
        [[10.0, 20.0, 30.0, 40.0]]
    """

    def __init__(
        self,
        size: int | tuple[int, int],
        fill: int = 114,
        *,
        enlarge: bool = True,
        stride: int | None = None,
    ) -> None:
        """Say how large.

        Args:
            size: Of the result in pixels, one int or (height, width).
            fill: Value of the padding in all channels, 0 to 255. 114 is that of the YOLO recipes.
            enlarge: Whether smaller images are enlarged; otherwise they are only padded.
            stride: In pixels. If given, height and width are padded only to the next multiple of
                it, `size` being the most that the image itself takes: less to compute for one
                image at a time.
        """
        self.size = checked_size(size)
        self.fill = checked_whole("fill", fill, 0, 255)
        self.enlarge = bool(enlarge)
        self.stride = None if stride is None else checked_whole("stride", stride, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample in its new size; a bare image likewise."""
        image = image_of(sample)
        height, width = image.shape[:2]
        whole = self.size
        scale = min(whole[0] / height, whole[1] / width)
        scale = scale if self.enlarge else min(scale, 1.0)
        rows, columns = max(1, round(height * scale)), max(1, round(width * scale))
        if self.stride is not None:
            whole = -(-rows // self.stride) * self.stride, -(-columns // self.stride) * self.stride
        top, left = (whole[0] - rows) // 2, (whole[1] - columns) // 2

        def boxed(image: NDArray[Any], fill: int = 0) -> NDArray[Any]:
            canvas = np.full((*whole, *image.shape[2:]), fill, image.dtype)
            canvas[top : top + rows, left : left + columns] = _resized(image, rows, columns)
            return canvas

        if isinstance(sample, dict):
            scales = columns / width, rows / height
            sample = moved(sample, scales, (left, top))
            sample["letterbox"] = (*scales, left, top, height, width)
        return with_image(sample, boxed(image, self.fill), boxed)

    @staticmethod
    def undo(
        boxes: NDArray[Any], letterbox: tuple[float, float, int, int, int, int]
    ) -> NDArray[np.float32]:
        """Return boxes as they are in the image before `Letterbox`.

        Args:
            boxes: Shape (N, 4), left, top, right, bottom in pixels of the padded image.
            letterbox: What the sample has under that name: scale along x and y, padding at the left
                and the top in pixels, height and width of the image before. That of the last
                Letterbox, and only true if nothing moved the image after it.

        Returns:
            float32, shape (N, 4), clipped to the image; a new array.
        """
        scale_x, scale_y, left, top, height, width = letterbox
        moved_back = np.asarray(boxes, np.float64).reshape(-1, 4) - [left, top, left, top]
        inside = np.clip(moved_back / ([scale_x, scale_y] * 2), 0, [width, height] * 2)
        return np.asarray(inside, np.float32)


def _resized(image: NDArray[Any], rows: int, columns: int) -> NDArray[Any]:
    height, width = image.shape[:2]
    if (rows, columns) == (height, width):
        return image
    # Averages of areas, or what shrinks by more than 2 would skip pixels between the four it reads.
    method = cv2.INTER_AREA if rows < height or columns < width else cv2.INTER_LINEAR
    resized = cv2.resize(image, (columns, rows), interpolation=method)
    return np.asarray(resized).reshape(rows, columns, *image.shape[2:])  # one channel stays an axis


# From edges of pixels, which boxes count, to their centres, which OpenCV counts.
_TO_CENTRES: Final = np.array([[1, 0, -0.5], [0, 1, -0.5], [0, 0, 1]])
_TO_EDGES: Final = np.array([[1, 0, 0.5], [0, 1, 0.5], [0, 0, 1]])


class RandomPerspective(ShownByArguments):
    """Moves an image at random, and cuts the result to a size.

        edge in the result = shift . shear . turn and scale . perspective . centre . edge

    The image's centre comes to a random place near the centre of the result. So the canvas of
    `Mosaic`, 2 s wide, is cut to s around its middle, and an image of s is only moved.

    A box becomes the bounds of its four corners, clipped to the result. Objects are dropped of
    which too little is left, by the three limits. Landmarks beyond the result become NaN.

    Reference:
        The order of the maps, their distributions and the limits are those published with YOLOv5:
        degrees 0, translate 0.1, scale 0.5, shear 0, perspective 0 are its table for training from
        scratch.

    Example:
        >>> sample = {
        ...     "image": np.zeros((200, 200, 3), np.uint8),
        ...     "boxes": np.array([[90, 80, 110, 120], [0, 0, 9, 9]], np.float32),
        ... }
        >>> RandomPerspective(100, translate=0, scale=0)(sample)["boxes"]
        array([[40., 30., 60., 70.]], dtype=float32)
    """

    def __init__(
        self,
        size: int | tuple[int, int] | None = None,
        *,
        degrees: float = 0.0,
        translate: float = 0.1,
        scale: float = 0.5,
        shear: float = 0.0,
        perspective: float = 0.0,
        fill: int = 114,
        min_side_px: float = 2.0,
        min_area_ratio: float = 0.1,
        max_aspect: float = 100.0,
    ) -> None:
        """Say how far.

        Args:
            size: Of the result in pixels, one int or (height, width); None: as the image.
            degrees: The angle is uniform in [-degrees, degrees].
            translate: A share of the result's size, 0 to 1: the image's centre is uniform in
                [0.5 - translate, 0.5 + translate] of width and of height.
            scale: The factor is uniform in [1 - scale, 1 + scale]; 0 to 1, 1 excluded.
            shear: Angles of x and y are uniform in [-shear, shear], in degrees below 90.
            perspective: Both coefficients are uniform in [-perspective, perspective], per pixel
                from the centre; 0 to 0.001.
            fill: Value of what lies beyond the image, in all channels, 0 to 255.
            min_side_px: An object's clipped box is wider and higher than this.
            min_area_ratio: Its area is more than this share of its area before, scaled.
            max_aspect: Its longer side is less than this many times the shorter one. 100 in the
                recipe, 20 in its first releases.
        """
        self.size = None if size is None else checked_size(size)
        self.degrees = checked_number("degrees", degrees, 0, 180)
        self.translate = checked_number("translate", translate, 0, 1)
        self.scale = checked_number("scale", scale, 0, 0.999)
        self.shear = checked_number("shear", shear, 0, 89)
        self.perspective = checked_number("perspective", perspective, 0, 0.001)
        self.fill = checked_whole("fill", fill, 0, 255)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self.min_area_ratio = checked_number("min_area_ratio", min_area_ratio, 0, 1)
        self.max_aspect = checked_number("max_aspect", max_aspect, 1)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample moved; a bare image likewise."""
        image = image_of(sample)
        height, width = self.size or image.shape[:2]
        matrix, scale = self._drawn(image.shape[:2], (height, width))
        if isinstance(sample, dict):
            sample = self._with_objects(sample, matrix, scale, (0, 0, width, height))
        centres, dsize = _TO_CENTRES @ matrix @ _TO_EDGES, (width, height)

        def seen(image: NDArray[Any], fill: int = 0) -> NDArray[Any]:
            if self.perspective:
                pixels = cv2.warpPerspective(image, centres, dsize, borderValue=(fill,) * 4)
            else:
                pixels = cv2.warpAffine(image, centres[:2], dsize, borderValue=(fill,) * 4)
            # One channel stays an axis.
            return np.asarray(pixels).reshape(height, width, *image.shape[2:])

        return with_image(sample, seen(image, self.fill), seen)

    def _drawn(
        self, before: tuple[int, ...], after: tuple[int, int]
    ) -> tuple[NDArray[np.float64], float]:
        """Return the map of edges, and the scale in it."""
        draw = sample_rng().uniform(-1, 1, 8)
        scale = 1 + self.scale * draw[3]
        centre, seen, turned, sheared, shifted = (np.eye(3) for _ in range(5))
        centre[:2, 2] = -before[1] / 2, -before[0] / 2
        seen[2, :2] = self.perspective * draw[:2]
        angle = math.radians(self.degrees * draw[2])
        turned[:2, :2] = scale * np.array(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]
        )
        sheared[0, 1], sheared[1, 0] = np.tan(np.radians(self.shear * draw[4:6]))
        shifted[:2, 2] = (0.5 + self.translate * draw[6:8]) * [after[1], after[0]]
        return shifted @ sheared @ turned @ seen @ centre, scale

    def _with_objects(
        self,
        sample: dict[str, Any],
        matrix: NDArray[np.float64],
        scale: float,
        region: tuple[int, int, int, int],
    ) -> dict[str, Any]:
        result = warped(sample, matrix)
        if "boxes" not in result:
            return clipped(result, region)
        areas = areas_px(sample["boxes"]) * scale**2
        is_kept = np.isfinite(result["boxes"]).all(axis=1) & (areas > 0)
        boxes = np.clip(result["boxes"], 0, [*region[2:]] * 2).astype(np.float32)
        with np.errstate(invalid="ignore", divide="ignore"):
            sides = (boxes[:, 2:] - boxes[:, :2]).astype(np.float64)
            short, long = sides.min(axis=1), sides.max(axis=1)
            is_kept &= (short > self.min_side_px) & (long < self.max_aspect * short)
            is_kept &= sides.prod(axis=1) > self.min_area_ratio * areas
        return clipped(kept({**result, "boxes": boxes}, is_kept), region)


class ObjectCrop(ShownByArguments):
    """Cuts a part out of an image, resizes it, and takes the objects along that are seen in it.

    Boxes are clipped to the part; landmarks beyond it become NaN, their visibility 0. What
    `Letterbox` noted is dropped.

    With `class_weights` the part is moved to an object of the image, drawn by the weight of its
    class: all of it is in the part, or the part is within it.

    Example:
        >>> from penstock.vision.crops import CenterCropResize
        >>> sample = {
        ...     "image": np.zeros((100, 100, 3), np.uint8),
        ...     "boxes": np.array([[40, 40, 60, 60], [0, 40, 30, 60]], np.float32),
        ... }
        >>> ObjectCrop(CenterCropResize(50, resize=100), min_visibility=0.5)(sample)["boxes"]
        array([[15., 15., 35., 35.]], dtype=float32)
    """

    def __init__(
        self,
        crop: Crop,
        *,
        min_visibility: float = 0.25,
        min_side_px: float = 2.0,
        class_weights: Sequence[float] | None = None,
    ) -> None:
        """Say which part.

        Args:
            crop: Which part, and how large: `RandomResizedCrop(…)`, say.
            min_visibility: Objects are dropped of which less than this share of the box's area is
                in the part, 0 to 1.
            min_side_px: And those whose box, clipped, is not wider and higher than this in the
                result.
            class_weights: The weight of each class, 0 or more, in the order of the dataset's
                `class_names`; None does not move the part. An image that has no object of a weight
                above 0 is cut as without.
        """
        self.crop = checked_crop(crop)
        self.min_visibility = checked_number("min_visibility", min_visibility, 0, 1)
        self.min_side_px = checked_number("min_side_px", min_side_px, 0)
        self.class_weights = None if class_weights is None else _checked(class_weights, self.crop)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the part; of a bare image likewise."""
        image = image_of(sample)
        rng = None if self.crop.is_drawless else sample_rng()
        height, width = image.shape[:2]
        cut = self.crop.cut(height, width, rng)
        if self.class_weights is not None and isinstance(sample, dict) and rng is not None:
            cut = self._aimed(cut, sample, rng)
        part = functools.partial(_pixels, cut=cut, size=self.crop.size)
        pixels = part(image)
        if isinstance(sample, dict):
            sample = self._objects(sample, cut, pixels.shape[:2])
        return with_image(sample, pixels, part)

    def _aimed(self, cut: Cut, sample: dict[str, Any], rng: np.random.Generator) -> Cut:
        """Return the cut moved to one of the objects, drawn by the weights of their classes."""
        labels, weights = np.asarray(sample["labels"]), np.asarray(self.class_weights)
        ends = np.cumsum(weights[labels])
        if not len(ends) or not ends[-1]:
            return cut
        chosen = int(np.searchsorted(ends, rng.random() * ends[-1], side="right"))
        x1, y1, x2, y2 = sample["boxes"][chosen].tolist()
        height, width = sample["image"].shape[:2]
        return cut._replace(
            top=_start(y1, y2, cut.height, height, rng),
            left=_start(x1, x2, cut.width, width, rng),
        )

    def _objects(self, sample: dict[str, Any], cut: Cut, size: tuple[int, ...]) -> dict[str, Any]:
        scale = cut.resized_width / cut.width, cut.resized_height / cut.height
        shift = (
            -cut.left * scale[0] - cut.column_offset,
            -cut.top * scale[1] - cut.row_offset,
        )
        whole, region = moved(sample, scale, shift), (0, 0, size[1], size[0])
        if "boxes" in whole:
            seen = np.clip(whole["boxes"], 0, [size[1], size[0]] * 2)
            is_seen = areas_px(seen) >= self.min_visibility * areas_px(whole["boxes"])
            whole = kept(whole, is_seen)
        return clipped(whole, region, self.min_side_px)


def _checked(weights: Sequence[float], crop: Crop) -> list[float]:
    if crop.is_drawless:
        raise ConfigError(
            f"class_weights move a random part to an object, and {crop!r} is always the same part: "
            "give RandomResizedCrop(…), or leave them out."
        )
    values = np.asarray(weights, np.float64)
    is_good = values.ndim == 1 and (np.isfinite(values) & (values >= 0)).all() and values.any()
    if not is_good:
        raise ConfigError(
            "class_weights are numbers from 0 on, one for each class, and not all of them 0, in "
            f"the order of the dataset's class_names; got {shown(weights)}"
        )
    return list(map(float, values))


def _start(low: float, high: float, length: int, whole: int, rng: np.random.Generator) -> int:
    """Return where a part of `length` pixels begins: around `low` to `high`, or within."""
    first, last = sorted((math.ceil(high) - length, math.floor(low)))
    most = whole - length
    return int(rng.integers(min(max(first, 0), most), min(max(last, 0), most) + 1))


def _pixels(image: NDArray[Any], cut: Cut, size: tuple[int, int]) -> NDArray[Any]:
    part = image[cut.top : cut.top + cut.height, cut.left : cut.left + cut.width]
    scaled = _resized(part, cut.resized_height, cut.resized_width)
    rows = slice(cut.row_offset, cut.row_offset + size[0])
    columns = slice(cut.column_offset, cut.column_offset + size[1])
    return np.array(scaled[rows, columns], order="C")
