# SPDX-License-Identifier: Apache-2.0
"""examples/yolo in MindSpore: torch's bytes, a loss that falls, moving averages, a loss scale."""

from __future__ import annotations

import re

from tests.examples.programs import run
from tests.examples.test_yolo import FOLDER, scenes

IN_PROGRAMS = ("mindspore",)  # it has threads, so this process had better not import it
__all__ = ["scenes"]

PROGRAM = FOLDER / "train_mindspore.py"
LINE = re.compile(r"epoch \d: loss (\S+), validation of the averages (\S+), loss scale (\S+)")

STEPS = f"""
import math, sys
import numpy as np
sys.path.insert(0, {str(FOLDER)!r})
import mindspore
from mindspore import amp, nn
from model_mindspore import TinyDetector
from train_mindspore import EMA, make_step

net = TinyDetector(2)
net.set_train()
weights = net.trainable_params()
scaler = amp.DynamicLossScaler(1024.0, 2, 100)
step = make_step(net, nn.SGD(weights, 0.01), scaler)
ema = EMA(net, decay=0.9, tau=2.0)
values = lambda: np.concatenate([w.asnumpy().ravel() for w in weights])
images = np.ones((2, 3, 32, 32), np.float32)
targets = np.full((2, 4, 6), -1, np.float32)
targets[1, 0] = 1, 0, 0.5, 0.5, 0.5, 0.5
for pixel in (0.5, np.inf, 0.5):
    images[0, 0, 0, 0] = pixel
    before = values()
    _, is_finite = step(mindspore.Tensor(images), mindspore.Tensor(targets))
    if is_finite:
        ema.update()
        first = ema.steps == 1
        expected = before if first else expected
        decay = 0.9 * (1 - math.exp(-ema.steps / 2.0))
        expected = expected * decay + values() * (1 - decay)
    print(bool(is_finite), not np.array_equal(values(), before), float(scaler.scale_value))
    found = {{p.name: p for p in ema.averages}}
    mean = np.concatenate([found["ema." + w.name].asnumpy().ravel() for w in weights])
    assert np.allclose(mean, expected, atol=1e-6)
"""


def test_every_byte_of_two_epochs_is_torchs(scenes):
    printed = run(PROGRAM, scenes, "--verify", "--size", 64, "--batch-size", 4)
    assert printed == "6 batches of 2 epochs: torch and MindSpore have the same bytes\n"


def test_two_epochs_train(scenes):
    printed = run(PROGRAM, scenes, "--size", 64, "--batch-size", 2, "--num-workers", 1)
    first, second = (LINE.fullmatch(line).groups() for line in printed.splitlines())
    assert first[2] == second[2] == "65536"
    assert float(second[0]) < float(first[0])
    assert float(second[1]) > 0  # and no NaN: 12 steps are too few for statistics of batches


def test_a_step_that_overflows_changes_no_weight_and_halves_the_loss_scale():
    assert run("-c", STEPS).splitlines() == [
        "True True 1024.0",
        "False False 512.0",
        "True True 512.0",
    ]
