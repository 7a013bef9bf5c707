# SPDX-License-Identifier: Apache-2.0
r"""`LMDBStore`: records in an LMDB file, or in several; and files of pickles made by scripts.

    b"\0"                            what is being packed, until it is complete
    8 bytes, big-endian: position    a record            so a file is appended to, and read in order
    b"penstock.index"                a record: keys, labels …           written last, with
    b"penstock.summary"              a record: count, fingerprint …     this: they make it a store

Behind the last page of the file lie the checksums of its pages: see `pages`.

With shards the address is a folder of files `00000-of-00004.lmdb`, each a store by itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from penstock.data.packed_list import PackedList
from penstock.errors import ConfigError, StoreError
from penstock.stores.folder.listing import is_image
from penstock.stores.index import Index, joined
from penstock.stores.lmdb.environments import Environment
from penstock.stores.records import (
    EncodedImage,
    Record,
    check_record,
    decode_record,
    header_of,
    image_start,
)
from penstock.stores.store import OpenedStore, missing_records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from penstock.stores.lmdb.environments import FileVersion

INDEX_KEY: Final = b"penstock.index"
SUMMARY_KEY: Final = b"penstock.summary"
PACK_KEY: Final = b"\0"  # sorts before all others
_SHARD: Final = re.compile(r"(\d{5})-of-(\d{5})\.lmdb")
_ESCAPED: Final = "surrogateescape"


def open_lmdb(
    path: str | Path,
    *,
    layout: Literal["records", "pickle"] = "records",
    trusted: bool = False,
    **options: Any,  # noqa: ANN401
) -> LMDBStore:
    """Return the store of a file: of records, or of pickles if they are `trusted`."""
    if layout == "records":
        return LMDBStore(path, **options)
    if layout != "pickle":
        raise ConfigError(f"layout of lmdb stores is 'records' or 'pickle', not {layout!r}.")
    return PickledLMDBStore(path, trusted=trusted, **options)


class LMDBStore(OpenedStore["_OpenFiles"]):
    """A store in an LMDB file: embedded, memory-mapped, for any number of processes.

    A batch is looked up in one read transaction, by sorted keys, and nothing is copied that need
    not be.

    Concurrency:
        Any thread. A forked or spawned process opens the file for itself, at first use.

    Example:
        >>> import tempfile
        >>> from penstock.stores import pack
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = pack([("one", 1), ("two", 2)], f"lmdb:{folder.name}/numbers.lmdb")
        >>> with LMDBStore(f"{folder.name}/numbers.lmdb") as store:
        ...     store.get_many([1])
        [Record(key='1', label=2, sample=('two', 2))]
        >>> folder.cleanup()
    """

    def __init__(
        self,
        path: str | Path,
        *,
        verify: Literal["once", "always", "never"] = "once",
        readahead: bool = False,
    ) -> None:
        """Name the file; it is opened at first use.

        Args:
            path: A file that `penstock pack` made, or the folder of its shards.
            verify: When checksums are compared. Of records: the first time that a process reads
                one, every time, or never. Of the pages in which LMDB looks for records: once for
                this store and all processes that get a copy of it, each time that a process opens
                the file, or never. A file that is truncated is always refused.
            readahead: Whether the system reads ahead: for scans in order.

        Raises:
            ConfigError: `verify` is none of the three.
        """
        if verify not in ("once", "always", "never"):
            raise ConfigError(f"verify is 'once', 'always' or 'never', not {verify!r}.")
        self._path = Path(path)
        self._verify = verify
        self._verified: tuple[FileVersion, ...] = ()
        self._readahead = readahead

    @property
    def address(self) -> str:
        """`lmdb:` and the path."""
        return f"lmdb:{self._path}"

    def what(self) -> str:
        """Return what was packed, in the words of its packer."""
        return self._files().what

    def _load_index(self) -> Index:
        indexes = []
        for part in self._files().parts:
            with part.environment.reading() as transaction:
                name = f"the index of {part.environment.path}"
                value = transaction.get(INDEX_KEY)
                indexes.append(Index.from_tree(decode_record(value, name).sample, name))
                if len(indexes[-1]) != part.stop - part.start:
                    raise StoreError(
                        f"{name} has {len(indexes[-1])} keys, its summary says "
                        f"{part.stop - part.start} records. Pack it anew, or restore a copy."
                    )
        return indexes[0] if len(indexes) == 1 else joined(indexes)

    def _summary(self, environment: Environment) -> dict[str, Any]:
        """Return what a file says of itself: `count`, `fingerprint`, `what`."""
        with environment.reading() as transaction:
            value = transaction.get(SUMMARY_KEY)
            if value is None or transaction.get(INDEX_KEY) is None:
                raise _no_store(environment, transaction)
            name = f"the summary of {environment.path}"
            summary = decode_record(value, name).sample
        match summary:
            case {"count": int(count), "fingerprint": str(), "what": str()} if 0 <= count < 2**40:
                return dict(summary)
        raise StoreError(f"{name} is damaged: it is {summary!r:.80}.")

    def _files(self) -> _OpenFiles:
        files = self._open
        if files is None or files.pid != os.getpid():
            with contextlib.ExitStack() as opened:
                files = self._open = self._opened(opened)
            self._verified = tuple(part.environment.version for part in files.parts)
        return files

    def _opened(self, opened: contextlib.ExitStack) -> _OpenFiles:
        parts: list[_Part] = []
        prints: list[str] = []
        summary: dict[str, Any] = {}
        count = 0
        for path in _files_of(self._path):
            environment = Environment(
                path,
                readahead=self._readahead,
                verify_tree=self._verify != "never",
                verified=() if self._verify == "always" else self._verified,
            )
            opened.callback(environment.close)
            summary = self._summary(environment)
            parts.append(_Part(environment, count, count + summary["count"]))
            if summary["count"] and summary["fingerprint"] in prints:
                raise StoreError(
                    f"{path} has the same records as another shard, which was copied over it. "
                    "Restore it from a copy, or pack the shards anew."
                )
            count += summary["count"]
            prints.append(summary["fingerprint"])
        fingerprint = "+".join(prints)
        # The index was read earlier, maybe in another process.
        if self._index is not None and fingerprint != self._index.fingerprint:
            raise StoreError(
                f"{self.address} is not the file that it was: its fingerprint was "
                f"{self._index.fingerprint}, now it is {fingerprint}. It was packed anew "
                "or written to while it was in use; make the dataset again."
            )
        return _OpenFiles(
            os.getpid(),
            parts,
            fingerprint,
            summary["what"],
            np.zeros(count, np.bool_),
            np.zeros(count, np.uint32),
            opened.pop_all().close,
        )

    @contextlib.contextmanager
    def _values(self, files: _OpenFiles, positions: NDArray[np.int64]) -> Iterator[list[Any]]:
        """Return views of the records at `positions`, valid inside the block."""
        values: list[Any] = [None] * len(positions)
        stops = [part.stop for part in files.parts]
        # In the order of the file; `getmulti` passes over what is not there.
        order = np.argsort(positions, kind="stable")
        cuts = np.searchsorted(positions[order], stops).tolist()
        with contextlib.ExitStack() as stack:
            for part, start, stop in zip(files.parts, [0, *cuts], cuts, strict=False):
                places = order[start:stop]
                if not len(places):
                    continue
                transaction = stack.enter_context(part.environment.reading())
                self._look_up(transaction, part, positions, places, values)
            try:
                yield values
            finally:
                values.clear()

    def _look_up(
        self,
        transaction: Any,  # noqa: ANN401
        part: _Part,
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        values: list[Any],
    ) -> None:
        """Write the values of some positions to their places; no variable outlives them."""
        with transaction.cursor() as cursor:
            found = cursor.getmulti(position_keys(positions[places] - part.start))
        if len(found) != len(places):
            there = {part.start + int.from_bytes(key, "big") for key, _ in found}
            found.clear()
            absent = [p for p in positions[np.sort(places)].tolist() if p not in there]
            raise missing_records([self.keys[p] for p in absent], self.address)
        for place, pair in zip(places.tolist(), found, strict=True):
            values[place] = pair[1]

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        files = self._files()
        with self._values(files, positions) as values:
            records = [
                self._decoded(files, position, value, copy=copy)
                for position, value in zip(positions.tolist(), values, strict=True)
            ]
            try:
                yield records
            finally:
                records.clear()

    def _decoded(self, files: _OpenFiles, position: int, value: Any, *, copy: bool) -> Record:  # noqa: ANN401
        verify = self._is_to_verify(files, position)
        name = self._name(position)
        try:
            record = decode_record(value, name, verify=verify, copy=copy)
        except StoreError as error:
            # Without the frames that have views of the map: a debugger that shows their variables
            # once the file is closed would end the process.
            message = str(error)
        else:
            files.is_verified[position] |= verify
            return record
        del value
        raise StoreError(message)

    @contextlib.contextmanager
    def borrow_images(self, positions: NDArray[np.int64]) -> Iterator[list[memoryview]]:
        """As in `Store`, without decoding the records."""
        files = self._files()
        with self._values(files, positions) as values:
            starts = files.image_starts[positions]
            if self._verify == "always" or not starts.all():
                for position, value in zip(positions.tolist(), values, strict=True):
                    self._find_image(files, position, value)
                starts = files.image_starts[positions]
            images = [value[start:] for value, start in zip(values, starts.tolist(), strict=True)]
            try:
                yield images
            finally:
                images.clear()

    def _find_image(self, files: _OpenFiles, position: int, value: Any) -> None:  # noqa: ANN401
        """Verify a record as is asked for, and note where its image begins."""
        verify = self._is_to_verify(files, position)
        if verify or not files.image_starts[position]:
            name = self._name(position)
            head_bytes = check_record(value, name) if verify else header_of(value, name)[0]
            files.is_verified[position] |= verify
            files.image_starts[position] = image_start(head_bytes)

    def _is_to_verify(self, files: _OpenFiles, position: int) -> bool:
        if self._verify == "once":
            return not files.is_verified[position]
        return self._verify == "always"


class PickledLMDBStore(LMDBStore):
    """An LMDB file of pickles, as scripts make it by hand.

        b"0", b"1" …     pickled (bytes, label), or any sample
        b"__keys__"      pickled list of those keys, in order      … one of the two
        b"__len__"       pickled number of samples

    A pickle is a program: the writer of the file decides what runs when it is read. Labels are not
    available before the samples are read.
    """

    def __init__(self, path: str | Path, *, trusted: bool, **options: Any) -> None:  # noqa: ANN401
        """Name the file; it is opened at first use.

        Args:
            path: The file, or the folder with a `data.mdb` in it.
            trusted: Whether its pickles may be decoded.
            options: As for `LMDBStore`; there are no checksums of records to `verify`.

        Raises:
            ConfigError: `trusted` is not true, or an option is wrong.
        """
        super().__init__(path, **options)
        if trusted is not True:
            raise ConfigError(
                f'{path}: layout="pickle" decodes pickles, which can run any program that their '
                "writer wanted to be run. If you trust the file's maker, add trusted=True."
            )

    def _summary(self, environment: Environment) -> dict[str, Any]:
        *_, size_bytes, time_ns = environment.version  # it has no fingerprint of its own
        return {"count": 0, "fingerprint": f"{size_bytes:x}-{time_ns:x}", "what": ""}

    def _load_index(self) -> Index:
        files = self._files()
        with files.parts[0].environment.reading() as transaction:
            keys, length = transaction.get(b"__keys__"), transaction.get(b"__len__")
            if keys is not None:
                found = self._unpickled(keys, "__keys__")
                names = [k if isinstance(k, str) else k.decode("utf-8", _ESCAPED) for k in found]
            elif length is not None:
                is_text = bytes(length).isdigit()  # some write it so
                count = int(bytes(length)) if is_text else self._unpickled(length, "__len__")
                names = [str(number) for number in range(count)]
            else:
                raise StoreError(
                    f"{self.address} is no file of pickles, with __keys__ or __len__: open what "
                    "`penstock pack` wrote without layout."
                )
        return Index(PackedList(names), fingerprint=files.fingerprint)

    def _unpickled(self, value: Any, key: str) -> Any:  # noqa: ANN401
        try:
            return pickle.loads(value)
        except Exception as error:  # a damaged pickle raises nearly anything
            raise StoreError(
                f"the value of {key!r} in {self.address} cannot be unpickled: "
                f"{type(error).__name__}: {error}."
            ) from error

    @contextlib.contextmanager
    def _read(self, positions: NDArray[np.int64], *, copy: bool) -> Iterator[list[Record]]:
        keys = [self.keys[position] for position in positions.tolist()]
        with self._files().parts[0].environment.reading() as transaction:
            values = [transaction.get(key.encode("utf-8", _ESCAPED)) for key in keys]
            absent = [key for key, value in zip(keys, values, strict=True) if value is None]
            if absent:
                raise missing_records(absent, self.address)
            pairs = zip(keys, values, strict=True)
            yield [_unpickled_record(key, self._unpickled(value, key)) for key, value in pairs]


def _unpickled_record(key: str, sample: Any) -> Record:  # noqa: ANN401
    if isinstance(sample, (tuple, list)) and len(sample) == 2:
        data, label = sample
        known = int(label) if isinstance(label, (int, np.integer)) else None
        return Record(key, known, (_as_image(data), label if known is None else known))
    return Record(key, None, _as_image(sample))


def _as_image(data: Any) -> Any:  # noqa: ANN401
    return EncodedImage(data) if isinstance(data, bytes) and is_image(data) else data


class _Part(NamedTuple):
    """One of the files, and the positions of the whole that are in it."""

    environment: Environment
    start: int
    stop: int


class _OpenFiles(NamedTuple):
    """The files of one store, open in one process."""

    pid: int
    parts: list[_Part]
    fingerprint: str
    what: str
    is_verified: NDArray[np.bool_]
    image_starts: NDArray[np.uint32]
    close: Callable[[], None]


def _no_store(environment: Environment, transaction: Any) -> StoreError:  # noqa: ANN401
    path = environment.path
    if transaction.get(PACK_KEY) is not None:
        return StoreError(
            f"{path} is unfinished: its packing was interrupted. `penstock pack --resume` with the "
            "same source and destination finishes it."
        )
    return StoreError(
        f"{path} is an LMDB file that Penstock did not write: it has no index. Pickles can run any "
        'program: if a script wrote some, and you trust it, read it with layout="pickle", '
        f"trusted=True, or convert it by `penstock pack --trust-pickle lmdb:{path} lmdb:NEW`."
    )


def _files_of(path: Path) -> list[Path]:
    """Return the files of a store in the order of their records."""
    if not path.is_dir() or (path / "data.mdb").exists():
        return [path]
    shards = sorted(entry.name for entry in path.iterdir() if is_shard(entry.name))
    if not shards:
        raise StoreError(f"{path} is a folder without an LMDB file in it.")
    num_shards = int(shards[0][9:14])
    wanted = [shard_name(number, num_shards) for number in range(num_shards)]
    if shards != wanted:
        odd = min(set(wanted) ^ set(shards))
        raise StoreError(
            f"{path} should have {num_shards} shards, {wanted[0]} to {wanted[-1]}; {odd} is "
            "missing, or of another store."
        )
    return [path / name for name in shards]


def is_shard(name: str) -> bool:
    """Return whether a file is called as a shard is."""
    return _SHARD.fullmatch(name) is not None


def shard_name(number: int, num_shards: int) -> str:
    """Return the file name of a shard, which sorts as its number does."""
    return f"{number:05}-of-{num_shards:05}.lmdb"


def position_keys(positions: NDArray[np.int64]) -> list[bytes]:
    """Return the keys of records: big-endian, so that they sort as bytes in order."""
    text = positions.astype(">u8").tobytes()
    return [text[start : start + 8] for start in range(0, len(text), 8)]
