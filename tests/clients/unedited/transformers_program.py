# SPDX-License-Identifier: Apache-2.0
"""A training with Transformers on torch's loader; the argument is the number of workers."""

from __future__ import annotations

import sys

import torch
from tests.clients.torchvision_operators import declare_missing

declare_missing()  # transformers imports torchvision where it is installed

from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        tokens = torch.randint(0, 50, (16,))
        return {"input_ids": tokens, "labels": tokens}


class Print(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        losses = logs.get("loss"), logs.get("eval_loss")
        sys.stdout.write(f"{state.global_step}: {losses}\n")


set_seed(4)
config = GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2)
arguments = TrainingArguments(
    "out",
    num_train_epochs=2,
    logging_steps=1,
    eval_strategy="epoch",
    save_strategy="no",
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
    dataloader_num_workers=int(sys.argv[1]),
)
trainer = Trainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=Tokens(),
    eval_dataset=Tokens(),
    callbacks=[Print()],
)
trainer.remove_callback(PrinterCallback)  # it prints how long each evaluation took
trainer.train()
