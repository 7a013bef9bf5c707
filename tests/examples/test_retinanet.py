# SPDX-License-Identifier: Apache-2.0
"""examples/retinanet: its formulas against references, and its programs on real photos."""

from __future__ import annotations

import importlib
import json
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
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tests.clients.torchvision_operators import declare_missing
from tests.examples.programs import imported

from penstock.errors import StoreError
from penstock.images import decode_image

FOLDER = Path(__file__).parents[2] / "examples" / "retinanet"
MODULES = (
    *("anchors", "checkpoint", "data", "evaluate", "losses", "model", "plot_losses", "predict"),
    *("step_log", "train"),
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


@pytest.mark.parametrize(("alpha", "gamma"), [(0.25, 2.0), (0.75, 0.5)])
def test_focal_loss_is_the_papers_formula(example, alpha, gamma):
    logits = torch.linspace(-6, 6, 241)
    for target in (0.0, 1.0):
        targets = torch.full_like(logits, target)
        loss = example.losses.sigmoid_focal_loss(logits, targets, alpha=alpha, gamma=gamma)
        wanted = direct_focal_loss(logits, targets.bool().numpy(), alpha, gamma)
        np.testing.assert_allclose(loss.numpy(), wanted, rtol=2e-6, atol=1e-9)


# Detection and scores


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
        found = example.evaluate.detect(model(images), images.shape[1:3])
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
RESUMED = (*TINY, "--save-every", "3", "--threshold", "1", "--batch-size", "3", "--mosaic")


def test_a_run_that_was_killed_goes_on_as_one_that_was_not(example, cells, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert example.train.main([str(cells), "--out", str(whole), *RESUMED]) == 0
    command = [str(cells), "--out", str(killed), *RESUMED]
    done = program(KILLED_IN_STEP, *command, "--num-workers", 0)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [line["step"] for line in steps_of(killed)] == [1, 2, 3, 4]
    saved = example.checkpoint.load(killed / "checkpoint.pt")
    assert saved["schedule"]["step"] == 3
    assert (saved["loader"]["epoch"], saved["loader"]["batches"]) == (0, 3)
    assert example.train.main([*command, "--num-workers", "2", "--resume"]) == 0
    lines = steps_of(whole)
    assert len(lines) > 6
    assert len({tuple(line["images"]) for line in lines}) == len(lines)
    assert steps_of(killed) == lines  # all figures, to the last bit
    ends = [example.checkpoint.load(out / "checkpoint.pt") for out in (whole, killed)]
    for name, values in ends[0]["model"].items():
        assert torch.equal(values, ends[1]["model"][name]), name
    assert ends[0]["random"]["torch"].equal(ends[1]["random"]["torch"])


def test_a_signal_finishes_the_step_and_saves(example, cells, tmp_path, monkeypatch, capsys):
    number, taken = signal.SIGTERM, example.train.Run.train_on

    def interrupted(run, images, targets):
        if run.step == 2:
            signal.raise_signal(number)
        return taken(run, images, targets)

    monkeypatch.setattr(example.train.Run, "train_on", interrupted)
    handler = signal.getsignal(number)
    command = [str(cells), "--out", str(tmp_path), *TINY, "--num-workers", "0"]
    assert example.train.main(command) == 128 + number
    assert f"stopped by {number.name}; --resume goes on" in capsys.readouterr().out
    assert signal.getsignal(number) is handler
    assert len(steps_of(tmp_path)) == 3
    assert example.checkpoint.load(tmp_path / "checkpoint.pt")["schedule"]["step"] == 3


def test_the_programs_train_evaluate_and_draw(cells, tmp_path):
    """As the README has them."""
    out, environment = tmp_path / "run", {**os.environ, "OMP_NUM_THREADS": "1"}
    checkpoint, drawn, scores = out / "checkpoint.pt", tmp_path / "losses.svg", tmp_path / "s.json"
    photos, found = cells / "JPEGImages", tmp_path / "found"
    for command in (
        ("train.py", cells, "--out", out, *TINY, "--num-workers", "1", "--seconds", "60"),
        ("evaluate.py", cells, "--checkpoint", checkpoint, "--num-workers", "0", "--json", scores),
        ("plot_losses.py", out / "log.jsonl", drawn),
        ("predict.py", photos, "--checkpoint", checkpoint, "--out", found, "--least-score", "0"),
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
    results = json.loads((found / "detections.json").read_text())
    assert sorted(results) == sorted(map(str, photos.iterdir()))
    assert all(results.values())
    assert {path.stem for path in found.glob("*.jpg")} == {path.stem for path in photos.iterdir()}


# Weights from elsewhere


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
def test_a_state_dict_of_torchvision_fits(example, depth, tmp_path):
    """Its features are torchvision's, also from an old file, which does not count batches."""
    declare_missing()
    theirs = getattr(importlib.import_module("torchvision.models"), f"resnet{depth}")().eval()
    state = theirs.state_dict()
    old = {name: value for name, value in state.items() if not name.endswith("batches_tracked")}
    torch.save(old, tmp_path / "resnet.pth")
    ours = example.model.ResNet(depth, 1.0, "batch").eval()
    example.model.load_backbone(ours, tmp_path / "resnet.pth")
    assert list(ours.state_dict()) == [name for name in state if not name.startswith("fc.")]
    x = torch.randn(1, 3, 64, 96, generator=torch.Generator().manual_seed(depth))
    with torch.inference_mode():
        features = ours(x)
        x = theirs.layer1(theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(x)))))
        for stage, feature in zip((2, 3, 4), features, strict=True):
            x = getattr(theirs, f"layer{stage}")(x)
            torch.testing.assert_close(feature, x)


