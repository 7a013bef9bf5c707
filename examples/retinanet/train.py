# SPDX-License-Identifier: Apache-2.0
"""Train RetinaNet on a folder of VOC XML.

    python train.py FOLDER --out runs/first              # begins
    python train.py FOLDER --out runs/first --resume     # goes on, from the middle of an epoch

OUT/log.jsonl has a line for each step, OUT/checkpoint.pt the whole run: network, optimizer,
schedule, random numbers, and where the loader is. A run that was killed and resumed takes the same
steps as one that was not: the same batches and, on a CPU with as many threads, the same losses, bit
for bit. SIGTERM and the end of `--seconds` save before they end the run.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

import checkpoint
import torch
from data import Balance, loader_for, sampler_for, training_set
from losses import retinanet_losses
from model import ModelOptions, Norm, RetinaNet

from penstock import seed_everything
from penstock.errors import StoreError, WorkerDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

WARM_UP_STEPS: Final = 100  # or a tenth of the run, if that is less
LEAST_FACTOR: Final = 0.01  # of the learning rate, at the end
MAX_GRADIENT_NORM: Final = 5.0
TERMINATED: Final = 128 + signal.SIGTERM  # so that `train.py && evaluate.py` ends there


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
    """Notes a SIGTERM, so that the step that is under way can be finished and saved."""

    is_asked = False

    def __enter__(self) -> Stopping:
        self._before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self._before)

    def _note(self, *_: object) -> None:
        self.is_asked = True


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
    def progress(self) -> float:
        """Share of the run that is done, by steps or, if that is more, by the clock."""
        by_steps = self.step / self.num_steps
        seconds = self.options.seconds
        return min(1.0, max(by_steps, self.elapsed_s / seconds if seconds else 0.0))

    def train_on(self, images: Tensor, targets: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Take a step; return the line for the log."""
        rate = self.options.learning_rate * schedule(
            self.progress, self.step, min(WARM_UP_STEPS, self.num_steps // 10)
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        outputs = self.model(images.to(memory_format=torch.channels_last))
        losses = retinanet_losses(*outputs, targets)
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
    options.out.mkdir(parents=True, exist_ok=True)
    cut_log(options.log, run.step)
    return run


def train(run: Run) -> int:
    """Train to the end of the epochs, of the seconds, or until SIGTERM; return the exit status."""
    options = run.options
    print(f"{run.loader.dataset}\nstep {run.step:,} of {run.num_steps:,}; log in {options.log}")
    with Stopping() as stopping, options.log.open("a", encoding="utf-8") as log:
        try:
            train_epochs(run, log, stopping)
        except WorkerDied:
            if not stopping.is_asked:  # a SIGTERM to the process group ends the workers as well
                raise
        checkpoint.save(run.state_dict(), options.checkpoint)
    print(f"{run.step:,} steps in {run.elapsed_s:,.0f} s; {options.checkpoint}")
    stats = run.loader.stats()
    print(f"loader: waited for {stats.run.wait_share:.1%} of the time. {stats.verdict}")
    return TERMINATED if stopping.is_asked else 0


def train_epochs(run: Run, log: Any, stopping: Stopping) -> None:  # noqa: ANN401 - a text file
    """Take the steps that are left."""
    options = run.options
    run.model.train()
    for epoch in range(run.loader.epoch, options.epochs):
        total, count = 0.0, 0
        for images, targets in run.loader:
            line = run.train_on(images, targets)
            log.write(f"{json.dumps(line)}\n")
            log.flush()
            total, count = total + line["loss"], count + 1
            if stopping.is_asked or (options.seconds and run.elapsed_s >= options.seconds):
                return
            if run.step % options.save_every == 0:
                checkpoint.save(run.state_dict(), options.checkpoint)
        if count:
            mean = f"mean loss {total / count:.3f}, learning rate {line['learning_rate']:.2g}"
            print(f"epoch {epoch + 1}/{options.epochs}: {mean}, {run.elapsed_s:,.0f} s", flush=True)


def cut_log(path: Path, step: int) -> None:
    """Drop the lines of steps after `step`, which were not saved any more and come again."""
    lines = path.read_text("utf-8").splitlines(keepends=True) if path.exists() else []
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text("".join(lines[:step]), "utf-8")
    partial.replace(path)


def parsed(arguments: Sequence[str] | None) -> Options:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = Options(Path(), Path())
    parser.add_argument("data", type=Path, help="folder of Annotations, JPEGImages, ImageSets")
    parser.add_argument("--out", type=Path, required=True, help="folder of log and checkpoint")
    parser.add_argument("--resume", action="store_true", help="go on, if OUT has a checkpoint")
    parser.add_argument("--size", type=size_of, help="HEIGHTxWIDTH or one number, in px")
    parser.add_argument("--seconds", type=float, help="end by then; the clock decides the schedule")
    parser.add_argument("--mosaic", action="store_true", help="four images in one, for 4/5 of it")
    parser.add_argument("--vertical-flip", action="store_true", help="nothing has an up: cells")
    parser.add_argument("--balance", choices=get_args(Balance))
    parser.add_argument("--norm", choices=get_args(Norm))
    for name, kind in NUMBERS_AND_TEXTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.set_defaults(
        **{field.name: getattr(default, field.name) for field in dataclasses.fields(Options)[2:]}
    )
    return Options(**vars(parser.parse_args(arguments)))


NUMBERS_AND_TEXTS: Final[dict[str, type]] = {
    "split": str,
    "epochs": int,
    "batch_size": int,
    "seed": int,
    "threshold": float,
    "alpha": float,
    "learning_rate": float,
    "weight_decay": float,
    "depth": int,
    "width": float,
    "pyramid_channels": int,
    "num_convolutions": int,
    "anchor_sides": float,
    "num_workers": int,
    "save_every": int,
    "device": str,
}


def size_of(text: str) -> tuple[int, int]:
    """Read "240x320", or "320" for a square."""
    height, _, width = text.partition("x")
    return int(height), int(width or height)


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        run = begun(parsed(arguments))
    except (FileExistsError, StoreError, ValueError) as error:  # the user's to mend: no traceback
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return train(run)


if __name__ == "__main__":
    raise SystemExit(main())
