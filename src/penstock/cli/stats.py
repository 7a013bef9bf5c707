# SPDX-License-Identifier: Apache-2.0
"""`penstock stats`: classes, counts, imbalance and sizes of a folder or store."""

from __future__ import annotations

import io
import math
import textwrap
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from penstock.cli import options
from penstock.cli.reasons import errors_in_code
from penstock.cli.terminal import Bar
from penstock.data.labels.known import known_labels
from penstock.data.ragged import RaggedArray
from penstock.errors import StoreError, StoreUnreachable
from penstock.lines import counted, format_bytes, printable, say, say_json
from penstock.redact import without_password
from penstock.sampling.balance import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from penstock.vision.datasets.annotated import AnnotatedImages

_SAMPLED: Final = 1000  # records: a mean to some 3 % where sizes vary as much as their mean
# Sides of squares, in pixels, between which COCO's evaluation calls objects medium.
_SMALL_PX, _LARGE_PX = 32, 96
_FIRST_ROWS, _LAST_ROWS = 30, 10  # of more classes than these, the middle is left out
_WIDTH: Final = 88  # columns, of what is wrapped


@options.takes(list_columns=options.LIST_OPTIONS, fields=options.FIELD_OPTIONS)
def stats(
    src: Annotated[str, typer.Argument(metavar="SRC", help=options.ANY_SOURCE)],
    as_json: options.AsJson = False,
    sample: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Records to read for the sizes; 0 is all of them."),
    ] = _SAMPLED,
    split: options.Split = None,
    column: options.Column = None,
    class_of: options.ClassOfOption = options.ClassOf.all,
    *,
    list_columns: dict[str, Any],
    fields: dict[str, str],
) -> None:
    """Count the classes of a folder or dataset, and measure its images.

    Classes are counted from the index, without reading a record. Sizes come from records spread
    evenly over the store, and of an image its header alone is read. A dataset without a list of its
    labels is read as a whole.
    """
    from penstock.cli.sources import attributes_for, labels_by, names_code, source_named
    from penstock.stores.dataset import StoreDataset
    from penstock.stores.store import Store

    by_field = column is not None or class_of is not options.ClassOf.all
    with (
        errors_in_code(src, is_code=names_code(src)),
        source_named(
            src, split, list_columns, fields=fields, attributes=attributes_for(column),
            # What is balanced or split by is what training sees; else objects are counted as they
            # are.
            bad_boxes="fix" if by_field else "keep",
        ) as found,
    ):  # fmt: skip
        num_records, read, labels, names = _records_of(found)
        address = src if names_code(src) else getattr(found, "store", found).address
        if by_field:
            options.warn_of_bad_boxes(found)
            dataset = StoreDataset(found) if isinstance(found, Store) else found
            labels, names = labels_by(dataset, column, class_of)
        with Bar() as bar:
            sizes = _sizes(num_records, read, sample, bar, is_code=names_code(src))
        record = {
            "address": without_password(address),
            "num_records": num_records,
            **count_classes(labels, names or ()),
            "sizes": sizes,
        }
        if hasattr(found, "box_counts") and not by_field:  # `AnnotatedImages` needs OpenCV
            record["objects"] = _count_objects(found)
    if column is not None:
        record["column"] = column
    if as_json:
        say_json(record)
        return
    for line in _tables(record):
        say(line)


def _records_of(dataset: Any) -> tuple[int, Callable[[int], Any], Any, Any]:  # noqa: ANN401
    """Return number, reader, labels and class names of the records that `pack` would make."""
    from penstock.stores.index import labels_from
    from penstock.stores.pack_source import Images, pack_source
    from penstock.stores.records import decode_record
    from penstock.stores.store import Store

    store = getattr(dataset, "store", dataset)  # transforms change nothing of what is counted
    if isinstance(store, Store):

        def read_record(position: int) -> Any:  # noqa: ANN401
            with store.borrow(np.array([position])) as (record,):
                return record.sample

        return len(store), read_record, store.index.labels, store.index.class_names

    source = pack_source(dataset, Images())
    labels = known_labels(dataset)
    if not isinstance(labels, RaggedArray) and (labels is None or labels.dtype.kind not in "biu"):
        labels = labels_from([source[n].label for n in range(len(source))])

    def read_sample(position: int) -> Any:  # noqa: ANN401
        return decode_record(source[position].data, f"sample {position}").sample

    return len(source), read_sample, labels, source.class_names


