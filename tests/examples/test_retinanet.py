# SPDX-License-Identifier: Apache-2.0
"""examples/retinanet: its formulas against references, and its programs on real photos."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tests.examples.programs import imported

from penstock.errors import StoreError
from penstock.vision.convert import convert

FOLDER = Path(__file__).parents[2] / "examples" / "retinanet"
MODULES = (
    *("anchors", "checkpoint", "data", "evaluate", "losses", "model", "plot_losses", "step_log"),
    "train",
)
TINY = (
    *("--size", "96x128", "--width", "0.125", "--pyramid-channels", "16"),
    *("--num-convolutions", "1", "--anchor-sides", "2", "--batch-size", "4", "--epochs", "2"),
)
OBJECT = (
    "<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax>"
    "</bndbox></object>"
)


@pytest.fixture(scope="module")
def example():
    """The example's modules."""
    with imported(FOLDER, MODULES) as modules:
        yield SimpleNamespace(**modules)


@pytest.fixture(autouse=True)
def one_thread():
    """As the programs that run beside it have: sums of other threads differ in the last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def program(code, *arguments, **more):
    """Run code that may import the example's modules, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(FOLDER)},
        **more,
    )


@pytest.fixture(scope="module")
def cells(data_dir, tmp_path_factory):
    """A folder of 14 real photos: 12 to train with."""
    source, root = data_dir / "bccd", tmp_path_factory.mktemp("voc") / "cells"
    names = (source / "ImageSets/Main/train.txt").read_text().split()[:14]
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for name in names:
        shutil.copy(source / f"Annotations/{name}.xml", root / "Annotations")
        shutil.copy(source / f"JPEGImages/{name}.jpg", root / "JPEGImages")
    (root / "ImageSets/Main/train.txt").write_text("\n".join(names[:12]))
    (root / "ImageSets/Main/val.txt").write_text("\n".join(names[12:]))
    return root


def steps_of(out):
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


# Losses


def direct_focal_loss(logits, targets, alpha, gamma):
    """The paper's formula as it is written, in numbers of 64 bits."""
    p = 1 / (1 + np.exp(-np.asarray(logits, np.float64)))
    p_t = np.where(targets, p, 1 - p)
    return -np.where(targets, alpha, 1 - alpha) * (1 - p_t) ** gamma * np.log(p_t)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.5, 0.0), (0.75, 0.5), (0.25, 5.0)])
def test_focal_loss_is_the_papers_formula(example, alpha, gamma):
    logits = torch.linspace(-6, 6, 241)
    for target in (0.0, 1.0):
        targets = torch.full_like(logits, target)
        loss = example.losses.sigmoid_focal_loss(logits, targets, alpha=alpha, gamma=gamma)
        wanted = direct_focal_loss(logits, targets.bool().numpy(), alpha, gamma)
        np.testing.assert_allclose(loss.numpy(), wanted, rtol=2e-6, atol=1e-9)


def test_focal_loss_and_its_gradient_are_right_for_extreme_logits(example):
    values = [-1e4, -200.0, -80.0, -30.0, -17.0, -1.0, 0.0, 1.0, 17.0, 30.0, 80.0, 200.0, 1e4]
    for target in (0.0, 1.0):
        results = []
        for dtype in (torch.float32, torch.float64):
            logits = torch.tensor(values, dtype=dtype, requires_grad=True)
            loss = example.losses.sigmoid_focal_loss(logits, torch.full_like(logits, target))
            loss.sum().backward()
            results.append((loss.detach().double(), logits.grad.double()))
        for narrow, wide in zip(*results, strict=True):
            assert torch.isfinite(wide).all()
            # Below 1e-37 float32 has no normal numbers: 0 is as right there.
            torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-37)
        wrong = torch.tensor(values) * (1 - 2 * target)  # how sure it is of what is not so
        loss = results[1][0]
        weight = 0.25 if target else 0.75
        torch.testing.assert_close(loss[wrong > 100], weight * wrong[wrong > 100].double())


