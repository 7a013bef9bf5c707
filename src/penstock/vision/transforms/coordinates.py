# SPDX-License-Identifier: Apache-2.0
"""Boxes and landmarks under the maps that move an image's pixels.

Boxes count the edges of pixels, landmarks their centres:

    box          0   1   2   3        a map x -> a x + b of edges moves a landmark
    pixels       | 0 | 1 | 2 |        x -> a (x + 0.5) + b - 0.5
    landmark       0   1   2

A landmark that is cut off with its part of the image becomes NaN: not marked; its "visibility", if
the sample has that, becomes 0, which says the same. Whoever moves pixels drops "letterbox".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.vision.samples import kept, num_objects, without_letterbox

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["areas_px", "clipped", "hidden_where_unmarked", "moved", "visible_landmarks", "warped"]

_CENTRE: Final = 0.5  # from the edge of a pixel to its centre


def moved(
    sample: dict[str, Any],
    scale: tuple[float, float],
    shift_px: tuple[float, float],
) -> dict[str, Any]:
    """Return a sample with boxes and landmarks scaled, then shifted.

    Args:
        sample: With "boxes", "landmarks", or neither.
        scale: Along x and y; negative mirrors.
        shift_px: Added to x and y of edges afterwards.

    Returns:
        A new dict; its boxes and landmarks are new arrays, in float32, everything else is as
        before, but for "letterbox", which is gone.

    Raises:
        ConfigError: an array has another number of rows than there are objects.

    Example:
        >>> sample = {"boxes": np.array([[0, 0, 2, 4]], np.float32)}
        >>> moved(sample, (-1, 1), (10, 0))["boxes"]  # mirrored in an image 10 px wide
        array([[ 8.,  0., 10.,  4.]], dtype=float32)
    """
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
    """Return a sample with boxes and landmarks under a projective map.

    A box becomes the bounds of its four corners. What the map takes through infinity becomes NaN.
    The rest is as `moved` has it.

    Args:
        sample: With "boxes", "landmarks", or neither.
        matrix: Shape (3, 3), of edges in pixels.

    Returns:
        A new dict; its boxes and landmarks are new arrays, in float32.
    """
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
    sample: dict[str, Any],
    region_px: tuple[float, float, float, float],
    min_side_px: float = 0.0,
) -> dict[str, Any]:
    """Return a sample cut at a region of its image.

    Args:
        sample: With "boxes", "landmarks", or neither.
        region_px: Left, top, right, bottom.
        min_side_px: Objects are dropped whose box, clipped, is not wider and higher than this.

    Returns:
        A new dict without these objects; landmarks beyond the region are NaN.
    """
    result = visible_landmarks(sample, region_px)
    if "boxes" not in sample:
        return result
    left, top, right, bottom = region_px
    boxes = np.asarray(sample["boxes"])
    result["boxes"] = np.clip(boxes, [left, top, left, top], [right, bottom, right, bottom])
    result["boxes"] = result["boxes"].astype(np.float32)
    sides = result["boxes"][:, 2:] - result["boxes"][:, :2]
    return kept(result, (sides > min_side_px).all(axis=1))


def visible_landmarks(
    sample: dict[str, Any], region_px: tuple[float, float, float, float]
) -> dict[str, Any]:
    """Return a new dict whose landmarks are NaN, visibility 0, where they lie beyond the region."""
    result = dict(sample)
    if "landmarks" in sample:
        edges = sample["landmarks"] + _CENTRE
        is_seen = ((edges >= region_px[:2]) & (edges < region_px[2:])).all(axis=-1)
        result["landmarks"] = np.where(is_seen[..., None], sample["landmarks"], np.float32("nan"))
    return hidden_where_unmarked(result)


def hidden_where_unmarked(sample: dict[str, Any]) -> dict[str, Any]:
    """Return a new dict with a "visibility" of 0 for each landmark that is NaN.

    "visibility" of another shape than (N, K) is a user's own array, and is left alone.
    """
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
