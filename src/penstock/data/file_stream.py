# SPDX-License-Identifier: Apache-2.0
"""`FileStream`: records, by number, of files that can only be read from front to back."""
# The numbers of records make the files a map-style dataset: an order is computed from them, and the
# loader resumes, changes ranks and replaces workers as with any other. `LaneBatchSampler` gives the
# order in which each file is read once. Any other is correct too.
#
# A thread keeps some files open, each with the window of records that it read last:
#
#     file 3   |··window 0··|··window 1··|··window 2··|
#                            kept         read on from here
#
# Rejected: *an iterable dataset with a buffer in each worker*. Its state has a place for each
# worker, so neither their number nor that of the ranks could change.

from __future__ import annotations

import json
import math
import operator
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from penstock.data.dataset import Dataset
from penstock.data.file_formats import format_of
from penstock.data.names import name_samples
from penstock.errors import ConfigError, StoreError
from penstock.faults import annotate
from penstock.forks import Owner
from penstock.opening import FileState, fingerprint_of
from penstock.system_limits import cores_by_affinity
from penstock.warn import warn_user
from penstock.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from numpy.typing import ArrayLike, NDArray

    from penstock.data.file_formats import FileFormat, RecordReader

_ALL: Final = 1 << 62
_VERSION: Final = 1  # of a file of counts
_MOST_IN_VAIN: Final = 10  # records passed over or read, for each that is given


