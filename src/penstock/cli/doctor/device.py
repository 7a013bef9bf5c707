# SPDX-License-Identifier: Apache-2.0
"""The GPU, as torch sees it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.doctor.finding import Finding
from penstock.system_limits import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["has_nvidia_driver", "look_at_device"]

_ROOT: Final = Path("/")
_TOPIC: Final = "device"
_NAME: Final = "GPU"
_CHOOSERS: Final = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def has_nvidia_driver(root: Path = _ROOT) -> bool:
    """Return whether this machine, or its container, shows an NVIDIA GPU.

    Args:
        root: Below it lie `proc` and `dev`.
    """
    return any((root / name).exists() for name in ("proc/driver/nvidia/version", "dev/nvidiactl"))


def look_at_device(
    facts: Mapping[str, Any] | None, torch_version: str | None, root: Path = _ROOT
) -> Finding:
    """Return what torch can copy batches to.

    Args:
        facts: What a process that imported torch told; None if there is none.
        torch_version: None if torch is not installed.
        root: As of `has_nvidia_driver`.
    """
    is_there = has_nvidia_driver(root)
    if facts is None:
        found = "torch cannot be imported" if torch_version else "not looked for: no torch here"
        return Finding(_TOPIC, _NAME, found, values={"nvidia_driver": is_there})
    values = {**facts, "nvidia_driver": is_there}
    if facts["kind"] is not None:
        return _present(facts, values)
    hider = _hider(facts)
    if hider and (is_there or facts["cuda"] or facts["hip"]):
        found = f"none{_build(facts)}: hidden by {hider}={os.environ[hider]!r}"
        return Finding(_TOPIC, _NAME, found, values=values)
    if facts["cuda"] is None and facts["hip"] is None:
        found = f"none: torch {torch_version} is a build for the CPU"
        if not is_there:
            return Finding(_TOPIC, _NAME, found, values=values)
        remedy = "This machine has an NVIDIA driver: install a build of torch with CUDA."
        return Finding(_TOPIC, _NAME, f"{found} alone", remedy, "advice", values)
    return _absent(facts, values, is_there=is_there)


def _present(facts: Mapping[str, Any], values: Mapping[str, Any]) -> Finding:
    sizes = [
        device["name"]
        + (f" ({format_bytes(device['total_bytes'])})" if device["total_bytes"] else "")
        for device in facts["devices"]
    ]
    found = f"{facts['kind']}: {', '.join(sizes)}{_build(facts)}"
    warned = "; torch warns: ".join(["", *facts["warnings"]])
    if facts["error"] is not None:
        remedy = (
            "torch cannot compute on it. Known causes: a build of torch without this GPU's "
            "architecture, a driver that is too old, another process that has it for itself."
        )
        return Finding(
            _TOPIC, _NAME, f"{found}; {facts['error']}{warned}", remedy, "problem", values
        )
    if warned:
        remedy = "It computes all the same; torch's warning says what does not fit."
        return Finding(_TOPIC, _NAME, found + warned, remedy, "advice", values)
    return Finding(_TOPIC, _NAME, f"{found}; a computation on it worked", values=values)


def _absent(facts: Mapping[str, Any], values: Mapping[str, Any], *, is_there: bool) -> Finding:
    found = f"none{_build(facts)}: {facts['error'] or 'torch finds no device'}"
    chosen = [f"{name}={os.environ[name]!r}" for name in _CHOOSERS if name in os.environ]
    if chosen:
        found += f" ({', '.join(chosen)})"
    if not is_there:
        return Finding(_TOPIC, _NAME, found, values=values)
    remedy = (
        "This machine has an NVIDIA driver, and torch cannot use it. Known causes: a driver too "
        "old for this build of torch (see nvidia-smi), a container without access to the GPU, "
        "CUDA_VISIBLE_DEVICES names another one. Loaders work without; device= needs it."
    )
    return Finding(_TOPIC, _NAME, found, remedy, "advice", values)


def _hider(facts: Mapping[str, Any]) -> str | None:
    """Return the variable that hides every GPU on purpose: no number in it, or a negative first."""
    for name in _CHOOSERS if facts["hip"] else _CHOOSERS[:1]:
        value = os.environ.get(name)
        if value is not None and (not value.strip() or value.strip().startswith("-")):
            return name
    return None


def _build(facts: Mapping[str, Any]) -> str:
    if facts["cuda"]:
        return f", torch is built for CUDA {facts['cuda']}"
    return f", torch is built for ROCm {facts['hip']}" if facts["hip"] else ""
