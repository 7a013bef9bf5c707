# SPDX-License-Identifier: Apache-2.0
"""Train on packed rows of images and their captions, with ranks whose steps cost the same.

A document is an image, a token for each patch, and then its caption, a token for each byte. The
images are drawn here: stripes, with a caption that names their colours.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import numpy as np
import torch
from model import Transformer
from PIL import Image, ImageDraw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_convert

from penstock.sampling import PackingSampler
from penstock.text import PackedCollate
from penstock.torch import DataLoader

PATCH = 8  # its side, in pixels
IMAGE, END = 256, 257  # tokens; those below are bytes
ENCODER_COST = 5.0  # of a patch, beside 1 for each token
NUM_PAIRS, ROW_TOKENS, ROWS = 4000, 512, 4
COLOURS = ("red", "green", "blue", "yellow", "white")


class Pairs:
    """Images and captions. Lengths and costs are known without an image."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.grids = rng.integers(2, 13, (NUM_PAIRS, 2)).tolist()  # rows and columns of patches
        self.stripes = [rng.choice(COLOURS, rng.integers(1, 6)) for _ in self.grids]
        self.captions = [", ".join(f"a {c} stripe" for c in row).encode() for row in self.stripes]
        self.num_patches = np.array([rows * columns for rows, columns in self.grids])
        self.lengths = self.num_patches + [len(caption) + 1 for caption in self.captions]
        self.costs = self.lengths + ENCODER_COST * self.num_patches

    def __len__(self) -> int:
        return NUM_PAIRS

    def __getitem__(self, index: int) -> dict[str, Any]:
        patches = self.patches(index)
        text = [*self.captions[index], END]
        return {
            "input_ids": [IMAGE] * len(patches) + text,
            "labels": [-100] * len(patches) + text,  # an image is not to be predicted
            "patches": patches,
            "cost": self.costs[index],
        }

    def patches(self, index: int) -> np.ndarray:
        """Draw; return the pixels of each patch and its place, float32 (patches, 194)."""
        rows, columns = self.grids[index]
        image = Image.new("RGB", (PATCH * columns, PATCH * rows))
        bounds = np.linspace(0, image.width, len(self.stripes[index]) + 1).astype(int).tolist()
        for colour, (left, right) in zip(
            self.stripes[index], itertools.pairwise(bounds), strict=True
        ):
            ImageDraw.Draw(image).rectangle((left, 0, right, image.height), str(colour))
        pixels = np.asarray(image).reshape(rows, PATCH, columns, PATCH, 3).swapaxes(1, 2) / 255
        places = np.indices((rows, columns)).reshape(2, -1).T / (rows, columns)
        return np.hstack([pixels.reshape(rows * columns, -1), places]).astype(np.float32)


def collated(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return packed rows, and the patches of all images one after the other."""
    patches = np.concatenate([pair.pop("patches") for pair in pairs])
    return default_convert({**PackedCollate(ROW_TOKENS)(pairs), "patches": patches})


class ImageText(nn.Module):
    """A transformer that is given patches wherever there is an IMAGE."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.transformer = Transformer(END + 1, ROW_TOKENS, width, num_layers=2)
        self.encoder = nn.Sequential(
            nn.Linear(3 * PATCH**2 + 2, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, batch: dict[str, Any]) -> Tensor:
        x = self.transformer.tokens(batch["input_ids"])
        # Documents come in the order of the samples, and so do the places of their patches.
        x[batch["input_ids"] == IMAGE] = self.encoder(batch["patches"])
        return self.transformer.decode(x, batch["position_ids"], batch["document_ids"])


def imbalance(pairs: Pairs, cost: np.ndarray | None) -> float:
    """Return how far the dearer of two ranks is above their mean, on average over the steps."""
    options = {"drop_last": True, "cost": cost, "seed": 0, "num_replicas": 2}
    ranks = [PackingSampler(pairs.lengths, ROW_TOKENS, ROWS, rank=k, **options) for k in (0, 1)]
    costs = np.array([[pairs.costs[batch].sum() for batch in packs] for packs in ranks])
    return float((costs.max(axis=0) / costs.mean(axis=0)).mean() - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=150, help="to train; an epoch has 184")
    steps = parser.parse_args().steps
    pairs = Pairs()
    for name, cost in {"tokens": None, "cost": pairs.costs}.items():
        print(f"2 ranks, balanced by {name}: one is {imbalance(pairs, cost):.2%} above the mean")
    packs = PackingSampler(pairs.lengths, ROW_TOKENS, ROWS, drop_last=True, cost=pairs.costs)
    loader = DataLoader(pairs, batch_sampler=packs, collate_fn=collated, seed=0)
    torch.manual_seed(0)
    model = ImageText()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    for step, batch in enumerate(itertools.islice(loader, steps), start=1):
        logits, labels = model(batch)[:, :-1], batch["labels"][:, 1:]
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0:
            cost, number = batch["cost"].sum(), len(batch["cost"])
            print(f"step {step}: loss {loss.item():.3f}, {number} pairs, cost {cost:,.0f}")


if __name__ == "__main__":
    main()
