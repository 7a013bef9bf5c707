# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's annotations: an XML file for each image, in folders.

VOC counts pixels from 1 and includes both ends: a box over the whole of a 640 x 480 image is
xmin=1, ymin=1, xmax=640, ymax=480. Here boxes are 0-based and half-open, so that the same box is
(0, 0, 640, 480), its width 640 - 0, and its pixels `image[0:480, 0:640]`:

    x1, y1, x2, y2 = xmin - origin, ymin - origin, xmax, ymax        origin = 1

Tools that count from 0 write the box's edges, (0, 0, 640, 480) for the same one: then origin is 0,
and the numbers are taken as they are. A landmark is a point, and becomes x - origin, y - origin.

VOC has no landmarks itself, and tools add them in several ways. These are read:

    <landmarks><landmark><name>nose</name><x>7</x><y>9</y><visibility>2</visibility></landmark> …
    <landmarks><landmark name="nose" x="7" y="9" visibility="2"/> …     also <point>, <keypoint>
    <landmarks><nose><x>7</x><y>9</y></nose> …                          the element is the name
    <landmarks><x1>7</x1><y1>9</y1><x2>8</x2> …                         numbers, from any first one
    <landmarks><nose_x>7</nose_x><nose_y>9</nose_y> …                   names
    <landmarks>7 9 8 9 …</landmarks>                                    x1 y1 x2 y2 …
    <lm><x1>7</x1><y1>9</y1> …</lm>                                     as in WIDER FACE's copies

There `<has_lm>0</has_lm>` says that the numbers mean nothing, and the object has no landmarks.
`keypoints` may stand for `landmarks`. The first form is the one written. `visibility` is COCO's: 0
not marked, 1 hidden, 2 seen; `visible` is 0 for hidden, 1 for seen. "nan" says that a point is not
marked.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from penstock.errors import StoreError
from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.annotated_folder import annotated_folder
from penstock.stores.folder.listing import IMAGE_SUFFIXES, cannot_list, is_system_folder
from penstock.vision.annotations.model import AnnotatedImage, AnnotatedObject
from penstock.vision.annotations.reading import (
    MAX_LANDMARK_NAMES,
    MAX_LANDMARKS,
    coordinate,
    coordinate_text,
    element_line,
    first_repeated,
    xml_escaped,
)
from penstock.vision.annotations.voc_files import (
    parse_xml,
    stems_of_split,
    warn_of_images_alone,
    xml_text,
)
from penstock.vision.arguments import checked_choice

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray

_FOLDERS_SHOWN: Final = 5  # in an error
_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
# "Unspecified" is what old tools write into fields that were not filled in.
_FLAGS: Final = {
    "": None,
    "unspecified": None,
    "0": False,
    "false": False,
    "1": True,
    "true": True,
}
_FLAG_NAMES: Final = ("truncated", "occluded", "difficult")
_ATTRIBUTES: Final = "attributes"
_LANDMARK_TAGS: Final = ("landmarks", "keypoints", "lm")
_KNOWN: Final = {"name", "bndbox", "pose", "part", _ATTRIBUTES, *_FLAG_NAMES, *_LANDMARK_TAGS}

_POINT_TAGS: Final = frozenset(("landmark", "point", "keypoint", "lm"))
_NUMBERED: Final = re.compile(r"(?P<side>[xy])_?(?P<point>[0-9]{1,6})")
_NAMED: Final = re.compile(r"(?P<point>.+)_(?P<side>[xy])")
_ASIDE: Final = frozenset(("visible", "visibility", "blur"))  # beside the points, and no points
_VISIBILITIES: Final = {"visibility": ("0", "1", "2"), "visible": (None, "0", "1")}

Box = tuple[float, float, float, float]


