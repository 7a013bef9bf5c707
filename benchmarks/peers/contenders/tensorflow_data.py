# SPDX-License-Identifier: Apache-2.0
"""tf.data: TensorFlow's input pipelines, which run on threads of the calling process."""

from __future__ import annotations

import io
import math
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import works
from contender import Contender, Epoch, Job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

_SHARD_BYTES: Final = 10_000_000  # "at least 10 MB+ and ideally 100 MB+", says its guide
_LARGEST_SEED: Final = 2**31 - 1


# ---------------------------------------------------------------- photos


def _cropped(jpeg: Any) -> Any:  # noqa: ANN401 - tensors; TensorFlow is not imported here
    """Decode no more than the crop, resize it and flip it, as in TensorFlow's ImageNet input."""
    import tensorflow as tf

    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(jpeg),
        bounding_boxes=tf.zeros([1, 0, 4]),
        min_object_covered=0.0,  # else no crop is smaller than a tenth
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
    )
    window = tf.concat([begin[:2], size[:2]], axis=0)
    image = tf.image.decode_and_crop_jpeg(jpeg, window, channels=3)
    image = tf.image.resize(image, [works.CROP_PX, works.CROP_PX])
    return tf.image.random_flip_left_right(image)


def _normalised(images: Any, labels: Any) -> Any:  # noqa: ANN401
    import tensorflow as tf

    mean = tf.constant([255 * mean for mean in works.MEAN])
    std = tf.constant([255 * std for std in works.STD])
    return tf.transpose((images - mean) / std, [0, 3, 1, 2]), labels


def _photo_epochs(job: Job, samples: Any, load: Callable[..., Any]) -> Epoch:  # noqa: ANN401
    """Return epochs of shuffled samples; `load` makes a JPEG and a label of each."""
    import tensorflow as tf

    def sample(*parts: Any) -> Any:  # noqa: ANN401
        jpeg, label = load(*parts)
        return _cropped(jpeg), label

    dataset = samples.map(sample, num_parallel_calls=tf.data.AUTOTUNE)
    if job.tolerant:
        dataset = dataset.ignore_errors()
    dataset = dataset.batch(job.batch_size)
    dataset = dataset.map(_normalised, num_parallel_calls=tf.data.AUTOTUNE)
    options = tf.data.Options()
    options.deterministic = False
    dataset = dataset.prefetch(tf.data.AUTOTUNE).with_options(options)
    return lambda _number: dataset.as_numpy_iterator()


def photos(job: Job) -> Epoch:
    """Shuffle the files' names, then read the files."""
    import tensorflow as tf

    tf.random.set_seed(job.seed)
    files, labels = zip(*works.labelled_files(job.photos), strict=True)
    names = tf.data.Dataset.from_tensor_slices((list(files), list(labels)))
    names = names.shuffle(len(files), seed=job.seed)
    return _photo_epochs(job, names, lambda file, label: (tf.io.read_file(file), label))


def _features() -> dict[str, Any]:
    import tensorflow as tf

    return {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }


def pack(job: Job) -> None:
    """Write TFRecord files of `tf.train.Example`, the photos in an order drawn at random."""
    import tensorflow as tf

    files = works.labelled_files(job.photos)
    order = np.random.default_rng(job.seed).permutation(len(files)).tolist()
    num_bytes = sum(Path(file).stat().st_size for file, _ in files)
    num_shards = max(1, num_bytes // _SHARD_BYTES)
    for shard in range(num_shards):
        name = f"photos-{shard:05}-of-{num_shards:05}.tfrecord"
        with tf.io.TFRecordWriter(str(job.packed / name)) as writer:
            for file, label in (files[index] for index in order[shard::num_shards]):
                jpeg = tf.train.BytesList(value=[Path(file).read_bytes()])
                feature = {
                    "image/encoded": tf.train.Feature(bytes_list=jpeg),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[label])
                    ),
                }
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())


def packed(job: Job) -> Epoch:
    """Read the TFRecord files together, and shuffle all records in one buffer."""
    import tensorflow as tf

    tf.random.set_seed(job.seed)
    files = sorted(map(str, job.packed.glob("*.tfrecord")))
    num_samples = len(works.labelled_files(job.photos))
    records = (
        tf.data.Dataset.from_tensor_slices(files)
        .shuffle(len(files), seed=job.seed)
        .interleave(
            tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False
        )
        .shuffle(num_samples, seed=job.seed)
    )
    features = _features()

    def load(record: Any) -> Any:  # noqa: ANN401
        example = tf.io.parse_single_example(record, features)
        return example["image/encoded"], example["image/class/label"]

    return _photo_epochs(job, records, load)


# ---------------------------------------------------------------- samples in memory


