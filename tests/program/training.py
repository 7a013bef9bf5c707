# SPDX-License-Identifier: Apache-2.0
"""A training, under `penstock run` and without."""

from __future__ import annotations

from tests.program.running import PYTHON, RUN, environment, ran, written

# A training: seeded, shuffled, with random numbers in workers, an epoch that is left early, and a
# loader that is made anew each time.
TRAINING = """
import sys
import torch
from torch.utils.data import DataLoader, Dataset

class Noisy(Dataset):
    def __len__(self):
        return 103
    def __getitem__(self, index):
        return torch.full((4,), float(index)) + torch.randn(4), index % 2

def main():
    num_workers = int(sys.argv[1])
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    train = DataLoader(
        Noisy(), batch_size=8, shuffle=True, num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    for epoch in range(3):
        for step, (inputs, labels) in enumerate(train):
            if (epoch, step) == (1, 5):
                break
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for inputs, labels in DataLoader(Noisy(), batch_size=50, num_workers=num_workers):
                loss = loss + model(inputs).sum()
        print(epoch, loss.item(), len(train), torch.rand(1).item())

if __name__ == "__main__":
    main()
"""


def run(folder, source, *options, words=(), status=0, **variables):
    """Run a program under `penstock run`, or without where the options are None, to its end."""
    written(folder / "train.py", source)
    command = PYTHON if options == (None,) else (*RUN, *map(str, options))
    done = ran([*command, "train.py", *map(str, words)], folder, env=environment(**variables))
    assert done.returncode == status, done.stderr
    return done
