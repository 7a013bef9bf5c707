# SPDX-License-Identifier: Apache-2.0
"""Does balancing the classes help the rare ones, and what does it cost the others?

Question
    445 photos of clothes in ten classes, 120 T-shirts to 5 skirts (24:1). A small network from
    scratch, natural class shares against balanced ones: recall of the three rarest classes (skirt
    5, hat 10, outwear 15 photos), accuracy over all, training loss.

Method
    natural         `penstock.torch.DataLoader(shuffle=True, seed=)`: every photo once an epoch.
    alpha 0.5, 1    `ClassBalancedSampler`: shares by the square root of the counts; equal shares.
    loss weights    natural shares, and `CrossEntropyLoss(weight=1 / count)`, whose mean divides by
                    the weights of the batch.
    torch           torch's DataLoader and `WeightedRandomSampler(1 / count, len(dataset))`, the
                    usual recipe.

    All else is the same: 60 epochs of 13 batches of 32, so 780 steps whatever the sampler; 64 x 64
    px, random-resized crop (35 to 100 % of the area) and flip of `ImagePipeline.train`; four blocks
    of convolution, batch norm, ReLU and max-pooling (16, 32, 64, 128 channels), 99,000 weights;
    AdamW, one cycle up to a learning rate of 0.003, weight decay 0.01. One thread, no workers. The
    recipe was fixed on runs with natural shares and left alone afterwards: no arm was tuned.
    Round k has seed k: of the first weights, the order and the augmentation. Scored are the last
    weights, on 80 validation photos, eight of each class, so accuracy is the mean recall. The loss
    of the last epoch is of the photos as the arm draws and weights them; that on the training
    photos has each of the 445 once, unaugmented and unweighted.

    Another folder with train/CLASS and validation/CLASS: PENSTOCK_BENCH_PHOTOS=/path. Without any,
    noise is drawn.

Left out
    Pretrained weights, which one would use for so few photos. Other seeds, sizes and recipes.

Machine
    2 cores of an Intel Xeon (a virtual machine, other work beside), 23.5 GiB, Linux 6.18, Python
    3.11.7, torch 2.13.0 (CPU), numpy 2.4.6

Command
    python benchmarks/imbalance.py --rounds 3 --save

Result
    2026-11-22, seeds 0, 1, 2; recall in percent, mean (each seed):

                                 rarest three       the others         accuracy  loss: last  on all
    penstock, natural             6.9 (4 8 8)  56.0 (52 57 59)  41.2 (38 42 44)       0.58    0.37
    penstock, alpha 0.5          9.7 (8 12 8)  53.6 (52 55 54)  40.4 (39 42 40)       0.52    0.34
    penstock, alpha 1          11.1 (12 12 8)  57.1 (54 57 61)  43.3 (41 44 45)       0.43    0.46
    penstock, loss weights    13.9 (12 12 17)  48.2 (46 46 52)  37.9 (36 36 41)       0.65    0.62
    torch, weights 1 / count   13.9 (17 8 17)  47.0 (43 45 54)  37.1 (35 34 42)       0.53    0.56

    The rarest three are 24 photos: 1.7 of them are told right with natural shares, 2.3 with alpha
    0.5, 2.7 with alpha 1, 3.3 with weights; each seed of each arm has 1 to 4. No skirt is ever
    told right. One or two photos are a direction, not a size; "alpha 1" and "torch" draw with the
    same shares and are 6 points of accuracy apart. docs/guide/imbalance.md says how to read it.

What it does not show
    Differences of a few photos: 24 are scored for the rare classes. What balancing does with
    millions of photos, where a rare class has hundreds of its own.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from _meter import Meter
from _runner import Benchmark, Reading, Target, check, data_loader

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

_SIDE_PX: Final = 64
_BATCH_SIZE: Final = 32
_NUM_RARE: Final = 3  # classes


@dataclass(frozen=True, slots=True)
class Size:
    """How long is trained."""

    num_epochs: int


@dataclass(frozen=True, slots=True)
class Arm:
    """What differs between the contenders.

    Attributes:
        alpha: Of `ClassBalancedSampler`; None is natural shares.
        by_loss: Whether the loss is weighted by 1 / count.
        by_torch: Whether torch loads, with weights of 1 / count.
    """

    alpha: float | None = None
    by_loss: bool = False
    by_torch: bool = False


def photo_folder() -> Path:
    """Return the folder with train/CLASS and validation/CLASS."""
    given = os.environ.get("PENSTOCK_BENCH_PHOTOS")
    tests_data = os.environ.get("PENSTOCK_TEST_DATA", Path(__file__).parents[2] / "shared" / "data")
    folder = Path(given) if given else Path(tests_data) / "clothing"
    check(not given or folder.is_dir(), f"PENSTOCK_BENCH_PHOTOS={folder} is no folder")
    return folder if folder.is_dir() else drawn_folder()


@functools.cache
def drawn_folder() -> Path:
    """Return a folder of noise that lasts as long as this process: to see that all works."""
    from PIL import Image

    root = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, root)
    rng = np.random.default_rng(0)
    for part, counts in (("train", (40, 20, 4, 3, 2)), ("validation", (2,) * 5)):
        for name, count in zip("abcde", counts, strict=True):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                noise = rng.integers(0, 256, (96, 80, 3), np.uint8)
                Image.fromarray(noise).save(root / part / name / f"{number}.jpg")
    return root


def asked_round() -> int:
    """Return the number of the round; -1 for the run whose memory is watched."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round", type=int, default=0)
    return parser.parse_known_args()[0].round