def read_voc_folder(
    root: str | Path, split: str | None = None, *, origin: int = 1
) -> list[AnnotatedImage]:
    """Return the images of a folder that have an annotation.

    The folder holds `Annotations/NAME.xml` and `JPEGImages/NAME.*`, or `annotations/` and
    `images/`, or two subfolders of other names, or NAME.xml beside NAME.jpg. An image goes with the
    annotation of its name, whatever `<filename>` says; that counts where no image has the name.
    Images without an annotation are left out, with a warning.

    Args:
        root: The folder.
        split: `ImageSets/Main/SPLIT.txt` names the images and their order; a repeated name
            repeats the sample. None takes all, sorted.
        origin: As in `read_voc`.

    Returns:
        The images; `key` is the name without its suffix, with the subfolder if it is in one.

    Raises:
        StoreError: there are no annotations, or no such split; one is missing or damaged; two
            images have one name. The message names the file and the object.
    """
    checked_choice("origin", origin, (0, 1))
    root = Path(root)
    annotations, images = voc_places(root)
    files = _by_stem(annotations, (".xml",))
    if not files:
        raise StoreError(f"{annotations} has no XML files: it is no folder of VOC annotations.")
    pictures = _by_stem(images, IMAGE_SUFFIXES) if images.is_dir() else {}
    if split is None:
        keys: Sequence[str] = sorted(files)
        warn_of_images_alone(images, pictures.keys() - files.keys())
    else:
        keys = stems_of_split(root, split, files)
        absent = [key for key in keys if key not in files]
        if absent:
            raise StoreError(
                f"the split {split!r} of {root} names {len(absent)} image(s) without annotations: "
                f"{absent[0]}.xml is not there."
            )
    found = {}
    for key in dict.fromkeys(keys):
        file = annotations / files[key]
        try:
            element = voc_root(read_annotation(file, MAX_TREE_BYTES))
            path = images / _picture(element, key, pictures)
            found[key] = _image(element, path, key, origin, str(file))
        except ValueError as error:
            raise StoreError(f"cannot read {file}: {error}.") from error
    return [found[key] for key in keys]


def voc_places(root: Path) -> tuple[Path, Path]:
    """Return the folders of annotations and of images."""
    for of_xml, of_images in (("Annotations", "JPEGImages"), ("annotations", "images")):
        if (root / of_xml).is_dir():
            return root / of_xml, root / of_images
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "not there"
        raise StoreError(f"{root} is {what}: looked for {os.path.abspath(root)}.")
    below = sorted(root.glob("VOCdevkit/*/Annotations"))
    if below:  # torchvision's `root`
        names = ", ".join(str(folder.parent) for folder in below[:_FOLDERS_SHOWN])
        raise StoreError(f"{root} has no Annotations of its own. Name one of these: {names}.")
    found = annotated_folder(root)
    if found is not None and found.form == "voc" and found.images is not None:
        return found.annotations, found.images
    return root, root


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of files below a folder by what they are called without their suffix."""

    def refuse(error: OSError) -> None:
        raise cannot_list(error) from error

    found: dict[str, str] = {}
    for above, subfolders, names in os.walk(folder, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if not is_system_folder(name))
        prefix = os.path.relpath(above, folder).replace(os.sep, "/")
        for name in sorted(names):
            # "._cat.xml" beside cat.xml is what macOS leaves on foreign disks.
            if not name.lower().endswith(suffixes) or name.startswith("."):
                continue
            path = name if prefix == "." else f"{prefix}/{name}"
            stem = os.path.splitext(path)[0]
            if stem in found:
                raise StoreError(
                    f"{folder} has {found[stem]!r} and {path!r}: which of them is meant by "
                    f"{stem!r}? Move one away."
                )
            found[stem] = path
    return found


def _picture(root: Element, key: str, pictures: dict[str, str]) -> str:
    """Return the image's path; where there is none, one that says which is missing."""
    if key in pictures:
        return pictures[key]
    said = (root.findtext("filename") or "").strip().replace("\\", "/").rpartition("/")[2]
    by_name = f"{key.rpartition('/')[0]}/{said}".lstrip("/")
    return by_name if pictures.get(os.path.splitext(by_name)[0]) == by_name else f"{key}.jpg"


