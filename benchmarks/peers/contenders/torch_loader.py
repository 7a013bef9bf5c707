# SPDX-License-Identifier: Apache-2.0
"""torch.utils.data.DataLoader."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders import photo_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
            image = self._make(file.read())
        return (torch.from_numpy(image) if isinstance(image, np.ndarray) else image), label


class BigBatches:
    """`works.big_batch` by number."""

    def __init__(self, num_batches: int) -> None:
        """Keep the number of batches."""
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return the number of batches."""
        return self._num_batches

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401 - a numpy array
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


def path_array(num_samples: int) -> Any:  # noqa: ANN401
    """Return the paths as one numpy array of bytes, made without a list of them."""
    paths = (works.path_of(index).encode() for index in range(num_samples))
    return np.fromiter(paths, f"S{len(works.path_of(0))}", num_samples)


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


def _loader(dataset: Any, job: Job, **more: Any) -> Any:  # noqa: ANN401
    import torch
    from torch.utils.data import DataLoader

    options = {
        "batch_size": job.batch_size,
        "shuffle": True,
        "num_workers": job.num_workers,
        "persistent_workers": True,
        "generator": torch.Generator().manual_seed(job.seed),
        **more,
    }
    if options["num_workers"] == 0:
        del options["persistent_workers"]
    return DataLoader(dataset, **options)


def _photos(make: Callable[[bytes], Any], job: Job) -> Epoch:
    options: dict[str, Any] = {}
    if make is photo_ops.fast_sample:
        options["worker_init_fn"] = photo_ops.one_thread
    return epochs(_loader(PhotoFiles(job.photos, make), job, **options), numpy_pair)


def _torchvision_photos(job: Job) -> Epoch:
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(works.CROP_PX, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(works.MEAN, works.STD),
        ]
    )
    return epochs(_loader(ImageFolder(str(job.photos), transform), job), numpy_pair)


def _tiny(job: Job) -> Epoch:
    import torch
    from torch.utils.data import TensorDataset

    rows = torch.from_numpy(works.tiny_rows(job.num_samples))
    return epochs(_loader(TensorDataset(rows), job, num_workers=0), numpy_first)


def _tiny_bulk(job: Job) -> Epoch:
    import torch
    from torch.utils.data import BatchSampler, RandomSampler, TensorDataset

    dataset = TensorDataset(torch.from_numpy(works.tiny_rows(job.num_samples)))
    generator = torch.Generator().manual_seed(job.seed)
    sampler = BatchSampler(RandomSampler(dataset, generator=generator), job.batch_size, False)
    options = {"batch_size": None, "shuffle": None, "sampler": sampler, "num_workers": 0}
    return epochs(_loader(dataset, job, **options), numpy_first)


def _transport(job: Job) -> Epoch:
    loader = _loader(BigBatches(job.num_samples), job, batch_size=None, shuffle=False)
    return epochs(loader, numpy_only)


def _paths(job: Job) -> Epoch:
    return epochs(_loader(PathNumbers(path_array(job.num_samples)), job), numpy_only)


def _path_list(job: Job) -> Epoch:
    paths = [works.path_of(index) for index in range(job.num_samples)]
    return epochs(_loader(PathNumbers(paths), job), numpy_only)


_NO_FORMAT = "torch has no packed format; torchvision neither"
_NO_PLACE = "it cannot save its place; torchdata's StatefulDataLoader can"
_NO_TOLERANCE = "it has no way to leave out a sample that cannot be read"
_DOCS = "https://docs.pytorch.org/docs/stable/data.html"
_SAME = "as torch (simplejpeg, OpenCV): photos alone differ"
_PHOTOS_ONLY = {
    **dict.fromkeys(("tiny", "transport", "paths"), _SAME),
    **dict.fromkeys(("pack", "packed"), _NO_FORMAT),
    "resume": _NO_PLACE,
    "tolerant": _NO_TOLERANCE,
}

CONTENDERS = [
    Contender(
        name="torch (simplejpeg, OpenCV)",
        environment="torch",
        libraries=("torch", "simplejpeg", "cv2"),
        settings=(
            "2 forked workers, persistent_workers=True; tiny: TensorDataset without workers, which "
            "is faster than with them; 5 M paths in one numpy array, as its documentation advises "
            f"({_DOCS})"
        ),
        photos=partial(_photos, photo_ops.fast_sample),
        tiny=_tiny,
        transport=_transport,
        paths=_paths,
        absent={
            **dict.fromkeys(("pack", "packed"), _NO_FORMAT),
            "resume": _NO_PLACE,
            "tolerant": _NO_TOLERANCE,
        },
    ),
    Contender(
        name="torch (Pillow)",
        environment="torch",
        libraries=("torch", "PIL.Image"),
        settings="the same loader; photos by Pillow and numpy",
        photos=partial(_photos, photo_ops.pillow_sample),
        absent=_PHOTOS_ONLY,
    ),
    Contender(
        name="torch (torchvision)",
        environment="torch",
        libraries=("torch", "torchvision_on_cpu"),
        settings=(
            "the same loader; ImageFolder and transforms.v2 with Pillow's images until they are "
            "cropped, then uint8 tensors"
        ),
        photos=_torchvision_photos,
        absent=_PHOTOS_ONLY,
    ),
    Contender(
        name="torch (batch sampler)",
        environment="torch",
        libraries=("torch",),
        settings=(
            "tiny: TensorDataset asked for 1,024 rows at a time, by a BatchSampler as sampler and "
            f"batch_size=None, without workers ({_DOCS}#disable-automatic-batching)"
        ),
        tiny=_tiny_bulk,
        absent={
            **dict.fromkeys(("photos", "transport", "paths"), _SAME),
            **dict.fromkeys(("pack", "packed"), _NO_FORMAT),
            "resume": _NO_PLACE,
            "tolerant": _NO_TOLERANCE,
        },
    ),
    Contender(
        name="torch (list of str)",
        environment="torch",
        libraries=("torch",),
        settings="5 M paths in a Python list, as most datasets hold them",
        paths=_path_list,
        absent={
            **dict.fromkeys(("photos", "tiny", "transport"), _SAME),
            **dict.fromkeys(("pack", "packed"), _NO_FORMAT),
            "resume": _NO_PLACE,
            "tolerant": _NO_TOLERANCE,
        },
    ),
]