def count_classes(labels: Any, class_names: Sequence[str]) -> dict[str, Any]:  # noqa: ANN401
    """Return the counts of classes, the largest first; none if there are no labels.

    Equal counts are in order of the class numbers. Negative labels are classes without a name. Of
    labels that are a `RaggedArray`, objects and images are counted.

    Example:
        >>> count_classes(np.array([1, 0, 1]), ["cat", "dog"])["classes"][0]["count"]
        2
    """
    if labels is None:
        return {"num_classes": None}
    values = labels.values if isinstance(labels, RaggedArray) else labels
    ids = np.union1d(values, np.arange(len(class_names)))
    counts = np.bincount(np.searchsorted(ids, values), minlength=len(ids))
    shares = counts / max(1, counts.sum())
    there = counts[counts > 0]
    parts = there / max(1, there.sum())
    rows: list[dict[str, Any]] = [
        {
            "class": number,
            "name": class_names[number] if 0 <= number < len(class_names) else str(number),
            "count": count,
            "share": share,
        }
        for number, count, share in zip(ids.tolist(), counts.tolist(), shares.tolist(), strict=True)
    ]
    record: dict[str, Any] = {
        "num_classes": len(ids),
        "num_empty_classes": len(counts) - len(there),
        "largest_to_smallest": float(there.max() / there.min()) if len(there) else None,
        # Of as many equal classes the entropy is the same: from 1 to the number of classes.
        "effective_classes": math.exp(-(parts * np.log(parts)).sum()) if len(there) else None,
    }
    if isinstance(labels, RaggedArray):
        per_image = np.diff(labels.offsets)
        pairs = np.unique(np.stack((np.repeat(np.arange(len(labels)), per_image), values)), axis=1)
        images = np.bincount(np.searchsorted(ids, pairs[1]), minlength=len(ids))
        for row, number in zip(rows, images.tolist(), strict=True):
            row["images"] = number
        record["objects_per_image"] = _spread(per_image)
        record["num_images_without_objects"] = int((per_image == 0).sum())
    record["classes"] = [rows[n] for n in np.lexsort((ids, -counts)).tolist()]
    return record


def _spread(values: NDArray[Any]) -> dict[str, float] | None:
    if not len(values):
        return None
    return {
        "min": int(values.min()),
        "median": float(np.median(values)),
        "mean": float(values.mean()),
        "max": int(values.max()),
    }


def _sizes(
    num_records: int, read: Callable[[int], Any], num_sampled: int, bar: Bar, *, is_code: bool
) -> dict[str, Any]:
    """Return the sizes of `num_sampled` records, spread evenly, as JSON has them; 0 is all.

    Damaged records are counted. What a dataset of the user's own raises is an error, and no damage.
    """
    num_bytes: list[int] = []
    shapes_px: list[tuple[int, int] | None] = []
    num_read = min(num_sampled or num_records, num_records)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"PIL\.")  # only headers are read
        for done in range(num_read):
            try:
                sample = read(done * num_records // num_read)
            except StoreUnreachable:
                raise
            except (StoreError, ValueError, OSError) as error:
                if is_code and not isinstance(error, StoreError):
                    raise
            else:
                num_bytes.append(_bytes_of(sample, shapes_px))
            bar.show(done, num_read, "read for sizes")
    shapes = np.array([shape for shape in shapes_px if shape], np.int64).reshape(-1, 2)
    return {
        "num_sampled": len(num_bytes),
        "total_bytes": round(num_records * sum(num_bytes) / max(1, len(num_bytes))),
        "is_total_estimated": len(num_bytes) < num_records,
        "record_bytes": _spread(np.array(num_bytes)),
        "num_images": len(shapes),
        "num_unreadable": shapes_px.count(None),
        "num_damaged": num_read - len(num_bytes),
        "height_px": _spread(shapes[:, 0]),
        "width_px": _spread(shapes[:, 1]),
    }


def _bytes_of(value: Any, shapes_px: list[tuple[int, int] | None]) -> int:  # noqa: ANN401
    """Return the bytes of a sample's leaves, and add its images' sizes; None for no header."""
    from PIL import Image

    from penstock.stores.records import EncodedImage

    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(part, shapes_px) for part in value)
    if isinstance(value, str):
        return len(value.encode("utf-8", "surrogatepass"))
    if isinstance(value, EncodedImage):
        try:
            with Image.open(io.BytesIO(value.data)) as image:  # no pixel is decoded
                shapes_px.append((image.height, image.width))
        except Exception:  # over damaged data Pillow raises nearly anything
            shapes_px.append(None)
        value = value.data
    return len(value) if isinstance(value, bytes) else int(getattr(value, "nbytes", 0))


def _count_objects(dataset: AnnotatedImages) -> dict[str, Any]:
    """Return what annotations say of boxes and images; no image is decoded."""
    from penstock.vision.datasets.rules import judged  # stores alone need no OpenCV

    table, sizes, bad = dataset.store.table, dataset.sizes_px, dataset.box_counts
    boxes = np.asarray(table.boxes, np.float64).reshape(-1, 4)
    is_there = ~np.isnan(boxes).any(axis=1)
    boxes, images = boxes[is_there], table.images_of_objects[is_there]
    sides = boxes[:, 2:] - boxes[:, :2]
    has_area = (sides > 0).all(axis=1)
    areas = sides[has_area].prod(axis=1)
    kinds = np.bincount(np.digitize(areas, (_SMALL_PX**2, _LARGE_PX**2)), minlength=3).tolist()
    # What the data set has cut is inside by now; it knows the sizes in the files alone.
    num_outside = int(judged(boxes, sizes[images], "keep").outside.sum())
    return {
        "num_boxes": len(boxes),
        "num_boxes_without_area": int((~has_area).sum()),
        "bad_boxes": {
            "zero_area": bad.zero_area,
            "inverted": bad.inverted,
            "outside": max(bad.outside, num_outside),
        },
        "boxes_by_size": dict(zip(("small", "medium", "large"), kinds, strict=True)),
    }