def test_a_run_begins_with_weights_that_fit_and_refuses_others(example, cells, tmp_path, capsys):
    weights, out = tmp_path / "backbone.pth", tmp_path / "run"
    command = [str(cells), "--out", str(out), *TINY, "--weights-backbone", str(weights)]
    backbone = example.model.ResNet(18, 0.125, "batch")
    torch.nn.init.constant_(backbone.layer4[1].bn2.weight, 3.0)
    torch.save(backbone.state_dict(), weights)
    begun = example.train.begun(example.train.parsed(command)).model.backbone.state_dict()
    assert all(begun[name].equal(value) for name, value in backbone.state_dict().items())
    assert example.train.main([*command, "--depth", "50"]) == 1
    said = capsys.readouterr().err
    assert "layer1.0.conv1.weight is (8, 8, 3, 3) in the file and (8, 8, 1, 1) here" in said
    for content in (backbone, [1], {"model": backbone.state_dict()}, b"hello"):
        torch.save(content, weights) if content != b"hello" else weights.write_bytes(content)
        assert example.train.main(command) == 1
        assert f"ValueError: {weights} is damaged, or holds other" in capsys.readouterr().err


# Pictures of what is found


def untrained(example, size):
    """What a checkpoint has of a network for two classes."""
    options = example.model.ModelOptions(2, 18, 0.125, 16, 1)
    model = example.model.RetinaNet(options).state_dict()
    names = {"class_names": ("cell", "dust"), "options": {"size": size}}
    return {"model_options": vars(options), "model": model, **names}


