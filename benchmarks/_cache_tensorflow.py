# SPDX-License-Identifier: Apache-2.0
"""tf.data's `cache()`: the contender of cache.py that needs an interpreter with TensorFlow.

    python benchmarks/_cache_tensorflow.py FOLDER NUM_EPOCHS

It prints JSON: seconds, CPU seconds, images and batches, for the first epoch and for later ones;
and the memory of the process in MB. It decodes with two threads, as the other contenders have two
workers.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf

SIZE_PX, BATCH_SIZE = 224, 16


def decoded(path: Any) -> Any:  # noqa: ANN401
    """Return the pixels of a file, decoded with the JPEG library's fast transform, as Penstock."""
    return tf.io.decode_jpeg(tf.io.read_file(path), channels=3, dct_method="INTEGER_FAST")


def augmented(image: Any) -> Any:  # noqa: ANN401
    """Return a random crop, resized, perhaps flipped, and normalised: ImageNet's recipe."""
    begin, size, _ = tf.image.sample_distorted_bounding_box(
        tf.shape(image),
        tf.zeros([1, 0, 4]),
        area_range=(0.08, 1.0),
        aspect_ratio_range=(3 / 4, 4 / 3),
        max_attempts=10,
        use_image_if_no_bounding_boxes=True,
        min_object_covered=0.0,
    )
    image = tf.image.resize(tf.slice(image, begin, size), (SIZE_PX, SIZE_PX), antialias=True)
    image = tf.image.random_flip_left_right(image)
    return (image - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]


def main(folder: str, num_epochs: int) -> None:
    """Load the photos once, and then in `num_epochs` more epochs."""
    tf.config.threading.set_intra_op_parallelism_threads(1)
    files = sorted(map(str, Path(folder).glob("*/*.jp*g")))
    dataset = tf.data.Dataset.from_tensor_slices(files).map(decoded, num_parallel_calls=2).cache()
    dataset = dataset.shuffle(len(files), reshuffle_each_iteration=True)
    dataset = dataset.map(augmented, num_parallel_calls=2).batch(BATCH_SIZE).prefetch(2)
    found = {}
    for name, number in (("first", 1), ("later", num_epochs)):
        start_s, start_cpu_s = time.perf_counter(), _cpu_s()
        num_images = num_batches = 0
        for _ in range(number):
            for images in dataset:
                _ = float(images[0, 0, 0, 0]) + float(images[-1, -1, -1, -1])
                num_images += len(images)
                num_batches += 1
        wall_s, cpu_s = time.perf_counter() - start_s, _cpu_s() - start_cpu_s
        found[name] = (wall_s, cpu_s, num_images, num_batches)
    (pss,) = (
        line.split()[1]
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines()
        if line.startswith("Pss:")
    )
    print(json.dumps({**found, "pss_mb": int(pss) * 1024 / 1e6}))


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