def read_voc(
    data: bytes | str, *, path: str | Path, key: str, origin: int = 1, source: str = ""
) -> AnnotatedImage:
    """Return what one XML file says of its image."""
    checked_choice("origin", origin, (0, 1))
    return _image(voc_root(data), Path(path), key, origin, source)


def voc_root(data: bytes | str) -> Element:
    """Return the `<annotation>` element of a file."""
    root = parse_xml(data if isinstance(data, str) else xml_text(bytes(data)))
    if root.tag != "annotation":
        raise ValueError(f"the root element is <{root.tag}>, not <annotation>")
    return root


def _image(root: Element, path: Path, key: str, origin: int, source: str) -> AnnotatedImage:
    objects = enumerate(root.findall("object"))
    return AnnotatedImage(
        path,
        key,
        _length(root, "width"),
        _length(root, "height"),
        tuple(_object(item, f"object {number}", origin) for number, item in objects),
        source,
    )


def _length(root: Element, name: str) -> int | None:
    """Return width or height, in pixels, from an annotation's `<size>`; None if missing or 0."""
    text = root.findtext(f"size/{name}")
    if text is None or not text.strip():
        return None
    number = _number(text, f"size: {name}")
    if number < 0 or number != int(number):
        raise ValueError(f"size: {name} is {text.strip()[:40]!r}, not a number of pixels")
    return int(number) or None


def _object(item: Element, where: str, origin: int) -> AnnotatedObject:
    """Return what an `<object>` or a `<part>` says; errors call it `where`, and by its class."""
    name, where = _named(item, where)
    points, point_names, visibility = _landmarks(item, where, origin)
    parts = enumerate(item.findall("part"))
    return AnnotatedObject(
        class_name=name,
        box_xyxy_px=None if item.find("bndbox") is None else _box(item, where, origin),
        landmarks_xy_px=points,
        landmark_names=point_names,
        visibility=visibility,
        pose=(item.findtext("pose") or "").strip(),
        extra=_extra(item),
        parts=tuple(_object(part, f"{where}: part {n}", origin) for n, part in parts),
        **{flag: _flag(item, flag, where) for flag in _FLAG_NAMES},
    )


def _named(item: Element, where: str) -> tuple[str, str]:
    """Return the class of an object, and what errors call it."""
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{where} has no name")
    return name, f"{where} ({name})"


def _box(item: Element, where: str, origin: int) -> Box:
    """Return `<bndbox>` as left, top, right, bottom: 0-based, half-open."""
    box = item.find("bndbox")
    if box is None:
        raise ValueError(f"{where} has no bndbox")
    minus = (origin, origin, 0, 0)
    left, top, right, bottom = (
        _number(box.findtext(side), f"{where}: {side}", less)
        for side, less in zip(_SIDES, minus, strict=True)
    )
    return left, top, right, bottom


def _number(text: str | None, where: str, minus: int = 0) -> float:
    """Return the number of an element that has to be there."""
    if text is None:
        raise ValueError(f"{where} is missing")
    try:
        return coordinate(text, minus)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def _flag(item: Element, name: str, where: str) -> bool | None:
    """Return a flag; None where the element is missing, or not filled in."""
    text = (item.findtext(name) or "").strip()
    if text.lower() not in _FLAGS:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not 0 or 1")
    return _FLAGS[text.lower()]


def _extra(item: Element) -> dict[str, str]:
    """Return what else is in an object, by name or path; one that comes again as x[2], x[3]."""
    found: dict[str, str] = {}
    times: Counter[str] = Counter()
    for name, value in (*_attributes(item), *_leaves(item)):
        times[name] += 1
        unique = name if times[name] == 1 else f"{name}[{times[name]}]"
        if name and unique not in found:
            found[unique] = (value or "").strip()
    return found


