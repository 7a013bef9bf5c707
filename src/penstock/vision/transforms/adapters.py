# SPDX-License-Identifier: Apache-2.0
"""Transforms in a chain; those of Albumentations and torchvision on our samples.

Neither library is imported here: the transform that is given has brought its library along.
"""

from __future__ import annotations

import copy
import importlib
import random
import threading
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from PIL import Image

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.arguments import ShownByArguments, checked_transforms, shown
from penstock.vision.samples import image_of, kept, num_objects, with_image, without_letterbox
from penstock.vision.transforms.geometry import hidden_where_unmarked

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

_ROWS: Final = "penstock_rows"  # which object a box is of
_POINTS: Final = "penstock_points"  # which landmark a keypoint is
_HAS_NO_PARAMS: Final = ("format", "label_fields")  # those that we decide
_SEEDS: Final = 2**63


class Compose:
    """Applies transforms in turn, each to what the one before it gave.

    Attributes:
        transforms: The transforms.

    Example:
        >>> from penstock.vision.transforms.geometry import HorizontalFlip, VerticalFlip
        >>> half_turn = Compose(HorizontalFlip(1), VerticalFlip(1))
        >>> half_turn(np.arange(4, dtype=np.uint8).reshape(2, 2))
        array([[3, 2],
               [1, 0]], dtype=uint8)
    """

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        """Keep the transforms: functions of a sample that return one.

        Raises:
            ConfigError: one of them cannot be called.
        """
        self.transforms = checked_transforms("Compose", transforms)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - of any kind
        """Return the sample after all transforms."""
        for transform in self.transforms:
            sample = transform(sample)
        return sample

    def __repr__(self) -> str:
        return f"Compose({', '.join(map(repr, self.transforms))})"


class _Copies(threading.local):
    """A thread's copies of a transform, and what of a sample it would change."""

    def __init__(self, transform: Any) -> None:  # noqa: ANN401
        self.copies: dict[Any, Any] = {(): _rebuilt(transform, ())}
        # A Compose with parameters of boxes warns if it never changes any.
        self.targets = self.copies[()].available_keys
        self.python_random = random.Random(0)


