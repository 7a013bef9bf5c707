# SPDX-License-Identifier: Apache-2.0
"""What `penstock stats` prints."""

from __future__ import annotations

import sys
import textwrap
from typing import Any, Final

from penstock.lines import amount, printable, say
from penstock.plural import counted
from penstock.sampling.balance_text import aligned

__all__ = ["WIDTH", "print_tables"]

_FIRST_ROWS, _LAST_ROWS = 30, 10  # of more classes than these, the middle is left out
WIDTH: Final = 88  # columns, of what is wrapped
_BAR: Final = 40  # characters of the longest bar


def print_tables(record: dict[str, Any]) -> None:
    """Print what was counted: classes, sizes, and what is known of boxes.

    Args:
        record: As JSON has it.
    """
    lines = ["Its records have no labels."]
    if record["num_classes"] is not None:
        records, classes = record["num_records"], record["num_classes"]
        lines = [f"{counted(records, 'record')}, {counted(classes, 'class')}", ""]
        lines += [*aligned(_class_rows(record)), "", *_wrapped(_about_classes(record))]
    lines += ["", *aligned([[printable(record["address"]), ""], *_size_rows(record)]), ""]
    sizes = record["sizes"]
    read = f"{counted(sizes['num_sampled'], 'record')}, spread evenly"
    read = read if sizes["is_total_estimated"] else "all records"
    advice = " `penstock check` lists those that cannot be read." * (sizes["num_damaged"] > 0)
    lines += _wrapped(
        f"Sizes from {read}: bytes of images, arrays, strings and bytes; pixels from the images' "
        f"headers.{advice}"
    )
    if "objects" in record:
        lines += ["", *_object_lines(record["objects"])]
    if "objects_error" in record:
        lines += ["", f"Its boxes: {record['objects_error']}"]
    for line in lines:
        say(line)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH)


def _class_rows(record: dict[str, Any]) -> list[list[str]]:
    classes = record["classes"]
    several = "objects_per_image" in record
    rows = [["class", *(("objects", "share", "images") if several else ("records", "share"))]]
    num_hidden = max(0, len(classes) - _FIRST_ROWS - _LAST_ROWS)
    for position, row in enumerate(classes):
        cells = [f"{row['count']:,}", f"{row['share']:.2%}"]
        cells += [f"{row['images']:,}"] if several else []
        if not 0 <= position - _FIRST_ROWS < num_hidden:
            rows.append([printable(row["name"]), *cells])
        elif position == _FIRST_ROWS:
            hidden = classes[position : position + num_hidden]
            count, share = (sum(row[name] for row in hidden) for name in ("count", "share"))
            more = [f"... {num_hidden:,} more", f"{count:,}", f"{share:.2%}"]
            rows.append([*more, *[""] * several])
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
        all_of = "size of all, estimated" if sizes["is_total_estimated"] else "size of all"
        three = " / ".join(amount(spread[name]) for name in ("min", "mean", "max"))
        rows += [[all_of, amount(sizes["total_bytes"])]]
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


def _object_lines(objects: dict[str, Any]) -> list[str]:
    lines = []
    for title, name in (
        ("Longer side of the images, in pixels", "longer_side_px"),
        ("Boxes per image", "boxes_per_image"),
        ("Area of a box, in square pixels", "box_area_px"),
    ):
        if any(objects[name]["counts"]):
            lines += [title, *_bars(**objects[name]), ""]
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in objects["boxes_by_size"].items())
    text = f"Boxes: {kinds} (below 32 x 32 pixels, to 96 x 96, from there on)."
    bad = ", ".join(f"{count:,} {kind}" for kind, count in objects["bad_boxes"].items() if count)
    if bad:
        text += f" Bad boxes: {bad}; `rules=AnnotationRules(bad_boxes=...)` says what they become."
    return [*lines, *_wrapped(text)]


def _bars(edges: list[float], counts: list[int]) -> list[str]:
    """Return a line for each bin of whole numbers: its values, a bar, its count."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    mark = "█" if encoding.lower().startswith("utf") else "#"
    names = [
        f"{low:,.0f} to {high:,.0f}" if high > low else f"{low:,.0f}"
        for low, high in zip(edges, (edge - 1 for edge in edges[1:]), strict=False)
    ]
    longest, most = max(map(len, names)), max(counts)
    return [  # however little there is, it has a bar
        f"  {name:>{longest}}  {mark * -(-count * _BAR // most)} {count:,}"
        for name, count in zip(names, counts, strict=True)
    ]
