# SPDX-License-Identifier: Apache-2.0
"""How fast do image files come out of a store, and what does packing cost?

Question
    525 photos (15 MB), shuffled, in batches of 64, as the bytes of their files: images per second
    out of a folder, an LMDB file and MongoDB, against what people write by hand. And: seconds and
    bytes of packing the folder.

Method
    raw lmdb           `transaction.get(key)` for each image in one open transaction: a bare loop
                       without labels or a loader. The limit. Each value is dropped at once, or kept
                       until 64 are there, as a batch has to.
    pickle recipe      the common hand-made LMDB dataset: `pickle.loads(transaction.get(key))` gives
                       `(bytes, label)`; under torch's DataLoader.
    penstock, lmdb     `LMDBDataset(path, decode=None)` under `penstock.torch.DataLoader`.
    folder             torch: a dataset that opens and reads the file. penstock: `ImageFolder`.
    find_one           a dataset with a Mongo client for each process, and one `find_one` a sample;
                       under torch's DataLoader.
    penstock, mongodb  `MongoDataset(uri, decode=None)`.
    parquet            2,100 images of 50 kB, noise, in 20 row groups, as `StoreDataset("arrow:...",
                       decode=None)` that keeps nine of them decoded: in order; shuffled; and by row
                       groups, that is `ShardSampler(dataset)`, which has seven of them open.

    Every loader has the same list of indices: shuffled epochs in a row. Without workers and with 2.
    Workers run, and files are in the page cache, before the clock starts: one pass over all images,
    in which each batch is checked against the files. A real mongod serves both MongoDB contenders,
    in the same way, with authentication, on loopback. The MongoDB collection and the LMDB files are
    made in the contender's process, untimed, except by "pack" contenders, whose figure is images/s
    and whose further figures are seconds and MB.

Left out
    Decoding: it takes a hundred times as long as reading from LMDB, and has a benchmark of its own.
    A cold disk. Data larger than memory.

Machine
    2 cores of an Intel Xeon (a virtual machine), 23.5 GiB, Linux 6.18, Python 3.11.7, torch 2.13.0,
    numpy 2.4.6, lmdb 3.0.0, pymongo 4.20.0, MongoDB 6.0.5

Command
    python benchmarks/stores.py --save

Result
    2026-11-21, 3 rounds, medians, images/s (CPU us per batch of 64):

                                 0 workers            2 workers
        raw lmdb, bare loop      650,000  (99)
        raw lmdb, lists of 64    373,000 (172)
        pickle recipe, torch     185,000 (346)        10,600  (6,930)
        lmdb, penstock           172,000 (373)        55,900  (2,020)     5.3 x the recipe
        folder, torch             69,700 (920)         8,800  (8,250)
        folder, penstock          69,600 (920)        41,600  (2,800)     4.7 x
        mongodb find_one, torch    1,910 (31,700)      2,960 (37,900)
        mongodb, penstock         11,500 (6,430)      15,700  (7,360)     6.0 x and 5.3 x

    Without workers 0.8 of the bare loop was the target, and 0.26 is reached. The photos lie in the
    cache of the processor, so nearly all is the copy: the bare loop drops each value at once, and
    the next one takes the same warm memory; a batch has to keep 64, which alone brings the loop
    down to 0.57. Of our 360 us a batch, 200 are that copy, 50 the lookup, 35 sorting, checking and
    putting in order, 75 the loader. With workers the bytes cross to the main process in the arena;
    that is where the recipe loses.

    Packing 525 photos with two workers: 0.33 s, 16.2 MB (of 15.0 MB), 1,610 images/s, most of it
    the start of the workers and two fsyncs; by hand, in one process and with one fsync, 0.10 s and
    16.2 MB. Into MongoDB 0.40 s, 15.5 MB on disk.

    Parquet, 2026-11-26, 3 rounds, on a machine that ran tests as well, images/s (CPU us per batch):

                                 0 workers            2 workers
        in order                  18,200  (2,980)      4,200 (14,400)
        by row groups             18,000  (3,150)      4,400 (11,800)     0.99 and 1.06 x
        shuffled                   1,300 (31,400)      1,600 (42,300)

    Before, with four groups kept: by row groups 2,600 and 2,800, shuffled 1,000 and 1,050, of
    2,000 such images in groups of 100.

What it does not show
    How a store compares with another on a network, or under many ranks. MongoDB and the
    loader share two cores here.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_BATCH_SIZE = 64
_PARQUET_BYTES = 50_000  # of an image
_ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is read.

    Attributes:
        num_images: At most this many of the folder's.
        num_passes: Over all images, for the contenders that read from memory.
        num_slow_passes: For those that ask a server or open files.
    """

    num_images: int
    num_passes: int
    num_slow_passes: int