def network(num_classes: int) -> Any:  # noqa: ANN401 - torch is imported inside
    """Return the network, its weights drawn from torch's global generator."""
    import torch
    from torch import nn

    layers: list[nn.Module] = []
    num_in = 3
    for num_out in (16, 32, 64, 128):
        layers += [
            nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(num_out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
        num_in = num_out
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes)]
    # Channels last is a quarter faster on a CPU.
    return nn.Sequential(*layers, *pooled).to(memory_format=torch.channels_last)


def training_loader(arm: Arm, dataset: Any, seed: int) -> Any:  # noqa: ANN401
    """Return the loader of an arm; the number of its batches is the same for all."""
    options = {"batch_size": _BATCH_SIZE, "drop_last": True}
    if arm.by_torch:
        from torch.utils.data import WeightedRandomSampler

        weights = 1 / np.bincount(dataset.labels)[dataset.labels]
        torch_sampler = WeightedRandomSampler(weights, len(dataset))
        return data_loader("torch")(dataset, sampler=torch_sampler, **options)
    if arm.alpha is None:
        return data_loader("penstock")(dataset, shuffle=True, seed=seed, **options)
    from penstock.sampling.class_balanced import ClassBalancedSampler

    sampler = ClassBalancedSampler(dataset, alpha=arm.alpha, seed=seed)
    return data_loader("penstock")(dataset, sampler=sampler, seed=seed, **options)


def train(arm: Arm, size: Size) -> Reading:
    """Train with one arm, and score the weights that come out."""
    import torch

    import penstock
    from penstock.vision import ImageFolder, ImagePipeline

    torch.set_num_threads(1)
    number = asked_round()
    seed = penstock.seed_everything(max(number, 0))
    num_epochs = size.num_epochs if number >= 0 else 1  # memory shows in the first
    pipeline = ImagePipeline.train(_SIDE_PX, scale=(0.35, 1.0))
    dataset = ImageFolder(photo_folder() / "train", transform=pipeline)
    loader = training_loader(arm, dataset, seed)
    model = network(len(dataset.classes))
    counts = np.bincount(dataset.labels, minlength=len(dataset.classes))
    with Meter() as meter:
        loss = fit(model, loader, num_epochs, counts if arm.by_loss else None)
    num_batches = num_epochs * len(loader)
    recalls = score(model, "validation").recalls
    rarest = np.argsort(counts, kind="stable")[:_NUM_RARE]
    return Reading.of(
        meter,
        float(recalls[rarest].mean()),
        num_batches,
        {
            "accuracy": float(recalls.mean()),
            "recall of the others": float(np.delete(recalls, rarest).mean()),
            "loss of the last epoch": loss,
            "loss on the training photos": score(model, "train").loss,
        },
        {"recall of each class": recalls.tolist(), "photos of each class": counts.tolist()},
    )


def fit(
    model: Any,  # noqa: ANN401
    loader: Any,  # noqa: ANN401
    num_epochs: int,
    counts: npt.NDArray[np.int64] | None,
) -> float:
    """Train; return the mean loss of the last epoch, weighted where `counts` are given."""
    import torch

    weights = None if counts is None else torch.tensor(1 / counts, dtype=torch.float32)
    loss_of = torch.nn.CrossEntropyLoss(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.003, total_steps=num_epochs * len(loader)
    )
    losses: list[float] = []
    for _ in range(num_epochs):
        losses = []
        for images, labels in loader:
            images = images.contiguous(memory_format=torch.channels_last)
            loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
    check(np.isfinite(losses).all(), f"losses {losses}")
    return float(np.mean(losses))


@dataclass(frozen=True, slots=True)
class Score:
    """How good weights are.

    Attributes:
        recalls: Share of each class's photos that are told right, shape (classes,).
        loss: Mean cross-entropy, every photo counting alike.
    """

    recalls: npt.NDArray[np.float64]
    loss: float


def score(model: Any, part: str) -> Score:  # noqa: ANN401
    """Score the model on the folder `part`, without augmentation."""
    import torch

    from penstock.vision import ImageFolder, ImagePipeline

    transform = ImagePipeline.eval(_SIDE_PX, resize=_SIDE_PX)
    dataset = ImageFolder(photo_folder() / part, transform=transform)
    model.eval()
    right = np.zeros(len(dataset.classes))
    loss = 0.0
    with torch.no_grad():
        for images, labels in data_loader("penstock")(dataset, batch_size=_BATCH_SIZE, seed=0):
            outputs = model(images)
            loss += float(torch.nn.functional.cross_entropy(outputs, labels, reduction="sum"))
            hits = labels[outputs.argmax(1) == labels]
            right += np.bincount(hits.numpy(), minlength=len(right))
    return Score(right / np.bincount(dataset.labels, minlength=len(right)), loss / len(dataset))


CONTENDERS: dict[str, Callable[[Size], Reading]] = {
    "penstock, natural": partial(train, Arm()),
    "penstock, alpha 0.5": partial(train, Arm(alpha=0.5)),
    "penstock, alpha 1": partial(train, Arm(alpha=1.0)),
    "penstock, loss weights": partial(train, Arm(by_loss=True)),
    "torch, weights 1 / count": partial(train, Arm(by_torch=True)),
}

BENCHMARK = Benchmark(
    file=__file__,
    unit="recall of the rarest three",
    better="higher",
    contenders=CONTENDERS,
    full=Size(num_epochs=60),
    smoke=Size(num_epochs=1),
    targets=[
        Target("penstock, alpha 0.5", "penstock, natural"),
        Target("penstock, alpha 1", "penstock, natural"),
        Target("penstock, alpha 1", "penstock, natural", figure="accuracy"),
        Target("penstock, alpha 1", "torch, weights 1 / count"),
    ],
    rounds=3,
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
