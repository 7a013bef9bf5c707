# SPDX-License-Identifier: Apache-2.0
"""The contenders of remote.py: how each packs the samples, and how it reads them from far away.

remote.py runs this file with the interpreter that has a contender's packages, once to pack and
once to load, so that it may be another environment than its own:

    python benchmarks/_remote_loaders.py JOB    # the fields of a `Job`, as JSON

A sample is bytes: its number, noise, and its number again. A batch is the bytes of its samples in
one array, and their lengths. All contenders make it by the same function, in the worker.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import urllib.request
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

__all__ = ["MARK", "WAYS", "Job", "sizes_of"]

MARK: Final = "EPOCH "
_NUMBER: Final = np.dtype("<i8")
_LEAST_BYTES, _MOST_BYTES = 60_000, 140_000
# Of all formats that are read a shard at a time. Their defaults, 64 MB and so, would make three of
# these data, and no cache of a third of them could hold one and read another.
_NUM_SHARDS: Final = 50
_BUFFERS: Final = 4  # an order that comes from a buffer has a fourth of the data in it


@dataclass(frozen=True, slots=True)
class Job:
    """What to do.

    Attributes:
        way: Which contender, a key of `WAYS`.
        data: Where the formats lie: BUCKET/FORMAT below it is an object's address.
        endpoint: The server's address; "" to pack.
        num_samples: How many there are.
        num_epochs: How often each is read.
        batch_size: Samples of a batch.
        num_workers: Processes.
        cache: Folder that a contender may keep data in; made anew for each run.
        cache_bytes: How many bytes it may keep there.
        eviction: Of Penstock's cache.
    """

    way: str
    data: str
    endpoint: str
    num_samples: int
    num_epochs: int
    batch_size: int
    num_workers: int
    cache: str
    cache_bytes: int
    eviction: str

    def folder(self, kind: str) -> Path:
        """Return where a format lies."""
        return Path(self.data) / "bucket" / kind


# ---------------------------------------------------------------- samples and batches


def sizes_of(num_samples: int) -> NDArray[np.int64]:
    """Return the bytes of each sample."""
    return np.random.default_rng(0).integers(_LEAST_BYTES, _MOST_BYTES + 1, num_samples)


def payload(number: int, size: int) -> bytes:
    """Return a sample."""
    mark = np.array(number, _NUMBER).tobytes()
    return mark + np.random.default_rng(number).bytes(size - 16) + mark


class Payloads:
    """All samples, in an order that is mixed once, as one packs for readers of shards."""

    def __init__(self, num_samples: int) -> None:
        """Draw the sizes."""
        self._sizes = sizes_of(num_samples).tolist()
        self.numbers = random.Random(0).sample(range(num_samples), num_samples)

    @property
    def samples_per_shard(self) -> int:
        """Where a format has shards."""
        return max(1, len(self) // _NUM_SHARDS)

    @property
    def shard_bytes(self) -> int:
        """About as many bytes."""
        return self.samples_per_shard * (_LEAST_BYTES + _MOST_BYTES) // 2

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.numbers)

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        """Return bytes and number."""
        number = self.numbers[index]
        return payload(number, self._sizes[number]), number


def joined(samples: Sequence[Any]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return the bytes of samples one after the other, and their lengths."""
    parts = [np.frombuffer(_bytes_of(sample), np.uint8) for sample in samples]
    return np.concatenate(parts), np.array([len(part) for part in parts])


def tensors(samples: Sequence[Any]) -> Any:  # noqa: ANN401
    """Return the same as tensors, which torch's loader carries in shared memory."""
    import torch

    flat, lengths = joined(samples)
    return torch.from_numpy(flat), torch.from_numpy(lengths)


def _bytes_of(sample: Any) -> bytes:  # noqa: ANN401
    """Return the bytes in what a library makes of a sample."""
    if isinstance(sample, dict):
        sample = sample.get("data", sample.get("bin"))
    elif isinstance(sample, tuple):
        sample = sample[0]
    data: bytes = sample
    return data


def numbers_in(batch: Any, sizes: NDArray[np.int64]) -> list[int]:  # noqa: ANN401
    """Return the numbers of the samples of a batch.

    Raises:
        ValueError: a sample is not as it was packed.
    """
    flat, lengths = (np.asarray(part) for part in batch)
    stops = np.cumsum(lengths)
    numbers = []
    for start, stop in zip((stops - lengths).tolist(), stops.tolist(), strict=True):
        first, last = flat[start : start + 8].tobytes(), flat[stop - 8 : stop].tobytes()
        number = int.from_bytes(first, "little")
        if first != last or number >= len(sizes) or stop - start != sizes[number]:
            raise ValueError(f"wrong data: sample {number} is not as it was packed")
        numbers.append(number)
    return numbers


# ---------------------------------------------------------------- Penstock


def _pack_shards(folder: Path, samples: Payloads) -> None:
    from penstock.stores import pack

    pack(samples, f"shards:{folder}", num_workers=0)


