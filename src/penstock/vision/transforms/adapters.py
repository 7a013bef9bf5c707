# SPDX-License-Identifier: Apache-2.0
"""Transforms of other libraries on our samples: Albumentations, torchvision.

Neither library is imported here: the transform that is given has brought its library along.
"""

from __future__ import annotations

import copy
import importlib
import random
import threading
from typing import Any, Final

import numpy as np

from penstock.errors import ConfigError
from penstock.randomness.samples import sample_rng
from penstock.vision.samples import image_of, kept, num_objects, with_image

__all__ = ["Albumentations", "Torchvision"]

_ROWS: Final = "penstock_rows"  # which object a box is of
_POINTS: Final = "penstock_points"  # which landmark a keypoint is
_HAS_NO_PARAMS: Final = ("format", "label_fields")  # those that we decide
_SEEDS: Final = 2**63


class Albumentations:
    """An Albumentations transform on our samples, reproducible under our seeds.

    Boxes are handed over as boxes, landmarks as keypoints. What Albumentations drops is dropped
    from every array by object; a landmark that it drops becomes NaN. The options of the
    `bbox_params` and `keypoint_params` that the Compose has (min_visibility, clip, …) hold; their
    `format` and `label_fields` are not needed, nor are the params themselves.

    Landmarks keep their numbers: a mirror image by Albumentations exchanges no left and right
    ones, as `HorizontalFlip(landmark_order=…)` does.

    All its random numbers come from `sample_rng()`. That costs some 15 us for each sample; giving
    every transform a seed, by its `set_random_seed`, some 160 us for five transforms.

    Attributes:
        transform: As given; it is not changed. Copies of it are used.

    Concurrency:
        Any thread: each has a copy of the transform, whose random state and tables are its own. It
        pickles if the transform does.

    Example:
        >>> import albumentations
        >>> flip = Albumentations(albumentations.HorizontalFlip(p=1))
        >>> sample = {"image": np.zeros((4, 10, 3), np.uint8), "boxes": np.array([[0, 0, 2, 4]])}
        >>> flip(sample)["boxes"].round(3)
        array([[ 8.,  0., 10.,  4.]], dtype=float32)
    """

    def __init__(self, transform: Any) -> None:  # noqa: ANN401 - a class of a library not imported
        """Keep the transform.

        Args:
            transform: A `Compose`, or any single transform, of Albumentations 2.0.

        Raises:
            ConfigError: it is not from Albumentations.
        """
        if not callable(transform) or not _is_of(transform, "albumentations"):
            raise ConfigError(
                "Albumentations takes a transform of the package albumentations, such as "
                f"albumentations.Compose([…]); got {transform!r}"
            )
        self.transform = transform
        self._of_thread = threading.local()

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample transformed; a bare image likewise.

        Returns:
            A new dict; or a new image. The image is what the transform makes of it.

        Raises:
            Exception: what Albumentations raises: for a box beyond the image, say.
        """
        data: dict[str, Any] = {"image": image_of(sample)}
        local = self._of_this_thread()
        if not isinstance(sample, dict):
            return self._seeded(())(**data)["image"]
        num_objects(sample)
        if "boxes" in sample and "bboxes" in local.targets:
            data["bboxes"] = np.asarray(sample["boxes"], np.float32)
            data[_ROWS] = np.arange(len(sample["boxes"]))
        if "landmarks" in sample and "keypoints" in local.targets:
            points = np.asarray(sample["landmarks"], np.float32)
            numbers = np.flatnonzero(~np.isnan(points).any(axis=-1))
            data["keypoints"], data[_POINTS] = points.reshape(-1, 2)[numbers], numbers
        given = tuple(name for name in ("bboxes", "keypoints") if name in data)
        return _taken_back(sample, self._seeded(given)(**data))

    def _of_this_thread(self) -> Any:  # noqa: ANN401
        """Copies of the transform, and what of a sample it would change."""
        local = self._of_thread
        if not hasattr(local, "copies"):
            plain = _rebuilt(self.transform, ())
            # A Compose that is told of boxes warns if it never changes any.
            local.targets = plain.available_keys
            local.copies, local.python_random = {(): plain}, random.Random(0)
        return local

    def _seeded(self, given: tuple[str, ...]) -> Any:  # noqa: ANN401
        """This thread's copy of the transform, drawing from the sample's generator."""
        local, rng = self._of_this_thread(), sample_rng()
        if given not in local.copies:
            local.copies[given] = _rebuilt(self.transform, given)
        mine = local.copies[given]
        local.python_random.seed(int(rng.integers(_SEEDS)))
        if hasattr(mine, "set_random_state"):  # before 2.0 it drew from the global generators
            mine.set_random_state(rng, local.python_random)
        return mine

    def __getstate__(self) -> dict[str, Any]:
        """Leave the threads' copies behind."""
        return {"transform": self.transform}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with no copy."""
        self.transform = state["transform"]
        self._of_thread = threading.local()

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"Albumentations({self.transform!r})"


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
    before = getattr(own, "processors", {})
    if "bboxes" in given:
        kept_options = _options(before.get("bboxes"))
        options["bbox_params"] = library.BboxParams(
            format="pascal_voc", label_fields=[_ROWS], **kept_options
        )
    if "keypoints" in given:
        kept_options = _options(before.get("keypoints"))
        options["keypoint_params"] = library.KeypointParams(
            format="xy", label_fields=[_POINTS], **kept_options
        )
    return library.Compose(list(own.transforms) if is_compose else [own], **options)


def _options(processor: Any) -> dict[str, Any]:  # noqa: ANN401
    if processor is None:
        return {}
    return {
        name: value
        for name, value in vars(processor.params).items()
        if name not in _HAS_NO_PARAMS and not name.startswith("_")
    }


def _taken_back(sample: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = with_image(sample, data["image"])
    if "keypoints" in data:
        numbers = np.asarray(data[_POINTS], np.int64).reshape(-1)
        moved = np.full(sample["landmarks"].shape, np.nan, np.float32)
        moved.reshape(-1, 2)[numbers] = np.asarray(data["keypoints"]).reshape(-1, 2)
        result["landmarks"] = moved
    if "bboxes" in data:
        result = kept(result, np.asarray(data[_ROWS], np.int64).reshape(-1))
        result["boxes"] = np.asarray(data["bboxes"], np.float32).reshape(-1, 4)
    return result


class Torchvision:
    """A torchvision transform on our samples.

    The transform gets a Pillow image; one of `torchvision.transforms.v2` gets boxes and landmarks,
    too, as `tv_tensors`. A Pillow image comes back as an array, a tensor as a tensor. Objects that
    `SanitizeBoundingBoxes` drops are dropped from every array by object.

    In seeded loading torch's generator is seeded for each sample, so the same sample comes out for
    any number of workers.

    Attributes:
        transform: As given.

    Concurrency:
        As the transform. It pickles if the transform does.
    """

    def __init__(self, transform: Any, *, colour_only: bool = False) -> None:  # noqa: ANN401
        """Keep the transform.

        Args:
            transform: Of `torchvision.transforms` or `torchvision.transforms.v2`, or any function
                of a Pillow image.
            colour_only: Whether it leaves every pixel in its place, so that boxes and landmarks
                need not be told. The first kind can transform samples with boxes only then.

        Raises:
            ConfigError: it cannot be called.
        """
        if not callable(transform):
            raise ConfigError(f"Torchvision takes a transform; got {transform!r}")
        self.transform = transform
        self.colour_only = bool(colour_only)

    def __call__(self, sample: Any) -> Any:  # noqa: ANN401 - a dict or an array
        """Return the sample transformed; a bare image likewise.

        Raises:
            ConfigError: the sample has boxes or landmarks, which this kind of transform cannot
                move.
        """
        from PIL import Image

        picture = Image.fromarray(image_of(sample))
        marks = [
            key for key in ("boxes", "landmarks") if isinstance(sample, dict) and key in sample
        ]
        if not marks or self.colour_only:
            return with_image(sample, _as_array(self.transform(picture)))
        if not type(self.transform).__module__.startswith("torchvision.transforms.v2"):
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
            data["landmarks"] = _key_points(torch, tensors, sample["landmarks"], canvas)
        data = self.transform(data)
        result = kept(with_image(sample, _as_array(data["image"])), data["labels"].numpy())
        if "boxes" in marks:
            result["boxes"] = _rows_of(data["boxes"], result, "boxes")
        if "landmarks" in marks:
            points = data["landmarks"].numpy().astype(np.float32)
            if len(points) != len(rows):
                raise ConfigError(
                    f"the transform gave the landmarks of {len(points)} objects for {len(rows)}: "
                    "leave out SanitizeKeyPoints"
                )
            result["landmarks"] = points[data["labels"].numpy()]
        return result

    def __repr__(self) -> str:
        """Return the call that makes it."""
        return f"Torchvision({self.transform!r})"


def _key_points(
    torch: Any,  # noqa: ANN401
    tensors: Any,  # noqa: ANN401
    landmarks: np.ndarray[Any, Any],
    canvas: tuple[int, int],
) -> Any:  # noqa: ANN401
    if not hasattr(tensors, "KeyPoints"):
        raise ConfigError(
            "the sample has landmarks, which torchvision moves from release 0.23 on: use a newer "
            "one, Albumentations, or Penstock's own transforms"
        )
    # As they are, centres of pixels: torchvision's mirror is x' = width - 1 - x, too.
    points = torch.from_numpy(np.array(landmarks, np.float32))
    return tensors.KeyPoints(points, canvas_size=canvas)


def _rows_of(boxes: Any, sample: dict[str, Any], key: str) -> np.ndarray[Any, Any]:  # noqa: ANN401
    array = np.asarray(boxes.numpy(), np.float32).reshape(-1, 4)
    form = str(getattr(getattr(boxes, "format", None), "name", "XYXY"))
    if form != "XYXY" or len(array) != len(sample[key]):
        raise ConfigError(
            f"the transform gave {len(array)} boxes in the form {form} for {len(sample[key])} "
            "objects: boxes stay XYXY, and only SanitizeBoundingBoxes may drop some"
        )
    return array


def _as_array(image: Any) -> Any:  # noqa: ANN401
    """A Pillow image as an array; anything else as it is."""
    from PIL import Image

    return np.array(image) if isinstance(image, Image.Image) else image


def _is_of(transform: Any, package: str) -> bool:  # noqa: ANN401
    """Whether a class of the object is from the package; the user's own subclasses, too."""
    return any(cls.__module__.partition(".")[0] == package for cls in type(transform).__mro__)
