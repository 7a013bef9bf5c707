# SPDX-License-Identifier: Apache-2.0
"""Which files a record becomes in a folder, and what they are called."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.stores.folder.listing import IMAGE_SUFFIXES
from penstock.stores.folder.marks import IMAGE, PAIR, RECORD, VOC, annotation_path, is_safe
from penstock.stores.folder.voc import object_names, xml_bytes, xml_text
from penstock.stores.records import EncodedImage, EncodedRecord, decode_record, is_pair

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "MAX_NAME_BYTES",
    "RecordFiles",
    "folder_name",
    "image_suffix",
    "is_image",
    "record_files",
]

MAX_NAME_BYTES: Final = 255  # of Linux' file systems
_SUFFIXES: Final = (*IMAGE_SUFFIXES, ".gif")
_MAGIC: Final = (
    (b"\xff\xd8\xff", ".jpg"),
    (b"\x89PNG\r\n\x1a\n", ".png"),
    (b"GIF8", ".gif"),
    (b"BM", ".bmp"),
    (b"II*\0", ".tiff"),
    (b"MM\0*", ".tiff"),
)

_PNM: Final = re.compile(rb"P[1-6][\s#]")


class RecordFiles(NamedTuple):
    """A record as files.

    Attributes:
        kind: PAIR, IMAGE, VOC or RECORD.
        files: What is in each, by path; that of the record comes first. Paths come from keys, and
            are not to be trusted.
    """

    kind: int
    files: dict[str, bytes | memoryview]


def record_files(record: EncodedRecord, class_names: Sequence[str]) -> RecordFiles:
    """Return the files of a record.

    Raises:
        StoreError: the record is damaged.
    """
    sample = decode_record(record.data, f"record {record.key!r}", copy=False).sample
    if is_pair(sample, record.label):
        image = sample[0].data
        return RecordFiles(PAIR, {_image_path(record, image, class_names): image})
    if isinstance(sample, EncodedImage) and type(record.label) is not tuple:
        return RecordFiles(IMAGE, {_image_path(record, sample.data, class_names): sample.data})
    xml = _voc_xml(sample) if "/" not in record.key else None
    if xml is None:
        return RecordFiles(RECORD, {record.key + ".record": record.data})
    image = sample[0].data
    path = f"JPEGImages/{record.key}{image_suffix(image) or '.jpg'}"
    return RecordFiles(VOC, {path: image, annotation_path(path): xml})


def _image_path(
    record: EncodedRecord, image: bytes | memoryview, class_names: Sequence[str]
) -> str:
    path, label = record.key, record.label
    if not path.lower().endswith(_SUFFIXES):
        path += image_suffix(image) or ".bin"
    if "/" not in path and type(label) is int and 0 <= label < len(class_names):
        return f"{folder_name(class_names[label], label)}/{path}"
    return path


def folder_name(class_name: str, label: int) -> str:
    """Return the folder of a class: its name, unless that is none for a folder.

    Example:
        >>> folder_name("cat", 0), folder_name("t-shirt/top", 1)
        ('cat', 'class 1')
    """
    num_bytes = len(class_name.encode("utf-8", "surrogatepass"))
    is_name = "/" not in class_name and is_safe(class_name) and num_bytes <= MAX_NAME_BYTES
    return class_name if is_name else f"class {label}"


def _voc_xml(sample: Any) -> bytes | None:  # noqa: ANN401
    """Return the annotation of a sample of VOC's as a file; None if it is another sample."""
    if type(sample) is not tuple or len(sample) != 2:
        return None
    image, text = sample
    if not isinstance(image, EncodedImage) or type(text) is not str:
        return None
    try:
        object_names(text)
        data = xml_bytes(text)
        return data if xml_text(data) == text else None
    except ValueError:
        return None


def image_suffix(image: bytes | memoryview) -> str | None:
    """Return the extension that an image file's first bytes call for.

    Example:
        >>> image_suffix(bytes.fromhex("ffd8ffe0")), image_suffix(b"no image")
        ('.jpg', None)
    """
    start = bytes(image[:16])
    if start[:4] == b"RIFF" and start[8:12] == b"WEBP":
        return ".webp"
    return next((suffix for magic, suffix in _MAGIC if start.startswith(magic)), None)


def is_image(data: bytes | memoryview) -> bool:
    """Return whether a file is an image by its first bytes, whole or not.

    Example:
        >>> is_image(b"P6 2 2 255 ..."), is_image(b"root:x:0:0")
        (True, False)
    """
    return image_suffix(data) is not None or _PNM.match(bytes(data[:3])) is not None
