# SPDX-License-Identifier: Apache-2.0
"""Train what a config describes, with mmengine's Runner on Penstock's loader.

    python train.py configs/one_frame.py --work-dir runs/one_frame
    torchrun --nproc-per-node=2 train.py configs/one_frame.py --launcher pytorch

It is what `tools/train.py` of MMDetection3D does, and the few lines that training on CPUs takes.
"""

from __future__ import annotations

import argparse
import gc
import os
import warnings
from pathlib import Path

import torch
import torch.distributed.nn  # before there is a group, or it holds it beyond the end

with warnings.catch_warnings():
    # mmengine 0.10.7 uses parts of torch that are deprecated by now.
    warnings.simplefilter("ignore")
    from mmengine.config import Config, DictAction
    from mmengine.registry import RUNNERS
    from mmengine.runner import find_latest_checkpoint


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--work-dir", help="for logs and checkpoints")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="auto",
        help="go on from a checkpoint; without a name from the latest of the work dir, if any",
    )
    parser.add_argument("--amp", action="store_true", help="mixed precision; takes a GPU")
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"])
    # torch.distributed.launch gives it, spelled one way or the other; torchrun sets LOCAL_RANK.
    parser.add_argument("--local-rank", "--local_rank", type=int, default=0)
    parser.add_argument("--seed", type=int, help="of weights, order and augmentation")
    parser.add_argument("--deterministic", action="store_true", help="of torch's algorithms, too")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="as train_dataloader.batch_size=4"
    )
    args = parser.parse_args()
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    return args


def configured(args: argparse.Namespace) -> Config:
    """Return the config, changed in what the command line gives and in nothing else.

    With `--resume` and no name, a work dir without a checkpoint changes nothing: the first start of
    a job that is always started so loads the `load_from` of its config.
    """
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    given = {}
    if args.work_dir or not config.get("work_dir"):
        given["work_dir"] = args.work_dir or str(Path("runs", args.config.stem))
    if args.launcher:
        given["launcher"] = args.launcher
    if args.seed is not None:
        given["randomness.seed"] = args.seed
    if args.deterministic:
        given["randomness.deterministic"] = True
    if args.amp and (kind := config.optim_wrapper.get("type")) != "AmpOptimWrapper":
        if kind not in (None, "OptimWrapper"):
            raise SystemExit(f"--amp makes an AmpOptimWrapper of an OptimWrapper, not of {kind}")
        given["optim_wrapper.type"] = "AmpOptimWrapper"
        given["optim_wrapper.loss_scale"] = "dynamic"
    config.merge_from_dict(given)
    checkpoint = args.resume
    if checkpoint == "auto":
        checkpoint = find_latest_checkpoint(config.work_dir)
    if checkpoint:
        config.merge_from_dict({"resume": True, "load_from": checkpoint})
    return config


def prepare_ranks_of_cpus(config: Config) -> None:
    """Do what mmengine does for ranks with GPUs: by itself it asks for a device of CUDA."""
    torch.distributed.init_process_group("gloo")
    # What mmengine gives to a wrapper that the config does not have.
    by_default = {
        "broadcast_buffers": False,
        "find_unused_parameters": config.get("find_unused_parameters", False),
    }
    wrapper = config.get("model_wrapper_cfg") or by_default
    config.model_wrapper_cfg = {**wrapper, "device_ids": None}


def main() -> None:
    """Train."""
    config = configured(arguments())
    is_on_cpu = config.get("launcher") == "pytorch" and not torch.cuda.is_available()
    if is_on_cpu:
        prepare_ranks_of_cpus(config)
    RUNNERS.build(config).train()
    if torch.distributed.is_initialized():
        gc.collect()  # the model first: after the group, it may wait for ever
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
