# SPDX-License-Identifier: Apache-2.0
"""Train a small transformer on the token files that texts.py wrote.

One process alone, or several ranks started by torchrun. With --resume, a run that was killed goes
on from its checkpoint, in the middle of an epoch: the same batches and, on as many threads, the
same losses, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # before there is a group, or it holds it beyond the end
from model import Transformer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from penstock.data import ConcatDataset
from penstock.sampling import DistributedSampler, MixtureSampler, PackingSampler
from penstock.text import PackedCollate, TokenFile, lengths_of
from penstock.torch import DataLoader

if TYPE_CHECKING:
    import numpy as np

KINDS = "prose", "code"
VALIDATION_STEPS = 8
WARM_UP = 0.05  # of the run
IGNORED = -100  # cross_entropy leaves such labels out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("texts", type=Path, help="the folder that texts.py wrote")
    parser.add_argument("--out", type=Path, default="runs/packed", help="folder of the checkpoint")
    parser.add_argument("--data", choices=["packed", "padded", "mixture"], default="packed")
    parser.add_argument("--steps", type=int, default=600, help="to train")
    parser.add_argument("--rows", type=int, default=4, help="in a step, of all ranks together")
    parser.add_argument("--row-tokens", type=int, default=512, help="tokens in a row")
    parser.add_argument("--width", type=int, default=256, help="of the network, a multiple of 64")
    parser.add_argument("--layers", type=int, default=3, help="of the network")
    parser.add_argument("--lr", type=float, default=2e-3, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0, help="of weights and batches")
    parser.add_argument("--workers", type=int, default=0, help="of each rank")
    parser.add_argument("--print-every", type=int, default=10, help="steps")
    parser.add_argument("--save-every", type=int, default=50, help="steps; validates, too")
    parser.add_argument("--max-steps", type=int, help="save and end after so many in this run")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    return parser.parse_args()


def texts_of(args: argparse.Namespace, split: str) -> dict[str, Any]:
    """Return prose and code. A sample is a document; in a mixture, a row of joined documents."""
    files = {
        kind: TokenFile(args.texts / f"{kind}-{split}", max_tokens=args.row_tokens)
        for kind in KINDS
    }
    if args.data == "mixture":
        return {kind: file.blocks(args.row_tokens) for kind, file in files.items()}
    return files


def loader_for(args: argparse.Namespace) -> DataLoader[dict[str, Any]]:
    """Return the loader of this rank's share of each step."""
    texts = texts_of(args, "train")
    documents = ConcatDataset(list(texts.values()))
    rows = args.rows // num_ranks()
    options: dict[str, Any] = {"num_workers": args.workers, "seed": args.seed}
    options["persistent_workers"] = args.workers > 0
    options["collate_fn"] = padded if args.data == "padded" else PackedCollate(args.row_tokens)
    if args.data == "mixture":
        num_rows = args.steps * args.rows
        order = MixtureSampler(texts, weights_of(num_rows), num_rows)  # the run is one epoch
        share = DistributedSampler(order, num_ranks(), rank())
        return DataLoader(documents, batch_size=rows, sampler=share, **options)
    packs = PackingSampler(lengths_of(documents), args.row_tokens, rows, drop_last=True)
    return DataLoader(documents, batch_sampler=packs, **options)


