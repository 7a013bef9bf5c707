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

from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.annotated_folder import annotated_folder
from penstock.stores.folder.listing import IMAGE_SUFFIXES, cannot_list, is_system_folder
from penstock.stores.folder.voc import parse_xml, stems_of_split, warn_of_images_alone, xml_text
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from xml.etree.ElementTree import Element

    from numpy.typing import NDArray

LANDMARK_TAGS: Final = ("landmarks", "keypoints", "lm")
_POINT_TAGS: Final = frozenset(("landmark", "point", "keypoint", "lm"))
_NUMBERED: Final = re.compile(r"(?P<side>[xy])_?(?P<point>[0-9]{1,6})")
_NAMED: Final = re.compile(r"(?P<point>.+)_(?P<side>[xy])")
# Beside the points, and no points themselves.
_ASIDE: Final = frozenset(("visible", "visibility", "blur"))
_VISIBILITIES: Final = {"visibility": ("0", "1", "2"), "visible": (None, "0", "1")}


class _Point(NamedTuple):
    x: float
    y: float
    name: str = ""
    visibility: int | None = None


Landmarks = tuple[tuple[tuple[float, float], ...], tuple[str, ...], tuple[int, ...]]


def read_landmarks(item: Element, where: str, origin: int) -> Landmarks:
    """Return points, their names and their visibility; the last two empty if no point has any.

    Raises:
        ValueError: a coordinate is missing or is none, or the form is unknown.
    """
    holders = [child for child in item if child.tag in LANDMARK_TAGS]
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
    visibility = tuple(_visibility(point) for point in points)
    is_said = any(point.visibility is not None for point in points)
    return (
        tuple((point.x, point.y) for point in points),
        names if any(names) else (),
        visibility if is_said else (),
    )


def _points(holder: Element, where: str, origin: int) -> Sequence[_Point]:
    children = [child for child in holder if child.tag not in _ASIDE]
    if not len(holder):
        return _from_text((holder.text or "").replace(",", " ").split(), where, origin)
    if children and all(_NUMBERED.fullmatch(child.tag) for child in children):
        sides = _sides(children, _NUMBERED, where)
        numbers = sorted(map(int, sides))
        if numbers != list(range(numbers[0], numbers[0] + len(sides))):
            raise ValueError(f"{where} has points {numbers[0]} to {numbers[-1]}, but not all")
        ordered = sorted(sides, key=int)
        return [_pair(sides[point], f"{where}: {point}", origin) for point in ordered]
    if all(_NAMED.fullmatch(child.tag) and not len(child) for child in children):
        sides = _sides(children, _NAMED, where)
        named = sides.items()
        return [_pair(of_one, f"{where}: {n}", origin)._replace(name=n) for n, of_one in named]
    return [_from_element(c, f"{where}: <{c.tag}> {n}", origin) for n, c in enumerate(children)]


def _from_text(words: list[str], where: str, origin: int) -> list[_Point]:
    if len(words) % 2:
        raise ValueError(f"{where} has {len(words)} numbers; x and y of each point are even")
    values = [_value(word, f"{where}: number {n}", origin) for n, word in enumerate(words)]
    return [_Point(*pair) for pair in zip(values[::2], values[1::2], strict=True)]


def _sides(
    children: list[Element], pattern: re.Pattern[str], where: str
) -> dict[str, dict[str, str]]:
    """Return the texts of x and y for each point, in the order that points come."""
    sides: dict[str, dict[str, str]] = {}
    for child in children:
        found = pattern.fullmatch(child.tag)
        assert found is not None  # the caller looked
        of_point = sides.setdefault(found["point"], {})
        if found["side"] in of_point:
            raise ValueError(f"{where} has <{child.tag}> twice")
        of_point[found["side"]] = child.text or ""
    return sides


def _pair(sides: dict[str, str], where: str, origin: int) -> _Point:
    x, y = (_value(sides.get(side), f"{where}: {side}", origin) for side in "xy")
    return _Point(x, y)


def _from_element(child: Element, where: str, origin: int) -> _Point:
    texts = {name: _field(child, name) for name in ("name", "x", "y", *_VISIBILITIES)}
    if texts["x"] is None and texts["y"] is None:
        raise ValueError(f"{where} is no point: it has no x and y")
    name = (texts["name"] or "").strip()
    if not name and child.tag not in _POINT_TAGS:
        name = child.tag
    x, y = (_value(texts[side], f"{where}: {side}", origin) for side in "xy")
    return _Point(x, y, name, _visibility_in(texts, where))