def _chosen(job: Job, choose: Callable[[Any], Any]) -> Any:  # noqa: ANN401
    """Return epoch after epoch of batches; `choose` makes one of the samples' numbers.

    The order is computed number by number (`index_shuffle`): there is no buffer to fill.
    """
    import tensorflow as tf

    starts = tf.data.Dataset.range(0, job.num_samples, job.batch_size)

    def epoch(number: Any) -> Any:  # noqa: ANN401
        # Of seeds that differ by one, index_shuffle makes orders that are alike.
        drawn = tf.random.stateless_uniform(
            [2], tf.stack([tf.constant(job.seed, tf.int64), number]), 0, _LARGEST_SEED, tf.int32
        )

        def batch(start: Any) -> Any:  # noqa: ANN401
            places = tf.range(start, tf.minimum(start + job.batch_size, job.num_samples))
            indices = tf.random.experimental.index_shuffle(places, drawn, job.num_samples - 1)
            return choose(indices)

        return starts.map(batch, num_parallel_calls=tf.data.AUTOTUNE)

    return tf.data.Dataset.counter().flat_map(epoch).prefetch(tf.data.AUTOTUNE)


def _epochs(job: Job, dataset: Any) -> Epoch:  # noqa: ANN401
    batches = dataset.as_numpy_iterator()
    num_batches = math.ceil(job.num_samples / job.batch_size)

    def epoch(_number: int) -> Iterator[npt.NDArray[Any]]:
        for _ in range(num_batches):
            yield next(batches)

    return epoch


def _rows(job: Job) -> Any:  # noqa: ANN401
    import tensorflow as tf

    rows = tf.constant(works.tiny_rows(job.num_samples))
    return _chosen(job, lambda indices: tf.gather(rows, indices))


def tiny(job: Job) -> Epoch:
    """Gather each batch's rows from a tensor."""
    return _epochs(job, _rows(job))


def paths(job: Job) -> Epoch:
    """Gather each batch's paths from a tensor of strings."""
    import tensorflow as tf

    all_paths = tf.constant([works.path_of(index) for index in range(job.num_samples)])

    def numbers(indices: Any) -> Any:  # noqa: ANN401
        # What works.number_in does, in TensorFlow's operations.
        digits = tf.strings.substr(tf.gather(all_paths, indices), -12, 8)
        return tf.strings.to_number(digits, tf.int64)

    return _epochs(job, _chosen(job, numbers))


class _Resume:
    """Rows that can be left: `tf.train.Checkpoint` writes the iterator's state into two files."""

    def __init__(self, job: Job) -> None:
        self._dataset = _rows(job)
        self._state: bytes | None = None
        self._batches: Any = None

    def batches(self) -> Iterator[npt.NDArray[np.float32]]:
        """Return the batches from the start, or from where `restore` said."""
        import tensorflow as tf

        self._batches = iter(self._dataset)
        if self._state is not None:
            with tempfile.TemporaryDirectory() as folder:
                with zipfile.ZipFile(io.BytesIO(self._state)) as files:
                    files.extractall(folder)
                checkpoint = tf.train.Checkpoint(iterator=self._batches)
                checkpoint.read(f"{folder}/state").assert_consumed()
        return (batch.numpy() for batch in self._batches)

    def state(self) -> bytes:
        """Return the files of a checkpoint."""
        import tensorflow as tf

        state = io.BytesIO()
        with tempfile.TemporaryDirectory() as folder:
            tf.train.Checkpoint(iterator=self._batches).write(f"{folder}/state")
            with zipfile.ZipFile(state, "w") as files:
                for path in sorted(Path(folder).iterdir()):
                    files.write(path, path.name)
        return state.getvalue()

    def restore(self, state: bytes) -> None:
        """Keep a checkpoint for the iterator that is to come."""
        self._state = state


CONTENDERS = [
    Contender(
        name="tf.data",
        environment="tensorflow",
        libraries=("tensorflow",),
        settings=(
            "As its guide (Better performance with the tf.data API) says: map with "
            "num_parallel_calls=AUTOTUNE (threads, as many as it finds best), the normalisation "
            "vectorised after batch, prefetch(AUTOTUNE), deterministic=False for photos. "
            "decode_and_crop_jpeg of sample_distorted_bounding_box, whose crops are 0.38 of a "
            "photo on average (in DALI and MindSpore: 0.43); resize without antialiasing, its "
            "default. Packed: TFRecord files of 10 MB, read by a parallel interleave, and a "
            "shuffle buffer over the whole set. Rows and paths: tf.gather from a tensor by "
            "index_shuffle, the shuffling without a buffer that its reference shows for tf.data. "
            "Resume: tf.train.Checkpoint of the iterator."
        ),
        photos=photos,
        pack=pack,
        packed=packed,
        tiny=tiny,
        paths=paths,
        resume=_Resume,
        antialias=False,
        absent={
            "transport": (
                "it has no worker processes: Python code (from_generator, numpy_function) runs in "
                "the main process"
            ),
        },
    ),
]