class FileStream(Dataset[Any]):
    r"""The records of files that can only be read from front to back, one file after the other.

    `stream[i]` is record i. Use it with `penstock.sampling.LaneBatchSampler`, in whose order each
    file is decompressed about once, and shuffled by windows. Any other order gives the same
    samples, slowly: a file is read from its beginning up to the record.

    Records are counted first, which reads all files once, several at a time. (Parquet has the
    number in the file.) Blank lines are not records. Records are decoded as they are used: a
    damaged one is an error of its own sample, which `on_error="skip"` leaves out.

    A subclass may change samples: `__getitem__` calls that of `FileStream`.

    Attributes:
        files: Paths, as text.
        counts: Records of each file, int64, shape (files,).
        window: As given.

    Concurrency:
        Any thread or process; each opens files of its own.

    Example:
        >>> from penstock import Loader
        >>> from penstock.sampling import LaneBatchSampler
        >>> for number in (0, 10):
        ...     with open(f"/tmp/penstock-doc-{number}.jsonl", "w") as file:
        ...         _ = file.write("".join(f'{{"x": {number + k}}}\n' for k in range(3)))
        >>> stream = FileStream([f"/tmp/penstock-doc-{k}.jsonl" for k in (0, 10)], "jsonl")
        >>> len(stream), stream[4]
        (6, {'x': 11})
        >>> loader = Loader(stream, batch_sampler=LaneBatchSampler(stream, 2, seed=1))
        >>> sorted(x for batch in loader for x in batch["x"].tolist())
        [0, 1, 2, 10, 11, 12]
    """

    #: Steps go round the workers in turn, so that each has lanes of its own.
    reads_in_turn: ClassVar[bool] = True
    #: `__getitems__` only saves time: where a sample may fail, they are read one by one.
    reads_each: ClassVar[bool] = True
    _shows = ("length", "num_files", "parse", "window")

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        parse: str | Callable[[str], Iterable[Any]],
        *,
        window: int = 1024,
        counts: ArrayLike | str | os.PathLike[str] | None = None,
        max_open: int = 64,
    ) -> None:
        """Count the records.

        Args:
            files: Paths, in an order that stays the same; indices go by it.
            parse: "jsonl" gives what each line has as JSON; "lines" each line as text; "tar" the
                files that have one name, as bytes by extension, with "__key__"; "parquet" each row
                as a dict. Lines and tar files may be compressed, if they end in .gz or .zst. Or a
                function that takes a path and yields the samples of that file.
            window: Records that are read and kept together, at least 1; the sampler shuffles them.
            counts: Records of each file. Or the path of a JSON file that keeps them: it is read,
                and written if files are new or were changed. Count in one process before others
                begin. None counts now.
            max_open: Files that a thread keeps open, each with a window of records: at least as
                many as it reads lanes.

        Raises:
            ConfigError: an argument is not as said above.
            StoreError: a file cannot be read, or is cut off.
            MissingExtraError: a library that reads such files is not installed.
        """
        paths = [files] if isinstance(files, (str, os.PathLike)) else files
        self.files = [os.fspath(path) for path in paths]
        if not self.files:
            raise ConfigError("files should be one path or more, but none was given.")
        self.parse = parse
        self._format = format_of(parse)
        for name, value in (("window", window), ("max_open", max_open)):
            if operator.index(value) < 1:
                raise ConfigError(f"{name} should be 1 or more, but got {name}={value!r}.")
        self.window, self._max_open = operator.index(window), operator.index(max_open)
        self._states = list(map(_state_of, self.files))
        self.counts: NDArray[np.int64] = self._counted(counts)
        self._stops = np.cumsum(self.counts)
        self._starts = self._stops - self.counts
        self._local = threading.local()

    def _counted(self, counts: ArrayLike | str | os.PathLike[str] | None) -> NDArray[np.int64]:
        if isinstance(counts, (str, os.PathLike)):
            return _kept_counts(Path(counts), self._states, self._format)
        if counts is None:
            return np.array(_count(self._states, self._format), np.int64)
        array = np.asarray(counts)
        if array.shape != (len(self.files),) or array.dtype.kind not in "iu" or (array < 0).any():
            raise ConfigError(
                f"counts should be the number of records of each of {len(self.files)} files, "
                f"integers, 0 or more, but got shape {array.shape}, dtype {array.dtype}."
            )
        return array.astype(np.int64)

    @property
    def num_files(self) -> int:
        """How many files there are."""
        return len(self.files)

    @property
    def is_drawless(self) -> bool:
        """Whether reading draws no random number: a function of the user's may."""
        return isinstance(self.parse, str)

    @property
    def fingerprint(self) -> str:
        """Identifies the files; a loader warns if its state was saved with others."""
        return fingerprint_of(self._states, self._format.name)

    def __len__(self) -> int:
        """Return the number of records."""
        return int(self._stops[-1]) if self.files else 0

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        """Return one sample; a negative index counts from the end.

        Raises:
            StoreError: the record is damaged, or the file; or the file was changed since its
                records were counted.
        """
        file, number = self._place(index)
        record = self._kept().record(file, number, self.window, int(self.counts[file]))
        return self._format.decode(self.files[file], record)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, as `__getitem__` does."""
        places = np.asarray(indices)
        is_outside = len(places) and not 0 <= places.min() <= places.max() < len(self)
        if type(self).__getitem__ is not FileStream.__getitem__ or is_outside:
            return [self[index] for index in indices]
        files = np.searchsorted(self._stops, places, side="right")
        numbers = places - self._starts[files]
        record, decode, paths = self._kept().record, self._format.decode, self.files
        window, counts = self.window, self.counts[files].tolist()
        samples: list[Any] = []
        try:
            for file, number, count in zip(files.tolist(), numbers.tolist(), counts, strict=True):
                samples.append(decode(paths[file], record(file, number, window, count)))
        except Exception as error:
            named = name_samples(self, [int(places[len(samples)])])
            annotate(error, f"while reading {named} of the dataset")
            raise
        return samples

    def _kept(self) -> _KeptFiles:
        """Return what this thread has open."""
        kept: _KeptFiles | None = getattr(self._local, "files", None)
        if kept is None or not kept.owner.is_here:
            kept = self._local.files = _KeptFiles(self._states, self._format, self._max_open)
        return kept

    def describe(self, index: int) -> str:
        """Return file and number of a record, which counts from 1: "a.jsonl.gz, record 3"."""
        file, number = self._place(index)
        return f"{self.files[file]}, record {number + 1:,}"

    def _place(self, index: int) -> tuple[int, int]:
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is out of range for {len(self)} records.")
        place %= len(self)
        file = int(np.searchsorted(self._stops, place, side="right"))
        return file, place - int(self._starts[file])

    def __getstate__(self) -> dict[str, Any]:
        """Return all but what is open."""
        return {k: v for k, v in self.__dict__.items() if k not in ("_local", "_format")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin with no open file."""
        self.__dict__.update(state, _local=threading.local(), _format=format_of(state["parse"]))


class _KeptFile:
    """An open file, and the window of it that was read last."""

    def __init__(self, reader: RecordReader) -> None:
        self.reader = reader
        self.place = 0  # records that were passed
        self.records: list[Any] = []
        self.num_left = 0  # records of the window that were not given