def test_losses_are_sums_over_counted_anchors_by_the_number_of_positives(example):
    anchors = torch.tensor(
        [[0.0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 22], [50, 50, 60, 60]]
    )  # a match, another, one between (IoU 0.45), background
    targets = [
        {"boxes": torch.tensor([[0.0, 0, 10, 10]]), "labels": torch.tensor([1])},
        {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)},
    ]
    logits, offsets = torch.randn(2, 4, 3), torch.randn(2, 4, 4)
    losses = example.losses.retinanet_losses(logits, offsets, anchors, targets)
    wanted = np.zeros((2, 4, 3), bool)
    wanted[0, :2, 1] = True
    each = direct_focal_loss(logits, wanted, 0.25, 2.0)
    each[0, 2] = 0
    assert losses.num_positives == 2
    assert losses.classes.item() == pytest.approx(each.sum() / 2, rel=1e-5)
    difference = np.abs(
        offsets[0, :2].double().numpy() - [[0, 0, 0, 0], [0, 0.5 / 9, 0, math.log(10 / 9)]]
    )
    smooth = np.where(difference < 1 / 9, difference**2 * 4.5, difference - 1 / 18)
    assert losses.boxes.item() == pytest.approx(smooth.sum() / 2, rel=1e-5)


def test_a_batch_without_objects_has_a_loss_and_a_gradient(example):
    empty = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.int64)}
    logits = torch.zeros(1, 5, 2, requires_grad=True)
    offsets = torch.zeros(1, 5, 4, requires_grad=True)
    anchors = torch.tensor([[0.0, 0, 8, 8]]).repeat(5, 1)
    losses = example.losses.retinanet_losses(logits, offsets, anchors, [empty])
    (losses.classes + losses.boxes).backward()
    assert losses.num_positives == 0
    assert losses.boxes.item() == 0
    assert losses.classes.item() == pytest.approx(10 * 0.75 * 0.25 * math.log(2))
    assert (logits.grad > 0).all()


# Anchors


def test_anchors_lie_where_the_outputs_are_and_have_the_papers_sides(example):
    grid = example.anchors.AnchorGrid()
    sizes = [(30, 40), (15, 20), (8, 10), (4, 5), (2, 3)]  # of 240 x 320 px
    boxes = grid.boxes(sizes, torch.device("cpu"))
    counts = [height * width * 9 for height, width in sizes]
    assert len(grid) == 9
    assert boxes.shape == (sum(counts), 4)
    levels = boxes.split(counts)
    for level, stride, (height, width) in zip(
        levels, example.anchors.STRIDES_PX, sizes, strict=True
    ):
        centres = ((level[:, :2] + level[:, 2:]) / 2).reshape(height, width, 9, 2)
        assert centres[0, 0, 0].tolist() == [stride / 2, stride / 2]
        expected = torch.tensor([(width - 0.5) * stride, (height - 0.5) * stride])
        torch.testing.assert_close(centres[-1, -1], expected.expand(9, 2))
        torch.testing.assert_close(centres[0, 1, 4], torch.tensor([1.5 * stride, 0.5 * stride]))
        sides = (level[:9, 2:] - level[:9, :2]).reshape(3, 3, 2)
        side = 4 * stride * 2 ** (torch.arange(3) / 3)
        torch.testing.assert_close(sides.prod(dim=2), (side**2)[:, None].expand(3, 3))
        ratios = sides[..., 1] / sides[..., 0]
        torch.testing.assert_close(ratios, torch.tensor([0.5, 1, 2]).expand(3, 3))
    assert levels[0][1:9:3].tolist()[0] == [-12, -12, 20, 20]  # 32 px around (4, 4)


@pytest.mark.parametrize(
    ("bottom", "expected"),
    [(10, 0), (5, 0), (4.9, "IGNORED"), (4, "IGNORED"), (3.9, "BACKGROUND")],
)
def test_anchors_match_from_an_iou_of_one_half_and_are_background_below_0_4(
    example, bottom, expected
):
    box = torch.tensor([[0.0, 0, 10, 10]])
    anchors = torch.tensor([[0.0, 0, 10, 10], [0, 0, 10, bottom]])  # the first is its best
    found = example.anchors.match(anchors, box)[1].item()
    assert found == (expected if expected == 0 else getattr(example.anchors, expected))