def _field(child: Element, name: str) -> str | None:
    text = child.get(name)
    return child.findtext(name) if text is None else text


def _visibility_in(texts: dict[str, str | None], where: str) -> int | None:
    for name, known in _VISIBILITIES.items():
        text = (texts[name] or "").strip()
        if text and text not in known:
            raise ValueError(
                f"{where}: {name} is {text[:40]!r}, not {' or '.join(filter(None, known))}"
            )
        if text:
            return known.index(text)
    return None


def _visibility(point: _Point) -> int:
    if point.visibility is not None:
        return point.visibility
    return 0 if math.isnan(point.x) else 2


def _value(text: str | None, where: str, origin: int) -> float:
    if text is None:
        raise ValueError(f"{where} is missing")
    if text.strip().lower() == "nan":
        return math.nan
    try:
        return coordinate(text, origin)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


def landmark_lines(found: AnnotatedObject, where: str, origin: int) -> list[str]:
    """Return the lines of `<landmarks>`; none for an object without.

    Raises:
        ValueError: there are more or fewer names, or visibilities, than points.
    """
    points = found.landmarks_xy_px
    if not points:
        return []
    for what, values in (("names", found.landmark_names), ("visibilities", found.visibility)):
        if values and len(values) != len(points):
            raise ValueError(f"{where} has {len(points)} landmarks and {len(values)} {what}")
    lines = ["\t<landmarks>"]
    for number, (x, y) in enumerate(points):
        name = found.landmark_names[number] if found.landmark_names else ""
        seen = f"<visibility>{found.visibility[number]}</visibility>" if found.visibility else ""
        lines.append(
            f"\t\t<landmark>{f'<name>{xml_escaped(name)}</name>' if name else ''}"
            f"<x>{coordinate_text(x, origin)}</x><y>{coordinate_text(y, origin)}</y>{seen}"
            "</landmark>"
        )
    return [*lines, "\t</landmarks>"]


_SIDES: Final = ("xmin", "ymin", "xmax", "ymax")
# "Unspecified" is what old tools write into fields that nobody filled in.
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
_KNOWN: Final = {"name", "bndbox", "pose", "part", _ATTRIBUTES, *_FLAG_NAMES, *LANDMARK_TAGS}


def read_object(item: Element, where: str, origin: int) -> AnnotatedObject:
    """Return what an `<object>` or a `<part>` says.

    Args:
        item: The element.
        where: What errors call it, without its class: "object 3".
        origin: Number of the first pixel, see above.

    Raises:
        ValueError: a field is missing or is none of its kind.
    """
    name = read_class_name(item, where)
    where = f"{where} ({name})"
    points, point_names, visibility = read_landmarks(item, where, origin)
    flags = {flag: read_flag(item, flag, where) for flag in _FLAG_NAMES}
    parts = enumerate(item.findall("part"))
    return AnnotatedObject(
        class_name=name,
        box_xyxy_px=None if item.find("bndbox") is None else read_box(item, where, origin),
        landmarks_xy_px=points,
        landmark_names=point_names,
        visibility=visibility,
        pose=(item.findtext("pose") or "").strip(),
        extra=_extra(item),
        parts=tuple(read_object(part, f"{where}: part {n}", origin) for n, part in parts),
        **flags,
    )


def read_class_name(item: Element, where: str) -> str:
    """Return the text of `<name>`; without one, ValueError."""
    name = (item.findtext("name") or "").strip()
    if not name:
        raise ValueError(f"{where} has no name")
    return name


def read_box(item: Element, where: str, origin: int = 1) -> tuple[float, float, float, float]:
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


def read_flag(item: Element, name: str, where: str) -> bool | None:
    """Return a flag; None where the element is missing, or nobody filled it in."""
    text = (item.findtext(name) or "").strip()
    if text.lower() not in _FLAGS:
        raise ValueError(f"{where}: {name} is {text[:40]!r}, not 0 or 1")
    return _FLAGS[text.lower()]


def read_length(root: Element, name: str) -> int | None:
    """Return width or height, in pixels, from an annotation's `<size>`; None if missing or 0."""
    text = root.findtext(f"size/{name}")
    if text is None or not text.strip():
        return None
    number = _number(text, f"size: {name}")
    if number < 0 or number != int(number):
        raise ValueError(f"size: {name} is {text.strip()[:40]!r}, not a number of pixels")
    return int(number) or None


