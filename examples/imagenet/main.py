# SPDX-License-Identifier: Apache-2.0
"""Train a classifier on ImageNet, or on any folder with train/CLASS/*.jpg and val/CLASS/*.jpg.

One process alone, or one for each GPU, started by torchrun.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or it holds it beyond the end
from folder import EvalTransform, ImageFolder, TrainTransform
from models import ARCHITECTURES, make_model
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

# isort: split
from penstock.torch import DataLoader, DistributedSampler, Subset


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("data", type=Path, help="folder of train/CLASS/*.jpg and val/CLASS/*.jpg")
    parser.add_argument("--arch", choices=ARCHITECTURES, default="resnet18", help="the network")
    parser.add_argument("--size", type=int, default=224, help="of images, in pixels")
    parser.add_argument("--epochs", type=int, default=90, help="to train")
    parser.add_argument("--batch-size", type=int, default=256, help="of all ranks together")
    parser.add_argument("--lr", type=float, default=0.1, help="at first")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--weight-decay", type=float, default=1e-4, help="of SGD")
    parser.add_argument("--workers", type=int, default=4, help="of each rank")
    parser.add_argument("--print-every", type=int, default=10, help="steps")
    parser.add_argument("--save-every", type=int, default=1000, help="steps; and after each epoch")
    parser.add_argument("--max-steps", type=int, help="save and end after so many in this run")
    parser.add_argument("--checkpoint", type=Path, default="checkpoint.pt", help="the file")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--seed", type=int, help="of torch: weights, orders, augmentations")
    parser.add_argument("--data-seed", type=int, help="the same batches for any --workers")
    return parser.parse_args()


class AverageMeter:
    """The last value, and the mean of all, of a loss or a time."""

    def __init__(self, name: str, form: str) -> None:
        self.name, self.form = name, form
        self.value = self.sum = 0.0
        self.count = 0

    def update(self, value: float, count: int = 1) -> None:
        self.value = value
        self.sum += value * count
        self.count += count

    def __str__(self) -> str:
        mean = self.sum / max(self.count, 1)
        return f"{self.name} {self.value:{self.form}} ({mean:{self.form}})"


@dataclass
class Training:
    """What a checkpoint holds, beside the place it was saved at."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loader: DataLoader[tuple[Tensor, Tensor]]
    args: argparse.Namespace
    epoch: int = 0
    steps_left: float = float("inf")

    def save(self) -> None:
        state = {
            "epoch": self.epoch,
            "model": bare(self.model).state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
        }
        if rank() == 0:
            part = self.args.checkpoint.with_suffix(".part")
            torch.save(state, part)
            part.replace(self.args.checkpoint)  # there is always a whole one

    def resume(self) -> None:
        saved = torch.load(self.args.checkpoint, map_location="cpu")
        self.epoch = saved["epoch"]
        bare(self.model).load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(saved["loader"])


def main() -> None:
    args = parse()
    end_if_missing(args)
    if args.seed is not None:
        torch.manual_seed(args.seed)
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    run(args, device)
    if dist.is_initialized():
        gc.collect()  # the model first: after the group, it may wait for ever
        dist.destroy_process_group()


def run(args: argparse.Namespace, device: torch.device) -> None:
    loader, val_loader, num_classes = make_loaders(args)
    model: nn.Module = make_model(args.arch, num_classes).to(device)
    if dist.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay
    )
    training = Training(model, optimizer, loader, args, steps_left=args.max_steps or float("inf"))
    if args.resume:
        training.resume()
    while training.epoch < args.epochs and training.steps_left > 0:
        train(training, device)
        if training.steps_left > 0:
            validate(model, val_loader, device)
            training.epoch += 1
        training.save()


def end_if_missing(args: argparse.Namespace) -> None:
    for name in ("train", "val"):
        if not (args.data / name).is_dir():
            there = ", ".join(sorted(path.name for path in args.data.glob("*") if path.is_dir()))
            sys.exit(f"{args.data}: no folder {name}; there are {there or 'none'}")
    if args.resume and not args.checkpoint.exists():
        sys.exit(f"--resume: there is no {args.checkpoint}")


def make_loaders(args: argparse.Namespace) -> tuple[DataLoader[Any], DataLoader[Any], int]:
    train_set = ImageFolder(args.data / "train", TrainTransform(args.size))
    val_set = ImageFolder(args.data / "val", EvalTransform(args.size))
    sampler = DistributedSampler(train_set) if dist.is_initialized() else None
    options: dict[str, Any] = {"num_workers": args.workers, "pin_memory": torch.cuda.is_available()}
    options |= {
        "batch_size": args.batch_size // num_ranks(),
        "persistent_workers": args.workers > 0,
    }
    options |= {"seed": args.data_seed}
    loader = DataLoader(train_set, shuffle=sampler is None, sampler=sampler, **options)
    share = Subset(val_set, range(rank(), len(val_set), num_ranks()))  # each image counts once
    return loader, DataLoader(share, **options), len(train_set.classes)


def train(training: Training, device: torch.device) -> None:
    training.model.train()
    adjust_lr(training)
    if isinstance(training.loader.sampler, DistributedSampler):
        training.loader.sampler.set_epoch(training.epoch)
    meters = AverageMeter("time", ".3f"), AverageMeter("data", ".3f"), AverageMeter("loss", ".6f")
    times, waits, losses = meters
    end = time.perf_counter()
    for step, (images, labels) in enumerate(training.loader, start=1):
        images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        waits.update(time.perf_counter() - end)
        loss = nn.functional.cross_entropy(training.model(images), labels)
        training.optimizer.zero_grad()
        loss.backward()
        training.optimizer.step()
        losses.update(loss.item(), len(labels))
        times.update(time.perf_counter() - end)
        if step % training.args.print_every == 0 and rank() == 0:
            print(f"epoch {training.epoch}, step {step}:", *meters, sep="  ", flush=True)
        if step % training.args.save_every == 0:
            training.save()
        training.steps_left -= 1
        if training.steps_left == 0:
            break
        end = time.perf_counter()


def adjust_lr(training: Training) -> None:
    """A tenth of the learning rate, every 30 epochs."""
    for group in training.optimizer.param_groups:
        group["lr"] = training.args.lr * 0.1 ** (training.epoch // 30)


@torch.inference_mode()
def validate(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> None:
    model.eval()
    right, count = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in loader:
        right += (bare(model)(images.to(device)).argmax(1) == labels.to(device)).sum()
        count += len(labels)
    counts = torch.stack([right, count])
    if dist.is_initialized():
        dist.all_reduce(counts)
    if rank() == 0:
        print(f"validation: {counts[0]} of {counts[1]} right", flush=True)


def bare(model: nn.Module) -> nn.Module:
    """The network as one process has it: what a checkpoint fits for any number of ranks."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


if __name__ == "__main__":
    main()