@pytest.mark.parametrize(
    ("boxes", "anchors", "expected"),
    [
        # an anchor takes the box that it overlaps most
        (
            [[0.0, 0, 10, 10], [0, 2, 10, 12]],
            [[0.0, 0, 10, 10], [0, 2, 10, 12], [0, 1.4, 10, 11.4], [0, 0.5, 10, 10]],
            [0, 1, 1, 0],
        ),
        # a box that suits no anchor gets its best one, where it has one at all
        (
            [[0.0, 0, 3, 3], [100, 100, 110, 110]],
            [[0.0, 0, 10, 10], [0, 0, 40, 40], [60, 60, 70, 70]],
            [0, None, None],
        ),
        # the best anchor of two boxes takes the one that it overlaps more
        ([[0.0, 0, 10, 4], [0, 0, 10, 9]], [[0.0, 0, 10, 10], [60, 60, 70, 70]], [1, None]),
        ([[0.0, 0, 10, 9], [0, 0, 10, 4]], [[0.0, 0, 10, 10], [60, 60, 70, 70]], [0, None]),
        ([], [[0.0, 0, 10, 10]], [None]),
    ],
)
def test_anchors_match_the_boxes_that_they_overlap_most(example, boxes, anchors, expected):
    found = example.anchors.match(torch.tensor(anchors), torch.tensor(boxes).reshape(-1, 4))
    background = example.anchors.BACKGROUND
    assert found.tolist() == [background if number is None else number for number in expected]


positions, sides = st.floats(-500, 500), st.floats(1, 400)
rectangles = st.tuples(positions, positions, sides, sides).map(
    lambda r: [r[0], r[1], r[0] + r[2], r[1] + r[3]]
)


@given(box=rectangles, anchor=rectangles)
def test_decode_undoes_encode(example, box, anchor):
    boxes, anchors = (torch.tensor([one], dtype=torch.float64) for one in (box, anchor))
    ratio = ((boxes[:, 2:] - boxes[:, :2]) / (anchors[:, 2:] - anchors[:, :2])).max()
    back = example.anchors.decode(example.anchors.encode(boxes, anchors), anchors)
    if ratio < 1000 / 16:
        torch.testing.assert_close(back, boxes, rtol=1e-9, atol=1e-7)
    else:  # no side gets longer than that
        limit = 62.5 * (anchors[:, 2:] - anchors[:, :2])
        assert (back[:, 2:] - back[:, :2] <= limit * (1 + 1e-9)).all()


# The network


@pytest.mark.parametrize(("depth", "norm"), [(18, "group"), (34, "batch"), (50, "group")])
def test_the_pyramid_has_five_levels_also_of_odd_sizes(example, depth, norm):
    options = example.model.ModelOptions(2, depth, 0.125, 16, 1, norm)
    model = example.model.RetinaNet(options)
    images = torch.randn(2, 3, 100, 150)
    features = model.backbone(images)
    expected = [(13, 19), (7, 10), (4, 5)]
    assert [tuple(feature.shape[2:]) for feature in features] == expected
    assert tuple(feature.shape[1] for feature in features) == model.backbone.out_channels
    levels = model.pyramid(features)
    sizes = [*expected, (2, 3), (1, 2)]
    assert [tuple(level.shape) for level in levels] == [(2, 16, *size) for size in sizes]
    outputs = model(images)
    num_anchors = 9 * sum(height * width for height, width in sizes)
    assert outputs.class_logits.shape == (2, num_anchors, 2)
    assert outputs.box_offsets.shape == (2, num_anchors, 4)
    assert outputs.anchors.shape == (num_anchors, 4)


def test_outputs_are_in_the_order_of_the_anchors(example):
    """What the box subnet says at one place of P3 comes out at the anchors of that place."""
    model = example.model.RetinaNet(example.model.ModelOptions(2, 18, 0.125, 16, 1))
    levels = [torch.zeros(1, 16, 4 // 2**k or 1, 4 // 2**k or 1) for k in range(5)]
    marked = torch.arange(16 * 18.0).reshape(1, 18, 4, 4)  # 9 anchors x 2 classes
    rest = [torch.zeros(1, 18, *level.shape[2:]) for level in levels[1:]]
    found = example.model._by_anchor([marked, *rest], 2)
    row, column, anchor, kind = 2, 1, 5, 1
    place = (row * 4 + column) * 9 + anchor
    assert found[0, place, kind] == marked[0, anchor * 2 + kind, row, column]
    boxes = model.grid.boxes([level.shape[2:] for level in levels], torch.device("cpu"))
    centre = (boxes[place, :2] + boxes[place, 2:]) / 2
    assert centre.tolist() == [(column + 0.5) * 8, (row + 0.5) * 8]


# Detection and scores


def slow_suppression(boxes, scores, labels, threshold):
    left = sorted(range(len(boxes)), key=lambda n: (-scores[n], n))
    kept = []
    while left:
        best, *rest = left
        kept.append(best)
        left = [
            n for n in rest if labels[n] != labels[best] or iou(boxes[n], boxes[best]) <= threshold
        ]
    return kept


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(width, 0) * max(height, 0)
    return shared / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - shared)


@pytest.mark.parametrize("seed", range(5))
def test_suppression_is_that_of_a_slow_reference(example, seed):
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 60, (80, 2))
    boxes = np.concatenate([corners, corners + rng.integers(5, 40, (80, 2))], axis=1)
    scores = rng.integers(0, 20, 80) / 20  # with ties
    labels = rng.integers(0, 3, 80)
    found = example.evaluate.non_maximum_suppression(
        torch.tensor(boxes, dtype=torch.float64), torch.tensor(scores), torch.tensor(labels), 0.5
    )
    assert found.tolist() == slow_suppression(boxes, scores, labels, 0.5)
    assert 3 < len(found) < 80


