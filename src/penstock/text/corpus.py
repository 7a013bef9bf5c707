# SPDX-License-Identifier: Apache-2.0
"""`Corpus`: the records of JSON lines, Parquet and Arrow files, in order, from any place on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.data.unpacked import COMPRESSED, DAMAGE, damaged, unpacked, whole_lines
from penstock.errors import ConfigError, StoreError
from penstock.opening import FileState, open_file
from penstock.optional import missing_extra

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINES: Final = (".jsonl", ".ndjson", ".json")
_TABLES: Final = (".parquet", ".arrow", ".feather")
_CHUNK_BYTES: Final = 1 << 20  # of lines, for a worker: a tenth of a second for a tokenizer
_CHUNK_ROWS: Final = 1024


class CorpusPlace(NamedTuple):
    """How far a corpus was read: `num_records` lines of file `source`, or rows of all tables."""

    source: int = 0
    num_records: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some lines of a file, or rows of a table.

    Attributes:
        path: The file that they are from; for rows, the path of the corpus.
        first: Number of the first record: lines count from 1, rows from 0.
        records: Whole lines, as bytes; or the values of rows, as a list.
        end: The place after the last record.
        num_bytes: Bytes of all files up to that place.
    """

    path: str
    first: int
    records: bytes | list[Any] = field(repr=False)
    end: CorpusPlace
    num_bytes: int = field(repr=False)

    @property
    def is_lines(self) -> bool:
        """Whether the records are lines."""
        return isinstance(self.records, bytes)

    def named(self) -> Iterator[tuple[str, Any]]:
        """Yield each record with its name, such as "a.jsonl, line 3"; blank lines are left out."""
        lines = self.records.split(b"\n") if isinstance(self.records, bytes) else self.records
        kind = "line" if self.is_lines else "row"
        for number, record in enumerate(lines, self.first):
            if not self.is_lines or record.strip():
                yield f"{self.path}, {kind} {number}", record


class Corpus:
    """The files of a corpus, read in chunks.

    Attributes:
        size_bytes: Total size of the files.
        fingerprint: Names, sizes and times of the files.
    """

    def __init__(self, path: str | Path, key: str) -> None:
        """Find the files: in a folder, the JSON lines files, or else the tables, by name.

        Args:
            path: A file of JSON lines, also compressed by gzip or Zstandard; a Parquet or Arrow
                file; a folder of these; or one that Hugging Face's `save_to_disk` wrote.
            key: The column of the tables to read.
        """
        self.path = Path(path)
        self.key = key
        self._tables: list[Any] = []
        self._lines: list[Path] = []
        if not self.path.exists():
            raise StoreError(f"{path} does not exist.")
        if self.path.is_dir():
            self._lines = sorted(p for p in self.path.iterdir() if _is_lines(p))
        elif _is_lines(self.path):
            self._lines = [self.path]
        elif self.path.suffix not in _TABLES:
            raise ConfigError(
                f"{path} is not a corpus. A corpus is a file of JSON lines ({', '.join(_LINES)}, "
                f"also with {' or '.join(COMPRESSED)}), a table ({', '.join(_TABLES)}), or a "
                "folder of these."
            )
        files = self._lines or self._table_paths()
        states = list(map(FileState.of, files))
        self.size_bytes = sum(state.size_bytes for state in states)
        self.fingerprint = [[Path(s.path).name, s.size_bytes, s.time_ns] for s in states]

    def _table_paths(self) -> list[Path]:
        try:
            from penstock.stores.arrow import table_paths
        except ModuleNotFoundError as error:
            raise missing_extra(error, f"the corpus {self.path}") from error
        return table_paths(self.path)

    def chunks(self, start: CorpusPlace) -> Iterator[Chunk]:
        """Yield the records from a place on.

        Raises:
            ConfigError: the tables have no such column.
            StoreError: a file is cut off or damaged, or has a line longer than 256 MiB.
        """
        if not self._lines:
            yield from self._of_table(start)
            return
        num_before = 0
        for number, path in enumerate(self._lines):
            if number >= start.source:
                skip = start.num_records if number == start.source else 0
                yield from _of_lines(path, number, skip, num_before)
            num_before += path.stat().st_size

    def _of_table(self, start: CorpusPlace) -> Iterator[Chunk]:
        import pyarrow as pa  # type: ignore[import-untyped]  # it has no annotations

        from penstock.stores.arrow import Tables

        tables = Tables(self._table_paths())
        try:
            if self.key not in tables.schema.names:
                raise ConfigError(
                    f"{self.path} has no column {self.key!r}, but {tables.schema.names}: name one "
                    "with --text-key; texts need --tokenizer."
                )
            kind = tables.schema.field(self.key).type
            is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
            row = 0
            for column in tables.chunks(self.key):
                if is_text:  # as bytes: each is decoded by itself, as one may not be UTF-8
                    large = pa.types.is_large_string(kind)
                    column = column.view(pa.large_binary() if large else pa.binary())
                for first in range(0, len(column), _CHUNK_ROWS):
                    part = column.slice(first, _CHUNK_ROWS)
                    skip = min(max(0, start.num_records - row), len(part))
                    if skip < len(part):
                        stop = row + len(part)
                        num_bytes = self.size_bytes * stop // max(1, tables.num_rows)
                        values = part.slice(skip).to_pylist()
                        yield Chunk(
                            str(self.path), row + skip, values, CorpusPlace(0, stop), num_bytes
                        )
                    row += len(part)
        finally:
            tables.close()


def _is_lines(path: Path) -> bool:
    name = path.name
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    # A dataset of Hugging Face also has JSON files that are not a corpus.
    of_datasets = ("state.json", "dataset_info.json", "dataset_dict.json")
    return name.endswith(_LINES) and name not in of_datasets


def _of_lines(path: Path, source: int, skip: int, num_before: int) -> Iterator[Chunk]:
    """Yield the lines of a file after the first `skip`."""
    number = 0  # of the lines read
    with open_file(path) as file:
        try:
            for lines in whole_lines(path, unpacked(str(path), file, _CHUNK_BYTES)):
                count = lines.count(b"\n") + (not lines.endswith(b"\n"))
                left = max(0, skip - number)
                if left < count:
                    rest = lines.split(b"\n", left)[-1] if left else lines
                    end = CorpusPlace(source, number + count)
                    yield Chunk(str(path), number + left + 1, rest, end, num_before + file.tell())
                number += count
        except DAMAGE as error:
            raise damaged(path, f"line {number:,}", error) from error