def _attributes(item: Element) -> Iterator[tuple[str, str | None]]:
    for attribute in item.findall(f"{_ATTRIBUTES}/attribute"):
        name = (attribute.findtext("name") or attribute.get("name") or "").strip()
        value = attribute.findtext("value")
        yield name, attribute.text if value is None else value


def _leaves(item: Element, path: str = "") -> Iterator[tuple[str, str | None]]:
    for child in item:
        here = f"{path}{child.tag}"
        if not path and child.tag in _KNOWN:
            continue
        if len(child):
            yield from _leaves(child, f"{here}/")
        else:
            yield here, child.text


class _Point(NamedTuple):
    x: float
    y: float
    name: str = ""
    visibility: int | None = None


_Landmarks = tuple[tuple[tuple[float, float], ...], tuple[str, ...], tuple[int, ...]]


def _landmarks(item: Element, where: str, origin: int) -> _Landmarks:
    """Return points, their names and their visibility; the last two empty if no point has any."""
    holders = [child for child in item if child.tag in _LANDMARK_TAGS]
    if not holders or (item.findtext("has_lm") or "").strip() == "0":
        return (), (), ()
    if len(holders) > 1:
        raise ValueError(f"{where} has landmarks twice: <{holders[0].tag}>, <{holders[1].tag}>")
    points = _points(holders[0], f"{where}: {holders[0].tag}", origin)
    names = tuple(point.name for point in points)
    most = MAX_LANDMARK_NAMES if any(names) else MAX_LANDMARKS
    if len(points) > most:
        raise ValueError(f"{where} has {len(points):,} landmarks; {most:,} is the most")
    if any(names) and not all(names):
        raise ValueError(f"{where}: landmark {names.index('')} has no name, and others have one")
    twice = first_repeated(names)
    if any(names) and twice is not None:
        raise ValueError(f"{where}: two landmarks are called {twice!r}")
    is_said = any(point.visibility is not None for point in points)
    visibility = (
        (0 if math.isnan(point.x) else 2) if point.visibility is None else point.visibility
        for point in points
    )
    return (
        tuple((point.x, point.y) for point in points),
        names if any(names) else (),
        tuple(visibility) if is_said else (),
    )


def _points(holder: Element, where: str, origin: int) -> Sequence[_Point]:
    """Return the points in any of the forms that the top of this module shows."""
    children = [child for child in holder if child.tag not in _ASIDE]
    if not len(holder):
        words = (holder.text or "").replace(",", " ").split()
        if len(words) % 2:
            raise ValueError(f"{where} has {len(words)} numbers; x and y of each point are even")
        values = [_side(word, f"{where}: number {n}", origin) for n, word in enumerate(words)]
        return [_Point(*pair) for pair in zip(values[::2], values[1::2], strict=True)]
    if children and all(_NUMBERED.fullmatch(child.tag) for child in children):
        sides = _sides(children, _NUMBERED, where)
        numbers = sorted(map(int, sides))
        if numbers != list(range(numbers[0], numbers[0] + len(sides))):
            raise ValueError(f"{where} has points {numbers[0]} to {numbers[-1]}, but not all")
        ordered = sorted(sides, key=int)
        return [_pair(sides[point], f"{where}: {point}", origin) for point in ordered]
    if all(_NAMED.fullmatch(child.tag) and not len(child) for child in children):
        named = _sides(children, _NAMED, where).items()
        return [_pair(of_one, f"{where}: {n}", origin)._replace(name=n) for n, of_one in named]
    return [_point(c, f"{where}: <{c.tag}> {n}", origin) for n, c in enumerate(children)]


