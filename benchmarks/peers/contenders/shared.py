# SPDX-License-Identifier: Apache-2.0
"""What several contenders use. A contender's file imports this one and photo_ops, and no other.

Datasets for loaders like torch's, epochs of such loaders, and files that are written beforehand.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
from typing import TYPE_CHECKING, Any

import numpy as np
import works

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt
    from contender import Epoch, Job

__all__ = [
    "BigBatches",
    "PathNumbers",
    "PhotoFiles",
    "Resuming",
    "ResumingTensors",
    "Rows",
    "batch_sampler",
    "beside",
    "epochs",
    "numbers_in",
    "numpy_first",
    "numpy_only",
    "numpy_pair",
    "path_array",
    "written_whole",
]


# ---------------------------------------------------------------- datasets


class PhotoFiles:
    """Photos and labels, each photo made of a file's bytes by a function."""

    def __init__(self, photos: Path, make: Callable[[bytes], Any]) -> None:
        """List the files."""
        self._files = works.labelled_files(photos)
        self._make = make

    def __len__(self) -> int:
        """Return the number of photos."""
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return a photo as a tensor, and its label."""
        import torch

        path, label = self._files[index]
        with open(path, "rb") as file:
            return torch.from_numpy(self._make(file.read())), label


class BigBatches:
    """`works.big_batch` by number."""

    def __init__(self, num_batches: int) -> None:
        """Keep the number of batches."""
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._num_batches

    def __getitem__(self, index: int) -> npt.NDArray[np.float32]:
        """Return a ready batch."""
        return works.big_batch(index)


class PathNumbers:
    """The numbers in paths, which lie in an array of bytes or in a list of str."""

    def __init__(self, paths: Any) -> None:  # noqa: ANN401
        """Keep the paths."""
        self._paths = paths

    def __len__(self) -> int:
        """Return the number of paths."""
        return len(self._paths)

    def __getitem__(self, index: int) -> int:
        """Return the number in a path."""
        path = self._paths[index]
        return works.number_in(path if isinstance(path, str) else path.decode())


def path_array(num_samples: int) -> npt.NDArray[np.bytes_]:
    """Return the paths as one numpy array of bytes, made without a list of them."""
    paths = (works.path_of(index).encode() for index in range(num_samples))
    return np.fromiter(paths, f"S{len(works.path_of(0))}", num_samples)


class Rows:
    """Rows in memory, an array or a tensor, several of which are taken at a time."""

    def __init__(self, rows: Any) -> None:  # noqa: ANN401
        """Keep the rows."""
        self._rows = rows

    def __call__(self, numbers: Any) -> Any:  # noqa: ANN401
        """Return the rows of these numbers."""
        return self._rows[numbers]


def numbers_in(paths: Sequence[str]) -> npt.NDArray[np.int64]:
    """Return the numbers in the paths of a batch."""
    return np.array([works.number_in(path) for path in paths])


# ---------------------------------------------------------------- loaders like torch's


def batch_sampler(num_samples: int, job: Job) -> Any:  # noqa: ANN401
    """Return a sampler of shuffled lists of numbers, one for each batch.

    A loader with it as `sampler` and `batch_size=None` asks its dataset for whole batches.
    """
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    generator = torch.Generator().manual_seed(job.seed)
    order = RandomSampler(range(num_samples), generator=generator)
    return BatchSampler(order, job.batch_size, drop_last=False)


def epochs(loader: Any, take: Callable[[Any], Any]) -> Epoch:  # noqa: ANN401
    """Return epochs of a loader whose batches are handed out by `take`, as arrays."""

    def epoch(_number: int) -> Iterator[Any]:
        return map(take, loader)

    return epoch


def numpy_pair(batch: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """Return images and labels as views."""
    return batch[0].numpy(), batch[1].numpy()


def numpy_only(batch: Any) -> Any:  # noqa: ANN401
    """Return a tensor as a view."""
    return batch.numpy()


def numpy_first(batch: Any) -> Any:  # noqa: ANN401
    """Return the only tensor of a batch of `TensorDataset` as a view."""
    return batch[0].numpy()


class Resuming:
    """An epoch of a loader with `state_dict`, of numbers and names, and `load_state_dict`."""

    def __init__(self, loader: Any, take: Callable[[Any], Any]) -> None:  # noqa: ANN401
        """Keep the loader; `take` hands its batches out as arrays."""
        self._loader = loader
        self._take = take

    def batches(self) -> Iterator[np.ndarray]:
        """Return the batches from the start, or from where `restore` said."""
        return map(self._take, self._loader)

    def state(self) -> bytes:
        """Return the place as JSON."""
        return json.dumps(self._loader.state_dict()).encode()

    def restore(self, state: bytes) -> None:
        """Go to a place."""
        self._loader.load_state_dict(json.loads(state))


class ResumingTensors(Resuming):
    """The same where the state has tensors in it: it is saved as torch saves."""

    def state(self) -> bytes:
        """Return the place as a file of torch."""
        import torch

        file = io.BytesIO()
        torch.save(self._loader.state_dict(), file)
        return file.getvalue()

    def restore(self, state: bytes) -> None:
        """Go to a place."""
        import torch

        self._loader.load_state_dict(torch.load(io.BytesIO(state), weights_only=True))


# ---------------------------------------------------------------- files written beforehand


def beside(job: Job, name: str) -> Path:
    """Return a place beside the packed photos, for what else a contender keeps in files."""
    return job.packed.with_name(f"{job.packed.name}-{name}")


@contextlib.contextmanager
def written_whole(target: Path) -> Iterator[Path]:
    """Yield where to write a file or a folder, which gets its name when it is whole."""
    half = target.with_name(f".{target.name}-{os.getpid()}")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield half
        half.rename(target)
    finally:
        if half.is_dir():
            shutil.rmtree(half)
        else:
            half.unlink(missing_ok=True)