def test_detections_are_drawn_where_they_are(example, cells, tmp_path, monkeypatch):
    """In pixels of the photo: one of 480 x 640 is letterboxed by a quarter, below 20 rows."""
    photo, state = min((cells / "JPEGImages").iterdir()), untrained(example, (160, 160))
    found = example.evaluate.Detections(
        torch.tensor([[25.0, 45.0, 75.0, 95.0]]), torch.tensor([0.75]), torch.tensor([1])
    )
    monkeypatch.setattr(example.evaluate, "detect", lambda *_, **__: [found])
    results = example.predict.predict(state, [photo], tmp_path)
    objects = [{"class": "dust", "score": 0.75, "box": [100.0, 100.0, 300.0, 300.0]}]
    assert results == {str(photo): objects}
    assert decode_image((tmp_path / photo.name).read_bytes()).shape == (480, 640, 3)
    picture = Image.new("RGB", (640, 480))
    example.predict.draw(picture, objects, state["class_names"])
    drawn = np.asarray(picture).any(axis=2)
    (columns,) = drawn[150].nonzero()
    assert (columns.min(), columns.max(), drawn[:, 200].nonzero()[0].max()) == (100, 299, 299)
    assert not drawn[110:290, 110:290].any()
    assert drawn[80:100, 100:200].any()  # the class and the score, above the box


def test_photos_are_not_overwritten_and_bad_ones_are_named(example, cells, tmp_path, capsys):
    (tmp_path / "bad.jpg").write_bytes(b"no photo")
    checkpoint, photos = tmp_path / "checkpoint.pt", cells / "JPEGImages"
    link = tmp_path / "links" / "face.jpg"
    link.parent.mkdir()
    link.symlink_to(min(photos.iterdir()))
    example.checkpoint.save(untrained(example, (96, 128)), checkpoint)
    for photo, out, wanted in (
        (tmp_path / "bad.jpg", tmp_path / "out", "bad.jpg"),
        (tmp_path / "none.jpg", tmp_path / "out", "none.jpg"),
        (photos, photos, "give another --out"),
        (link, link.parent, "give another --out"),
    ):
        command = [str(photo), "--checkpoint", str(checkpoint), "--out", str(out)]
        assert example.predict.main([*command, "--num-workers", "0"]) == 1
        assert wanted in capsys.readouterr().err
    torch.save({"conv1.weight": torch.zeros(1)}, checkpoint)
    assert example.predict.main(command) == 1
    assert "none of train.py's" in capsys.readouterr().err


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


def test_classes_without_boxes_and_images_without_objects_are_trained_on(example, cells, tmp_path):
    root, out = with_masks(cells, tmp_path / "masks"), tmp_path / "run"
    command = [str(root), "--out", str(out), *TINY, "--batch-size", "1", "--num-workers", "0"]
    assert example.train.main([*command, "--balance", "repeat"]) == 0
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
    (command,) = re.findall("^penstock split .*", "".join(blocks("console")), re.MULTILINE)
    arguments = shlex.split(command)[1:]
    subprocess.run([sys.executable, "-m", "penstock", *arguments], cwd=tmp_path, check=True)
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
    assert len(commands) == 7
    for command in commands:
        assert example.train.parsed(shlex.split(command, comments=True)[2:]).out.parts[0] == "runs"


def test_the_readmes_loop_runs(example, cells, tmp_path, monkeypatch):
    (tmp_path / "BCCD").symlink_to(cells)
    monkeypatch.chdir(tmp_path)
    (loop,) = blocks("python")
    names = {}
    exec(compile(loop, "README.md", "exec"), names)  # the modules are importable here
    assert names["images"].shape == (4, 240, 320, 3)  # the last of 12 photos by eights
    assert {"boxes", "labels", "image_id"} <= set(names["targets"][0])


def test_a_broken_annotation_is_named(example, cells, tmp_path, capsys):
    root = tmp_path / "broken"
    shutil.copytree(cells, root)
    broken = sorted((root / "Annotations").iterdir())[0]
    broken.write_text(broken.read_text()[:300])
    assert example.train.main([str(root), "--out", str(tmp_path / "run"), *TINY]) == 1
    said = capsys.readouterr().err
    assert said.startswith("StoreError: ")
    assert str(broken) in said
    assert not (tmp_path / "run").exists()
    with pytest.raises(StoreError, match=re.escape(broken.name)):
        example.data.training_set(root, "train", (96, 128))