def _sides(
    children: list[Element], pattern: re.Pattern[str], where: str
) -> dict[str, dict[str, str | None]]:
    """Return the texts of x and y for each point, in the order that points come."""
    sides: dict[str, dict[str, str | None]] = {}
    for child in children:
        found = pattern.fullmatch(child.tag)
        assert found is not None  # the caller looked
        of_point = sides.setdefault(found["point"], {})
        if found["side"] in of_point:
            raise ValueError(f"{where} has <{child.tag}> twice")
        of_point[found["side"]] = child.text or ""
    return sides


def _pair(sides: dict[str, str | None], where: str, origin: int) -> _Point:
    x, y = (_side(sides.get(side), f"{where}: {side}", origin) for side in "xy")
    return _Point(x, y)


def _side(text: str | None, where: str, origin: int) -> float:
    if text is not None and text.strip().lower() == "nan":
        return math.nan
    return _number(text, where, origin)


def _point(child: Element, where: str, origin: int) -> _Point:
    """Return a point that is an element, with x and y as attributes or as elements within."""
    fields = ("name", "x", "y", *_VISIBILITIES)
    texts = {name: child.get(name, child.findtext(name)) for name in fields}
    if texts["x"] is None and texts["y"] is None:
        raise ValueError(f"{where} is no point: it has no x and y")
    name = (texts["name"] or "").strip()
    if not name and child.tag not in _POINT_TAGS:
        name = child.tag
    visibility = None
    for field, known in _VISIBILITIES.items():
        text = (texts[field] or "").strip()
        if text and text not in known:
            either = " or ".join(filter(None, known))
            raise ValueError(f"{where}: {field} is {text[:40]!r}, not {either}")
        if text and visibility is None:
            visibility = known.index(text)
    return _pair(texts, where, origin)._replace(name=name, visibility=visibility)


def write_voc(image: AnnotatedImage, *, origin: int = 1) -> bytes:
    """Return the XML file of an image, in UTF-8; `read_voc` reads the same image from it."""
    checked_choice("origin", origin, (0, 1))
    size = (("width", image.width_px), ("height", image.height_px), ("depth", 3))
    lines = [element_line("filename", image.path.name)]
    if image.width_px and image.height_px:
        inner = (f"\t{element_line(name, str(length))}" for name, length in size)
        lines += ["\t<size>", *inner, "\t</size>"]
    for number, found in enumerate(image.objects):
        lines += _object_lines(found, f"object {number}", origin)
    return "\n".join(["<annotation>", *lines, "</annotation>", ""]).encode()


def _object_lines(
    found: AnnotatedObject, where: str, origin: int, tag: str = "object"
) -> list[str]:
    if not found.class_name.strip():
        raise ValueError(f"{where} has no class, and VOC has no object without a <name>")
    where = f"{where} ({found.class_name})"
    lines = [element_line("name", found.class_name)]
    if found.pose:
        lines.append(element_line("pose", found.pose))
    for name in _FLAG_NAMES:
        flag = getattr(found, name)
        if flag is not None:
            lines.append(element_line(name, str(int(flag))))
    if found.box_xyxy_px is not None:
        sides = zip(_SIDES, found.box_xyxy_px, (origin, origin, 0, 0), strict=True)
        inner = [element_line(side, coordinate_text(value, more)) for side, value, more in sides]
        lines += ["\t<bndbox>", *(f"\t{line}" for line in inner), "\t</bndbox>"]
    if found.landmarks_xy_px:
        inner = _landmark_lines(found, where, origin)
        lines += ["\t<landmarks>", *inner, "\t</landmarks>"]
    if found.extra:
        inner = [
            f"\t\t<attribute><name>{xml_escaped(name)}</name>"
            f"<value>{xml_escaped(value)}</value></attribute>"
            for name, value in found.extra.items()
        ]
        lines += [f"\t<{_ATTRIBUTES}>", *inner, f"\t</{_ATTRIBUTES}>"]
    for number, part in enumerate(found.parts):
        lines += _object_lines(part, f"{where}: part {number}", origin, "part")
    return [f"\t<{tag}>", *(f"\t{line}" for line in lines), f"\t</{tag}>"]


