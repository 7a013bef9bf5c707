# SPDX-License-Identifier: Apache-2.0
"""A tiny masked language model trained by Transformers' Trainer; what each step was given.

    torchrun --nproc-per-node=2 -m tests.clients.trainer_run FOLDER CHECKPOINT

writes `rank<r>.json` into FOLDER: a run, what a resumed one does, and one that goes on at the
CHECKPOINT of another number of processes.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.nn  # see tests.distributed.launching.TORCHRUN
import torch.utils.data
from tests.clients.torchvision_operators import declare_missing

declare_missing()  # transformers imports torchvision where it is installed

from tokenizers import Tokenizer  # noqa: E402
from tokenizers.models import WordLevel  # noqa: E402
from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from penstock.integrations.transformers import (  # noqa: E402
    PenstockTrainer,
    PenstockTrainerMixin,
)

LENGTH = 26
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


class Sentences(torch.utils.data.Dataset):
    """Token ids of different lengths, the first of which is the sample's number."""

    def __init__(self, length=LENGTH):
        self.length = length
        self.read = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)  # group_by_length iterates until then
        self.read.append(index)
        tokens = [10 + (index * step) % 40 for step in range(1, 3 + index % 5)]
        return {"input_ids": [10 + index, *tokens], "number": index}


def tokenizer():
    words = {word: number for number, word in enumerate([*SPECIAL, *map(str, range(5, 64))])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]",
    )  # fmt: skip


class Masking:
    """A collator that draws which tokens are masked; it lets the samples' numbers through."""

    def __init__(self):
        self.mask = DataCollatorForLanguageModeling(tokenizer())

    def __call__(self, samples):
        numbers = [sample["number"] for sample in samples]
        batch = self.mask([{"input_ids": sample["input_ids"]} for sample in samples])
        return {**batch, "number": torch.tensor(numbers)}


class Noting:
    """A trainer that notes what each step is given."""

    def training_step(self, model, inputs, *rest):
        self.given = getattr(self, "given", [])
        numbers = inputs.pop("number")
        self.given.append([numbers.tolist(), inputs["input_ids"].tolist()])
        return super().training_step(model, inputs, *rest)

    def prediction_step(self, model, inputs, *rest, **named):
        self.evaluated = getattr(self, "evaluated", [])
        self.evaluated += inputs.pop("number").tolist()
        return super().prediction_step(model, inputs, *rest, **named)


class OfTorch(Noting, Trainer):
    """On torch's engine."""


class Ours(Noting, PenstockTrainer):
    """On Penstock's."""


class Users(PenstockTrainerMixin, OfTorch):
    """A `Trainer` of one's own with the mixin."""


def model():
    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForMaskedLM(config)


def trainer(kind, folder, *, data=None, loader_options=None, eval_loader_options=None, **settings):
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "num_train_epochs": 2,
        "save_steps": 5,
        "gradient_accumulation_steps": 2,
        "seed": 5,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "ddp_backend": "gloo" if "RANK" in os.environ else None,
        "ddp_find_unused_parameters": False,
        "learning_rate": 1e-2,
        **settings,
    }
    options = {
        "loader_options": loader_options,
        "eval_loader_options": eval_loader_options,
    }
    return kind(
        model(),
        TrainingArguments(str(folder), **settings),
        data_collator=Masking(),
        train_dataset=Sentences() if data is None else data,
        eval_dataset=Sentences(7),
        **({} if kind is OfTorch else options),
    )


def weights(made):
    return [float(p.detach().double().sum()) for p in made.model.parameters()]


def run(folder, **settings):
    """All steps; then those after the first checkpoint, by a trainer that resumes there."""
    whole = trainer(Ours, folder, **settings)
    whole.train()
    data = Sentences()
    resumed = trainer(Ours, folder, data=data, **settings)
    resumed.train(resume_from_checkpoint=str(folder / "checkpoint-5"))
    return {
        "given": whole.given,
        "given_after": resumed.given,
        "num_read": len(data.read),
        "weights": weights(whole),
        "weights_after": weights(resumed),
    }


def given_after(checkpoint, folder, **settings):
    """What the steps after a checkpoint are given."""
    made = trainer(Ours, folder, save_strategy="no", **settings)
    made.train(resume_from_checkpoint=str(checkpoint))
    return made.given


if __name__ == "__main__":
    warnings.simplefilter("error", UserWarning)
    folder = Path(sys.argv[1])
    noted = run(folder, per_device_train_batch_size=1)
    noted["taken_over"] = given_after(sys.argv[2], folder, per_device_train_batch_size=1)
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(noted))
    torch.distributed.barrier()
    gc.collect()  # see tests.distributed.launching.TORCHRUN
    torch.distributed.destroy_process_group()