def _penstock(job: Job) -> Any:  # noqa: ANN401
    from penstock import Loader
    from penstock.stores import StoreDataset

    options: dict[str, Any] = {}
    if job.cache_bytes:
        options["local_cache"] = f"{job.cache}:{max(1, round(job.cache_bytes / 1e6))}MB"
        options["eviction"] = job.eviction
    dataset = StoreDataset("s3://bucket/shards", decode=None, endpoint=job.endpoint, **options)
    return Loader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        collate_fn=joined,
        persistent_workers=True,
    )


# ---------------------------------------------------------------- torch, an object for each sample


def _pack_objects(folder: Path, samples: Payloads) -> None:
    folder.mkdir(parents=True)
    for index in range(len(samples)):
        data, number = samples[index]
        (folder / f"{number:08}").write_bytes(data)


class Objects:
    """An object of the store for each sample, read by a client that is made in the worker."""

    def __init__(self, job: Job, client: Callable[[str], Callable[[str], bytes]]) -> None:
        """Connect to nothing yet."""
        self._job = job
        self._client = client
        self._get: Callable[[str], bytes] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._job.num_samples

    def __getitem__(self, number: int) -> bytes:
        """Return a sample."""
        if self._get is None:
            self._get = self._client(self._job.endpoint)
        return self._get(f"objects/{number:08}")


def by_boto3(endpoint: str) -> Callable[[str], bytes]:
    """Return what reads an object with boto3."""
    import boto3

    client = boto3.client("s3", endpoint_url=endpoint)
    return lambda key: client.get_object(Bucket="bucket", Key=key)["Body"].read()


def by_obstore(endpoint: str) -> Callable[[str], bytes]:
    """Return what reads an object with obstore."""
    import obstore
    from obstore.store import from_url

    store = from_url("s3://bucket", endpoint=endpoint, client_options={"allow_http": True})
    return lambda key: bytes(obstore.get(store, key).bytes())


def _torch(job: Job, client: Callable[[str], Callable[[str], bytes]]) -> Any:  # noqa: ANN401
    return _torch_loader(job, Objects(job, client), shuffle=True)


def _torch_loader(job: Job, dataset: Any, **more: Any) -> Any:  # noqa: ANN401
    from torch.utils.data import DataLoader

    options = {"batch_size": job.batch_size, "collate_fn": tensors, **more}
    return DataLoader(dataset, num_workers=job.num_workers, persistent_workers=True, **options)


# ---------------------------------------------------------------- shards of others


def _pack_mds(folder: Path, samples: Payloads) -> None:
    from streaming import MDSWriter

    columns, limit = {"data": "bytes"}, samples.shard_bytes
    with MDSWriter(out=str(folder), columns=columns, size_limit=limit) as writer:
        for index in range(len(samples)):
            writer.write({"data": samples[index][0]})


def _with_workers(kind: Any, dataset: Any, job: Job) -> Any:  # noqa: ANN401
    """Return a peer's loader of the shape that torch's has."""
    return kind(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        collate_fn=tensors,
        persistent_workers=True,
    )


def _mosaic(job: Job) -> Any:  # noqa: ANN401
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        remote="s3://bucket/mds",
        local=job.cache,
        cache_limit=job.cache_bytes,
        batch_size=job.batch_size,
        shuffle=True,
    )
    for stream in dataset.streams:
        # Else forked workers share the connection that read the index, and mix up its answers.
        stream._downloader._s3_client = None
    return _with_workers(StreamingDataLoader, dataset, job)


def _pack_litdata(folder: Path, samples: Payloads) -> None:
    import litdata

    with tempfile.TemporaryDirectory() as scratch:
        # Otherwise it leaves folders in /tmp.
        for name in ("DATA_OPTIMIZER_CACHE_FOLDER", "DATA_OPTIMIZER_DATA_CACHE_FOLDER"):
            os.environ[name] = scratch
        litdata.optimize(
            samples.__getitem__,
            list(range(len(samples))),
            str(folder),
            chunk_bytes=samples.shard_bytes,
            num_workers=1,
        )


def _lit_data(job: Job) -> Any:  # noqa: ANN401
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # else it takes https alone
    dataset = StreamingDataset(
        "s3://bucket/litdata",
        cache_dir=job.cache,
        max_cache_size=job.cache_bytes,
        shuffle=True,
        drop_last=False,
        storage_options={"endpoint_url": job.endpoint},
    )
    return _with_workers(StreamingDataLoader, dataset, job)


def _pack_tar(folder: Path, samples: Payloads) -> None:
    import webdataset

    folder.mkdir(parents=True)
    pattern, limit = str(folder / "%05d.tar"), samples.samples_per_shard
    with webdataset.ShardWriter(pattern, maxcount=limit, verbose=0) as writer:
        for index in range(len(samples)):
            data, number = samples[index]
            writer.write({"__key__": f"{number:08}", "bin": data})