def _landmark_lines(found: AnnotatedObject, where: str, origin: int) -> list[str]:
    points = found.landmarks_xy_px
    for what, values in (("names", found.landmark_names), ("visibilities", found.visibility)):
        if values and len(values) != len(points):
            raise ValueError(f"{where} has {len(points)} landmarks and {len(values)} {what}")
    lines = []
    for number, (x, y) in enumerate(points):
        name = found.landmark_names[number] if found.landmark_names else ""
        seen = f"<visibility>{found.visibility[number]}</visibility>" if found.visibility else ""
        lines.append(
            f"\t\t<landmark>{f'<name>{xml_escaped(name)}</name>' if name else ''}"
            f"<x>{coordinate_text(x, origin)}</x><y>{coordinate_text(y, origin)}</y>{seen}"
            "</landmark>"
        )
    return lines


@dataclass(frozen=True, eq=False)
class VOCAnnotation:
    """The annotation of one image; its arrays have a row for each object, in the file's order.

    Attributes:
        filename: As the annotation says it; empty if it does not. It need not be true.
        width_px: Width of the image; None where it is missing or 0.
        height_px: Height of the image; None where it is missing or 0.
        class_names: Class of each object.
        boxes_xyxy_px: float32, shape (objects, 4): left, top, right, bottom; 0-based, half-open.
        difficult: bool, shape (objects,): objects that VOC's own evaluation does not count.
        truncated: bool, shape (objects,): objects that go on beyond their box.
    """

    filename: str
    width_px: int | None
    height_px: int | None
    class_names: tuple[str, ...]
    boxes_xyxy_px: NDArray[np.float32]
    difficult: NDArray[np.bool_]
    truncated: NDArray[np.bool_]

    @property
    def is_degenerate(self) -> NDArray[np.bool_]:
        """Which boxes begin and end in one column or row, or end before they begin.

        In VOC's form xmin >= xmax or ymin >= ymax: taken at its word one pixel wide or less, in
        practice a click without a drag. They are kept, as training code has to decide.
        """
        sizes = self.boxes_xyxy_px[:, 2:] - self.boxes_xyxy_px[:, :2]
        return np.asarray((sizes <= 1).any(axis=1))


def parse_voc(xml: str | bytes) -> VOCAnnotation:
    """Return the boxes of an annotation; `annotations.voc.read_voc` returns all that it says.

    Nothing outside of `xml` is read: a DOCTYPE, which entities need, is an error. `difficult` and
    `truncated` may be missing and are then false, as in many tools' files.

    Args:
        xml: The file, as bytes or as text.

    Returns:
        The annotation, with arrays of its own.

    Raises:
        ValueError: it is no XML, or no annotation; a field is missing or is no number. The message
            names the object.

    Example:
        >>> found = parse_voc(
        ...     "<annotation><size><width>640</width><height>480</height></size><object>"
        ...     "<name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin><xmax>20</xmax>"
        ...     "<ymax>480</ymax></bndbox></object></annotation>"
        ... )
        >>> found.class_names, found.boxes_xyxy_px
        (('cell',), array([[  0.,  10.,  20., 480.]], dtype=float32))
    """
    root = voc_root(xml)
    names, boxes, flags = [], [], []
    for number, item in enumerate(root.findall("object")):
        name, where = _named(item, f"object {number}")
        names.append(name)
        boxes.append(_box(item, where, 1))
        flags.append([bool(_flag(item, flag, where)) for flag in ("difficult", "truncated")])
    difficult, truncated = np.array(flags, np.bool_).reshape(-1, 2).T.copy()
    return VOCAnnotation(
        (root.findtext("filename") or "").strip(),
        _length(root, "width"),
        _length(root, "height"),
        tuple(names),
        np.array(boxes, np.float32).reshape(-1, 4),
        difficult,
        truncated,
    )