@contextlib.contextmanager
def photos(size: Size) -> Iterator[Path]:
    """Return a folder with a subfolder for each class, of links to real photos or of drawn ones."""
    data = Path(os.environ.get("PENSTOCK_TEST_DATA") or _ROOT.parent / "shared" / "data")
    found = sorted((data / "clothing").rglob("*.jpg"))[: size.num_images]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "photos"
        for number, path in enumerate(found or range(size.num_images)):
            name = path.parent.name if isinstance(path, Path) else f"class {number % 10}"
            (folder / name).mkdir(parents=True, exist_ok=True)
            target = folder / name / f"{number:05}.jpg"
            if isinstance(path, Path):
                target.write_bytes(path.read_bytes())
            else:
                _draw(target, number)
        yield folder


def _draw(path: Path, number: int) -> None:
    from PIL import Image

    noise = np.random.default_rng(number).integers(0, 256, (40, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((320, 320)).save(file, "JPEG", quality=90)
    path.write_bytes(file.getvalue())


def files_of(folder: Path) -> list[tuple[bytes, int]]:
    """Return every file's bytes and class, in the order of the stores."""
    classes = sorted(path.name for path in folder.iterdir())
    paths = sorted(folder.rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))
    return [(path.read_bytes(), classes.index(path.parent.name)) for path in paths]


def orders(num_images: int, num_passes: int) -> list[int]:
    """Return shuffled passes over all images, one after the other."""
    generator = np.random.default_rng(0)
    passes = [generator.permutation(num_images) for _ in range(num_passes)]
    return [int(index) for order in passes for index in order]


class Recipe:
    """What a search for "lmdb dataset pytorch" finds: pickled pairs, opened lazily."""

    def __init__(self, path: str, num_images: int) -> None:
        """Keep where it is."""
        self._path = path
        self._num_images = num_images
        self._env: Any = None

    def __len__(self) -> int:
        """Return the number of images."""
        return self._num_images

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return one pair."""
        if self._env is None:
            import lmdb

            self._env = lmdb.open(
                self._path, subdir=False, readonly=True, lock=False, readahead=False
            )
        with self._env.begin(write=False) as transaction:
            data = transaction.get(str(index).encode("ascii"))
        pair: tuple[bytes, int] = pickle.loads(data)
        return pair


def write_recipe(path: str, samples: Sequence[tuple[bytes, int]]) -> None:
    """Write the file that `Recipe` reads."""
    import lmdb

    with (
        lmdb.open(path, subdir=False, map_size=1 << 32) as env,
        env.begin(write=True) as transaction,
    ):
        for number, sample in enumerate(samples):
            transaction.put(str(number).encode("ascii"), pickle.dumps(sample))


class Files:
    """Opens and reads a file for each sample."""

    def __init__(self, folder: Path) -> None:
        """List the files."""
        classes = sorted(path.name for path in folder.iterdir())
        paths = sorted(folder.rglob("*.jpg"), key=lambda path: (path.parent.name, path.name))
        self._samples = [(str(path), classes.index(path.parent.name)) for path in paths]

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return one pair."""
        path, label = self._samples[index]
        with open(path, "rb") as file:
            return file.read(), label


class FindOne:
    """One query per sample, by the id that the position is."""

    def __init__(self, uri: str, num_images: int) -> None:
        """Keep where it is."""
        self._uri = uri
        self._num_images = num_images
        self._collection: Any = None

    def __len__(self) -> int:
        """Return the number of images."""
        return self._num_images

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return one pair."""
        if self._collection is None:
            import pymongo

            self._collection = pymongo.MongoClient(self._uri)["bench"]["plain"]
        document = self._collection.find_one({"_id": index})
        return document["image"], document["label"]


def read(
    size: Size, make: Callable[[Path, Path], Any], library: str, num_workers: int, *, slow: bool
) -> Reading:
    """Read shuffled images through a loader, after a checked pass over all of them."""
    with photos(size) as folder, contextlib.ExitStack() as stack:
        expected = files_of(folder)
        dataset = make(folder, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        num_images = len(expected)
        sampler: list[int] = list(range(num_images))
        loader = data_loader(library)(  # type: ignore[arg-type]
            dataset,
            batch_size=_BATCH_SIZE,
            sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
        )
        got = [
            pair for files, labels in loader for pair in zip(files, labels.tolist(), strict=True)
        ]
        check(got == expected, "the images are not those of the folder")
        sampler[:] = orders(num_images, size.num_slow_passes if slow else size.num_passes)
        num_bytes = num_batches = 0
        with Meter() as meter:
            for files, _ in loader:
                num_batches += 1
                num_bytes += sum(map(len, files))
        total = sum(len(data) for data, _ in expected)
        check(num_bytes * num_images == total * len(sampler), "some bytes are missing")
        del loader
        return Reading.of(meter, len(sampler) / meter.wall_s, num_batches)


def raw_lmdb(size: Size, *, keep: bool) -> Reading:
    """Get every image's value from LMDB in a bare loop, and keep those of a batch if asked to."""
    import lmdb

    with photos(size) as folder, tempfile.TemporaryDirectory() as place:
        path = f"{place}/raw.lmdb"
        expected = files_of(folder)
        with (
            lmdb.open(path, subdir=False, map_size=1 << 32) as env,
            env.begin(write=True) as transaction,
        ):
            for number, (data, _) in enumerate(expected):
                transaction.put(number.to_bytes(8, "big"), data)
        keys = [number.to_bytes(8, "big") for number in orders(len(expected), size.num_passes)]
        options = {"readonly": True, "lock": False, "readahead": False}
        with lmdb.open(path, subdir=False, **options) as env, env.begin() as transaction:
            for number, (data, _) in enumerate(expected):
                check(transaction.get(number.to_bytes(8, "big")) == data, "another image")
            num_bytes = 0
            get = transaction.get
            with Meter() as meter:
                if keep:
                    for start in range(0, len(keys), _BATCH_SIZE):
                        batch = [get(key) for key in keys[start : start + _BATCH_SIZE]]
                        num_bytes += sum(map(len, batch))
                else:
                    for key in keys:
                        num_bytes += len(get(key))
        return Reading.of(meter, len(keys) / meter.wall_s, -(-len(keys) // _BATCH_SIZE))


def _recipe(folder: Path, place: Path) -> Recipe:
    samples = files_of(folder)
    write_recipe(f"{place}/recipe.lmdb", samples)
    return Recipe(f"{place}/recipe.lmdb", len(samples))


def _lmdb(folder: Path, place: Path) -> Any:  # noqa: ANN401
    from penstock.stores import LMDBDataset, pack

    pack(folder, f"lmdb:{place}/photos.lmdb")
    return LMDBDataset(place / "photos.lmdb", decode=None)


def _files(folder: Path, place: Path) -> Files:
    return Files(folder)


def _image_folder(folder: Path, place: Path) -> Any:  # noqa: ANN401
    from penstock.vision import ImageFolder

    return ImageFolder(folder, decode=None)


def from_parquet(size: Size, order: str, num_workers: int) -> Reading:
    """Read images of noise from row groups, of which not all are kept, after a checked pass."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from penstock.sampling import RandomSampler, SequentialSampler, ShardSampler
    from penstock.stores import StoreDataset, open_store

    num_images = 4 * size.num_images
    rng = np.random.default_rng(0)
    images = [rng.bytes(_PARQUET_BYTES) for _ in range(num_images)]
    with tempfile.TemporaryDirectory() as place:
        path = f"{place}/noise.parquet"
        rows = num_images // 20
        table = pa.table({"image": images, "label": range(num_images)})
        pq.write_table(table, path, row_group_size=rows)
        del table
        store = open_store(path, max_kept_size=int(9.5 * rows * _PARQUET_BYTES))
        dataset = StoreDataset(store, decode=None)
        samplers: dict[str, Callable[[], Any]] = {
            "in order": partial(SequentialSampler, dataset),
            "shuffled": partial(RandomSampler, dataset),
            "by row groups": partial(
                ShardSampler, dataset, num_nodes=1, node=0, ranks_per_node=1, local_rank=0
            ),
        }
        loader = data_loader("penstock")(
            dataset,
            batch_size=_BATCH_SIZE,
            sampler=samplers[order](),
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            seed=0,
        )
        seen: list[int] = []
        for files, labels in loader:
            check(all(file == images[k] for file, k in zip(files, labels, strict=True)), "images")
            seen += labels.tolist()
        check(sorted(seen) == list(range(num_images)), "not each image once")
        num_read = num_batches = 0
        with Meter() as meter:
            for _ in range(-(-size.num_slow_passes // 8)):
                for files, _ in loader:
                    num_batches += 1
                    num_read += len(files)
        del loader
        store.close()
        return Reading.of(meter, num_read / meter.wall_s, num_batches)


@contextlib.contextmanager
def server() -> Iterator[Any]:
    """Return a running MongoDB server with a user."""
    sys.path.insert(0, str(_ROOT))
    from tests.stores.mongod import Mongod, find_mongod

    with tempfile.TemporaryDirectory() as place:
        mongod = Mongod(find_mongod(Path(place)), Path(place))
        try:
            mongod.start()
            mongod.create_user()
            yield mongod
        finally:
            mongod.stop()


def from_mongodb(size: Size, library: Literal["torch", "penstock"], num_workers: int) -> Reading:
    """Read from a server: one query a sample under torch's loader, or ours."""
    with server() as mongod:

        def make(folder: Path, place: Path) -> Any:  # noqa: ANN401
            if library == "penstock":
                from penstock.stores import MongoDataset, pack

                pack(folder, mongod.uri("bench.packed"))
                return MongoDataset(mongod.uri("bench.packed"), decode=None)
            with mongod.client() as client:
                client["bench"]["plain"].insert_many(
                    {"_id": number, "image": data, "label": label}
                    for number, (data, label) in enumerate(files_of(folder))
                )
            return FindOne(mongod.uri(), len(files_of(folder)))

        return read(size, make, library, num_workers, slow=True)


def packed(size: Size, kind: Literal["lmdb", "mongodb", "recipe"]) -> Reading:
    """Pack the folder, with 2 workers."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(photos(size))
        place = stack.enter_context(tempfile.TemporaryDirectory())
        mongod = stack.enter_context(server()) if kind == "mongodb" else None
        num_images = sum(path.stat().st_size > 0 for path in folder.rglob("*.jpg"))
        total = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        with Meter() as meter:
            if kind == "recipe":
                write_recipe(f"{place}/recipe.lmdb", files_of(folder))
            else:
                from penstock.stores import pack

                address = f"lmdb:{place}/a.lmdb" if mongod is None else mongod.uri("bench.packed")
                report = pack(folder, address, num_workers=2)
                check(report.num_records == num_images, "images are missing")
        num_bytes = sum(path.stat().st_size for path in Path(place).iterdir())
        if mongod is not None:
            with mongod.client() as client:
                client.admin.command("fsync")  # sizes on disk are told as of the last checkpoint
                num_bytes = client["bench"].command("collStats", "packed")["storageSize"]
        more = {"size_MB": num_bytes / 1e6, "source_MB": total / 1e6}
        return Reading.of(meter, num_images / meter.wall_s, -(-num_images // _BATCH_SIZE), more)


_PACKS: dict[Literal["recipe", "lmdb", "mongodb"], str] = {
    "recipe": "pack by hand into lmdb",
    "lmdb": "penstock pack into lmdb",
    "mongodb": "penstock pack into mongodb",
}


def _contenders() -> dict[str, Callable[[Size], Reading]]:
    found: dict[str, Callable[[Size], Reading]] = {
        "raw lmdb, bare loop": partial(raw_lmdb, keep=False),
        "raw lmdb, lists of 64": partial(raw_lmdb, keep=True),
    }
    for workers in (0, 2):
        kinds: list[tuple[str, Callable[[Path, Path], Any], str, bool]] = [
            ("torch, pickle recipe", _recipe, "torch", False),
            ("penstock, lmdb", _lmdb, "penstock", False),
            ("torch, folder", _files, "torch", True),
            ("penstock, folder", _image_folder, "penstock", True),
        ]
        for name, make, library, slow in kinds:
            found[f"{name}, {workers} workers"] = partial(
                read, make=make, library=library, num_workers=workers, slow=slow
            )
        found[f"torch, mongodb find_one, {workers} workers"] = partial(
            from_mongodb, library="torch", num_workers=workers
        )
        found[f"penstock, mongodb, {workers} workers"] = partial(
            from_mongodb, library="penstock", num_workers=workers
        )
        for order in ("in order", "shuffled", "by row groups"):
            found[f"penstock, parquet {order}, {workers} workers"] = partial(
                from_parquet, order=order, num_workers=workers
            )
    for kind, name in _PACKS.items():
        found[name] = partial(packed, kind=kind)
    return found


BENCHMARK = Benchmark(
    file=__file__,
    unit="images/s",
    better="higher",
    contenders=_contenders(),
    full=Size(num_images=525, num_passes=200, num_slow_passes=20),
    smoke=Size(num_images=20, num_passes=2, num_slow_passes=1),
    targets=[
        Target("penstock, lmdb, 0 workers", "raw lmdb, bare loop", at_least=0.8),
        Target("penstock, lmdb, 0 workers", "raw lmdb, lists of 64"),
        Target("penstock, lmdb, 2 workers", "torch, pickle recipe, 2 workers", at_least=2),
        Target("penstock, lmdb, 0 workers", "torch, pickle recipe, 0 workers"),
        Target("penstock, mongodb, 0 workers", "torch, mongodb find_one, 0 workers", at_least=5),
        Target("penstock, mongodb, 2 workers", "torch, mongodb find_one, 2 workers", at_least=5),
        Target("penstock, folder, 2 workers", "torch, folder, 2 workers"),
        Target(_PACKS["lmdb"], _PACKS["recipe"]),
        *(
            Target(
                f"penstock, parquet by row groups, {workers} workers",
                f"penstock, parquet {other}, {workers} workers",
                at_least=at_least,
            )
            for workers in (0, 2)
            for other, at_least in (("in order", 1 / 3), ("shuffled", None))
        ),
    ],
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
