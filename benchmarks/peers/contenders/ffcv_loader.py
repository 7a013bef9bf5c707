# SPDX-License-Identifier: Apache-2.0
"""FFCV: threads and compiled stages that read a file of its own, the beton.

It has no other source: samples that are elsewhere are packed first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import works
from contender import Contender, Epoch, Job
from contenders.shared import beside, numpy_first, numpy_pair, written_whole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

PHOTOS_NAME = "photos.beton"
# Its default, given also here, as the time to the first batch and the memory depend on it.
BATCHES_AHEAD = 3


class JpegFiles:
    """JPEGs as they lie in their files, and labels."""

    def __init__(self, files: list[tuple[str, int]]) -> None:
        """Keep the list."""
        self._files = files

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.uint8], int]:
        """Return a file's bytes, and its label."""
        path, label = self._files[index]
        return np.fromfile(path, np.uint8), label


class RowTuples:
    """Rows in memory, each a sample with one field."""

    def __init__(self, rows: npt.NDArray[np.float32]) -> None:
        """Keep the rows."""
        self._rows = rows

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> tuple[npt.NDArray[np.float32]]:
        """Return a row."""
        return (self._rows[index],)


def jpeg_field() -> type[Any]:
    """Return the field that keeps a JPEG's bytes.

    `RGBImageField` takes pixels and encodes them anew. What it reads are a JPEG's bytes with its
    height and width, so this field writes these, and reads as that one does.
    """
    import simplejpeg
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import IMAGE_MODES

    class JpegField(RGBImageField):
        def encode(self, destination: Any, image: Any, malloc: Any) -> None:  # noqa: ANN401
            height, width, _, _ = simplejpeg.decode_jpeg_header(image.tobytes())
            destination["mode"] = IMAGE_MODES["jpg"]
            destination["height"], destination["width"] = height, width
            destination["data_ptr"], storage = malloc(image.nbytes)
            storage[:] = image

    return JpegField


def pack(job: Job) -> None:
    """Write the photos into a beton."""
    from ffcv.fields import IntField
    from ffcv.writer import DatasetWriter

    fields = {"image": jpeg_field()(), "label": IntField()}
    writer = DatasetWriter(str(job.packed / PHOTOS_NAME), fields, num_workers=job.num_workers)
    writer.from_indexed_dataset(JpegFiles(works.labelled_files(job.photos)))


class _Epochs:
    """Calls to epochs; the compiled stages and the order go on from one to the next."""

    def __init__(self, loader: Any) -> None:  # noqa: ANN401
        self._loader = loader

    def __call__(self, _epoch: int) -> Iterator[Any]:
        for batch in self._loader:
            yield self.taken(batch)

    def taken(self, batch: Any) -> Any:  # noqa: ANN401
        """Return a batch as arrays, which are views."""
        return numpy_first(batch)


class _PhotoEpochs(_Epochs):
    """Epochs of images and labels."""

    def taken(self, batch: Any) -> Any:  # noqa: ANN401
        return numpy_pair(batch)


def _loader(path: str, job: Job, pipelines: dict[str, Any], **more: Any) -> Any:  # noqa: ANN401
    from ffcv.loader import Loader, OrderOption

    return Loader(
        path,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        seed=job.seed,
        drop_last=False,
        batches_ahead=BATCHES_AHEAD,
        pipelines=pipelines,
        **more,
    )


def packed(job: Job) -> Epoch:
    """Read the photos."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.transforms import (
        NormalizeImage,
        RandomHorizontalFlip,
        Squeeze,
        ToTensor,
        ToTorchImage,
    )

    image = [
        RandomResizedCropRGBImageDecoder((works.CROP_PX, works.CROP_PX)),
        RandomHorizontalFlip(),
        NormalizeImage(np.array(works.MEAN) * 255, np.array(works.STD) * 255, np.dtype("float32")),
        ToTensor(),
        ToTorchImage(channels_last=False),
    ]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(1)]}
    path = str(job.packed / PHOTOS_NAME)
    return _PhotoEpochs(_loader(path, job, pipelines, custom_fields={"image": jpeg_field()}))


def _row_file(job: Job) -> Path:
    return beside(job, f"rows-{job.num_samples}.beton")


def prepare(job: Job, _work: str) -> None:
    """Write the rows into a beton."""
    from ffcv.fields import NDArrayField
    from ffcv.writer import DatasetWriter

    path = _row_file(job)
    if path.exists():
        return
    rows = works.tiny_rows(job.num_samples)
    fields = {"row": NDArrayField(np.dtype("float32"), rows.shape[1:])}
    with written_whole(path) as half:
        writer = DatasetWriter(str(half), fields, num_workers=job.num_workers)
        writer.from_indexed_dataset(RowTuples(rows), chunksize=5_000)


def tiny(job: Job) -> Epoch:
    """Read rows."""
    from ffcv.fields.ndarray import NDArrayDecoder
    from ffcv.transforms import ToTensor

    pipelines = {"row": [NDArrayDecoder(), ToTensor()]}
    return _Epochs(_loader(str(_row_file(job)), job, pipelines))


CONTENDERS = [
    Contender(
        name="FFCV",
        environment="ffcv",
        libraries=("torch", "ffcv", "ffcv.transforms"),
        settings=(
            "Loader(os_cache=True, order=OrderOption.RANDOM, num_workers=2, drop_last=False), as "
            "its tuning guide advises for what fits in memory "
            "(https://docs.ffcv.io/parameter_tuning.html); its own decoder, crop (by area, "
            "which antialiases), flip and normalisation, compiled for 2 threads, then "
            "ToTorchImage(channels_last=False). The photos' bytes are kept by a custom field; "
            "RGBImageField would encode them anew. "
            "Stages are compiled before the first batch of a process. tiny: rows packed as "
            "NDArrayField, as it has no form in memory"
        ),
        pack=pack,
        packed=packed,
        tiny=tiny,
        prepare=prepare,
        antialias=True,
        absent={
            "photos": "it reads only its own format",
            "transport": "its threads write into the main process's memory",
            "paths": "it reads only its own format, and holds no list of samples",
            "resume": "saving a position is not supported",
            "tolerant": "it cannot skip a sample: its decoder's errors are not checked, and its "
            "writer's workers end at theirs",
        },
    )
]
