# SPDX-License-Identifier: Apache-2.0
"""Records of files that are read from front to back: lines, tar, Parquet, a function's own.

A reader passes over records without decoding them, which is cheap for lines and for Parquet's row
groups.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np

from penstock.data.unpacked import DAMAGE, damaged, unpacked, whole_lines
from penstock.errors import ConfigError, StoreError
from penstock.faults import annotate
from penstock.opening import MAX_FILE_BYTES, open_file
from penstock.optional import missing_extra

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

#: A name in a tar file ends at its first dot after a character that is none: what follows says
#: what the file is.
SAMPLE_NAME: Final = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)")
_BLOCK_BYTES: Final = 1 << 18  # decompressed at a time; each lane holds some
_MAX_HEADER_BYTES: Final = 1 << 24
_ROWS: Final = 1024  # of Parquet, decoded at a time
_DECODER: Final = json.JSONDecoder()
_BLANK: Final = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")


class RecordReader:
    """The records of one file, in order, undecoded; `path` is for errors."""

    def __init__(self, path: str, records: Iterator[Any]) -> None:
        """Begin with the first record."""
        self.path = path
        self._records = records

    def skip(self, count: int) -> int:
        """Pass over records; return how many there were."""
        return sum(1 for _ in itertools.islice(self._records, count))

    def take(self, count: int) -> list[Any]:
        """Return the next records; fewer at the end of the file."""
        return list(itertools.islice(self._records, count))

    def close(self) -> None:
        """Close the file. May be called again."""
        if callable(close := getattr(self._records, "close", None)):
            close()

    def __del__(self) -> None:
        """Close the file."""
        try:
            self.close()
        except AttributeError:  # it could not be opened
            return


class _CalledReader(RecordReader):
    """What a user's function yields of a file."""

    def __init__(self, path: str, parse: Callable[[str], Iterable[Any]]) -> None:
        """Call it."""
        super().__init__(path, self._of(parse))

    def _of(self, parse: Callable[[str], Iterable[Any]]) -> Iterator[Any]:
        number = 0
        try:
            for sample in parse(self.path):
                yield sample
                number += 1
        except Exception as error:
            annotate(error, f"{self.path} was read up to record {number:,}.")
            raise


class _LineReader(RecordReader):
    """The lines of a file that are not blank, each with its number, which counts from 1."""

    def __init__(self, path: str) -> None:
        """Open the file."""
        self.path = path
        self._file = open_file(path)
        self._pieces = whole_lines(path, unpacked(path, self._file, _BLOCK_BYTES))
        self._piece = b""  # whole lines that come next
        self._num_lines = 0  # before them

    def _has_lines(self) -> bool:
        try:
            self._piece = self._piece or next(self._pieces, b"")
        except DAMAGE as error:
            raise damaged(self.path, f"line {self._num_lines:,}", error) from error
        if self._piece and not self._piece.endswith(b"\n"):
            self._piece += b"\n"  # the last line
        return bool(self._piece)

    def skip(self, count: int) -> int:
        left = count
        while left and self._has_lines():
            num_lines = self._piece.count(b"\n")
            num_records = num_lines - len(_BLANK.findall(b"\n" + self._piece))
            if num_records > left:
                self.take(left)
                return count
            left -= num_records
            self._num_lines += num_lines
            self._piece = b""
        return count - left

    def take(self, count: int) -> list[Any]:
        records: list[Any] = []
        while len(records) < count and self._has_lines():
            *lines, self._piece = self._piece.split(b"\n", count - len(records))
            first = self._num_lines + 1
            records += [x for x in enumerate(lines, first) if x[1] and not x[1].isspace()]
            self._num_lines += len(lines)
        return records

    def close(self) -> None:
        self._file.close()


class _TarReader(RecordReader):
    """The samples of a tar file: files in a row that have one name, by extension."""

    def __init__(self, path: str) -> None:
        """Open the file."""
        self._file = open_file(path)
        self._forward = _Forward(unpacked(path, self._file, _BLOCK_BYTES))
        self._is_taken = False
        self._num_samples = 0
        super().__init__(path, self._samples())

    def skip(self, count: int) -> int:
        self._is_taken = False
        return super().skip(count)

    def take(self, count: int) -> list[Any]:
        self._is_taken = True
        return super().take(count)

    def close(self) -> None:
        self._file.close()

    def _samples(self) -> Iterator[dict[str, Any]]:
        sample: dict[str, Any] = {}
        for member in self._members():
            named = SAMPLE_NAME.fullmatch(member.name)
            if named is None:  # no extension, or hidden: nothing of a sample
                continue
            key, extension = named[1], named[2].lower()
            if sample and sample["__key__"] != key:
                yield sample
                self._num_samples += 1
                sample = {}
            if extension in sample:
                raise StoreError(f"{self.path} has two files {key}.{extension} in a row.")
            sample["__key__"] = key
            sample[extension] = self._content(member) if self._is_taken else b""
        if sample:
            yield sample

    def _content(self, member: tarfile.TarInfo) -> bytes:
        if member.size > MAX_FILE_BYTES:
            raise StoreError(
                f"{self.path} has a file {member.name!r} of {member.size:,} bytes, and "
                f"{MAX_FILE_BYTES:,} is the most that is read."
            )
        try:
            data = self._forward.take(member.size)
        except DAMAGE as error:
            raise self._damaged(error) from error
        if len(data) < member.size:
            raise self._damaged(f"{member.name!r} ends too early")
        return data

    def _members(self) -> Iterator[tarfile.TarInfo]:
        try:
            # It asks for no more than read, seek and tell, and never goes back.
            with tarfile.open(fileobj=cast("BinaryIO", self._forward), mode="r:") as tar:
                while (member := tar.next()) is not None:
                    tar.members = []  # type: ignore[attr-defined]  # 1 KB each, of every file
                    if member.issym() or member.islnk() or member.issparse():
                        raise StoreError(
                            f"{self.path} has a link or a sparse file, {member.name!r}: pack it "
                            "with `tar --dereference --hard-dereference`."
                        )
                    if member.isreg():
                        yield member
            self._forward.seek_end()
        except StoreError:
            raise
        except Exception as error:  # damaged headers raise nearly anything
            raise self._damaged(error) from error
        if self._forward.last != bytes(tarfile.BLOCKSIZE):
            raise self._damaged("it has no end mark")

    def _damaged(self, error: object) -> StoreError:
        return damaged(self.path, f"sample {self._num_samples:,}", error)


