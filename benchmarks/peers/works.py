# SPDX-License-Identifier: Apache-2.0
"""The works that the peers do: their sizes, their data, and the checks of what comes out.

    .peers/data/photos       1,778 JPEGs: clothes and blood cells, each in a class folder of its own
    .peers/data/corrupt      the same, and one file that is no JPEG after its first 20 bytes
    .peers/data/colours.npy  the mean colour of each photo
    .peers/data/smoke/...    the same of 70 drawn photos, to see that all works
    .peers/data/packed/NAME  what a contender has packed

A photo's label is its number, as it is alone in its class: so each can be told from each other
after its way through a loader, which gives nothing but an image and a label.

This module needs numpy alone: it is imported in the environment of every peer, and in its workers.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import shutil
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt

__all__ = [
    "BATCH_SHAPE",
    "CROP_PX",
    "MEAN",
    "STD",
    "WORKS",
    "Size",
    "big_batch",
    "class_names",
    "labelled_files",
    "number_in",
    "path_of",
    "tiny_rows",
]

WORKS: Final = (
    *("photos", "pack", "packed", "tiny", "transport", "first", "paths"),
    *("resume-save", "resume-restore", "killed", "corrupt"),
)

CROP_PX: Final = 224
MEAN: Final = (0.485, 0.456, 0.406)
STD: Final = (0.229, 0.224, 0.225)
NUM_COLUMNS: Final = 32
BATCH_SHAPE: Final = (64, 3, CROP_PX, CROP_PX)
_NUMBERS_PER_PAGE: Final = 1024
_BROKEN_CLASS: Final = "broken"  # the last by name: the other photos keep their labels
_LAYOUT: Final = "2: a class folder per photo"
_EVERY: Final = 16  # rows and columns: 196 numbers of a channel tell its mean well enough
_LEAST_LIKENESS: Final = 0.75
_LEAST_CHANGE: Final = 0.05
_HERE: Final = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Size:
    """How much is loaded.

    Attributes:
        batch_size: Samples per batch; of transport, whose batches are whole samples, 1.
        num_samples: Rows, batches (transport) or paths; 0 where the photos are counted.
        num_workers: Processes or threads that load.
        num_reads: Samples of `paths` that are read, or batches after which `resume` stops.
        least_s: Seconds that the timed epochs take together at the least.
    """

    batch_size: int
    num_samples: int = 0
    num_workers: int = 2
    num_reads: int = 0
    least_s: float = 3.0


FULL: Final[Mapping[str, Size]] = {
    **dict.fromkeys(("photos", "pack", "packed", "first", "killed", "corrupt"), Size(64)),
    "tiny": Size(1024, 250_000),
    "transport": Size(1, 100),
    "paths": Size(256, 5_000_000, num_workers=4, num_reads=500_000),
    **dict.fromkeys(("resume-save", "resume-restore"), Size(64, 4_000_000, num_reads=50_000)),
}
SMOKE: Final[Mapping[str, Size]] = {
    **dict.fromkeys(
        ("photos", "pack", "packed", "first", "killed", "corrupt"), Size(8, least_s=0.0)
    ),
    "tiny": Size(128, 2_000, least_s=0.0),
    "transport": Size(1, 6, least_s=0.0),
    "paths": Size(64, 50_000, num_workers=2, num_reads=5_000),
    **dict.fromkeys(("resume-save", "resume-restore"), Size(64, 8_000, num_reads=50)),
}


def size_of(work: str, *, smoke: bool) -> Size:
    """Return the size of a work."""
    return (SMOKE if smoke else FULL)[work]


class WrongDataError(ValueError):
    """A contender delivered what it should not have."""


def check(condition: object, message: str) -> None:
    """Raise `WrongDataError` if `condition` does not hold (`-O` keeps this)."""
    if not condition:
        raise WrongDataError(f"wrong data: {message}")


# ---------------------------------------------------------------- data


def tiny_rows(num_samples: int) -> npt.NDArray[np.float32]:
    """Return the rows of `tiny` and `resume`: float32 (num_samples, 32).

    Row i holds i, i + 1, ... i + 31, which float32 has exactly up to 16.7 M: every row can be told
    from every other, and a torn one from a whole one.
    """
    rows = np.arange(num_samples, dtype=np.float32)[:, None]
    return rows + np.arange(NUM_COLUMNS, dtype=np.float32)


class RowByRow:
    """A dataset of rows in memory as most are written: it gives one at a time, and no more."""

    def __init__(self, rows: Any) -> None:  # noqa: ANN401
        """Keep the rows."""
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, number: int) -> Any:  # noqa: ANN401
        """Return a row."""
        return self._rows[number]


_ready: list[npt.NDArray[np.float32]] = []
_ready_lock = threading.Lock()


def big_batch(number: int) -> npt.NDArray[np.float32]:
    """Return a ready batch of 38.5 MB, float32 (64, 3, 224, 224), stamped with its number.

    Nothing is computed: the arrays of this process are used in turn. One is free again when nobody
    refers to it or to a view of it any more, so a peer that sends it later, from another thread,
    sends the right numbers; then a further array is made, as often as is needed.
    """
    with _ready_lock:
        for index in range(len(_ready)):
            if sys.getrefcount(_ready[index]) == 2:  # the list, and the argument
                batch = _ready[index]
                break
        else:
            # It owns its memory: views of a reshaped array refer to what lies behind that one.
            batch = np.empty(BATCH_SHAPE, np.float32)
            batch.reshape(-1)[:] = np.arange(math.prod(BATCH_SHAPE), dtype=np.float32)
            _ready.append(batch)
        batch[0, 0, 0, 0] = number
        return batch


def path_of(index: int) -> str:
    """Return path `index` of the work `paths`: 58 characters, as an image folder has them."""
    return f"datasets/photos/train/class_{index % 1000:04d}/original/img_{index:08d}.jpg"


def number_in(path: str) -> int:
    """Return the number that `path_of` was given."""
    return int(path[-12:-4])


def class_names(photos: Path) -> list[str]:
    """Return the class folders by name; a photo's label is its folder's place among them."""
    return sorted(entry.name for entry in os.scandir(photos) if entry.is_dir())


def labelled_files(photos: Path) -> list[tuple[str, int]]:
    """Return each photo's path and label, by class and name."""
    return [
        (entry.path, label)
        for label, name in enumerate(class_names(photos))
        for entry in sorted(os.scandir(photos / name), key=lambda entry: entry.name)
    ]