def _extra(item: Element) -> dict[str, str]:
    """Return what else is in an object: attributes by name, other elements by their path.

    A name that comes again is numbered as XPath does: x, x[2], x[3].
    """
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


def write_object(found: AnnotatedObject, where: str, origin: int, tag: str = "object") -> list[str]:
    """Return the lines of an `<object>`, each indented by a tab.

    Raises:
        ValueError: it has no class, or something that XML or VOC cannot say.
    """
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
    lines += _box_lines(found, origin)
    lines += landmark_lines(found, where, origin)
    lines += _attribute_lines(found)
    for number, part in enumerate(found.parts):
        lines += write_object(part, f"{where}: part {number}", origin, "part")
    return [f"\t<{tag}>", *(f"\t{line}" for line in lines), f"\t</{tag}>"]


def _box_lines(found: AnnotatedObject, origin: int) -> list[str]:
    if found.box_xyxy_px is None:
        return []
    plus = (origin, origin, 0, 0)
    sides = zip(_SIDES, found.box_xyxy_px, plus, strict=True)
    inner = [element_line(side, coordinate_text(value, more)) for side, value, more in sides]
    return ["\t<bndbox>", *(f"\t{line}" for line in inner), "\t</bndbox>"]


def _attribute_lines(found: AnnotatedObject) -> list[str]:
    if not found.extra:
        return []
    inner = [
        f"\t\t<attribute><name>{xml_escaped(name)}</name>"
        f"<value>{xml_escaped(value)}</value></attribute>"
        for name, value in found.extra.items()
    ]
    return [f"\t<{_ATTRIBUTES}>", *inner, f"\t</{_ATTRIBUTES}>"]


_NUM_SHOWN: Final = 5  # folders, in an error


def read_voc(
    data: bytes | str, *, path: str | Path, key: str, origin: int = 1, source: str = ""
) -> AnnotatedImage:
    """Return what one XML file says of its image.

    Nothing outside of `data` is read: a DOCTYPE, which entities need, is an error. All fields but
    an object's name may be missing. Boxes are returned as the file has them, also those that are
    empty, inverted or outside of the image.

    Args:
        data: The file, as bytes or as text.
        path: The image; the file's own word for it is not looked at.
        key: What the image is called.
        origin: Number of the first pixel: 1 in VOC; 0 for tools that write a box's edges,
            counted from 0.
        source: What the file is called, for later errors.

    Raises:
        ValueError: it is no XML, or no annotation, or a field is none of its kind. The message
            names the object.

    Example:
        >>> image = read_voc(
        ...     "<annotation><object><name>cell</name><bndbox><xmin>1</xmin><ymin>11</ymin>"
        ...     "<xmax>20</xmax><ymax>480</ymax></bndbox></object></annotation>",
        ...     path="JPEGImages/1.jpg",
        ...     key="1",
        ... )
        >>> image.objects[0].class_name, image.objects[0].box_xyxy_px
        ('cell', (0.0, 10.0, 20.0, 480.0))
    """
    _check_origin(origin)
    return _image(voc_root(data), Path(path), key, origin, source)


def voc_root(data: bytes | str) -> Element:
    """Return the `<annotation>` element of a file.

    Raises:
        ValueError: it is no XML, or its root is another.
    """
    root = parse_xml(data if isinstance(data, str) else xml_text(bytes(data)))
    if root.tag != "annotation":
        raise ValueError(f"the root element is <{root.tag}>, not <annotation>")
    return root


def _check_origin(origin: int) -> None:
    if origin not in (0, 1):
        raise ConfigError(f"origin is the number of the first pixel, 0 or 1, not {origin!r}.")


def _image(root: Element, path: Path, key: str, origin: int, source: str) -> AnnotatedImage:
    objects = enumerate(root.findall("object"))
    return AnnotatedImage(
        path,
        key,
        read_length(root, "width"),
        read_length(root, "height"),
        tuple(read_object(item, f"object {number}", origin) for number, item in objects),
        source,
    )


