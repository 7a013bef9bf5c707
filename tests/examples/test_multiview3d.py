# SPDX-License-Identifier: Apache-2.0
"""examples/multiview3d: six cameras keep their geometry, and a killed training goes on exactly."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import mmengine
import numpy as np
import pytest
import torch
from tests.clients.torchvision_operators import declare_missing
from tests.examples.programs import imported
from tests.support.processes import completed

declare_missing()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # parts of torch that are deprecated by now
    from mmengine.config import Config

    from penstock.images import decode_image
    from penstock.integrations.mmengine import PenstockRunner

FOLDER = Path(__file__).parents[2] / "examples" / "multiview3d"
CONFIG = FOLDER / "configs" / "one_frame.py"
RUN = Path(__file__).with_name("multiview3d_run.py")
INFOS = "n015-2018-07-24-11-22-45+0800.pkl"
MODULES = ("collate", "dataset", "geometry", "info", "metric", "model", "transforms")


@pytest.fixture(scope="module")
def plugin():
    """The example's modules; they stay imported, as mmengine's registries know their classes."""
    sys.path.insert(0, str(FOLDER))
    try:
        return {name: importlib.import_module(f"plugin.{name}") for name in MODULES}
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def programs():
    with imported(FOLDER, ("draw_scene", "train")) as found:
        yield found


@pytest.fixture(scope="module")
def frame(data_dir):
    """What the info file says of its one frame; the test trusts the file, the example does not."""
    with open(data_dir / "nuscenes" / INFOS, "rb") as file:
        return pickle.load(file)["data_list"][0]


@pytest.fixture
def config(plugin, data_dir, monkeypatch):
    monkeypatch.setenv("NUSCENES", str(data_dir / "nuscenes"))
    monkeypatch.setenv("NUSCENES_INFOS", INFOS)
    read = Config.fromfile(CONFIG)
    for loader in (read.train_dataloader, read.val_dataloader):
        loader.num_workers = 0
        loader.persistent_workers = False
        loader.dataset.pipeline[1].scale = 0.1
    return read


@pytest.fixture
def sample(config):
    return PenstockRunner.build_dataloader(config.val_dataloader, seed=0).dataset[0]


def truths(frame):
    boxes = np.array([i["bbox_3d"] for i in frame["instances"]])
    cameras = list(frame["images"].values())
    intrinsics = np.array([camera["cam2img"] for camera in cameras])
    extrinsics = np.array([camera["lidar2cam"] for camera in cameras])
    return boxes, intrinsics, extrinsics


def test_centres_of_boxes_are_projected_where_nuscenes_has_them(plugin, frame):
    geometry = plugin["geometry"]
    boxes, intrinsics, extrinsics = truths(frame)
    matrices = geometry.lidar2img(intrinsics, extrinsics)
    pixels, depths = geometry.project(boxes[:, :3], matrices)
    assert list(frame["images"]) == list(plugin["dataset"].CAMERAS)
    num_compared = 0
    for camera, name in enumerate(frame["images"]):
        for known in frame["cam_instances"][name]:
            found = np.r_["-1,2,0", pixels[camera], depths[camera][:, None]]
            wanted = [*known["center_2d"], known["depth"]]
            assert np.nanmin(np.abs(found - wanted).max(axis=1)) < 0.01  # pixels, metres
            num_compared += 1
    assert num_compared == 84


def test_after_resizing_a_point_is_projected_onto_what_it_was_projected_onto(plugin):
    scale = 0.5
    # Each pixel of the ramp says in which column it lies.
    ramp = np.broadcast_to(np.arange(240, dtype=np.float32)[None, :, None], (120, 240, 3)).copy()
    camera = np.array([[100.0, 0, 117.3], [0, 100.0, 61.2], [0, 0, 1]])
    sample = {"views": [ramp], "intrinsics": camera[None]}
    made = plugin["transforms"].ResizeViews(scale)(sample)
    points = np.array([[-0.9, 0.1, 1.0], [0.05, 0.2, 1.0], [0.7, -0.3, 2.0]])
    geometry = plugin["geometry"]
    pose = np.eye(4)[None]
    before, _ = geometry.project(points, geometry.lidar2img(camera[None], pose))
    after, _ = geometry.project(points, geometry.lidar2img(made["intrinsics"], pose))
    row = made["views"][0][0, :, 0]
    shown = np.interp(after[0, :, 0], np.arange(len(row)), row)
    np.testing.assert_allclose(shown, before[0, :, 0], atol=1e-3)  # by the matrix alone: 0.5, 1.5
    assert made["views"][0].shape == (120 * scale, 240 * scale, 3)


def test_a_box_is_projected_onto_where_rays_meet_it(plugin, programs):
    geometry, drawn = plugin["geometry"], programs["draw_scene"]
    box = np.array([[2.0, 14.0, -0.9, 4.6, 2.0, 1.7, 0.7]])
    intrinsics, lidar2cam = drawn.camera(-10, 1260)
    image = drawn.cast(intrinsics, lidar2cam, box, np.array([[255, 0, 0]], np.float32))
    met = np.argwhere(image[..., 0] > image[..., 1] + 50)[:, ::-1]
    matrix = geometry.lidar2img(intrinsics, lidar2cam)[None]
    (pixels,), _ = geometry.project(geometry.box_corners(box)[0], matrix)
    for side in (np.min, np.max):
        np.testing.assert_allclose(side(met, axis=0), side(pixels, axis=0), atol=1.0)


def before_1_1(info, *, before_1_0):
    """Return an info file as MMDetection3D wrote it before 1.1, or before 1.0."""
    names = {-1: "animal", **{label: n for n, label in info["metainfo"]["categories"].items()}}
    frames = []
    for frame in info["data_list"]:
        boxes = np.array([i["bbox_3d"] for i in frame["instances"]])
        if before_1_0:
            boxes = boxes[:, [0, 1, 2, 4, 3, 5, 6]]
            boxes[:, 6] = -boxes[:, 6] - np.pi / 2
        cameras = {}
        for name, camera in frame["images"].items():
            pose = np.linalg.inv(camera["lidar2cam"])
            cameras[name] = {
                "data_path": f"./data/nuscenes/samples/{name}/{camera['img_path']}",
                "cam_intrinsic": np.array(camera["cam2img"]),
                "sensor2lidar_rotation": pose[:3, :3],
                "sensor2lidar_translation": pose[:3, 3],
            }
        of_test_set = {"token": frame["token"], "cams": cameras}
        frames += [
            {
                **of_test_set,
                "gt_boxes": boxes,
                "gt_names": np.array([names[i["bbox_label_3d"]] for i in frame["instances"]]),
                "valid_flag": np.array([i["bbox_3d_isvalid"] for i in frame["instances"]]),
            },
            of_test_set,
        ]
    return {"infos": frames, "metadata": {"version": "v1.0-mini"}}


@pytest.mark.parametrize("before_1_0", [False, True])
def test_old_info_files_give_the_same_samples(config, plugin, data_dir, tmp_path, before_1_0):
    settings = config.val_dataloader.dataset
    settings.update(pipeline=[], data_prefix={"CAM_BACK": "samples/CAM_BACK"})
    new = PenstockRunner.build_dataloader(config.val_dataloader, seed=0).dataset
    info = plugin["info"].load_info(data_dir / "nuscenes" / INFOS)
    settings.ann_file = str(tmp_path / "old.pkl")
    Path(settings.ann_file).write_bytes(pickle.dumps(before_1_1(info, before_1_0=before_1_0), 2))
    old = PenstockRunner.build_dataloader(config.val_dataloader, seed=0).dataset
    assert [len(sample["boxes"]) for sample in old] == [50, 0]
    assert Path(old[0]["img_paths"][3]).parent == data_dir / "nuscenes" / "samples" / "CAM_BACK"
    before, after = dict(old[0]), dict(new[0])
    for name in ("boxes", "extrinsics"):  # computed; the rest is equal to the last bit
        np.testing.assert_allclose(before.pop(name), after.pop(name), rtol=0, atol=1e-6)
    np.testing.assert_equal(before, after)


class _Runs:
    def __reduce__(self):
        return os.system, ("touch /tmp/this-must-never-be",)


def test_what_an_info_file_holds_is_read_and_what_it_would_run_is_refused(
    plugin, frame, data_dir, tmp_path
):
    load_info = plugin["info"].load_info
    read = load_info(data_dir / "nuscenes" / INFOS)["data_list"][0]
    np.testing.assert_equal(read, frame)
    arrays = {"new": np.arange(6.0).reshape(2, 3), "flag": np.bool_(True)}
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        if protocol < 5:  # 5 writes arrays by a function of its own
            path = tmp_path / f"{protocol}.pkl"
            path.write_bytes(pickle.dumps(arrays, protocol))
            np.testing.assert_equal(load_info(path), arrays)
    for culprit, name in ((_Runs(), "system"), (eval, "eval"), (Path, "Path")):
        path = tmp_path / "bad.pkl"
        path.write_bytes(pickle.dumps({"data_list": [culprit]}))
        with pytest.raises(pickle.UnpicklingError, match=name):
            load_info(path)
    path.write_bytes(b"c_codecs\nencode\n(Vabc\nVrot13\ntR.")
    with pytest.raises(pickle.UnpicklingError, match="rot13"):
        load_info(path)


class _Pickled:
    """Is pickled as a call, and a state for what it returns."""

    def __init__(self, function, arguments, *state):
        self._made = (function, arguments, *state)

    def __reduce__(self):
        return self._made


RECONSTRUCT, SCALAR = np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0]
EMPTY = (np.ndarray, (0,), b"b")
# Eight bytes that are a Python object: with these flags, numpy itself takes the bytes as they are.
OBJECTS = _Pickled(
    np.dtype,
    ("V8", False, True),
    (3, "|", None, ("a",), {"a": (np.dtype("O"), 0)}, 8, 1, 0),
)
# The same, on a dtype that is harmless before it gets its state.
FIELDS = _Pickled(
    np.dtype,
    ("f8", False, True),
    (3, "<", None, ("a",), {"a": (np.dtype("f8"), 0)}, 8, 1, 0),
)
FLOATS = np.dtype("f8")


@pytest.mark.parametrize(
    ("culprit", "reason"),
    [
        (_Pickled(RECONSTRUCT, EMPTY, (1, (1,), OBJECTS, False, b"AAAAAAAA")), "of 'V8'"),
        (
            _Pickled(RECONSTRUCT, EMPTY, (1, (1,), FIELDS, False, b"AAAAAAAA")),
            "a dtype has the state",
        ),
        (_Pickled(SCALAR, (np.dtype("O"), b"AAAAAAAA")), "of 'O8'"),
        (
            _Pickled(RECONSTRUCT, EMPTY, (1, (99,), FLOATS, False, b"A" * 8)),
            "99 values are not 792",
        ),
        (_Pickled(RECONSTRUCT, EMPTY, (1, (-1, -1), FLOATS, False, b"A" * 8)), r"shape \(-1, -1\)"),
        (_Pickled(SCALAR, (FLOATS, b"A")), "1 values are not 8 bytes"),
        (_Pickled(RECONSTRUCT, EMPTY), "an array without values"),
        (_Pickled(np.dtype, ("f3",)), "no numbers of 'f3'"),
    ],
)
def test_a_file_cannot_make_addresses_of_its_bytes(plugin, tmp_path, culprit, reason):
    path = tmp_path / "bad.pkl"
    path.write_bytes(pickle.dumps({"data_list": [culprit]}, 2))
    with pytest.raises(pickle.UnpicklingError, match=reason):
        plugin["info"].load_info(path)  # with numpy's own functions, to print it is the end


class _Dirty:
    """Memory as a slot is: full of what was there before."""

    def empty(self, shape, dtype):
        return np.full(shape, np.nan, dtype)

    def leaf(self, array):
        return torch.from_numpy(array)


def test_views_are_normalised_and_padded_to_the_divisor(plugin, sample):
    mean, std = [120.0, 110.0, 100.0], [60.0, 50.0, 40.0]
    collate = plugin["collate"].CollateViews(mean, std, divisor=32)
    small = {**sample, "views": [view[:70, :100] for view in sample["views"]]}
    images = collate.collate_into([sample, small], _Dirty())["images"]
    assert images.shape == (2, 6, 3, 96, 160)  # of 90 x 160
    assert not torch.isnan(images).any()
    for of_batch, views in zip(images.numpy(), (sample["views"], small["views"]), strict=True):
        for image, view in zip(of_batch, views, strict=True):
            rows, columns = view.shape[:2]
            wanted = ((view.astype(np.float64) - mean) / std).transpose(2, 0, 1)
            np.testing.assert_allclose(image[:, :rows, :columns], wanted, atol=1e-6)
            assert not image[:, rows:].any()
            assert not image[:, :, columns:].any()


def test_the_batch_is_what_the_readme_says(config):
    batch = next(iter(PenstockRunner.build_dataloader(config.train_dataloader, seed=0)))
    rows = re.findall(r"\| `(\w+)` \| (\([^|]*\)) \| (\w+) \|", (FOLDER / "README.md").read_text())
    assert [name for name, _, _ in rows] == [name for name in batch if name != "metas"]
    letters = {"B": 2, "N": 6, "H": 96, "W": 160, "M": len(batch["boxes"])}
    for name, shape, dtype in rows:
        wanted = tuple(
            letters.get(s.strip()) or int(s) for s in shape[1:-1].split(",") if s.strip()
        )
        assert (tuple(batch[name].shape), str(batch[name].dtype)) == (wanted, f"torch.{dtype}")


def test_workers_change_nothing_and_epochs_differ(config):
    def epochs(num_workers):
        config.train_dataloader.update(num_workers=num_workers)
        config.train_dataloader.dataset.repeat = 4
        loader = PenstockRunner.build_dataloader(config.train_dataloader, seed=3)
        return [[batch["images"].clone() for batch in loader] for _ in range(2)]

    alone, together = epochs(0), epochs(2)
    for epoch in (0, 1):
        pairs = zip(alone[epoch], together[epoch], strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
    assert not any(torch.equal(a, b) for a in alone[0] for b in alone[1])


def test_colours_are_distorted_as_in_detr3d(plugin, monkeypatch):
    transforms = plugin["transforms"]

    def distorted(view, seed, **options):
        monkeypatch.setattr(transforms, "sample_rng", lambda: np.random.default_rng(seed))
        distort = transforms.PhotoMetricDistortionMultiViewImage(**options)
        return distort({"views": [view.copy()] * 2})["views"]

    grey, colour = np.full((1, 1, 3), 200, np.uint8), np.uint8([[[200, 120, 60]]])
    greys = np.array([distorted(grey, seed)[0][0, 0] for seed in range(400)])
    assert np.ptp(greys, axis=1).max() < 1e-3  # neither hue nor saturation nor order is there
    assert 75 < np.isclose(greys[:, 0], 200).sum() < 125  # neither brightness nor contrast: 1/4
    assert 84 <= greys.min() < 110 < 320 < greys.max() <= 348  # 168 / 2, 232 * 1.5
    still = {"brightness_delta": 0, "contrast_range": (1, 1)}
    colours = np.array([distorted(colour, seed, **still)[0][0, 0] for seed in range(400)])
    np.testing.assert_allclose(colours.max(axis=1), 200, rtol=1e-4)  # hue and saturation keep it
    least = colours.min(axis=1)  # 200 less 140, which saturation makes 210 to 70
    assert -10.1 < least.min() < -8 < 128 < least.max() < 130.1
    assert len(np.unique(colours.argsort(axis=1), axis=0)) == 6
    is_same = np.isclose(colours, [200, 120, 60], rtol=1e-4).all(axis=1)
    assert 40 < is_same.sum() < 78  # neither hue nor saturation: 1/4; the order: 1/2 + 1/2 / 6
    assert not np.array_equal(*distorted(colour, 1))
    np.testing.assert_array_equal(*distorted(colour, 1, per_camera=False))


def test_each_decoder_layer_learns_from_its_own_losses_in_mixed_precision_too(plugin, config):
    batch = next(iter(PenstockRunner.build_dataloader(config.val_dataloader, seed=0)))
    model = plugin["model"].TinyDETR3D(num_layers=3)
    sizes = torch.tensor(batch["metas"][0]["img_shapes"])[None]
    seen = torch.rand(1, 6, 8, 12, 20), torch.rand(1, 50, 3) * 40 - 20, batch["lidar2img"], sizes, 8
    wanted = plugin["model"].sample_views(*seen)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(**batch, mode="loss")
        found = plugin["model"].sample_views(*seen)
    assert wanted[1].any()
    assert all(map(torch.equal, found, wanted))  # pixels are as precise as without
    kinds = ("loss_cls", "loss_bbox")
    assert [*losses] == [*kinds, *(f"d{layer}.{kind}" for layer in (0, 1) for kind in kinds)]
    (losses["d1.loss_cls"] + losses["d1.loss_bbox"]).backward()
    assert model.boxes[0].weight.grad is None  # the point that a layer begins at is given


KEPT = {
    "work_dir": "elsewhere",
    "load_from": "weights.pth",
    "resume": False,
    "launcher": "slurm",
    "randomness": {"seed": 7, "diff_rank_seed": True, "deterministic": False},
    "optim_wrapper": {"accumulative_counts": 4},
    "default_scope": "mmengine",
}
MIXED = {**KEPT["optim_wrapper"], "type": "AmpOptimWrapper", "loss_scale": "dynamic"}


@pytest.mark.parametrize(
    ("arguments", "changed"),
    [
        ([], {}),
        (["--resume"], {}),  # the work dir has no checkpoint yet
        (["--resume", "a.pth"], {"resume": True, "load_from": "a.pth"}),
        (["--work-dir", "w"], {"work_dir": "w"}),
        (["--launcher", "none"], {"launcher": "none"}),
        (["--local-rank", "1"], {}),
        (["--local_rank=1"], {}),
        (["--seed", "3"], {"randomness": {**KEPT["randomness"], "seed": 3}}),
        (["--deterministic"], {"randomness": {**KEPT["randomness"], "deterministic": True}}),
        (["--cfg-options", "resume=True", "model.kept=1"], {"resume": True, "model": {"kept": 1}}),
        (["--amp"], {"optim_wrapper": MIXED}),
    ],
)
def test_every_key_of_a_config_survives(programs, tmp_path, monkeypatch, arguments, changed):
    keys = [key for key in inspect.signature(PenstockRunner).parameters if key != "cfg"]
    assert set(KEPT) < set(keys)
    kept = {key: KEPT.get(key, {"kept": key}) for key in [*keys, "model_wrapper_cfg", "my_own"]}
    path = tmp_path / "all_keys.py"
    path.write_text("".join(f"{key} = {value!r}\n" for key, value in kept.items()))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setattr(sys, "argv", ["train.py", str(path), *arguments])
    train = programs["train"]
    assert train.configured(train.arguments()).to_dict() == {**kept, **changed}
    assert os.environ["LOCAL_RANK"] == ("1" if "rank" in str(arguments) else "0")


OPTIONS = [
    "train_dataloader.dataset.repeat=8",
    "train_dataloader.dataset.pipeline.1.scale=0.06",
    "val_dataloader.dataset.pipeline.1.scale=0.06",
    "param_scheduler.0.end=2",  # of the learning rate's rise
    "default_hooks.logger.interval=1",
    "default_hooks.checkpoint.interval=3",
    "default_hooks.checkpoint.max_keep_ckpts=-1",
    "env_cfg.mp_cfg.opencv_num_threads=0",
]


def command(work_dir, *arguments, config=CONFIG, max_epochs=3):
    options = ["--cfg-options", *OPTIONS, f"train_cfg.max_epochs={max_epochs}"]
    options += [f"train_cfg.val_interval={max_epochs}"]
    program = [RUN, FOLDER / "train.py", config, "--work-dir", work_dir]
    return [str(part) for part in (sys.executable, *program, *arguments, *options)]


@pytest.fixture
def environment(data_dir):
    nuscenes = {"NUSCENES": str(data_dir / "nuscenes"), "NUSCENES_INFOS": INFOS}
    return {**os.environ, **nuscenes, "OMP_NUM_THREADS": "1"}


def run(environment, *arguments, **options):
    done = completed(command(*arguments, **options), env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(work_dir):
    """Return what was logged of each iteration, by its number, over all runs in the folder."""
    found = {}
    for path in sorted(work_dir.glob("*/vis_data/scalars.json")):
        for line in map(json.loads, path.read_text().splitlines()):
            if "loss" in line:
                found[line["iter"]] = (line["loss"], line["grad_norm"], line["lr"])
    return found


def test_a_training_that_is_killed_goes_on_with_the_very_same_batches(environment, tmp_path):
    said = run(environment, tmp_path / "whole")
    whole = losses(tmp_path / "whole")
    assert list(whole) == list(range(1, 13))
    assert whole[12][0] < 0.8 * whole[1][0]
    assert re.search(r"Epoch\(val\) \[3\]\[1/1\] +recall/within_2m: [01]\.\d+", said)
    assert said.count("Train loader: ") == 3
    assert re.search(r" loss_cls: .* d0\.loss_cls: .* d0\.loss_bbox: ", said)
    picture = tmp_path / "whole" / "views" / "iter_12.jpg"
    assert decode_image(picture.read_bytes()).shape == (540, 1440, 3)

    killed = tmp_path / "killed"
    with subprocess.Popen(
        command(killed), env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:  # by then checkpoint 6 is whole
            if "[2][4/4]" in line:
                process.send_signal(signal.SIGKILL)
                break
    before = losses(killed)
    assert list(before) == list(range(1, len(before) + 1))
    assert len(before) < 12
    said = run(environment, killed, "--resume")
    assert re.search(r"Load checkpoint from \S*iter_(6|9)\.pth", said)
    assert losses(killed) == whole


def test_weights_that_a_config_names_are_loaded(environment, plugin, tmp_path):
    torch.manual_seed(1)
    weights = plugin["model"].TinyDETR3D().state_dict()
    torch.save({"state_dict": weights}, tmp_path / "pretrained.pth")
    config = tmp_path / "config.py"
    config.write_text(
        f"_base_ = {str(CONFIG)!r}\nload_from = {str(tmp_path / 'pretrained.pth')!r}\n"
        "optim_wrapper = dict(optimizer=dict(lr=0.0))\n"  # they stay as they were loaded
    )
    # A job that may be started again gives --resume each time.
    run(environment, tmp_path / "run", "--resume", config=config, max_epochs=1)
    trained = torch.load(tmp_path / "run" / "iter_3.pth", weights_only=False)["state_dict"]
    assert all(torch.equal(trained[name], given) for name, given in weights.items())


def test_the_example_names_the_version_of_mmengine_that_it_was_made_with():
    assert mmengine.__version__ in (FOLDER / "README.md").read_text()