class _KeptFiles:
    """The files that a thread reads, by file and window, the one used last at the end."""

    def __init__(self, states: list[FileState], file_format: FileFormat, max_open: int) -> None:
        self.owner = Owner()
        self._states, self._format, self._max_open = states, file_format, max_open
        self._opened: dict[tuple[int, int], _KeptFile] = {}
        self._num_opens = self._num_passed = self._num_given = 0
        self._has_warned = False

    def record(self, file: int, number: int, window: int, count: int) -> Any:  # noqa: ANN401
        """Return record `number` of a file that has `count` of them."""
        key = file, number // window
        opened = self._opened.pop(key, None)
        if opened is None:
            opened = self._nearest(key)
            self._read(opened, file, key[1] * window, min(window, count - key[1] * window), count)
        opened.num_left -= 1
        self._num_given += 1
        if opened.num_left > 0 or opened.place < count:
            self._opened[key] = opened
        return opened.records[number % window]

    def _nearest(self, key: tuple[int, int]) -> _KeptFile:
        """Take out the open file that comes to a window first; or open it."""
        before = [kept for kept in self._opened if kept[0] == key[0] and kept[1] < key[1]]
        if before:
            return self._opened.pop(max(before))
        if len(self._opened) >= self._max_open:
            self._opened.pop(next(iter(self._opened))).reader.close()
        state = self._states[key[0]]
        if _state_of(state.path) != state:
            raise StoreError(
                f"{state.path} was changed since its records were counted. Make a new FileStream."
            )
        self._num_opens += 1
        self._warn_if_slow()
        return _KeptFile(_opened(state.path, self._format))

    def _read(self, opened: _KeptFile, file: int, first: int, size: int, count: int) -> None:
        opened.records = []
        self._num_passed += first + size - opened.place
        reader = opened.reader
        opened.place += reader.skip(first - opened.place)
        opened.records = reader.take(size)
        opened.num_left = len(opened.records)
        opened.place += len(opened.records)
        more = 0
        if opened.place == count:
            more = reader.skip(1)
            reader.close()
        if opened.place != first + size or more:
            found = f"more than {count}" if more else str(opened.place)
            raise StoreError(
                f"{self._states[file].path} has {found} records, and {count} were counted. Count "
                "anew: give no counts, or delete the file that keeps them."
            )

    def _warn_if_slow(self) -> None:
        is_slow = self._num_passed > _MOST_IN_VAIN * self._num_given
        if is_slow and self._num_opens > 4 * self._max_open and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"files were opened {self._num_opens} times, and {self._num_passed:,} records were "
                f"read to give {self._num_given:,}: a FileStream is read from front to back. Give "
                "the loader batch_sampler=penstock.sampling.LaneBatchSampler(stream, batch_size). "
                f"If it has one, give the stream max_open=, above the lanes ({self._max_open} now)."
            )


def _opened(path: str, file_format: FileFormat) -> RecordReader:
    try:
        return file_format.open(path)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror or error}.") from error


def _state_of(path: str) -> FileState:
    try:
        return FileState.of(path)
    except OSError as error:
        raise StoreError(
            f"cannot read {path}: {error.strerror}. Give the paths of files, such as "
            "sorted(glob.glob('data/*.jsonl.gz'))."
        ) from error


def _count(states: list[FileState], file_format: FileFormat) -> list[int]:
    """Return the number of records of each file."""

    def of_file(state: FileState) -> int:
        reader = _opened(state.path, file_format)
        try:
            return reader.skip(_ALL)
        finally:
            reader.close()

    with ThreadPoolExecutor(math.ceil(cores_by_affinity())) as pool:
        return list(pool.map(of_file, states))


def _kept_counts(path: Path, states: list[FileState], file_format: FileFormat) -> NDArray[np.int64]:
    """Return the counts that a file keeps; count what is new, and keep it there as well."""
    folder = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(folder) or os.path.isdir(path):
        raise ConfigError(f"counts should be the path of a file in a folder, but got {path}.")
    known: dict[tuple[str, int, int], int] = {}
    if path.exists():
        try:
            kept = json.loads(path.read_text("utf-8"))
            if kept["version"] != _VERSION:
                raise ValueError(f"version {kept['version']!r} where {_VERSION} is read")
            if kept["parse"] == file_format.name:
                known = {(str(n), int(s), int(t)): int(c) for n, s, t, c in kept["files"]}
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{path} is not a file of counts ({type(error).__name__}: {error}). Delete it, or "
                "name another one."
            ) from error
    keys = [(os.path.relpath(s.path, folder), s.size_bytes, s.time_ns) for s in states]
    new = [state for state, key in zip(states, keys, strict=True) if key not in known]
    if new:
        found = iter(_count(new, file_format))
        known |= {key: next(found) for key in keys if key not in known}
        rows = [[*key, count] for key, count in known.items()]
        write_whole(
            path, json.dumps({"version": _VERSION, "parse": file_format.name, "files": rows})
        )
    return np.array([known[key] for key in keys], np.int64)
