# SPDX-License-Identifier: Apache-2.0
"""Train RetinaNet on a folder of VOC XML.

    python train.py FOLDER --out runs/first              # begins
    python train.py FOLDER --out runs/first --resume     # goes on, from the middle of an epoch

OUT/log.jsonl has a line for each step, OUT/checkpoint.pt the whole run: network, optimizer,
schedule, random numbers, and where the loader is. A run that was killed and resumed takes the same
steps as one that was not: the same batches and, on a CPU with as many threads, the same losses, bit
for bit. Ctrl-C, SIGTERM and the end of `--seconds` save before they end the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO, get_args

import checkpoint
import step_log
import torch
from data import Balance, loader_for, sampler_for, training_set
from losses import retinanet_losses
from model import ModelOptions, Norm, RetinaNet, load_backbone

from penstock import seed_everything
from penstock.errors import StoreError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

WARM_UP_STEPS: Final = 100  # or a tenth of the run, if that is less
LEAST_FACTOR: Final = 0.01  # of the learning rate, at the end
MAX_GRADIENT_NORM: Final = 5.0
SIGNALLED: Final = 128  # and the signal's number, so that `train.py && evaluate.py` ends there
PACE_STEPS: Final = 10  # are timed, after the first one, which starts the workers


@dataclass(frozen=True)
class Options:
    """All that a run depends on; the command line's words."""

    data: Path
    out: Path
    split: str = "train"
    size: tuple[int, int] = (480, 640)
    epochs: int = 50
    seconds: float | None = None
    batch_size: int = 8
    seed: int = 0
    balance: Balance = "repeat"
    threshold: float = 0.5
    alpha: float = 0.5
    mosaic: bool = False
    vertical_flip: bool = False
    learning_rate: float = 1e-3
    weight_decay: float = 0.05
    depth: int = 18
    width: float = 1.0
    pyramid_channels: int = 256
    num_convolutions: int = 4
    norm: Norm = "batch"
    weights_backbone: str | None = None
    anchor_sides: float = 4.0
    num_workers: int = 2
    save_every: int = 100
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    resume: bool = False

    @property
    def checkpoint(self) -> Path:
        """The file that holds the run."""
        return self.out / "checkpoint.pt"

    @property
    def log(self) -> Path:
        """The file with a line for each step."""
        return self.out / "log.jsonl"


# What may differ when a run goes on: it changes no batch.
FREE: Final = {"data", "out", "num_workers", "save_every", "device", "resume"}


class Stopping:
    """Notes SIGTERM and Ctrl-C, so that the step that is under way can be finished and saved.

    A second Ctrl-C raises KeyboardInterrupt: the steps since the last save are lost.
    """

    asked_by: signal.Signals | None = None

    def __enter__(self) -> Stopping:
        self._before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        if self.asked_by and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked_by = signal.Signals(number)