class _Forward:
    """A file that goes forward only, for tarfile, which reads headers from it.

    Attributes:
        last: What was read last.
    """

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks
        self._block = memoryview(b"")
        self._place = 0
        self.last = b""

    def tell(self) -> int:
        return self._place

    def seek(self, place: int) -> None:
        while self._place < place and self._part(place - self._place):
            pass

    def seek_end(self) -> None:
        """Read the rest, which shows whether a compressed file is whole."""
        while self._part(_BLOCK_BYTES):
            pass

    def read(self, size: int) -> bytes:
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes; at most {_MAX_HEADER_BYTES:,} are read")
        self.last = self.take(size)
        return self.last

    def take(self, size: int) -> bytes:
        """Return bytes of a member."""
        parts = []
        while size and (part := self._part(size)):
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _part(self, size: int) -> memoryview:
        """Return some of the next bytes; none at the end."""
        self._block = self._block or memoryview(next(self._blocks, b""))
        part, self._block = self._block[:size], self._block[size:]
        self._place += len(part)
        return part


class _ParquetReader(RecordReader):
    """The rows of a Parquet file, as dicts; row groups are passed over unread."""

    def __init__(self, path: str) -> None:
        """Open the file."""
        try:
            import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations
            import pyarrow.parquet as pq  # type: ignore[import-untyped]  # like that
        except ModuleNotFoundError as error:
            raise missing_extra(error, path) from error
        self._errors = pa.ArrowException, OSError
        self._place = 0
        open_file(path).close()  # a regular file
        with self._readable(path):
            self._file = pq.ParquetFile(path)
            metadata = self._file.metadata
        groups = range(metadata.num_row_groups)
        self._stops = np.cumsum([metadata.row_group(group).num_rows for group in groups])
        self._num_rows = int(metadata.num_rows)
        super().__init__(path, self._rows(0))

    def skip(self, count: int) -> int:
        place = min(self._place + count, self._num_rows)
        num_skipped = place - self._place
        if self._group_of(place) == self._group_of(self._place):
            super().skip(num_skipped)
        else:
            self._records = self._rows(place)
        self._place = place
        return num_skipped

    def take(self, count: int) -> list[Any]:
        rows = super().take(count)
        self._place += len(rows)
        return rows

    def close(self) -> None:
        self._file.close()

    def _group_of(self, place: int) -> int:
        return int(np.searchsorted(self._stops, place, side="right"))

    def _rows(self, place: int) -> Iterator[dict[str, Any]]:
        first = self._group_of(place)
        skipped = place - (int(self._stops[first - 1]) if first else 0)
        groups = range(first, len(self._stops))
        with self._readable(self.path):
            for batch in self._file.iter_batches(_ROWS, groups, use_threads=False):
                yield from batch.slice(skipped).to_pylist()
                skipped = max(0, skipped - len(batch))

    @contextlib.contextmanager
    def _readable(self, path: str) -> Iterator[None]:
        try:
            yield
        except self._errors as error:
            raise damaged(path, f"row {self._place:,}", error) from error


@dataclass(frozen=True)
class FileFormat:
    """How files are read.

    Attributes:
        name: What it is called, for fingerprints.
        open: Returns the reader of a path.
        decode: Returns the sample of a record, given the path for errors.
    """

    name: str
    open: Callable[[str], RecordReader]
    decode: Callable[[str, Any], Any] = lambda _, record: record


def _text(path: str, record: tuple[int, bytes]) -> str:
    number, line = record
    try:
        return line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise StoreError(f"{path}, line {number:,}: {error}.") from error


def _json(path: str, record: tuple[int, bytes]) -> Any:  # noqa: ANN401
    text = _text(path, record).strip()
    try:
        sample, end = _DECODER.raw_decode(text)  # as json.loads does, in less time
        return sample if end == len(text) else json.loads(text)  # which says what is wrong
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}, line {record[0]:,}: it is not JSON: {error}.") from error


_FORMATS: Final = {
    "jsonl": FileFormat("jsonl", _LineReader, _json),
    "lines": FileFormat("lines", _LineReader, _text),
    "tar": FileFormat("tar", _TarReader),
    "parquet": FileFormat("parquet", _ParquetReader),
}


def format_of(parse: str | Callable[[str], Iterable[Any]]) -> FileFormat:
    """Return a format by its name, or that of a user's function."""
    if callable(parse):
        module, name = getattr(parse, "__module__", ""), getattr(parse, "__qualname__", "")
        return FileFormat(f"{module}.{name}", lambda path: _CalledReader(path, parse))
    if parse not in _FORMATS:
        raise ConfigError(
            f"parse should be one of {', '.join(_FORMATS)}, or a function that yields the samples "
            f"of a path, but got {parse!r:.80}."
        )
    return _FORMATS[parse]