def weights_of(num_rows: int) -> list[tuple[int, dict[str, float]]]:
    """Return the weights of the sources, and from which row of a run of so many they hold."""
    return [(0, {"prose": 3, "code": 1}), (num_rows // 2, {"prose": 1, "code": 3})]


def padded(documents: list[np.ndarray]) -> dict[str, Any]:
    """Return a batch with a row for each document, as PackedCollate makes one of packed rows."""
    lengths = torch.tensor([len(document) for document in documents])
    rows = nn.utils.rnn.pad_sequence([torch.as_tensor(d) for d in documents], batch_first=True)
    places = torch.arange(rows.shape[1]).expand_as(rows)
    is_token = places < lengths[:, None]
    labels = rows.where(is_token & (places > 0), IGNORED)
    return {
        "input_ids": rows,
        "labels": labels,
        "position_ids": places,
        "document_ids": is_token.int() - 1,
        "num_tokens": int((labels != IGNORED).sum()),
    }


def summed_loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Return the sum over all labels, each compared with the logits of the token before it."""
    logits = model(batch["input_ids"], batch["position_ids"], batch["document_ids"])
    labels = batch["labels"][:, 1:].flatten()
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels, reduction="sum")


def over_ranks(summed: Tensor, num_tokens: int) -> tuple[float, int]:
    """Return the mean loss over the tokens of all ranks, and their number."""
    totals = torch.stack([summed.detach().double(), torch.tensor(float(num_tokens)).double()])
    if is_many():
        dist.all_reduce(totals)
    return (totals[0] / totals[1]).item(), int(totals[1])


@torch.inference_mode()
def validate(model: nn.Module, args: argparse.Namespace) -> dict[str, float]:
    """Return the mean loss on some rows of each kind of text, the same ones every time."""
    losses = {}
    for kind, texts in texts_of(args, "val").items():
        packs = PackingSampler(lengths_of(texts), args.row_tokens, args.rows // num_ranks(), seed=0)
        loader = DataLoader(texts, batch_sampler=packs, collate_fn=PackedCollate(args.row_tokens))
        batches = list(itertools.islice(loader, VALIDATION_STEPS))
        total = sum(summed_loss(model, batch) for batch in batches)
        losses[kind], _ = over_ranks(total, sum(batch["num_tokens"] for batch in batches))
    return losses


class Training:
    """A run: what changes with each step, and its file."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.args = args
        tokenizer = Tokenizer.from_file(str(args.texts / "tokenizer.json"))
        size = tokenizer.get_vocab_size()
        self.network = Transformer(size, args.row_tokens, args.width, args.layers)
        self.model = DistributedDataParallel(self.network) if is_many() else self.network
        self.optimizer = torch.optim.AdamW(
            self.network.parameters(), args.lr, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.loader = loader_for(args)
        self.history: list[dict[str, float]] = []  # a line for each step

    def train_on(self, batch: dict[str, Any]) -> dict[str, float]:
        """Take a step; return its line."""
        step, num_steps = len(self.history), self.args.steps
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / num_steps)
        factor = min(cosine, (step + 1) / (WARM_UP * num_steps))
        self.optimizer.param_groups[0]["lr"] = self.args.lr * factor
        summed = summed_loss(self.model, batch)
        loss, num_tokens = over_ranks(summed, batch["num_tokens"])
        self.optimizer.zero_grad()
        (summed * num_ranks() / num_tokens).backward()  # DDP takes the mean of the gradients
        nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        return {"step": step + 1, "loss": loss, "tokens": num_tokens}

    def save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "loader": self.loader.state_dict(),
            "history": self.history,
        }
        if rank() == 0:
            part = self.args.out / "checkpoint.part"
            torch.save(state, part)
            part.replace(self.args.out / "checkpoint.pt")  # there is always a whole one

    def resume(self) -> None:
        saved = torch.load(self.args.out / "checkpoint.pt")
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.loader.load_state_dict(saved["loader"])
        self.history = saved["history"]

    def run(self) -> None:
        """Train to the end, epoch after epoch."""
        args = self.args
        last = min(args.steps, len(self.history) + (args.max_steps or args.steps))
        while len(self.history) < last:
            began = time.perf_counter()
            for batch in self.loader:
                line = self.train_on(batch)
                line["seconds"] = time.perf_counter() - began
                self.history.append(line)
                step = len(self.history)
                is_saved = step % args.save_every == 0 or step == last
                if is_saved:
                    line |= validate(self.network, args)
                if rank() == 0 and (is_saved or step % args.print_every == 0):
                    print(*(f"{name} {value:.6g}" for name, value in line.items()), flush=True)
                if is_saved:
                    self.save()
                if step == last:
                    break
                began = time.perf_counter()


def is_many() -> bool:
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if is_many() else 0


def num_ranks() -> int:
    return dist.get_world_size() if is_many() else 1


def main() -> None:
    args = parse()
    if args.resume and not (args.out / "checkpoint.pt").exists():
        sys.exit(f"--resume: there is no {args.out / 'checkpoint.pt'}")
    args.out.mkdir(parents=True, exist_ok=True)
    if "RANK" in os.environ:  # torchrun sets it
        dist.init_process_group("gloo")
    if args.rows % num_ranks():
        sys.exit(f"--rows {args.rows}: should be a multiple of the {num_ranks()} ranks")
    training = Training(args)
    if args.resume:
        training.resume()
    training.run()
    if is_many():
        del training
        gc.collect()  # the model first: after the group, it may wait for ever
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