def test_detect_finds_the_boxes_that_outputs_were_made_of(example):
    grid = example.anchors.AnchorGrid(2.0)
    anchors = grid.boxes([(8, 8), (4, 4), (2, 2), (1, 1), (1, 1)], torch.device("cpu"))
    truth = torch.tensor([[4.0, 4, 22, 20], [30, 30, 58, 62], [30, 30, 58, 62]])
    labels = torch.tensor([0, 1, 0])
    logits, offsets = torch.full((2, len(anchors), 2), -9.0), torch.zeros(2, len(anchors), 4)
    for number, (box, label) in enumerate(zip(truth, labels, strict=True)):
        best = example.anchors.box_iou(box[None], anchors)[0].topk(4).indices
        for place, logit in zip(best, (4.0 - number, 2.0, 1.0, 0.5), strict=True):
            logits[0, place, label] = logit
            offsets[0, place] = example.anchors.encode(box[None], anchors[place][None])[0]
    outputs = example.model.Outputs(logits, offsets, anchors)
    first, second = example.evaluate.detect(outputs, (64, 64))
    assert first.labels.tolist() == labels.tolist()  # best first; two classes may share a place
    torch.testing.assert_close(first.boxes, truth, atol=1e-4, rtol=1e-5)
    assert len(second.boxes) == 0


def test_boxes_are_clipped_to_the_image_before_they_suppress_each_other(example):
    truth = torch.tensor([[0.0, 0, 20, 20], [0, 0, 20, 30.0]])
    anchors = torch.tensor([[0.0, 0, 16, 16], [0, 0, 16, 16]])
    beyond = torch.tensor([[-20.0, -9, 20, 20], [0, 0, 60, 30]])  # do not overlap by one half
    logits = torch.tensor([[[2.0], [1.0]]])
    offsets = example.anchors.encode(beyond, anchors)[None]
    outputs = example.model.Outputs(logits, offsets, anchors)
    (found,) = example.evaluate.detect(outputs, (30, 20), iou_threshold=0.7)
    torch.testing.assert_close(found.boxes, truth)
    (found,) = example.evaluate.detect(outputs, (30, 20))
    torch.testing.assert_close(found.boxes, truth[:1])


@pytest.fixture
def scene(example):
    """Six images with some objects, of three classes."""
    rng = np.random.default_rng(3)
    objects = []
    for _ in range(6):
        corners = rng.uniform(0, 300, (7, 2))
        boxes = np.concatenate([corners, corners + rng.uniform(20, 90, (7, 2))], axis=1)
        objects.append(example.evaluate.Objects(boxes, rng.integers(0, 3, 7), np.zeros(7, bool)))
    return objects


def detections_of(example, objects, scores=None, shift=0.0):
    return [
        example.evaluate.Detections(
            torch.tensor(one.boxes + shift),
            torch.tensor(np.linspace(1, 0.5, len(one.labels)) if scores is None else scores),
            torch.tensor(one.labels),
        )
        for one in objects
    ]


