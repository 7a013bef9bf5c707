# SPDX-License-Identifier: Apache-2.0
"""Train boxes, landmarks and poses of faces at once, from one XML data set.

python train.py build/landmarks/faces
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from data import UNKNOWN, Faces
from model import FaceNet, landmark_errors, losses

import penstock
from penstock.errors import StoreError
from penstock.sampling import ClassBalancedSampler
from penstock.torch import DataLoader

HEADS = ("box", "landmarks", "pose")


@torch.inference_mode()
def evaluate(network: FaceNet, loader: DataLoader[dict[str, torch.Tensor]]) -> tuple[float, float]:
    """Return the mean landmark error in inter-ocular distances, and the share of right poses."""
    network.eval()
    errors, right = [], []
    for faces in loader:
        predicted = network(faces["image"])
        errors.append(landmark_errors(predicted["landmarks"], faces["landmarks"]))
        told = faces["pose"] != UNKNOWN
        right.append((predicted["pose"].argmax(1) == faces["pose"])[told])
    return torch.cat(errors).mean().item(), torch.cat(right).float().mean().item()


def told(error: float, share: float) -> str:
    return f"mean landmark error {error:.3f} inter-ocular distances, {share:.0%} of poses right"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", type=Path, help="what `penstock convert` wrote")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--samples", type=int, default=256, help="faces in an epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()

    seed = penstock.seed_everything(arguments.seed)
    try:
        train = Faces(arguments.data, "train", augment=True)
        test = Faces(arguments.data, "test", augment=False)
    except (StoreError, ValueError) as error:  # the folder is the user's to mend: no traceback
        sys.exit(f"{type(error).__name__}: {error}")
    # Faces without a pose are one class more: they are trained on for their boxes.
    sampler = ClassBalancedSampler(train, num_samples=arguments.samples, seed=seed)
    names = [train.pose_names[code] if code >= 0 else "unknown" for code in sampler.classes]
    for name, count, share in zip(names, sampler.counts, sampler.shares, strict=True):
        print(f"{name:8} {count:3} faces, {count / len(train):4.0%} of them, {share:4.0%} shown")
    loader = DataLoader(
        train,
        batch_size=arguments.batch_size,
        sampler=sampler,
        num_workers=arguments.workers,
        persistent_workers=arguments.workers > 0,
        seed=seed,
    )
    test_loader = DataLoader(test, batch_size=arguments.batch_size, seed=seed)

    network = FaceNet(len(train.pose_names))
    optimizer = torch.optim.AdamW(network.parameters(), weight_decay=0.01)
    num_steps = arguments.epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=num_steps)
    print(f"untrained: {told(*evaluate(network, test_loader))}")
    for epoch in range(arguments.epochs):
        network.train()
        sums = dict.fromkeys(HEADS, 0.0)
        for faces in loader:
            parts = losses(network(faces["image"]), faces)
            optimizer.zero_grad()
            (parts["box"] + parts["landmarks"] + parts["pose"]).backward()
            optimizer.step()
            schedule.step()
            sums = {name: total + parts[name].item() for name, total in sums.items()}
        means = ", ".join(f"{name} {total / len(loader):.4f}" for name, total in sums.items())
        print(f"epoch {epoch:2}  loss {sum(sums.values()) / len(loader):.4f}  ({means})")
    print(f"trained: {told(*evaluate(network, test_loader))}")


if __name__ == "__main__":
    main()
