# SPDX-License-Identifier: Apache-2.0
"""What a proof is: values that have to be equal, or to differ, told by digests of their bits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    Check = Callable[["Size"], "Proof"]


@dataclass(frozen=True)
class Size:
    """How much is compared.

    Attributes:
        samples: Of a dataset.
        workers: Numbers of workers.
    """

    samples: int
    workers: tuple[int, ...]


@dataclass(frozen=True)
class Proof:
    """What was compared.

    Attributes:
        told: The values by name, and their digests.
        holds: Whether they are as the claim has them; None where this machine cannot tell.
    """

    told: str
    holds: bool | None


@dataclass(frozen=True)
class Claim:
    """A sentence of a page, and how to look whether it is true.

    Attributes:
        page: Of `docs`.
        text: The claim.
        check: Compares.
    """

    page: str
    text: str
    check: Check


CLAIMS: list[Claim] = []


def claim(page: str, text: str) -> Callable[[Check], Check]:
    """Enter a function as the proof of a sentence."""

    def enter(check: Check) -> Check:
        CLAIMS.append(Claim(page, text, check))
        return check

    return enter


def equal(**values: Any) -> Proof:  # noqa: ANN401 - batches, states, numbers
    """Claim that all are the same, to the last bit."""
    digests = {_spaced(name): digest(value) for name, value in values.items()}
    if len(digests) > 1 and len(set(digests.values())) == 1:
        return Proof(f"{' = '.join(digests)}: {digest(next(iter(values.values())))}", True)
    return Proof(", ".join(f"{name}: {found}" for name, found in digests.items()), False)


def distinct(**values: Any) -> Proof:  # noqa: ANN401
    """Claim that no two are the same."""
    digests = {_spaced(name): digest(value) for name, value in values.items()}
    holds = len(digests) > 1 and len(set(digests.values())) == len(digests)
    sign = " ≠ " if holds else ", "
    return Proof(sign.join(f"{name}: {found}" for name, found in digests.items()), holds)


def both(*proofs: Proof) -> Proof:
    """Claim all that each of these does."""
    return Proof("; ".join(proof.told for proof in proofs), all(proof.holds for proof in proofs))


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def digest(value: Any) -> str:  # noqa: ANN401
    """Return eight hexadecimal digits of SHA-256 over all bits of a value, types and shapes too.

    A tensor has the digest of the array that it is. Short texts and numbers stand for themselves.
    """
    if isinstance(value, (str, int, bool)) and len(str(value)) <= 24:
        return str(value)
    state = hashlib.sha256()
    _feed(state, value)
    return state.hexdigest()[:8]


def _feed(state: Any, value: Any) -> None:  # noqa: ANN401
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        state.update(f"{value.dtype.str}{value.shape}".encode())
        state.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (list, tuple)):
        state.update(f"[{len(value)}".encode())
        for part in value:
            _feed(state, part)
    elif isinstance(value, dict):
        _feed(state, list(value.items()))
    else:
        state.update(repr(value).encode())