def _tables(record: dict[str, Any]) -> list[str]:
    """Return the lines to print: classes, sizes, and what is known of boxes."""
    lines = ["Its records have no labels."]
    if record["num_classes"] is not None:
        records, classes = record["num_records"], record["num_classes"]
        lines = [f"{counted(records, 'record')}, {counted(classes, 'class')}", ""]
        lines += [*aligned(_class_rows(record)), "", *_wrapped(_about_classes(record))]
    sizes = record["sizes"]
    read = "all records"
    if sizes["is_total_estimated"]:
        read = f"{counted(sizes['num_sampled'], 'record')}, spread evenly"
    advice = " `penstock check` lists those that cannot be read." if sizes["num_damaged"] else ""
    lines += ["", *aligned([[printable(record["address"]), ""], *_size_rows(record)]), ""]
    lines += _wrapped(
        f"Sizes from {read}: bytes of images, arrays and texts; pixels from the images' "
        f"headers.{advice}"
    )
    if "objects" in record:
        lines += ["", *_wrapped(_about_objects(record["objects"]))]
    return lines


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH)


def _class_rows(record: dict[str, Any]) -> list[list[str]]:
    classes = record["classes"]
    extra = ["images"] if "objects_per_image" in record else []
    rows = [["class", "objects" if extra else "records", "share", *extra]]
    for row in classes:
        cells = [f"{row['count']:,}", f"{row['share']:.2%}", *(f"{row[n]:,}" for n in extra)]
        rows.append([printable(row["name"]), *cells])
    hidden = classes[_FIRST_ROWS:-_LAST_ROWS]
    if hidden:
        count, share = (sum(row[name] for row in hidden) for name in ("count", "share"))
        more = [f"... {len(hidden):,} more", f"{count:,}", f"{share:.2%}"]
        rows[1 + _FIRST_ROWS : -_LAST_ROWS] = [[*more, *("" for _ in extra)]]
    return rows


def _about_classes(record: dict[str, Any]) -> str:
    if record["largest_to_smallest"] is None:
        return "All classes are empty."
    num_empty = record["num_empty_classes"]
    empty = f" Empty classes: {num_empty:,}." if num_empty else ""
    text = (
        f"Largest to smallest class: {record['largest_to_smallest']:,.1f} : 1.{empty} Effective "
        f"classes: {record['effective_classes']:,.1f} of {record['num_classes'] - num_empty:,}, "
        "the number of equally large classes with the same entropy, exp(-sum of p ln p)."
    )
    spread = record.get("objects_per_image")
    if spread is None:
        return text
    return (
        f"{text} Objects per image: {spread['min']:,} / {spread['mean']:,.1f} / {spread['max']:,} "
        f"(min / mean / max). Images without any: {record['num_images_without_objects']:,}."
    )


def _size_rows(record: dict[str, Any]) -> list[list[str]]:
    sizes = record["sizes"]
    rows = [["records", f"{record['num_records']:,}"]]
    if (spread := sizes["record_bytes"]) is not None:
        three = " / ".join(format_bytes(round(spread[name])) for name in ("min", "mean", "max"))
        all_of = "size of all, estimated" if sizes["is_total_estimated"] else "size of all"
        rows += [[all_of, format_bytes(sizes["total_bytes"])]]
        rows += [["size of a record, min / mean / max", three]]
    for what in ("height", "width"):
        if (spread := sizes[f"{what}_px"]) is not None:
            three = " / ".join(f"{spread[name]:,.0f}" for name in ("min", "median", "max"))
            rows.append([f"{what} of an image in pixels, min / median / max", three])
    for what, name in (
        ("images whose header cannot be read", "num_unreadable"),
        ("records that cannot be read", "num_damaged"),
    ):
        rows += [[what, f"{sizes[name]:,}"]] if sizes[name] else []
    return rows


def _about_objects(objects: dict[str, Any]) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in objects["boxes_by_size"].items())
    text = f"Boxes: {kinds} (below 32 x 32 pixels, to 96 x 96, from there on)."
    bad = ", ".join(f"{count:,} {kind}" for kind, count in objects["bad_boxes"].items() if count)
    if bad:
        text += f" Bad boxes: {bad}; `rules=AnnotationRules(bad_boxes=...)` says what they become."
    return text