def test_scores_are_those_that_pycocotools_prints(example, scene, tmp_path, capsys):
    found = detections_of(example, scene, shift=4.0)
    found = [one._replace(labels=(one.labels + (torch.arange(7) == 2)) % 3) for one in found]
    scores = example.evaluate.score(scene, found, ["a", "b", "c"])
    truth = {
        "info": {},
        "images": [{"id": n} for n in range(6)],
        "categories": [{"id": k} for k in range(3)],
        "annotations": [
            {"image_id": n, "category_id": int(label), "bbox": as_xywh(box), "iscrowd": 0}
            for n, one in enumerate(scene)
            for box, label in zip(one.boxes, one.labels, strict=True)
        ],
    }
    for number, annotation in enumerate(truth["annotations"]):
        annotation |= {"id": number + 1, "area": annotation["bbox"][2] * annotation["bbox"][3]}
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    reference = COCO(tmp_path / "truth.json")
    results = reference.loadRes(
        [
            {
                "image_id": n,
                "category_id": int(label),
                "bbox": as_xywh(box.tolist()),
                "score": float(score),
            }
            for n, one in enumerate(found)
            for box, score, label in zip(*one, strict=True)
        ]
    )
    evaluation = COCOeval(reference, results, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert scores.map_50_95 == pytest.approx(evaluation.stats[0])
    assert scores.map_50 == pytest.approx(evaluation.stats[1])
    assert 0.1 < scores.map_50_95 < scores.map_50 < 1


def as_xywh(box):
    return [float(box[0]), float(box[1]), float(box[2] - box[0]), float(box[3] - box[1])]


# Training


def options(example, data, out, *more):
    return example.train.parsed([str(data), "--out", str(out), *TINY, *map(str, more)])


def test_two_real_photos_are_learned_by_heart(example, cells):
    torch.manual_seed(0)
    names = example.data.training_set(cells, "train", (96, 128)).class_names
    pair = example.data.evaluation_set(cells, "val", (96, 128), names)
    loader = example.data.loader_for(pair, 2, seed=0, num_workers=0)
    ((images, targets),) = loader
    model = example.model.RetinaNet(example.model.ModelOptions(3, 18, 0.25, 32, 1, anchor_sides=2))
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(50):
        outputs = model(images)
        losses = example.losses.retinanet_losses(*outputs, targets)
        loss = losses.classes + losses.boxes
        if step == 0:
            first = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert first > 1
    assert loss.item() < first / 10
    model.eval()
    with torch.inference_mode():
        found = example.evaluate.detect(model(images), images.shape[-2:])
    objects = [example.evaluate.Objects(t["boxes"], t["labels"], t["difficult"]) for t in targets]
    scores = example.evaluate.score(objects, found, pair.class_names)
    assert scores.map_50 > 0.8


KILLED_IN_STEP = """
import os, signal, sys
import train

taken = train.Run.train_on
def killed(run, images, targets):
    if run.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return taken(run, images, targets)
train.Run.train_on = killed
train.main(sys.argv[1:])
"""
# 12 images, some twice, in an epoch of 4 steps and more: step 3 is in its middle. The kill loses
# step 4.
RESUMED = (*TINY, "--save-every", "3", "--threshold", "1", "--batch-size", "3")


@pytest.fixture(scope="module")
def whole_run(example, cells, tmp_path_factory):
    """Return a function that makes, once each, the run that nobody interrupts."""

    @functools.cache
    def made(*more):
        out = tmp_path_factory.mktemp("whole")
        torch.set_num_threads(1)
        assert example.train.main([str(cells), "--out", str(out), *RESUMED, *more]) == 0
        return out

    return made


@pytest.mark.parametrize(
    ("before", "after", "more"), [(0, 2, ()), (2, 0, ()), (2, 2, ("--mosaic",))]
)
def test_a_run_that_was_killed_goes_on_as_one_that_was_not(
    example, cells, whole_run, tmp_path, before, after, more
):
    command = [str(cells), "--out", str(tmp_path), *RESUMED, *more]
    done = program(KILLED_IN_STEP, *command, "--num-workers", before)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [line["step"] for line in steps_of(tmp_path)] == [1, 2, 3, 4]
    saved = example.checkpoint.load(tmp_path / "checkpoint.pt")
    assert saved["schedule"]["step"] == 3
    assert (saved["loader"]["epoch"], saved["loader"]["batches"]) == (0, 3)
    assert example.train.main([*command, "--num-workers", str(after), "--resume"]) == 0
    whole = whole_run(*more)
    lines = steps_of(whole)
    assert len(lines) > 6
    assert len({tuple(line["images"]) for line in lines}) == len(lines)
    assert steps_of(tmp_path) == lines  # all figures, to the last bit
    ends = [example.checkpoint.load(out / "checkpoint.pt") for out in (whole, tmp_path)]
    for name, values in ends[0]["model"].items():
        assert torch.equal(values, ends[1]["model"][name]), name
    assert ends[0]["random"]["torch"].equal(ends[1]["random"]["torch"])


@pytest.mark.parametrize(("more", "share"), [((), 1), (("--seconds", "0.001"), 0)])
def test_a_run_that_is_over_is_left_as_it_is(
    example, cells, whole_run, tmp_path, capsys, more, share
):
    shutil.copytree(whole_run(*more), tmp_path, dirs_exist_ok=True)
    command = [str(cells), "--out", str(tmp_path), *RESUMED, *more]
    before, loader = steps_of(tmp_path), loader_state(example, tmp_path)
    assert (len(before) > 1) == share
    for _ in range(2):
        capsys.readouterr()
        assert example.train.main([*command, "--resume", "--num-workers", "0"]) == 0
        assert steps_of(tmp_path) == before
        assert loader_state(example, tmp_path) == loader
        told = capsys.readouterr().out
        assert f"step {len(before)} of " in told
        assert re.search(r"^finished already \(epoch \d of 2, \d+ s\); for more", told, re.M)
        assert "loader:" not in told


def loader_state(example, out):
    return example.checkpoint.load(out / "checkpoint.pt")["loader"]


def signalled(example, monkeypatch, step, *signals):
    """Let the training be interrupted in the step after `step`."""
    taken = example.train.Run.train_on

    def interrupted(run, images, targets):
        if run.step == step:
            for number in signals:
                signal.raise_signal(number)
        return taken(run, images, targets)

    monkeypatch.setattr(example.train.Run, "train_on", interrupted)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_and_saves(
    example, cells, tmp_path, monkeypatch, capsys, number
):
    signalled(example, monkeypatch, 2, number)
    handler = signal.getsignal(number)
    command = [str(cells), "--out", str(tmp_path), *TINY, "--num-workers", "0"]
    assert example.train.main(command) == 128 + number
    assert f"stopped by {number.name}; --resume goes on" in capsys.readouterr().out
    assert signal.getsignal(number) is handler
    assert len(steps_of(tmp_path)) == 3
    assert example.checkpoint.load(tmp_path / "checkpoint.pt")["schedule"]["step"] == 3


def test_a_second_ctrl_c_aborts_without_a_traceback(example, cells, tmp_path, monkeypatch, capsys):
    signalled(example, monkeypatch, 2, signal.SIGINT, signal.SIGINT)
    command = [str(cells), "--out", str(tmp_path), *TINY, "--num-workers", "0"]
    assert example.train.main(command) == 130
    assert capsys.readouterr().err == "aborted: what was not saved is lost\n"
    assert not (tmp_path / "checkpoint.pt").exists()


def test_every_option_has_a_help_and_its_default(example, capsys):
    with pytest.raises(SystemExit):
        example.train.parsed(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert "images in a step (default: 8)" in told
    assert "steps from one checkpoint to the next (default: 100)" in told
    num_options = len(dataclasses.fields(example.train.Options)) - 2
    assert told.count("(default: ") == num_options


TERMINATED_AS_A_GROUP = """
import os, signal, sys
import data, train

class Terminating(data.RandomHSV):
    def __call__(self, sample):  # in a worker, while the main process waits for its first batch
        os.killpg(os.getpgrp(), signal.SIGTERM)
        return super().__call__(sample)
data.RandomHSV = Terminating
sys.exit(train.main(sys.argv[1:]))
"""


def test_sigterm_to_the_whole_group_saves_although_workers_die_of_it(example, cells, tmp_path):
    command = (cells, "--out", tmp_path, *TINY, "--num-workers", "1")
    done = program(TERMINATED_AS_A_GROUP, *command, start_new_session=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert example.checkpoint.load(tmp_path / "checkpoint.pt")["schedule"]["step"] == 0


def test_the_programs_train_evaluate_and_draw(cells, tmp_path):
    """As the README has them."""
    out, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    checkpoint, drawn, scores = out / "checkpoint.pt", tmp_path / "losses.svg", tmp_path / "s.json"
    for command in (
        ("train.py", cells, "--out", out, *TINY, "--num-workers", "1", "--seconds", "60"),
        ("evaluate.py", cells, "--checkpoint", checkpoint, "--num-workers", "0", "--json", scores),
        ("plot_losses.py", out / "log.jsonl", drawn),
    ):
        done = subprocess.run(
            [sys.executable, str(FOLDER / command[0]), *map(str, command[1:])],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
        )
        assert done.returncode == 0, done.stderr
        if command[0] == "train.py":
            assert re.search(
                r"^loader: waited for [\d.]+% of the time\. \w.*\.$", done.stdout, re.MULTILINE
            )
        if command[0] == "evaluate.py":
            assert done.stdout.splitlines()[0] == "| class | mAP@0.5 | mAP@[.5:.95] |"
            assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:]] == [
                *("| all classes", "| Platelets", "| RBC", "| WBC")
            ]
    assert set(json.loads(scores.read_text())["by_class_50"]) == {"Platelets", "RBC", "WBC"}
    assert drawn.read_text().startswith("<?xml")


def test_a_run_is_not_begun_over_another_one(example, cells, tmp_path, capsys):
    begun = example.train.begun(options(example, cells, tmp_path))
    example.checkpoint.save(begun.state_dict(), tmp_path / "checkpoint.pt")
    assert example.train.main([str(cells), "--out", str(tmp_path), *TINY]) == 1
    assert "checkpoint.pt is there already. --resume goes on with it" in capsys.readouterr().err


def test_a_run_goes_on_only_with_its_own_options(example, cells, tmp_path, capsys):
    begun = example.train.begun(options(example, cells, tmp_path))
    example.checkpoint.save(begun.state_dict(), tmp_path / "checkpoint.pt")
    command = [str(cells), "--out", str(tmp_path), *TINY, "--resume", "--seed", "3"]
    assert example.train.main([*command, "--num-workers", "0", "--save-every", "7"]) == 1
    told = capsys.readouterr().err
    assert "seed was 0 and is 3" in told
    assert "save_every" not in told
    assert "num_workers" not in told


def test_a_run_does_not_go_on_with_other_classes_or_images(example, cells, tmp_path, capsys):
    root, out = tmp_path / "data", tmp_path / "run"
    shutil.copytree(cells, root)
    begun = example.train.begun(options(example, root, out))
    example.checkpoint.save(begun.state_dict(), out / "checkpoint.pt")
    command = [str(root), "--out", str(out), *TINY, "--resume"]
    names = (root / "ImageSets/Main/train.txt").read_text().split()
    (root / "ImageSets/Main/train.txt").write_text("\n".join(names[1:]))
    assert example.train.main(command) == 1
    assert capsys.readouterr().err.startswith("StateError: ")
    changed = root / f"Annotations/{names[0]}.xml"
    changed.write_text(changed.read_text().replace("RBC", "red"))
    assert example.train.main(command) == 1
    assert "class_names was ('Platelets', 'RBC', 'WBC') and is" in capsys.readouterr().err


def test_a_loss_that_is_not_a_number_names_the_images(example, cells, tmp_path):
    run = example.train.begun(options(example, cells, tmp_path, "--num-workers", "0"))
    images, targets = next(iter(run.loader))
    with pytest.raises(FloatingPointError, match=f"step 1 is nan .*{targets[0]['image_id']}"):
        run.train_on(images * math.nan, targets)
    assert run.step == 0


# Folders that are not like BCCD


def with_masks(cells, root):
    """A folder of faces: three classes, one only in the other split; an image without objects."""
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    found = [
        [("with_mask", 40, 40, 140, 160), ("without_mask", 300, 50, 380, 150)],
        [("with_mask", 100, 140, 300, 360)],
        [],
        [("mask_weared_incorrect", 10, 10, 90, 100)],
    ]
    photos = sorted((cells / "JPEGImages").iterdir())
    for number, (objects, photo) in enumerate(zip(found, photos, strict=False)):
        shutil.copy(photo, root / f"JPEGImages/face{number}.jpg")
        body = "".join(OBJECT.format(*one) for one in objects)
        size = "<size><width>640</width><height>480</height><depth>3</depth></size>"
        (root / f"Annotations/face{number}.xml").write_text(
            f"<annotation>{size}{body}</annotation>"
        )
    (root / "ImageSets/Main/train.txt").write_text("face0\nface1\nface2\n")
    (root / "ImageSets/Main/val.txt").write_text("face3\nface2\n")
    return root


@pytest.mark.parametrize("balance", ["repeat", "class", "none"])
def test_classes_without_boxes_and_images_without_objects_are_trained_on(
    example, cells, tmp_path, balance
):
    root, out = with_masks(cells, tmp_path / "masks"), tmp_path / "run"
    command = [str(root), "--out", str(out), *TINY, "--batch-size", "1", "--num-workers", "0"]
    assert example.train.main([*command, "--balance", balance]) == 0
    lines = steps_of(out)
    assert any(line["positives"] == 0 for line in lines if line["images"] == ["face2"])
    assert "face2" in {line["images"][0] for line in lines}
    state = example.checkpoint.load(out / "checkpoint.pt")
    assert state["class_names"] == ("mask_weared_incorrect", "with_mask", "without_mask")
    with pytest.warns(UserWarning, match="with_mask"):  # that are not in this split
        scores = example.evaluate.evaluate(state, root, "val")
    assert scores.by_class_50["mask_weared_incorrect"] is not None
    assert scores.by_class_50["with_mask"] is None
    table = example.evaluate.as_table(scores)
    assert "| with_mask | - | - |" in table


def test_a_folder_with_landmarks_is_trained_on(example, data_dir, tmp_path):
    faces = data_dir / "faces" / "training_with_face_landmarks.xml"
    convert([faces], tmp_path / "faces", target_format="voc")
    out = tmp_path / "run"
    command = [str(tmp_path / "faces"), "--out", str(out), *TINY, "--num-workers", "0"]
    (tmp_path / "faces/ImageSets/Main").mkdir(parents=True)
    names = sorted(path.stem for path in (tmp_path / "faces/Annotations").iterdir())
    (tmp_path / "faces/ImageSets/Main/train.txt").write_text("\n".join(names))
    assert example.train.main([*command, "--mosaic", "--vertical-flip"]) == 0
    assert {name for line in steps_of(out) for name in line["images"]} == set(names)
    assert any(line["positives"] for line in steps_of(out))


def blocks(kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", (FOLDER / "README.md").read_text(), re.M | re.S)


def test_the_readme_makes_a_voc_folder_of_a_set_of_masks(example, cells, tmp_path):
    root = with_masks(cells, tmp_path / "masks")
    shutil.rmtree(root / "ImageSets")
    (root / "JPEGImages").rename(root / "images")
    (root / "Annotations").rename(root / "annotations")
    for number in range(4, 11):
        shutil.copy(root / "annotations/face0.xml", root / f"annotations/face{number:02}.xml")
        shutil.copy(root / "images/face0.jpg", root / f"images/face{number:02}.jpg")
    (commands,) = blocks("bash")
    subprocess.run(["bash", "-e", "-c", commands], cwd=root, check=True)
    train, val = (example.data.training_set(root, split, (96, 128)) for split in ("train", "val"))
    assert (len(train), len(val)) == (9, 2)
    assert train.class_names == ("mask_weared_incorrect", "with_mask", "without_mask")


def test_the_readmes_commands_are_understood(example):
    """All that begin `python train.py`; the folders that they name are the user's."""
    commands = [
        line
        for block in blocks("console")
        for line in block.replace("\\\n", " ").splitlines()
        if line.startswith("python train.py ")
    ]
    assert len(commands) == 5
    for command in commands:
        assert example.train.parsed(shlex.split(command, comments=True)[2:]).out.parts[0] == "runs"


def test_the_readmes_loop_runs(example, cells, tmp_path, monkeypatch):
    (tmp_path / "BCCD").symlink_to(cells)
    monkeypatch.chdir(tmp_path)
    (loop,) = blocks("python")
    names = {}
    exec(compile(loop, "README.md", "exec"), names)  # the modules are importable here
    assert names["images"].shape == (4, 3, 240, 320)  # the last of 12 photos by eights
    assert {"boxes", "labels", "image_id"} <= set(names["targets"][0])


def test_a_broken_annotation_is_named(example, cells, tmp_path, capsys):
    root = tmp_path / "broken"
    shutil.copytree(cells, root)
    broken = sorted((root / "Annotations").iterdir())[0]
    broken.write_text(broken.read_text()[:300])
    assert example.train.main([str(root), "--out", str(tmp_path / "run"), *TINY]) == 1
    told = capsys.readouterr().err
    assert told.startswith("StoreError: ")
    assert str(broken) in told
    assert not (tmp_path / "run").exists()
    with pytest.raises(StoreError, match=re.escape(broken.name)):
        example.data.training_set(root, "train", (96, 128))
