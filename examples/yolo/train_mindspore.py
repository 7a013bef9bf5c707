# SPDX-License-Identifier: Apache-2.0
"""The same batches in MindSpore: two epochs with EMA and loss scale; needs no torch.

python examples/yolo/train_mindspore.py build/yolo/bccd
python examples/yolo/train_mindspore.py build/yolo/bccd --verify   # against torch's batches
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mindspore
from data import STRIDE_PX, Recipe, training_loader, training_set
from mindspore import amp, nn, ops
from model_mindspore import TinyDetector, detection_loss
from targets import YOLOCollate

from penstock import Loader
from penstock.integrations.mindspore import to_mindspore
from penstock.vision import Letterbox, YOLODetection

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from penstock.integrations.mindspore import MindSporeBatches
    from penstock.vision import MixUp

LEARNING_RATE = 2e-3
MISSING = -1  # fills the rows of images with fewer objects


@mindspore.jit_class
class EMA:
    """Moving averages of a network's parameters and batch statistics, as published with YOLOv5.

    The decay begins at 0 and rises to `decay` in some `tau` steps.
    """

    def __init__(self, net: nn.Cell, decay: float = 0.9999, tau: float = 2000.0) -> None:
        self.decay, self.tau, self.steps = decay, tau, 0
        self._parameters = mindspore.ParameterTuple(net.get_parameters())
        self.averages = self._parameters.clone("ema", init="same")

    def update(self) -> None:
        self.steps += 1
        decay = self.decay * (1 - math.exp(-self.steps / self.tau))
        self._blend(mindspore.Tensor(decay, mindspore.float32))  # a number would be compiled in

    @mindspore.jit
    def _blend(self, decay: Any) -> None:  # noqa: ANN401
        for average, parameter in zip(self.averages, self._parameters):  # noqa: B905
            ops.assign(average, average * decay + parameter * (1 - decay))

    def copy_to(self, net: nn.Cell) -> None:
        """Give another network of the same kind the averages."""
        for average, parameter in zip(self.averages, net.get_parameters(), strict=True):
            parameter.set_data(average)


def columns(batch: tuple[Any, NDArray[np.float32], Any]) -> dict[str, Any]:
    """Return a batch of `YOLOCollate` as named columns, its table as one array per image."""
    images, targets, _ = batch
    return {"images": images, "targets": [targets[targets[:, 0] == k] for k in range(len(images))]}


def batches_of(
    dataset: Any,  # noqa: ANN401 - any map-style dataset
    options: argparse.Namespace,
    **order: bool,
) -> MindSporeBatches:
    """Return batches in two columns: images (B, 3, S, S), and targets (B, `max_objects`, 6).

    The shapes are always the same, so that a graph is compiled once.
    """
    workers: dict[str, Any] = {"num_workers": options.num_workers}
    if options.num_workers:  # MindSpore has threads, which a fork does not survive
        workers |= {"multiprocessing_context": "forkserver", "persistent_workers": True}
    loader = Loader(
        dataset,
        batch_size=options.batch_size,
        collate_fn=YOLOCollate(STRIDE_PX),
        seed=options.seed,
        **order,
        **workers,
    )
    names = ["images", "targets"]
    pad = {"targets": MISSING}
    return to_mindspore(loader, names, transform=columns, pad=pad, pad_to=options.max_objects)


def make_step(
    net: nn.Cell, optimizer: nn.Optimizer, scaler: amp.LossScaler
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Return a function that trains on a batch: its loss, and whether its gradients were finite.

    If they were not, the weights stay as they are and the loss scale is halved.
    """

    def scaled_loss(images: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401
        loss = detection_loss(*net(images), targets)
        return scaler.scale(loss), loss

    gradients_of = mindspore.value_and_grad(scaled_loss, None, optimizer.parameters, has_aux=True)

    @mindspore.jit
    def step(images: Any, targets: Any) -> tuple[Any, Any]:  # noqa: ANN401
        (_, loss), gradients = gradients_of(images, targets)
        gradients = scaler.unscale(gradients)
        is_finite = amp.all_finite(gradients)
        if is_finite:  # what torch's GradScaler.step does
            optimizer(gradients)
        scaler.adjust(is_finite)  # and GradScaler.update
        return loss, is_finite

    return step


def train(options: argparse.Namespace, dataset: MixUp, recipe: Recipe) -> None:
    """Print the losses of each epoch."""
    mindspore.set_seed(options.seed)  # the network's first weights
    whole = YOLODetection(options.folder, "val", transform=Letterbox(recipe.size_px))
    validation = batches_of(whole, options)
    training = batches_of(dataset, options, shuffle=True, drop_last=True)
    net, averaged = (TinyDetector(len(dataset.class_names)) for _ in range(2))
    # On Ascend and GPUs, in place of torch's autocast: amp.auto_mixed_precision(net, "O2").
    optimizer = nn.AdamWeightDecay(net.trainable_params(), LEARNING_RATE, weight_decay=0.01)
    scaler = amp.DynamicLossScaler(options.loss_scale, 2, 2000)
    ema, step = EMA(net), make_step(net, optimizer, scaler)

    @mindspore.jit
    def loss_of(images: Any, targets: Any) -> Any:  # noqa: ANN401
        return detection_loss(*averaged(images), targets)

    net.set_train()
    averaged.set_train(False)
    for epoch in range(recipe.epochs):
        losses = []
        for images, targets in training:
            loss, is_finite = step(images, targets)
            if is_finite:
                ema.update()
                losses.append(float(loss))
        ema.copy_to(averaged)
        of_validation = statistics.fmean(float(loss_of(*batch)) for batch in validation)
        print(
            f"epoch {epoch}: loss {statistics.fmean(losses):.3f}, validation of the averages "
            f"{of_validation:.3f}, loss scale {float(scaler.scale_value):g}",
            flush=True,
        )


def verify(options: argparse.Namespace, dataset: MixUp, epochs: int) -> int:
    """Compare every byte of the batches with those of torch's program; 0 if all are equal."""
    ours = batches_of(dataset, options, shuffle=True, drop_last=True)
    loader = training_loader(dataset, options.batch_size, 0, options.seed)
    count = 0
    for _ in range(epochs):
        for (images, targets, _), (own, padded) in zip(loader, ours, strict=True):
            rows = padded.asnumpy().reshape(-1, 6)
            rows = rows[rows[:, 0] != MISSING]
            for theirs, here in ((images.numpy(), own.asnumpy()), (targets.numpy(), rows)):
                if theirs.tobytes() != here.tobytes() or theirs.shape != here.shape:
                    print(f"batch {count} differs")
                    return 1
            count += 1
    print(f"{count} batches of {epochs} epochs: torch and MindSpore have the same bytes")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with data.yaml, images/ and labels/")
    parser.add_argument("--size", type=int, default=Recipe.size_px, help="in pixels")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--close-mosaic", type=int, default=1, metavar="EPOCHS")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-objects", type=int, default=300, help="rows of targets per image")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--loss-scale", type=float, default=65536.0, help="to begin with")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--verify", action="store_true", help="compare with torch's batches")
    options = parser.parse_args()
    recipe = Recipe(options.size, options.epochs, options.close_mosaic)
    dataset = training_set(options.folder, recipe)
    if options.verify:
        return verify(options, dataset, recipe.epochs)
    train(options, dataset, recipe)
    return 0


if __name__ == "__main__":
    sys.exit(main())
