# SPDX-License-Identifier: Apache-2.0
"""One key frame of nuScenes, over and over, each time with other colours."""
# ruff: noqa: C408 - configs of mmengine are written with dict()

custom_imports = dict(imports=["plugin", "penstock.integrations.mmengine"])
runner_type = "PenstockRunner"
default_scope = "mmengine"

data_root = "{{$NUSCENES:data/nuscenes}}"
ann_file = "{{$NUSCENES_INFOS:nuscenes_infos_train.pkl}}"
scale = 0.1  # 160 x 90 px: minutes on a CPU
range_m = 51.2

collate = dict(
    type="CollateViews", mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], divisor=32
)
frames = dict(
    type="NuScenesFrames",
    data_root=data_root,
    ann_file=ann_file,
    range_m=range_m,
)

train_dataloader = dict(
    # What mmengine knows.
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=collate,
    dataset=dict(
        **frames,
        repeat=32,
        pipeline=[
            dict(type="LoadViews"),
            dict(type="ResizeViews", scale=scale),
            dict(type="PhotoMetricDistortionMultiViewImage"),
        ],
    ),
    # What Penstock knows besides.
    seed="runner",
    on_error="replace",
)
val_dataloader = dict(
    batch_size=1,
    num_workers=1,
    sampler=dict(type="DefaultSampler", shuffle=False),
    collate_fn=collate,
    dataset=dict(
        **frames,
        test_mode=True,
        pipeline=[dict(type="LoadViews"), dict(type="ResizeViews", scale=scale)],
    ),
)
val_evaluator = dict(type="CentreRecall", within_m=2.0)

model = dict(type="TinyDETR3D", num_classes=10, num_queries=100, range_m=range_m)
optim_wrapper = dict(
    optimizer=dict(type="AdamW", lr=5e-3, weight_decay=0.01), clip_grad=dict(max_norm=10.0)
)
max_epochs = 20
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, end=10),
    dict(type="CosineAnnealingLR", T_max=max_epochs, convert_to_iter_based=True),
]

train_cfg = dict(by_epoch=True, max_epochs=max_epochs, val_interval=4)
val_cfg = dict()

default_hooks = dict(
    logger=dict(type="LoggerHook", interval=16),
    checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=32, max_keep_ckpts=3),
)
custom_hooks = [dict(type="PenstockHook"), dict(type="DrawViews")]
randomness = dict(seed=0)
