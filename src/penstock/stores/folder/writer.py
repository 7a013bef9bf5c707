# SPDX-License-Identifier: Apache-2.0
"""Writing records as files into a folder, beside its place until it is complete.

    DST.partial/                     grows, file by file; each gets its name when it is whole
    DST.partial/.penstock-journal    a line of JSON for each record, in order, before its files
    DST                              the old folder, or none, until the finished one takes its name

A kill leaves DST as it was. A writer that resumes goes by the journal: it verifies each file named
there, and keeps those up to the first that is not whole. A file that the journal does not name is
somebody's own; or one whose line was lost when the machine crashed, and then it is written anew.

Keys and class names may come from anybody's database: they never lead out of the folder. And DST is
replaced only if nothing is in it but what a writer put there: never somebody's own files.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import numpy as np
import xxhash

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.opening import read_file
from penstock.stores.folder.guard import (
    JOURNAL_NAME,
    NEW_NAME,
    note_files,
    refuse_to_replace,
    strangers_in,
)
from penstock.stores.folder.listing import list_classes, list_flat
from penstock.stores.folder.marks import (
    IMAGE,
    OURS,
    PAIR,
    RECORD,
    VOC,
    Listing,
    annotation_path,
    file_stats,
    is_safe,
    read_marker,
    stat_fingerprint,
    write_index,
    write_marker,
)
from penstock.stores.folder.paths import MAX_NAME_BYTES, RecordFiles, folder_name, record_files
from penstock.stores.folder.store import FolderStore
from penstock.stores.folder.voc import list_voc, xml_text
from penstock.stores.index_builder import IndexBuilder
from penstock.stores.placing import Lock, already_there, no_space, put_in_place, remove
from penstock.stores.records import (
    EncodedImage,
    EncodedRecord,
    decode_record,
    encode_record,
    header_of,
    is_pair,
)
from penstock.stores.store import other_source

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from penstock.stores.index import Index

__all__ = ["FolderWriter"]

_MAX_PATH_BYTES: Final = 4096  # of Linux, the folder's own path included
_MAX_DEPTH: Final = 100  # folders in one another: shutil.rmtree takes no more than some 900
_LISTS: Final[dict[int, tuple[str, Callable[[Path], Listing]]]] = {
    PAIR: ("classes", list_classes),
    IMAGE: ("flat", list_flat),
    VOC: ("voc", list_voc),
}


class FolderWriter:
    """Writes image files, and other samples as files of a record each. See `StoreWriter`.

    (image, class)    the image file, at its key; a key without a folder gets its class's
    image             the image file, at its key
    (image, VOC XML)  JPEGImages/KEY.jpg and Annotations/KEY.xml
    any other sample  KEY.record, the encoded record as it is

    A key without an image's extension gets the one that its content has. Where listing the folder
    would not give the same keys, labels and class names again, an index file is added.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        class_names: Sequence[str] = (),
        metadata: Mapping[str, Any] | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = True,
        index: Literal["auto", "always"] = "auto",
    ) -> None:
        """Begin a folder, or go on with one.

        Args:
            path: Where it will be.
            class_names: Name of class 0, 1, 2 …
            metadata: Any JSON.
            what: Says what is being packed, and how; a resumed writer has to be given the same.
            resume: Whether to go on with what an interrupted writer left, if it left anything.
            overwrite: Whether a folder that a writer made may be replaced.
            index: "always" adds the index file, with a checksum of every image, also where a
                listing would do: then files that are changed or removed later are noticed, and ones
                that are added are not seen.

        Raises:
            StoreError: the folder has files that no writer put there, or that were changed since;
                another writer is at it; what it left is of another source; the folder may not be
                replaced.
            ConfigError: `index` is neither of the two.
        """
        if index not in ("auto", "always"):
            raise ConfigError(f"index is 'auto' or 'always', not {index!r}.")
        self._path = Path(path)
        self._place = Path(os.path.realpath(path))  # through a link, its target is replaced
        self._what = what
        self._finished: FolderStore | None = None
        self._has_failed = False
        self._check_place(resume=resume, overwrite=overwrite)
        self._partial = self._place.with_name(self._place.name + ".partial")
        self._is_index_wanted = index == "always"
        self._built = IndexBuilder(class_names, metadata)
        self._paths: list[str] = []
        self._kinds = bytearray()
        self._checksums: list[int] = []
        self._made: set[str] = {""}  # folders
        self._others: set[str] = set()  # files that the journal does not name
        self._lock = Lock(self._partial, self._path)
        try:
            # Once more: another writer may have come to its end in between.
            complete = self._check_place(resume=resume, overwrite=overwrite)
            self._begin(complete, resume=resume)
        except OSError as error:
            self.close()
            raise self._failure(error) from error
        except BaseException:
            self.close()
            raise

    def _check_place(self, *, resume: bool, overwrite: bool) -> FolderStore | None:
        """Return the folder that is to be made, if it is there and wanted; else None.

        Raises:
            StoreError: what is in place may not be replaced. Without `overwrite` that is all but an
                empty folder, or none.
        """
        complete = self._store_of_the_same() if resume else None
        if complete is None:
            refuse_to_replace(self._place)
            if not overwrite and self._place.is_dir() and os.listdir(self._place):
                raise already_there(self.address, resume=resume)
        return complete

    def _begin(self, complete: FolderStore | None, *, resume: bool) -> None:
        journal = self._partial / JOURNAL_NAME
        text = read_file(journal, None) if journal.exists() else b""
        lines = text.split(b"\n")[:-1]  # the last one may have been cut off
        head, *entries = [_from_json(line) for line in lines] or [None]
        journaled = {path for entry in entries for path in _files_of(entry)}
        others = strangers_in(self._partial, journaled)
        if not lines:
            self._finished = complete
        if self._finished is not None:
            if not others:  # what a kill left of the folder that was replaced
                remove(self._partial)
            (self._place / JOURNAL_NAME).unlink(missing_ok=True)
            return
        is_taken_over = resume and bool(lines)
        if others and (not is_taken_over or any(map(self._is_link, others))):
            raise self._in_the_way(others[0])
        if is_taken_over:
            if not isinstance(head, dict) or head.get("what") != self._what:
                raise other_source(self._partial)
            self._others.update(others)
            self._take_over(lines, entries, journaled)
            return
        remove(self._partial)
        self._partial.mkdir()
        self._note([json.dumps({"what": self._what})])

    def _is_link(self, path: str) -> bool:
        return os.path.islink(self._partial / path)

    def _in_the_way(self, path: str) -> StoreError:
        return StoreError(
            f"{self._partial} is in the way: it is where a folder lies until it is complete, and "
            f"it holds files that no writer of Penstock left, {path!r} for one. Move them away."
        )

    def _store_of_the_same(self) -> FolderStore | None:
        """Return the folder that is in place, if it was made from the same source and is whole."""
        marker = read_marker(self._place)
        if marker is None or marker.get("what") != self._what:
            return None
        store = FolderStore(self._place)
        try:
            return store if len(store) == marker["num_records"] else None
        except StoreError:
            return None

    def _note(self, lines: Sequence[str]) -> None:
        """Append lines to the journal, at once."""
        data = "".join(line + "\n" for line in lines).encode()
        with (self._partial / JOURNAL_NAME).open("ab", buffering=0) as journal:
            while data:
                data = data[journal.write(data) :]

    def _take_over(self, lines: list[bytes], entries: list[Any], journaled: set[str]) -> None:
        """Take over the records whose files are whole, up to the first that is not."""
        for entry in entries:
            if not self._take_over_one(entry):
                break
        kept = set(self._listing(self._built.index()).files())
        for path in journaled - kept:
            if is_safe(path):
                (self._partial / path).unlink(missing_ok=True)
        new = self._partial / NEW_NAME
        new.write_bytes(b"".join(line + b"\n" for line in lines[: 1 + len(self._built)]))
        os.replace(new, self._partial / JOURNAL_NAME)

    def _take_over_one(self, entry: Any) -> bool:  # noqa: ANN401
        match entry:
            case [str() as key, label, str() as path, int() as kind, int() as checksum] if is_safe(
                path
            ) and kind in (PAIR, IMAGE, VOC, RECORD):
                label = tuple(label) if isinstance(label, list) else label
            case _:
                return False
        try:
            of_record, record = self._read_back(key, label, path, kind)
            if header_of(record.data, key)[1] != checksum:
                return False
            self._built.add([record])
        except (OSError, ValueError, StoreError):
            return False
        self._keep(of_record)
        return True

    def _read_back(
        self,
        key: str,
        label: Any,  # noqa: ANN401
        path: str,
        kind: int,
    ) -> tuple[RecordFiles, EncodedRecord]:
        data = read_file(f"{self._partial}/{path}", None)
        files: dict[str, bytes | memoryview] = {path: data}
        if kind == RECORD:
            sample = decode_record(data, key).sample
            return RecordFiles(kind, files), EncodedRecord(key, label, data, is_pair(sample, label))
        sample = EncodedImage(data)
        if kind == VOC:
            xml_path = annotation_path(path)
            xml = read_file(f"{self._partial}/{xml_path}")
            files[xml_path] = xml
            sample = (sample, xml_text(xml))
        elif kind == PAIR:
            sample = (sample, label)
        return RecordFiles(kind, files), encode_record(key, sample, label)

    @property
    def address(self) -> str:
        """`folder:` and the path."""
        return f"folder:{self._path}"

    @property
    def finished(self) -> bool:
        """Whether a writer that was to resume found the folder complete, from the same source.

        Then `written` has all records, and there is nothing to be written.
        """
        return self._finished is not None

    def checksum_at(self, number: int) -> int:
        """Return the checksum of a record that `written` lists, if it is not `finished`."""
        return self._built.checksums[number]

    def written(self) -> Sequence[tuple[str, int | tuple[int, ...] | None]]:
        """Return key and label of the records that were found."""
        store = self._finished
        if store is not None:
            return [(key, store.label_at(position)) for position, key in enumerate(store.keys)]
        return list(zip(self._built.keys, self._built.labels, strict=True))

    def put_many(self, records: Sequence[EncodedRecord]) -> None:
        """Write records, each to its file.

        Raises:
            StoreError: a key comes a second time: then none of these records is written. Or one
                cannot be written: then those before it may be, and `finish` is refused.
        """
        if self._finished is not None:
            raise StoreError(f"{self._path} is complete, and nothing can be added to it.")
        self._built.add(records)
        try:
            self._put(records)
        except OSError as error:
            self._has_failed = True
            raise self._failure(error) from error
        except BaseException:
            self._has_failed = True
            raise

    def _put(self, records: Sequence[EncodedRecord]) -> None:
        """Write the files of records, and before them their lines of the journal."""
        of_records = [record_files(record, self._built.class_names) for record in records]
        self._note(list(map(_line, records, of_records)))
        for record, of_record in zip(records, of_records, strict=True):
            for path, data in of_record.files.items():
                self._write(record.key, path, data)
            self._keep(of_record)

    def _keep(self, of_record: RecordFiles) -> None:
        self._paths.append(next(iter(of_record.files)))
        self._kinds.append(of_record.kind)
        digest = xxhash.xxh3_64()
        for data in of_record.files.values():
            digest.update(data)
        self._checksums.append(digest.intdigest())

    def _write(self, key: str, path: str, data: bytes | memoryview) -> None:
        """Write one file, under a name of its own until it is whole."""
        if not self._is_good(path):
            _refuse(
                key,
                "as a path it leads out of the folder, is too long, has a backslash or an empty "
                f"part, begins with {OURS!r}, or has a part of more than {MAX_NAME_BYTES} bytes",
            )
        place = f"{self._partial}/{path}"
        try:
            self._make_folder(key, path.rpartition("/")[0])
            if os.path.lexists(place) and path not in self._others:
                _refuse(key, f"the file {path!r} is there already, as another record's")
        except (FileExistsError, NotADirectoryError):
            _refuse(key, f"a part of {path!r} is another record's file")
        new = f"{self._partial}/{NEW_NAME}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with open(os.open(new, flags, 0o666), "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.rename(new, place)
        self._others.discard(path)

    def _is_good(self, path: str) -> bool:
        try:
            name_bytes = [len(os.fsencode(part)) for part in path.split("/")]
        except UnicodeEncodeError:
            return False
        whole_bytes = sum(name_bytes) + len(name_bytes) + len(os.fsencode(self._partial))
        if len(name_bytes) > _MAX_DEPTH:
            return False
        is_short = max(name_bytes) <= MAX_NAME_BYTES and whole_bytes < _MAX_PATH_BYTES
        return is_short and is_safe(path)

    def _make_folder(self, key: str, folder: str) -> None:
        """Make a folder and those above it; none that an interrupted writer left may be a link."""
        if folder in self._made:
            return
        parts = folder.split("/")
        for depth in range(1, len(parts) + 1):
            above = "/".join(parts[:depth])
            if above in self._made:
                continue
            place = f"{self._partial}/{above}"
            try:
                os.mkdir(place)
            except FileExistsError:  # on some systems Cat is cat
                if os.path.islink(place):
                    _refuse(key, f"{place} is a link")
                if not os.path.isdir(place):
                    raise
            self._made.add(above)

    def _listing(self, index: Index) -> Listing:
        """Return what a reader has to find."""
        return Listing(
            PackedList(index.keys),
            PackedList(self._paths),
            np.frombuffer(bytes(self._kinds), np.uint8),
            index.labels,
            index.class_names,
            np.array(self._checksums, np.uint64),
        )

    def finish(self) -> None:
        """Complete the folder and put it in its place.

        Raises:
            StoreError: files that no writer put there are in its place, or among those written; no
                space; a record could not be written. What was there is as it was.
        """
        if self._finished is not None:
            self.close()
            return
        if self._has_failed:
            raise StoreError(f"{self._path} lacks a record that could not be written.")
        if self._others:
            raise self._in_the_way(min(self._others))
        index = self._built.index()
        try:
            self._complete(index)
            refuse_to_replace(self._place)  # again: somebody may have put files there meanwhile
            put_in_place(self._partial, self._place)
            (self._place / JOURNAL_NAME).unlink()  # until now it could be gone on with
        except OSError as error:
            raise self._failure(error) from error
        self.close()

    def _complete(self, index: Index) -> None:
        expected = self._listing(index)
        layout = self._layout(expected)
        if layout is None:
            write_index(self._partial, expected)
        _sync(self._partial)  # on network file systems a file may get its time with its last byte
        stats = file_stats(self._partial, expected)
        note_files(self._partial, expected.files(), stats)
        write_marker(
            self._partial,
            {
                "layout": layout or "index",
                "num_records": len(index),
                "fingerprint": index.fingerprint,
                "files": stat_fingerprint(expected, stats),
                "what": self._what,
                "metadata": dict(index.metadata),
            },
        )
        _sync(self._partial)

    def _layout(self, expected: Listing) -> str | None:
        """Return the layout whose listing gives just these records; None if none does."""
        kinds = set(self._kinds) or {PAIR if expected.class_names else IMAGE}
        if kinds == {PAIR}:
            for label, name in enumerate(expected.class_names):  # also those without an image
                self._make_folder(name, folder_name(name, label))
        if self._is_index_wanted or len(kinds) > 1 or kinds == {RECORD}:
            return None
        layout, list_them = _LISTS[kinds.pop()]
        try:
            is_same = list_them(self._partial).equals(expected)
        except StoreError:
            return None
        return layout if is_same else None

    def close(self) -> None:
        """Let go of everything; what is not finished stays in `DST.partial`."""
        self._lock.close()

    def _failure(self, error: OSError) -> StoreError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return no_space(self._path, self._partial)
        return StoreError(f"cannot write {self._path}: {error}.")


def _refuse(key: str, reason: str) -> NoReturn:
    raise StoreError(f"record {key!r:.300} cannot be a file: {reason}. Give it another key.")


def _line(record: EncodedRecord, of_record: RecordFiles) -> str:
    """Return what the journal has of a record."""
    checksum = header_of(record.data, record.key)[1]
    path = next(iter(of_record.files))
    return json.dumps((record.key, record.label, path, of_record.kind, checksum))


def _files_of(entry: Any) -> tuple[str, ...]:  # noqa: ANN401
    """Return the files that an entry of the journal names."""
    match entry:
        case [_, _, str() as path, kind, _]:
            return (path, annotation_path(path)) if kind == VOC else (path,)
    return ()


def _from_json(line: bytes) -> Any:  # noqa: ANN401
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _sync(folder: Path) -> None:
    """Bring all files to the disk: those of its file system at once, not a million one by one."""
    syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    fd = os.open(folder, os.O_RDONLY)
    try:
        if syncfs is None:
            os.sync()
        elif syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), os.fspath(folder))
    finally:
        os.close(fd)