def slug(name: str) -> str:
    """Return a contender's name as the name of a folder."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def prepare(data: Path, *, smoke: bool) -> None:
    """Make the photos below `data`, if they are not there in the layout of this version.

    Raises:
        FileNotFoundError: There are no photos to copy; those of `smoke` are drawn.
    """
    data.mkdir(parents=True, exist_ok=True)
    with open(data / "layout.txt", "a+", encoding="utf-8") as layout:
        fcntl.flock(layout, fcntl.LOCK_EX)  # who comes second waits, and finds them
        layout.seek(0)
        if layout.read() == _LAYOUT:
            return
        _make(data, smoke=smoke)
        layout.truncate(0)
        layout.write(_LAYOUT)


def _make(data: Path, *, smoke: bool) -> None:
    half = data / f".half-{os.getpid()}"
    names = ("photos", "corrupt", "colours.npy")
    half.mkdir()
    try:
        (_draw_photos if smoke else _copy_photos)(half / "photos")
        shutil.copytree(half / "photos", half / "corrupt")
        _add_broken(half / "corrupt")
        np.save(half / "colours.npy", _colours(half / "photos"))
        for name in (*names, "packed", "resume"):  # what was packed holds the older photos
            if (data / name).is_dir():
                shutil.rmtree(data / name)
        for name in names:
            (half / name).rename(data / name)
    finally:
        shutil.rmtree(half)


def photo_facts(data: Path) -> dict[str, float]:
    """Return how many photos there are, and their size."""
    files = labelled_files(data / "photos")
    return {
        "num_photos": len(files),
        "photos_mb": sum(os.path.getsize(path) for path, _ in files) / 1e6,
    }


def _copy_photos(target: Path) -> None:
    given = os.environ.get("PENSTOCK_TEST_DATA")
    source = Path(given) if given else _HERE.parents[2] / "shared" / "data"
    clothes = sorted(
        path
        for part in ("train", "validation")
        for path in (source / "clothing" / part).glob("*/*.jp*g")
    )
    blood = sorted((source / "bccd" / "JPEGImages").glob("*.jp*g"))
    if not clothes or not blood:
        raise FileNotFoundError(
            f"the peers are compared on the photos of {source}/clothing/{{train,validation}}/CLASS "
            f"({len(clothes)} JPEGs) and {source}/bccd/JPEGImages ({len(blood)}), and need both; "
            "PENSTOCK_TEST_DATA names another place than shared/data beside the repository. "
            "--smoke needs none"
        )
    paths = [*clothes, *blood]
    for number, path in enumerate([*paths, *paths]):  # each twice, under another name
        shutil.copyfile(path, _photo_path(target, number))


def _photo_path(photos: Path, number: int) -> Path:
    folder = photos / f"{number:04}"
    folder.mkdir(parents=True)
    return folder / "photo.jpg"


def _draw_photos(target: Path) -> None:
    from PIL import Image

    for number in range(70):
        random = np.random.default_rng(number)
        ramp = np.linspace(-60, 60, 50)[None, :, None]
        pixels = random.uniform(60, 195, 3) + ramp + random.uniform(-40, 40, (40, 50, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
        image.resize((500, 400)).save(_photo_path(target, number))


def _add_broken(photos: Path) -> None:
    header = Path(labelled_files(photos)[0][0]).read_bytes()[:20]  # "this is a JPEG (JFIF)"
    noise = np.random.default_rng(0).integers(0, 255, 20_000, np.uint8)  # no 255: no marker
    (photos / _BROKEN_CLASS).mkdir()
    (photos / _BROKEN_CLASS / "photo.jpg").write_bytes(header + noise.tobytes())


def _colours(photos: Path) -> npt.NDArray[np.float64]:
    """Return the mean of each channel of each photo, normalised."""
    from PIL import Image

    means = []
    for path, _ in labelled_files(photos):
        with Image.open(path) as image:
            means.append(np.asarray(image.convert("RGB")).mean((0, 1)) / 255)
    return (np.array(means) - MEAN) / STD


# ---------------------------------------------------------------- the consumer


def touch(array: npt.NDArray[Any]) -> float:
    """Read one number of every 4 KiB page of a float32 batch: all that the consumer does."""
    return float(array.reshape(-1)[::_NUMBERS_PER_PAGE].sum())


class Consumer:
    """Reads the epochs of a contender, and checks them.

    `first` looks at every number. `take`, which is timed, adds up one number per page and looks at
    the label, the row's first number or the stamp. `second` is as fast as that, so that it leaves
    no fuller queues behind than a timed epoch does, and checks what takes two epochs.
    """

    unit = "samples"

    def first(self, batches: Iterator[Any]) -> int:
        """Check a whole epoch; return the number of samples."""
        raise NotImplementedError

    def second(self, batches: Iterator[Any]) -> None:
        """Check another one against the first."""
        self.take(batches)

    def take(self, batches: Iterator[Any]) -> tuple[int, int]:
        """Read a whole epoch; return the number of samples, and of batches."""
        raise NotImplementedError


class PhotoConsumer(Consumer):
    """Of images and labels."""

    unit = "images"

    def __init__(self, photos: Path, batch_size: int) -> None:
        """Count what has to come."""
        self._colours_path = photos.with_name("colours.npy")
        self.num_photos = sum(name != _BROKEN_CLASS for name in class_names(photos))
        self._batch_size = batch_size
        self._first = np.full((self.num_photos, 3), np.nan)

    def first(self, batches: Iterator[Any]) -> int:
        def checked() -> Iterator[Any]:
            for images, labels in batches:
                check_photos(images, labels, self._batch_size)
                yield images, labels

        self._first = self._colours_of(checked())
        self._check_likeness(self._first)
        return self.num_photos

    def second(self, batches: Iterator[Any]) -> None:
        colours = self._colours_of(batches)
        self._check_likeness(colours)
        change = float(np.median(abs(colours - self._first)))
        check(change > _LEAST_CHANGE, f"a photo changes by {change:.3f} from epoch to epoch only")

    def take(self, batches: Iterator[Any]) -> tuple[int, int]:
        seen = []
        for images, labels in batches:
            check(images.shape == (len(labels), 3, CROP_PX, CROP_PX), f"shape {images.shape}")
            touch(images)
            seen.append(labels.copy())
        self._check_each_once(seen)
        return self.num_photos, len(seen)

    def _colours_of(self, batches: Iterator[Any]) -> npt.NDArray[np.float64]:
        """Return the mean of each channel of each photo of an epoch, of some of its pixels."""
        seen: list[npt.NDArray[Any]] = []
        means: list[npt.NDArray[np.float64]] = []

        def noted() -> Iterator[Any]:
            for images, labels in batches:
                some = images[:, :, _EVERY // 2 :: _EVERY, _EVERY // 2 :: _EVERY]
                means.append(some.mean((2, 3), np.float64))
                seen.append(labels.copy())
                yield images, labels

        self.take(noted())
        colours = np.empty((self.num_photos, 3))
        colours[np.concatenate(seen)] = np.concatenate(means)
        return colours

    def _check_each_once(self, seen: list[npt.NDArray[Any]]) -> None:
        labels = np.concatenate(seen) if seen else np.empty(0, np.int64)
        if not np.array_equal(np.sort(labels), np.arange(self.num_photos)):
            counts = np.bincount(labels, minlength=self.num_photos)
            raise WrongDataError(
                f"wrong data: {len(labels)} photos came of {self.num_photos}; "
                f"{(counts == 0).sum()} are missing, {(counts > 1).sum()} came more than once"
            )
        check((np.diff(labels) < 0).mean() > 0.3, "the photos are not shuffled")

    def _check_likeness(self, colours: npt.NDArray[np.float64]) -> None:
        """Check that a label has its own photo: by colour, which crops and flips change little."""
        right = np.load(self._colours_path)
        for channel in range(3):
            likeness = float(np.corrcoef(colours[:, channel], right[:, channel])[0, 1])
            check(
                likeness > _LEAST_LIKENESS,
                f"channel {channel} of the images correlates with that of their photos by "
                f"{likeness:.2f}, and not by more than {_LEAST_LIKENESS}",
            )


def check_photos(images: Any, labels: Any, batch_size: int) -> None:  # noqa: ANN401
    """Check a batch of photos in every number."""
    for name, array in (("images", images), ("labels", labels)):
        check(isinstance(array, np.ndarray), f"the {name} are {type(array).__name__}, no array")
    check(np.issubdtype(labels.dtype, np.integer), f"the labels' dtype is {labels.dtype}")
    check(labels.ndim == 1, f"the labels' shape is {labels.shape}")
    check(0 < len(labels) <= batch_size, f"{len(labels)} labels in a batch of {batch_size}")
    check(images.shape == (len(labels), 3, CROP_PX, CROP_PX), f"the shape is {images.shape}")
    check(images.dtype == np.float32, f"the images' dtype is {images.dtype}")
    check(images.flags.c_contiguous, "the images are not in C order")
    for channel, (mean, std) in enumerate(zip(MEAN, STD, strict=True)):
        low, high = float(images[:, channel].min()), float(images[:, channel].max())
        # A hundredth of room: a decoder may round, a resampling filter may not go over the edge.
        fits = (0 - mean) / std - 0.01 <= low < high <= (1 - mean) / std + 0.01
        check(fits, f"the numbers of channel {channel} go from {low} to {high}")


class RowConsumer(Consumer):
    """Of the rows of `tiny_rows`."""

    unit = "rows"

    def __init__(self, num_samples: int, batch_size: int) -> None:
        """Every row has to come."""
        self._num_samples = num_samples
        self._batch_size = batch_size

    def first(self, batches: Iterator[Any]) -> int:
        seen = []
        for rows in batches:
            check_rows(rows, self._batch_size)
            seen.append(rows[:, 0].copy())
        return self._check_each_once(seen)

    def take(self, batches: Iterator[Any]) -> tuple[int, int]:
        seen = []
        for rows in batches:
            touch(rows)
            seen.append(rows[:, 0].copy())
        return self._check_each_once(seen), len(seen)

    def _check_each_once(self, seen: list[npt.NDArray[np.float32]]) -> int:
        numbers = np.concatenate(seen) if seen else np.empty(0, np.float32)
        check(len(numbers) == self._num_samples, f"{len(numbers)} rows of {self._num_samples}")
        order = numbers.astype(np.int64)
        counts = np.bincount(order, minlength=self._num_samples)
        check((counts == 1).all(), f"row {counts.argmax()} came {counts.max()} times")
        check((np.diff(order) < 0).mean() > 0.3, "the rows are not shuffled")
        return len(numbers)


def check_rows(rows: Any, batch_size: int) -> None:  # noqa: ANN401
    """Check a batch of rows in every number."""
    check(isinstance(rows, np.ndarray), f"the rows are {type(rows).__name__}, no array")
    check(rows.dtype == np.float32, f"the rows' dtype is {rows.dtype}")
    check(rows.shape[1:] == (NUM_COLUMNS,), f"the shape is {rows.shape}")
    check(0 < len(rows) <= batch_size, f"{len(rows)} rows in a batch of {batch_size}")
    whole = rows == rows[:, :1] + np.arange(NUM_COLUMNS, dtype=np.float32)
    check(whole.all(), "a row is torn: its numbers do not follow one another")


class BigBatchConsumer(Consumer):
    """Of the batches of `big_batch`."""

    unit = "batches"

    def __init__(self, num_batches: int) -> None:
        """Every batch has to come, in any order."""
        self._num_batches = num_batches

    def first(self, batches: Iterator[Any]) -> int:
        right = np.arange(math.prod(BATCH_SHAPE), dtype=np.float32)
        stamps = []
        for batch in batches:
            check(isinstance(batch, np.ndarray), f"a batch is {type(batch).__name__}, no array")
            check(batch.dtype == np.float32, f"the dtype is {batch.dtype}")
            check(batch.shape == BATCH_SHAPE, f"the shape is {batch.shape}")
            check(batch.flags.c_contiguous, "the batch is not in C order")
            check((batch.reshape(-1)[1:] == right[1:]).all(), "a batch has other numbers")
            stamps.append(int(batch[0, 0, 0, 0]))
        return self._check_stamps(stamps)

    def take(self, batches: Iterator[Any]) -> tuple[int, int]:
        stamps = []
        for batch in batches:
            touch(batch)
            stamps.append(int(batch[0, 0, 0, 0]))
        return self._check_stamps(stamps), len(stamps)

    def _check_stamps(self, stamps: list[int]) -> int:
        check(
            sorted(stamps) == list(range(self._num_batches)),
            f"the stamps are {sorted(stamps)}, and not each of 0 to {self._num_batches - 1} once",
        )
        return len(stamps)


def check_numbers(numbers: npt.NDArray[np.int64], num_samples: int) -> None:
    """Check what was read of the work `paths`: each at most once, and shuffled."""
    check(numbers.min() >= 0 and numbers.max() < num_samples, "a path of another list")
    check(len(np.unique(numbers)) == len(numbers), "a path came twice")
    check((np.diff(numbers) < 0).mean() > 0.3, "the paths are not shuffled")