def _web_dataset(job: Job) -> Any:  # noqa: ANN401
    import webdataset

    names = sorted(path.name for path in job.folder("tar").glob("*.tar"))
    urls = [f"{job.endpoint}/bucket/tar/{name}" for name in names]
    dataset = (
        webdataset.WebDataset(urls, shardshuffle=len(urls), detshuffle=True, seed=0)
        .shuffle(job.num_samples // _BUFFERS)
        .batched(job.batch_size, collation_fn=tensors)
    )
    return _torch_loader(job, dataset, batch_size=None, collate_fn=None)


def _pack_parquet(folder: Path, samples: Payloads) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    for start in range(0, len(samples), samples.samples_per_shard):
        stop = min(start + samples.samples_per_shard, len(samples))
        table = pa.table({"data": [samples[index][0] for index in range(start, stop)]})
        path = folder / f"{start:08}.parquet"
        # Noise: no page gets smaller.
        pq.write_table(table, path, compression="none", use_dictionary=False)


def _hugging_face(job: Job) -> Any:  # noqa: ANN401
    import datasets

    names = sorted(path.name for path in job.folder("parquet").glob("*.parquet"))
    rows = datasets.load_dataset(
        "parquet",
        data_files=[f"s3://bucket/parquet/{name}" for name in names],
        storage_options={"endpoint_url": job.endpoint},
        streaming=True,
        split="train",
    )
    return _torch_loader(job, rows.shuffle(seed=0, buffer_size=job.num_samples // _BUFFERS))


# ---------------------------------------------------------------- all of them


@dataclass(frozen=True, slots=True)
class Way:
    """How one library packs and loads.

    Attributes:
        kind: The format, a folder's name.
        pack: Writes it.
        load: Returns a loader; each `iter` is an epoch.
        needs: Modules, imported before the clock starts.
    """

    kind: str
    pack: Callable[[Path, Payloads], None]
    load: Callable[[Job], Any]
    needs: tuple[str, ...]


WAYS: Final = {
    "penstock": Way("shards", _pack_shards, _penstock, ("obstore", "penstock.stores")),
    "boto3": Way("objects", _pack_objects, partial(_torch, client=by_boto3), ("torch", "boto3")),
    "obstore": Way(
        "objects", _pack_objects, partial(_torch, client=by_obstore), ("torch", "obstore")
    ),
    "mosaic": Way("mds", _pack_mds, _mosaic, ("streaming",)),
    "litdata": Way("litdata", _pack_litdata, _lit_data, ("litdata",)),
    "webdataset": Way("tar", _pack_tar, _web_dataset, ("webdataset", "torch")),
    "huggingface": Way("parquet", _pack_parquet, _hugging_face, ("datasets", "s3fs", "torch")),
}


def _import(names: Iterable[str]) -> None:
    import importlib

    for name in names:
        if name in ("streaming", "litdata"):  # they import torchvision
            sys.path.insert(0, str(Path(__file__).parent / "peers"))
            importlib.import_module("torchvision_on_cpu")
        importlib.import_module(name)


def pack_once(job: Job) -> None:
    """Write the format, unless it is there."""
    way = WAYS[job.way]
    folder = job.folder(way.kind)
    if folder.exists():
        return
    half = folder.with_name(f"{way.kind}.half")
    half.parent.mkdir(parents=True, exist_ok=True)
    way.pack(half, Payloads(job.num_samples))
    half.rename(folder)


def epochs(job: Job) -> Iterator[dict[str, Any]]:
    """Load all epochs; yield of each what it took, and the numbers of the samples as they came."""
    from _meter import Meter

    sizes = sizes_of(job.num_samples)
    loader = None
    for _ in range(job.num_epochs):
        before = _counts(job.endpoint)
        order: list[int] = []
        first_s, num_batches = 0.0, 0
        with Meter() as meter:
            if loader is None:  # to open it is part of the first epoch
                loader = WAYS[job.way].load(job)
            for batch in loader:
                first_s = first_s or meter.elapsed_s()
                order += numbers_in(batch, sizes)
                num_batches += 1
        after = _counts(job.endpoint)
        if sorted(order) != list(range(job.num_samples)):
            raise ValueError(
                f"wrong data: {len(order)} samples came of {job.num_samples}, "
                f"{len(set(order))} different ones"
            )
        yield {
            "wall_s": meter.wall_s,
            "cpu_s": meter.cpu_s,
            "first_s": first_s,
            "num_batches": num_batches,
            "order": order,
            **{name: after[name] - before[name] for name in after},
        }


def _counts(endpoint: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{endpoint}/-/counts") as answer:
        counts: dict[str, int] = json.load(answer)
    return counts


def main() -> None:
    """Pack, or load where there is a server; print a line for each epoch."""
    job = Job(**json.loads(sys.argv[1]))
    _import(WAYS[job.way].needs)
    if not job.endpoint:
        pack_once(job)
        return
    for epoch in epochs(job):
        print(MARK + json.dumps(epoch), flush=True)


if __name__ == "__main__":
    main()