def write_voc(image: AnnotatedImage, *, origin: int = 1) -> bytes:
    """Return the XML file of an image, in UTF-8; `read_voc` reads the same image from it.

    What VOC has no element for, an object's `extra`, goes into the `<attributes>` that CVAT added
    to the format; landmarks go into `<landmarks>`.

    Args:
        image: Its path's last part becomes `<filename>`.
        origin: As in `read_voc`.

    Raises:
        ValueError: an object has no class, or a text has characters that XML cannot hold.
    """
    _check_origin(origin)
    size = (("width", image.width_px), ("height", image.height_px), ("depth", 3))
    lines = [element_line("filename", image.path.name)]
    if image.width_px and image.height_px:
        inner = (f"\t{element_line(name, str(length))}" for name, length in size)
        lines += ["\t<size>", *inner, "\t</size>"]
    for number, found in enumerate(image.objects):
        lines += write_object(found, f"object {number}", origin)
    return "\n".join(["<annotation>", *lines, "</annotation>", ""]).encode()


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
    _check_origin(origin)
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
        keys = _keys_of_split(root, split, files)
    found = {
        key: _read_file(annotations / files[key], key, images, pictures, origin)
        for key in dict.fromkeys(keys)
    }
    return [found[key] for key in keys]


def voc_places(root: Path) -> tuple[Path, Path]:
    """Return the folders of annotations and of images.

    Raises:
        StoreError: there is no such folder, or it is the one above.
    """
    for of_xml, of_images in (("Annotations", "JPEGImages"), ("annotations", "images")):
        if (root / of_xml).is_dir():
            return root / of_xml, root / of_images
    if not root.is_dir():
        what = "a file, not a folder" if root.exists() else "not there"
        raise StoreError(f"{root} is {what}: looked for {os.path.abspath(root)}.")
    below = sorted(root.glob("VOCdevkit/*/Annotations"))
    if below:  # torchvision's `root`
        names = ", ".join(str(folder.parent) for folder in below[:_NUM_SHOWN])
        raise StoreError(f"{root} has no Annotations of its own. Name one of these: {names}.")
    found = annotated_folder(root)
    if found is not None and found.form == "voc" and found.images is not None:
        return found.annotations, found.images
    return root, root


def _by_stem(folder: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """Return the paths of files below a folder by what they are called without their suffix."""
    found: dict[str, str] = {}
    for above, subfolders, names in os.walk(folder, onerror=_refuse_to_pass_over):
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


def _refuse_to_pass_over(error: OSError) -> None:
    raise cannot_list(error) from error


def _keys_of_split(root: Path, split: str, files: dict[str, str]) -> list[str]:
    keys = stems_of_split(root, split, files)
    absent = [key for key in keys if key not in files]
    if absent:
        raise StoreError(
            f"the split {split!r} of {root} names {len(absent)} image(s) without annotations: "
            f"{absent[0]}.xml is not there."
        )
    return keys


def _read_file(
    file: Path, key: str, images: Path, pictures: dict[str, str], origin: int
) -> AnnotatedImage:
    try:
        root = voc_root(read_annotation(file, MAX_TREE_BYTES))
        path = images / _picture(root, key, pictures)
        return _image(root, path, key, origin, str(file))
    except ValueError as error:
        raise StoreError(f"cannot read {file}: {error}.") from error


def _picture(root: Element, key: str, pictures: dict[str, str]) -> str:
    """Return the image's path; where there is none, one that says which is missing."""
    if key in pictures:
        return pictures[key]
    said = (root.findtext("filename") or "").strip().replace("\\", "/").rpartition("/")[2]
    by_name = f"{key.rpartition('/')[0]}/{said}".lstrip("/")
    return by_name if pictures.get(os.path.splitext(by_name)[0]) == by_name else f"{key}.jpg"


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
    objects = root.findall("object")
    names = [read_class_name(item, f"object {number}") for number, item in enumerate(objects)]
    where = [f"object {number} ({name})" for number, name in enumerate(names)]
    pairs = list(zip(objects, where, strict=True))
    boxes = np.array([read_box(item, place) for item, place in pairs], np.float32)
    flags = {
        flag: np.array([bool(read_flag(item, flag, place)) for item, place in pairs], np.bool_)
        for flag in ("difficult", "truncated")
    }
    return VOCAnnotation(
        (root.findtext("filename") or "").strip(),
        read_length(root, "width"),
        read_length(root, "height"),
        tuple(names),
        boxes.reshape(-1, 4),
        **flags,
    )
