# SPDX-License-Identifier: Apache-2.0
"""Train what a config describes, with mmengine's Runner on Penstock's loader.

    python train.py configs/one_frame.py --work-dir runs/one_frame
    torchrun --nproc-per-node=2 train.py configs/one_frame.py --launcher pytorch

It is what `tools/train.py` of MMDetection3D does, and the few lines that training on CPUs takes.
"""

from __future__ import annotations

import argparse
import gc
import warnings
from pathlib import Path

import torch
import torch.distributed.nn  # before there is a group, or it holds it beyond the end

with warnings.catch_warnings():
    # mmengine 0.10.7 uses parts of torch that are deprecated by now.
    warnings.simplefilter("ignore")
    from mmengine.config import Config, DictAction
    from mmengine.registry import RUNNERS


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--work-dir", type=Path, help="for logs and checkpoints")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        help="go on from a checkpoint; without a name from the latest of the work dir",
    )
    parser.add_argument("--launcher", choices=["none", "pytorch"], default="none")
    parser.add_argument("--seed", type=int, help="of weights, order and augmentation")
    parser.add_argument("--deterministic", action="store_true", help="of torch's algorithms, too")
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="as train_dataloader.batch_size=4"
    )
    return parser.parse_args()


def configured(args: argparse.Namespace) -> Config:
    """Return the config, with what the command line says instead."""
    config = Config.fromfile(args.config)
    config.merge_from_dict(args.cfg_options or {})
    config.work_dir = str(args.work_dir or Path("runs", args.config.stem))
    config.launcher = args.launcher
    config.resume = args.resume is not None
    config.load_from = None if args.resume in (None, "latest") else args.resume
    if args.seed is not None:
        config.randomness.seed = args.seed
    config.randomness.deterministic = args.deterministic
    return config


def prepare_ranks_of_cpus(config: Config) -> None:
    """Do what mmengine does for ranks with GPUs: by itself it asks for a device of CUDA."""
    torch.distributed.init_process_group("gloo")
    config.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None}


def main() -> None:
    """Train."""
    config = configured(arguments())
    is_on_cpu = config.launcher == "pytorch" and not torch.cuda.is_available()
    if is_on_cpu:
        prepare_ranks_of_cpus(config)
    RUNNERS.build(config).train()
    if torch.distributed.is_initialized():
        gc.collect()  # the model first: after the group, it may wait for ever
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