class Albumentations(ShownByArguments):
    """An Albumentations transform on our samples, reproducible under our seeds.

    Boxes are handed over as boxes, landmarks as keypoints, masks as masks. What Albumentations
    drops is dropped from every array by object; a landmark that it drops becomes NaN, its
    visibility 0. The options of the `bbox_params` and `keypoint_params` that the Compose has
    (min_visibility, clip, …) hold; their `format` and `label_fields` are not needed, nor are the
    params themselves.

    Landmarks keep their numbers: a mirror image by Albumentations exchanges no left and right
    ones, as `HorizontalFlip(landmark_order=…)` does. See docs/augmentation.md. A transform that
    moves pixels drops "letterbox".

    Called with keywords, as Albumentations is, it hands them on and returns what that returns:
    for masks of whole images, boxes in other forms, additional targets.

    All its random numbers come from `sample_rng()`.

    Attributes:
        transform: As given; it is not changed. Copies of it are used.

    Example:
        >>> import albumentations
        >>> flip = Albumentations(albumentations.HorizontalFlip(p=1))
        >>> sample = {"image": np.zeros((4, 10, 3), np.uint8), "boxes": np.array([[0, 0, 2, 4]])}
        >>> flip(sample)["boxes"].round(3)
        array([[ 8.,  0., 10.,  4.]], dtype=float32)
        >>> flip(image=sample["image"], mask=np.eye(4, 10))["mask"][0].argmax()
        np.int64(9)
    """

    def __init__(self, transform: Any) -> None:  # noqa: ANN401 - a class of a library not imported
        """Keep the transform.

        Args:
            transform: A `Compose`, or any single transform, of Albumentations 2.0.

        Raises:
            ConfigError: it is not from Albumentations.
        """
        packages = {cls.__module__.partition(".")[0] for cls in type(transform).__mro__}
        if "albumentations" not in packages:
            raise ConfigError(
                "Albumentations takes a transform of the package albumentations, such as "
                f"albumentations.Compose([…]); got {shown(transform)}"
            )
        self.transform = transform
        self._of_thread = _Copies(self.transform)

    def __call__(self, sample: Any = None, /, **targets: Any) -> Any:  # noqa: ANN401 - dict, array
        """Return the sample transformed; a bare image likewise."""
        if targets:
            return self._seeded(None)(*([] if sample is None else [sample]), **targets)
        data: dict[str, Any] = {"image": image_of(sample)}
        local = self._of_thread
        if not isinstance(sample, dict):
            return self._seeded(())(**data)["image"]
        num_objects(sample)
        if not {"bboxes", "keypoints"}.isdisjoint(local.targets):
            sample = without_letterbox(sample)
        if "boxes" in sample and "bboxes" in local.targets:
            data["bboxes"] = np.asarray(sample["boxes"], np.float32)
            data[_ROWS] = np.arange(len(sample["boxes"]))
        if "landmarks" in sample and "keypoints" in local.targets:
            points = np.asarray(sample["landmarks"], np.float32)
            points, numbers = self._handed_over(points.reshape(-1, 2), data["image"].shape[1::-1])
            data["keypoints"], data[_POINTS] = points, numbers
        if len(sample.get("masks", ())) and "masks" in local.targets:
            data["masks"] = sample["masks"].astype(np.uint8)
        given = tuple(name for name in ("bboxes", "keypoints") if name in data)
        return _taken_back(sample, self._seeded(given)(**data))

    def _handed_over(
        self, points: NDArray[np.float32], limits: tuple[int, ...]
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Landmarks that are marked, and that Albumentations takes; and their numbers."""
        params = getattr(getattr(self.transform, "processors", {}).get("keypoints"), "params", None)
        is_taken = ~np.isnan(points).any(axis=-1)
        if getattr(params, "remove_invisible", True):
            # It takes 0 to the width; half a pixel before that is in the image all the same.
            is_taken &= ((points >= -0.5) & (points < limits)).all(axis=-1)
            points = np.maximum(points, 0)
        numbers = np.flatnonzero(is_taken)
        return points[numbers], numbers

    def _seeded(self, given: tuple[str, ...] | None) -> Any:  # noqa: ANN401
        """This thread's copy of the transform, drawing from the sample's generator."""
        local, rng = self._of_thread, sample_rng()
        if given not in local.copies:
            local.copies[given] = (
                copy.deepcopy(self.transform) if given is None else _rebuilt(self.transform, given)
            )
        mine = local.copies[given]
        local.python_random.seed(int(rng.integers(_SEEDS)))
        mine.set_random_state(rng, local.python_random)
        return mine

    def __getstate__(self) -> dict[str, Any]:
        """Leave the threads' copies behind."""
        return {"transform": self.transform}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.transform = state["transform"]
        self._of_thread = _Copies(self.transform)


def _rebuilt(transform: Any, given: tuple[str, ...]) -> Any:  # noqa: ANN401
    """A copy whose processors know our row numbers, and no label field but those."""
    library = importlib.import_module("albumentations")
    own = copy.deepcopy(transform)
    is_compose = isinstance(own, library.Compose)
    options = {
        name: getattr(own, name)
        for name in ("p", "is_check_shapes", "strict", "mask_interpolation")
        if is_compose and hasattr(own, name)
    }
    for kind, name, make, form, field in (
        ("bboxes", "bbox_params", library.BboxParams, "pascal_voc", _ROWS),
        ("keypoints", "keypoint_params", library.KeypointParams, "xy", _POINTS),
    ):
        if kind in given:
            before = getattr(own, "processors", {}).get(kind)
            said = {} if before is None else vars(before.params)
            others = {k: v for k, v in said.items() if k not in _HAS_NO_PARAMS and k[0] != "_"}
            options[name] = make(format=form, label_fields=[field], **others)
    return library.Compose(list(own.transforms) if is_compose else [own], **options)


def _taken_back(sample: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = with_image(sample, data["image"])
    if "keypoints" in data:
        numbers = np.asarray(data[_POINTS], np.int64).reshape(-1)
        moved = np.full(sample["landmarks"].shape, np.nan, np.float32)
        moved.reshape(-1, 2)[numbers] = np.asarray(data["keypoints"]).reshape(-1, 2)
        result = hidden_where_unmarked({**result, "landmarks": moved})
    if "masks" in sample:
        empty = np.empty((0, *data["image"].shape[:2]))
        moved_masks = data.get("masks", sample["masks"] if len(sample["masks"]) else empty)
        result = {**result, "masks": np.asarray(moved_masks, sample["masks"].dtype)}
    if "bboxes" in data:
        result = kept(result, np.asarray(data[_ROWS], np.int64).reshape(-1))
        result["boxes"] = np.asarray(data["bboxes"], np.float32).reshape(-1, 4)
    return result


class Torchvision(ShownByArguments):
    """A torchvision transform on our samples.

    The transform gets a Pillow image; one of `torchvision.transforms.v2` gets boxes, landmarks and
    masks, too, as `tv_tensors`. A Pillow image comes back as an array, a tensor as a tensor.
    Objects that `SanitizeBoundingBoxes` drops are dropped from every array by object.

    "letterbox" is dropped, as pixels may have moved, unless `colour_only` says that they did not.

    In seeded loading torch's generator is seeded for each sample, so the same sample comes out for
    any number of workers.

    Attributes:
        transform: As given.
    """

    def __init__(self, transform: Any, *, colour_only: bool = False) -> None:  # noqa: ANN401
        """Keep the transform.

        Args:
            transform: Of `torchvision.transforms` or `torchvision.transforms.v2`, or any function
                of a Pillow image. Of v2 are also subclasses of its transforms, and a `Compose` or
                an `nn.Sequential` of nothing else.
            colour_only: Whether it leaves every pixel in its place, so that boxes and landmarks
                stay as they are. The first kind can transform samples with boxes only then.
        """
        self.transform = transform
        self.colour_only = bool(colour_only)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample transformed; a bare image likewise."""
        picture = Image.fromarray(image_of(sample))
        known = ("boxes", "landmarks", "masks")
        marks = [key for key in known if isinstance(sample, dict) and key in sample]
        if not self.colour_only:
            sample = without_letterbox(sample)
        if not marks or self.colour_only:
            return with_image(sample, _as_array(self.transform(picture)))
        if not _knows_marks(self.transform):
            raise ConfigError(
                f"{type(self.transform).__name__} gets no more than the image, and the sample has "
                f"{' and '.join(marks)}: use the transforms of torchvision.transforms.v2, or say "
                "Torchvision(…, colour_only=True) of one that moves no pixel"
            )
        return self._with_marks(sample, picture, marks)

    def _with_marks(self, sample: dict[str, Any], picture: Any, marks: list[str]) -> dict[str, Any]:  # noqa: ANN401
        torch, tensors = (importlib.import_module(n) for n in ("torch", "torchvision.tv_tensors"))
        canvas = picture.height, picture.width
        rows = torch.arange(num_objects(sample))
        data = {"image": picture, "labels": rows}  # the name that v2 looks for
        if "boxes" in marks:
            boxes = torch.from_numpy(np.array(sample["boxes"], np.float32))
            data["boxes"] = tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvas)
        if "landmarks" in marks:
            # As they are, centres of pixels: torchvision's mirror is x' = width - 1 - x, too. There
            # are key points from its release 0.23 on.
            points = torch.from_numpy(np.array(sample["landmarks"], np.float32))
            data["landmarks"] = tensors.KeyPoints(points, canvas_size=canvas)
        if "masks" in marks:
            data["masks"] = tensors.Mask(torch.from_numpy(np.array(sample["masks"])))
        data = self.transform(data)
        kept_rows = data["labels"].numpy()
        result = kept(with_image(sample, _as_array(data["image"])), kept_rows)
        if "boxes" in marks:
            boxes = np.asarray(data["boxes"].numpy(), np.float32).reshape(-1, 4)
            form = getattr(getattr(data["boxes"], "format", None), "name", "XYXY")
            if form != "XYXY" or len(boxes) != len(kept_rows):
                raise ConfigError(
                    f"the transform gave {len(boxes)} boxes in the form {form} for "
                    f"{len(kept_rows)} objects: boxes stay XYXY, and only SanitizeBoundingBoxes "
                    "may drop some"
                )
            result["boxes"] = boxes
        if "masks" in marks:
            result["masks"] = data["masks"].numpy()  # without those of objects that were dropped
        if "landmarks" in marks:
            moved = data["landmarks"].numpy().astype(np.float32)
            if len(moved) != len(rows):
                raise ConfigError(
                    f"the transform gave the landmarks of {len(moved)} objects for {len(rows)}: "
                    "leave out SanitizeKeyPoints"
                )
            result = hidden_where_unmarked({**result, "landmarks": moved[kept_rows]})
        return result


def _as_array(image: Any) -> Any:  # noqa: ANN401
    """A Pillow image as an array; anything else as it is."""
    return np.array(image) if isinstance(image, Image.Image) else image


def _knows_marks(transform: Any) -> bool:  # noqa: ANN401
    """Whether a transform is of torchvision's v2, or a chain of nothing else."""
    classes = [f"{cls.__module__}.{cls.__qualname__}" for cls in type(transform).__mro__]
    if any(name.startswith("torchvision.transforms.v2") for name in classes):
        return True
    if "torch.nn.modules.container.Sequential" in classes:
        return all(map(_knows_marks, transform))
    if "torchvision.transforms.transforms.Compose" in classes:
        return all(map(_knows_marks, transform.transforms))
    return False