class Run:
    """A training: what changes with each step, and how it is saved."""

    def __init__(self, options: Options) -> None:
        """Make it as it begins: the same for the same options."""
        seed_everything(options.seed)
        self.options = options
        self.device = torch.device(options.device)
        dataset = training_set(
            options.data,
            options.split,
            options.size,
            # The last epochs on whole images, as those that it will be asked about.
            mosaic_until=math.ceil(0.8 * options.epochs) if options.mosaic else 0,
            vertical_flip=options.vertical_flip,
        )
        self.class_names = tuple(dataset.class_names)
        self.loader = loader_for(
            dataset,
            options.batch_size,
            seed=options.seed,
            num_workers=options.num_workers,
            sampler=sampler_for(
                dataset,
                options.balance,
                seed=options.seed,
                threshold=options.threshold,
                alpha=options.alpha,
            ),
            shuffle=True,
            drop_last=True,
            device=self.device,
        )
        shared = {field.name for field in dataclasses.fields(ModelOptions)} - {"num_classes"}
        model_options = {name: getattr(options, name) for name in shared}
        self.model = RetinaNet(ModelOptions(len(self.class_names), **model_options)).to(
            self.device, memory_format=torch.channels_last
        )
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.model, options.weight_decay), options.learning_rate
        )
        self.step = 0
        self.began = time.monotonic()
        self.num_steps = options.epochs * len(self.loader)

    @property
    def elapsed_s(self) -> float:
        """Seconds of training, those before an interruption included."""
        return time.monotonic() - self.began

    @property
    def is_out_of_time(self) -> bool:
        """Whether the seconds of `--seconds` are over."""
        seconds = self.options.seconds
        return bool(seconds) and self.elapsed_s >= seconds

    @property
    def progress(self) -> float:
        """Share of the run that is done, by steps or, if that is more, by the clock."""
        by_steps = self.step / self.num_steps
        seconds = self.options.seconds
        return min(1.0, max(by_steps, self.elapsed_s / seconds if seconds else 0.0))

    @property
    def is_over(self) -> bool:
        """Whether all epochs were trained on, or the seconds are over."""
        return self.loader.epoch >= self.options.epochs or self.is_out_of_time

    def pace(self, seconds_per_step: float) -> str:
        """Say what trains where, how fast, and how long that takes from here."""
        left_s = (self.num_steps - self.step) * seconds_per_step
        if self.options.seconds:
            left_s = max(0.0, min(left_s, self.options.seconds - self.elapsed_s))
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return (
            f"{self.device}, {num_parameters:,} parameters, {seconds_per_step:.3g} s per step: "
            f"about {timedelta(seconds=round(left_s))} h left"
        )

    def train_on(self, images: Tensor, targets: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Take a step; return the line for the log."""
        rate = self.options.learning_rate * schedule(
            self.progress, self.step, min(WARM_UP_STEPS, self.num_steps // 10)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        losses = retinanet_losses(*self.model(images), targets)
        loss = losses.classes + losses.boxes
        names = [target["image_id"] for target in targets]
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"the loss of step {self.step + 1} is {loss.item()} (learning rate {rate:.2g}, "
                f"images {', '.join(names)}). Try a lower --learning-rate, and look at these "
                "images by `penstock view`"
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRADIENT_NORM)
        self.optimizer.step()
        self.step += 1
        return {
            "step": self.step,
            "epoch": self.loader.epoch,
            "learning_rate": rate,
            "loss": loss.item(),
            "class_loss": losses.classes.item(),
            "box_loss": losses.boxes.item(),
            "positives": losses.num_positives,
            "images": names,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as `checkpoint.save` takes it."""
        options = dataclasses.asdict(self.options)
        return {
            "options": {**options, "data": str(self.options.data), "out": str(self.options.out)},
            "class_names": self.class_names,
            "model_options": dataclasses.asdict(self.model.options),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": {"step": self.step, "elapsed_s": self.elapsed_s},
            "random": checkpoint.random_states(),
            "loader": self.loader.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Be where `state` was taken.

        Raises:
            ValueError: options differ that decide the batches or the steps, or the data do.
        """
        now = {**dataclasses.asdict(self.options), "class_names": self.class_names}
        saved = {**state["options"], "class_names": state["class_names"]}
        differing = [
            f"{name} was {before!r} and is {now[name]!r}"
            for name, before in saved.items()
            if name not in FREE and now[name] != before
        ]
        if differing:
            raise ValueError(
                f"--resume goes on with the run of {self.options.out}, but "
                f"{'; '.join(differing)}. Give the same options, or another --out"
            )
        self.loader.load_state_dict(state["loader"])  # first: it refuses other data
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["schedule"]["step"]
        self.began = time.monotonic() - state["schedule"]["elapsed_s"]
        checkpoint.restore_random_states(state["random"])


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay the weights of convolutions; biases and norms have one dimension and are left alone."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def schedule(progress: float, step: int, warm_up_steps: int) -> float:
    """Return the factor of the learning rate: a warm-up, then half a cosine down to 1 %."""
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return min(1.0, (step + 1) / (warm_up_steps + 1)) * (LEAST_FACTOR + (1 - LEAST_FACTOR) * cosine)


def begun(options: Options) -> Run:
    """Return the run as it begins or, with `--resume`, as it was saved; OUT is ready for it."""
    if options.checkpoint.exists() and not options.resume:
        raise FileExistsError(
            f"{options.checkpoint} is there already. --resume goes on with it; for another run "
            "give another --out, or remove it"
        )
    run = Run(options)
    if options.checkpoint.exists():
        run.load_state_dict(checkpoint.load(options.checkpoint))
    elif options.weights_backbone:
        load_backbone(run.model.backbone, Path(options.weights_backbone))
    options.out.mkdir(parents=True, exist_ok=True)
    step_log.cut(options.log, run.step)
    return run


def train(run: Run) -> int:
    """Train to the end of the epochs, of the seconds, or until a signal; return the exit status."""
    options = run.options
    print(f"{run.loader.dataset}\nstep {run.step:,} of {run.num_steps:,}; log in {options.log}")
    if options.checkpoint.exists() and run.is_over:  # as it was saved: a restart adds no step
        done = f"epoch {run.loader.epoch} of {options.epochs}, {run.elapsed_s:,.0f} s"
        print(f"finished already ({done}); for more steps begin a run with other --epochs")
        return 0
    with Stopping() as stopping, options.log.open("a", encoding="utf-8") as log:
        try:
            train_epochs(run, log, stopping)
        except WorkerDied:
            if not stopping.asked_by:  # a SIGTERM to the process group ends the workers as well
                raise
        save(run, log)
    print(f"{run.step:,} steps in {run.elapsed_s:,.0f} s; {options.checkpoint}")
    stats = run.loader.stats()
    print(f"loader: waited for {stats.run.wait_share:.1%} of the time. {stats.verdict}")
    if stopping.asked_by:
        print(f"stopped by {stopping.asked_by.name}; --resume goes on")
        return SIGNALLED + stopping.asked_by
    return 0


def save(run: Run, log: TextIO) -> None:
    """Write the checkpoint, but first the lines of its steps: there is none without them."""
    step_log.sync(log)
    checkpoint.save(run.state_dict(), run.options.checkpoint)


def train_epochs(run: Run, log: TextIO, stopping: Stopping) -> None:
    """Take the steps that are left."""
    options = run.options
    first, first_at_s = run.step + 1, 0.0
    run.model.train()
    for epoch in range(run.loader.epoch, options.epochs):
        for images, targets in run.loader:
            step_log.add(log, run.train_on(images, targets))
            if run.step == first:
                first_at_s = run.elapsed_s
            elif run.step == first + PACE_STEPS:
                print(run.pace((run.elapsed_s - first_at_s) / PACE_STEPS), flush=True)
            if stopping.asked_by or run.is_out_of_time:
                return
            if run.step % options.save_every == 0:
                save(run, log)
        # Of the log: it has the steps before an interruption, too.
        lines = [line for line in step_log.read(options.log) if line["epoch"] == epoch]
        if lines:
            mean = statistics.fmean(line["loss"] for line in lines)
            end = f"learning rate {lines[-1]['learning_rate']:.2g}, {run.elapsed_s:,.0f} s"
            print(f"epoch {epoch + 1}/{options.epochs}: mean loss {mean:.3f}, {end}", flush=True)


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """The defaults, and the lines above as they are."""


def parsed(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    default = Options(Path(), Path())
    parser.add_argument("data", type=Path, help="folder of Annotations, JPEGImages, ImageSets")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        default=argparse.SUPPRESS,
        help="folder of log and checkpoint",
    )
    parser.add_argument("--resume", action="store_true", help="go on, if OUT has a checkpoint")
    parser.add_argument("--size", type=size_of, help="HEIGHTxWIDTH or one number, in px")
    parser.add_argument("--seconds", type=float, help="end by then; the clock decides the schedule")
    parser.add_argument("--mosaic", action="store_true", help="four images in one, for 4/5 of it")
    parser.add_argument("--vertical-flip", action="store_true", help="nothing has an up: cells")
    parser.add_argument("--balance", choices=get_args(Balance), help="of rare classes")
    parser.add_argument("--norm", choices=get_args(Norm), help="group for small batches")
    for name, (kind, text) in NUMBERS_AND_TEXTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=text)
    parser.set_defaults(
        **{field.name: getattr(default, field.name) for field in dataclasses.fields(Options)[2:]}
    )
    return Options(**vars(parser.parse_args(arguments)))


NUMBERS_AND_TEXTS: Final[dict[str, tuple[type, str]]] = {
    "split": (str, "a file of ImageSets/Main"),
    "epochs": (int, "to train"),
    "batch_size": (int, "images in a step"),
    "seed": (int, "of weights, orders, augmentations"),
    "threshold": (float, "repeat: a class in a smaller share of the images is rare"),
    "alpha": (float, "class: 0 shows classes as often as they are, 1 all alike"),
    "learning_rate": (float, "at its highest"),
    "weight_decay": (float, "of convolutions"),
    "depth": (int, "of the ResNet: 18, 34, 50, 101"),
    "width": (float, "of the ResNet: its channels by those of the paper"),
    "weights_backbone": (str, "file with the state dict of a torchvision ResNet"),
    "pyramid_channels": (int, "of pyramid and subnets"),
    "num_convolutions": (int, "of each subnet, before its last one"),
    "anchor_sides": (float, "side of the smallest anchor of a level, in its strides"),
    "num_workers": (int, "processes that load; no batch depends on it"),
    "save_every": (int, "steps from one checkpoint to the next"),
    "device": (str, "cpu, cuda, cuda:1"),
}


def size_of(text: str) -> tuple[int, int]:
    """Read "240x320", or "320" for a square."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run = begun(parsed(arguments))
    except (OSError, StoreError, ValueError) as error:  # the user's to mend: no traceback
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    try:
        return train(run)
    except KeyboardInterrupt:
        print("aborted: what was not saved is lost", file=sys.stderr)
        return SIGNALLED + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
