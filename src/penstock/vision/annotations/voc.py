# SPDX-License-Identifier: Apache-2.0
"""Pascal VOC's annotations: an XML file for each image, in folders.

How VOC counts pixels is told in `voc_elements`, which landmarks are known in `voc_landmarks`.

Reference:
    Everingham and others, "The PASCAL Visual Object Classes Challenge 2012 development kit".
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError, StoreError
from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.stores.folder.annotated_folder import annotated_folder
from penstock.stores.folder.listing import IMAGE_SUFFIXES, cannot_list, is_system_folder
from penstock.vision.annotations.model import AnnotatedImage
from penstock.vision.annotations.voc_elements import read_length, read_object, write_object
from penstock.vision.annotations.voc_files import (
    parse_xml,
    stems_of_split,
    warn_of_images_alone,
    xml_text,
)
from penstock.vision.annotations.xml_text import element_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from xml.etree.ElementTree import Element

__all__ = ["read_voc", "read_voc_folder", "voc_places", "voc_root", "write_voc"]

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
