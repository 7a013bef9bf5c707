# SPDX-License-Identifier: Apache-2.0
"""`TokenWriter`: writes documents to a folder of tokens, which appears when it is complete.

It works in `NAME.partial`, with `journal.json` in place of the header: how much of both files is on
the disk, their checksums, and how far the source was read by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np

from penstock.errors import ConfigError, StoreError
from penstock.stores.placing import Lock, already_there, put_in_place, remove
from penstock.stores.store import other_source
from penstock.text.layouts import (
    DTYPES,
    FORMAT,
    VERSION,
    checksum_of,
    damaged,
    map_file,
    read_header,
    read_json,
    wrong_size,
)
from penstock.whole_file import fsync_folder, write_whole

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_COMMIT_BYTES: Final = 32 << 20  # of tokens that a kill may cost


class Written(NamedTuple):
    """What the files of a writer hold, and how far its source was read for that."""

    num_documents: int = 0
    num_tokens: int = 0
    crc_tokens: int = 0
    crc_offsets: int = zlib.crc32(bytes(8))
    position: Any = ()


class TokenWriter:
    """Writes a folder in Penstock's own layout, which appears when it is complete.

    Attributes:
        finished: Whether the folder is complete; a writer that resumes may find it so.
        written: What an interrupted run left, and what was put since.

    Concurrency:
        One thread; a second writer to the same place is refused.
    """

    def __init__(
        self,
        path: str | Path,
        dtype: DTypeLike,
        *,
        tokenizer_digest: str | None = None,
        what: str = "",
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Begin a folder, or go on with one.

        Args:
            path: The folder.
            dtype: uint16 or uint32.
            tokenizer_digest: For the header.
            what: Identifies what is written; a writer that resumes has to be given the same.
            resume: Whether to go on with what an interrupted writer left, if it left anything.
            overwrite: Whether a folder of tokens that is there may be replaced.

        Raises:
            ConfigError: the dtype is another one.
            StoreError: something at `path` may not be replaced; another writer is writing there; or
                what an interrupted writer left is of something else, or damaged.
        """
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPES.values():
            raise ConfigError(f"tokens are kept as uint16 or uint32, not {np.dtype(dtype)}.")
        self._path = Path(path)
        self._partial = self._path.with_name(f"{self._path.name}.partial")
        self._tokenizer_digest, self._what = tokenizer_digest, what
        self._files: list[BinaryIO] = []
        self.finished = False
        self.written = self._committed = Written()
        self._lock = Lock(self._partial, self._path)
        try:
            self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self.close()
            raise

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        journal = self._partial / "journal.json"
        has_rest = resume and journal.exists()
        if self._path.exists():
            header = read_header(self._path)  # an error for anything else, which stays
            if resume and not has_rest and header.get("what") == self._what:
                self.finished = True
                counts = header["num_documents"], header["num_tokens"]
                self.written = Written(*counts, position=header.get("position", ()))
                return
            if not overwrite:
                raise already_there(f"tokens:{self._path}", resume=resume)
        if has_rest:
            self._take_over(journal)
        else:
            remove(self._partial)
            self._partial.mkdir(parents=True)
        self._files = [open(self._partial / n, "ab") for n in ("tokens", "offsets")]  # noqa: SIM115
        if not has_rest:
            self._files[1].write(bytes(8))
            self._commit()

    def _take_over(self, journal: Path) -> None:
        """Truncate the files to what the journal says, and compare their checksums."""
        found = read_json(journal)
        if found.pop("what", None) != self._what:
            raise other_source(self._partial)
        try:
            self.written = self._committed = written = Written(**found)
            sizes = written.num_tokens * self.dtype.itemsize, 8 * (written.num_documents + 1)
        except TypeError as error:
            raise damaged(journal, str(error)) from error
        checksums = written.crc_tokens, written.crc_offsets
        for name, size_bytes, checksum in zip(("tokens", "offsets"), sizes, checksums, strict=True):
            path = self._partial / name
            if path.stat().st_size < size_bytes:
                raise wrong_size(path, path.stat().st_size, size_bytes)
            os.truncate(path, size_bytes)
            if checksum_of(map_file(path, "u1", size_bytes)) != checksum:
                raise damaged(path, "its checksum is not that of the journal")

    def put(self, values: NDArray[Any], lengths: NDArray[np.int64], position: object = ()) -> None:
        """Append documents.

        Args:
            values: Their tokens one after the other, of the writer's dtype.
            lengths: Tokens of each document.
            position: How far the source was read, as a value that JSON can hold.
        """
        before = self.written
        offsets = before.num_tokens + np.cumsum(lengths, dtype="<i8")
        tokens = np.ascontiguousarray(values, self.dtype)
        try:
            for file, array in zip(self._files, (tokens, offsets), strict=True):
                file.write(array.data)
        except OSError as error:
            raise self._cannot_write(error) from error
        self.written = Written(
            before.num_documents + len(lengths),
            before.num_tokens + len(tokens),
            zlib.crc32(tokens.data, before.crc_tokens),
            zlib.crc32(offsets.data, before.crc_offsets),
            position,
        )
        num_new = self.written.num_tokens - self._committed.num_tokens
        if num_new * self.dtype.itemsize >= _COMMIT_BYTES:
            self._commit()

    def _commit(self) -> None:
        try:
            for file in self._files:
                file.flush()
                os.fsync(file.fileno())
            journal = json.dumps({**self.written._asdict(), "what": self._what})
            write_whole(self._partial / "journal.json", journal, to_disk=True)
        except OSError as error:
            raise self._cannot_write(error) from error
        self._committed = self.written

    def _cannot_write(self, error: OSError) -> StoreError:
        return StoreError(f"cannot write {self._path}: {error.strerror}.")

    def finish(self) -> None:
        """Complete the folder and put it in its place."""
        if not self.finished:
            self._commit()
            written = self.written
            header = {
                "format": FORMAT,
                "version": VERSION,
                "dtype": np.dtype(self.dtype.type).name,
                "num_documents": written.num_documents,
                "num_tokens": written.num_tokens,
                "tokenizer": self._tokenizer_digest,
                "crc32": {"tokens": written.crc_tokens, "offsets": written.crc_offsets},
                "what": self._what,
                "position": written.position,
            }
            write_whole(
                self._partial / "header.json", json.dumps(header, indent=1) + "\n", to_disk=True
            )
            fsync_folder(self._partial)
            put_in_place(self._partial, self._path)
            self.finished = True
            (self._path / "journal.json").unlink()  # until here a writer could go on

    def close(self) -> None:
        """Close the files and release the lock; a writer that resumes finds what was written."""
        try:
            if self._files and not self.finished and self.written is not self._committed:
                self._commit()
        finally:
            for file in self._files:
                with contextlib.suppress(OSError):  # a full disk, which the commit has reported
                    file.close()
            self._files = []
            self._lock.close()
