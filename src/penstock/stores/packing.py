# SPDX-License-Identifier: Apache-2.0
"""`pack`: any dataset, folder or store into a store.

    source ──▶ workers: read, shrink, encode ──▶ this process: the writer, in the source's order

The workers are those of `penstock.Loader`, so a source is read as fast as it can be, and what one
of them raises names its sample.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.errors import ConfigError, StoreError
from penstock.faults import FaultPolicy
from penstock.loader import Loader
from penstock.stores.pack_source import Images, pack_source
from penstock.stores.records import header_of
from penstock.stores.registry import create_store
from penstock.system_limits import cores_by_affinity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from penstock.faults import Failure
    from penstock.stores.pack_source import PackSource
    from penstock.stores.records import EncodedRecord
    from penstock.stores.store import StoreWriter

_TASK_RECORDS: Final = 16  # a worker's task: small enough for a progress bar, large beside its cost
_FEW_RECORDS: Final = 64  # are packed sooner than workers are started


@dataclass(frozen=True, slots=True)
class PackProgress:
    """How far packing has come."""

    num_records: int
    num_done: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PackReport:
    """What was packed.

    Attributes:
        address: Of the store that was made, without secrets.
        num_records: Records in it.
        num_resumed: Of which an interrupted run had packed.
        num_bytes: Bytes of the records packed by this run.
        wall_s: Seconds it took.
        num_left_out: Samples that could not be packed, with `on_error="skip"`.
        left_out: The last 10,000 of them.
    """

    address: str
    num_records: int
    num_resumed: int
    num_bytes: int
    wall_s: float
    num_left_out: int
    left_out: tuple[Failure, ...]


def pack(
    src: object,
    dst: str | Path,
    *,
    num_workers: int | None = None,
    resize: int | None = None,
    quality: int | None = None,
    limit: int | None = None,
    num_shards: int = 1,
    resume: bool = False,
    overwrite: bool = False,
    append: bool = False,
    shard_size: int | None = None,
    on_error: Literal["raise", "skip"] = "raise",
    check_images: bool = False,
    follow_links: bool = False,
    metadata: Mapping[str, Any] | None = None,
    progress: Callable[[PackProgress], object] | None = None,
    worker_init_fn: Callable[[int], object] | None = None,
) -> PackReport:
    """Pack samples into a store, which takes its place when it is complete.

    A store that is at `dst` is replaced only with `overwrite`, and stays until then. Image files
    are stored as they are, byte for byte, unless they are to be shrunk.

    Args:
        src: A store or its address; a folder of images; or a map-style dataset, whose samples are
            trees of arrays, tensors, numbers, strings, bytes, and Pillow's images.
        dst: Address of the store to make: `lmdb:PATH`, `shards:PATH`, `s3://BUCKET/PREFIX`, or
            `mongodb://HOST/DB.COLLECTION`.
        num_workers: Processes that read and encode; None takes the usable cores, and none at all
            for few records.
        resize: Length in pixels of the shorter side that larger images are shrunk to, keeping their
            shape. They become JPEG files; smaller ones stay as they are.
        quality: From 1 to 100, of JPEG files made here: where images are shrunk (default 90), and,
            if given, of all other images as well.
        limit: Take this many from the front only.
        num_shards: Number of LMDB files.
        resume: Whether to go on where an interrupted run with the same arguments stopped. If that
            run had come to its end, nothing is done.
        overwrite: Whether a store that is at `dst`, and is not the one to be made, is replaced.
            Anything else that is there never is.
        append: Whether a store of shards that is at `dst` keeps its records, and these come behind
            them. Who has it open goes on with what was there.
        shard_size: Bytes of each shard of a store of shards, about; 64 MiB if None.
        on_error: Whether a sample that cannot be read or stored ends it, or is left out.
        check_images: Whether image files that are stored as they are have to be whole: each is
            decoded, as `penstock check` does it, which takes far longer than to copy it. One that
            is broken counts as a sample that cannot be read.
        follow_links: Whether files of a folder, or of a list, that lie outside of it are packed:
            links and names with ".." lead to them. Then each has to be an image by its first bytes.
        metadata: Any JSON, kept in the store's index.
        progress: Called again and again with how far it has come.
        worker_init_fn: Called in each worker with its number, first of all.

    Returns:
        What was packed.

    Raises:
        StoreError: source or destination cannot be read or written; files of the source lie outside
            of it, without `follow_links`; no space; another process packs into it; `resume` with
            other arguments; a store is there, without `overwrite`; of all samples none could be
            packed.
        ConfigError: an argument is out of its range, or they contradict each other.
        MissingExtraError: images are to be shrunk or checked, and the libraries that decode them
            are not installed.
        Exception: what the source raises, with a note that names the sample.

    Concurrency:
        One thread. Workers are forked or spawned as the platform does it, so under spawn it belongs
        below `if __name__ == "__main__"`.

    Example:
        >>> import tempfile
        >>> from penstock.stores import open_store
        >>> folder = tempfile.TemporaryDirectory()
        >>> report = pack([("one", 1), ("two", 2)], f"lmdb:{folder.name}/numbers.lmdb")
        >>> report.num_records, open_store(report.address).get_many([0])[0].sample
        (2, ('one', 1))
        >>> folder.cleanup()
    """
    _check(resize, quality, limit, on_error)
    start_s = time.monotonic()
    source = pack_source(src, Images(resize, quality, check_images, follow_links), limit)
    if not len(source):
        raise ConfigError("there is no sample to pack: an empty store would take the place of DST.")
    kept = dict(metadata if metadata is not None else source.metadata)
    writer = create_store(
        dst,
        class_names=source.class_names,
        metadata=kept,
        what=f"{source.what} {list(source.class_names)} {kept}",
        resume=resume,
        overwrite=overwrite,
        num_shards=num_shards,
        num_records=len(source),
        **({"append": True} if append else {}),
        **({} if shard_size is None else {"shard_size": shard_size}),
    )
    try:
        source.go_behind(getattr(writer, "num_before", 0))
        num_resumed, first = _where_to_go_on(source, writer)
        loader = _loader(source, first, num_workers, on_error, worker_init_fn)
        num_new, num_bytes = _write_all(loader, writer, source, progress)
        if not num_resumed + num_new:
            raise StoreError(
                f"none of {len(source)} samples could be packed, so there is no store to be made. "
                f"One of them: {loader.failures[0]}"
            )
        writer.finish()
    finally:
        writer.close()
        source.close()
    return PackReport(
        writer.address,
        num_resumed + num_new,
        num_resumed,
        num_bytes,
        time.monotonic() - start_s,
        len(source) - num_resumed - num_new,
        tuple(loader.failures),
    )


def _check(resize: int | None, quality: int | None, limit: int | None, on_error: str) -> None:
    numbers: dict[str, Any] = {"resize": resize, "quality": quality, "limit": limit}
    for name, value in numbers.items():
        greatest = 100 if name == "quality" else 1 << 60
        if value is not None and not (isinstance(value, int) and 1 <= value <= greatest):
            raise ConfigError(f"{name}={value!r} is no integer from 1 to {greatest:,}.")
    if on_error not in ("raise", "skip"):
        raise ConfigError(f"on_error is 'raise' or 'skip', not {on_error!r}.")


def _where_to_go_on(source: PackSource, writer: StoreWriter) -> tuple[int, int]:
    """Return the number of records that are there, and the first sample that is to be packed."""
    written = writer.written()
    if writer.finished:
        return len(written), len(source)
    if not written:
        return 0, 0
    position = source.position_of(written[-1][0])
    try:
        checksum = header_of(source[position].data, "")[1]
    except Exception:  # one that is broken now cannot be compared
        checksum = None
    if checksum is not None and writer.last_checksum() not in (None, checksum):
        raise StoreError(
            f"sample {written[-1][0]!r} of the source is not what the interrupted run packed: the "
            "source has changed since, or draws random numbers. Pack without resume."
        )
    # Samples may have been left out, so the last key counts, and not how many there are.
    return len(written), position + 1


def _loader(
    source: PackSource,
    first: int,
    num_workers: int | None,
    on_error: str,
    worker_init_fn: Callable[[int], object] | None,
) -> Loader[EncodedRecord]:
    num_left = len(source) - first
    if num_workers is None:
        num_workers = 0 if num_left < _FEW_RECORDS else int(cores_by_affinity())
    with warnings.catch_warnings():
        # Whether samples are random is the source's own affair.
        warnings.filterwarnings("ignore", "seed=0 does not reach", UserWarning)
        return Loader(
            source,
            batch_size=_TASK_RECORDS,
            sampler=range(first, len(source)),
            num_workers=min(num_workers, -(-num_left // _TASK_RECORDS)),
            collate_fn=list,
            worker_init_fn=worker_init_fn,
            on_error=FaultPolicy("skip", max_failures=None) if on_error == "skip" else "raise",
        )


def _write_all(
    loader: Loader[EncodedRecord],
    writer: StoreWriter,
    source: PackSource,
    progress: Callable[[PackProgress], object] | None,
) -> tuple[int, int]:
    """Return the number of records written, and of their bytes."""
    num_new, num_bytes = 0, 0
    with warnings.catch_warnings():
        # The report has the samples left out.
        warnings.filterwarnings("ignore", "epoch 0: .* bad samples? left out", UserWarning)
        for records in loader:
            writer.put_many(records)
            num_new += len(records)
            num_bytes += sum(len(record.data) for record in records)
            if progress is not None and records:
                num_done = source.position_of(records[-1].key) + 1
                progress(PackProgress(len(source), num_done, num_bytes))
    return num_new, num_bytes
