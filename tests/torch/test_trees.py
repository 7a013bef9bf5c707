# SPDX-License-Identifier: Apache-2.0
"""Whatever a batch is made of, it comes through workers unchanged, and is the user's alone."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from tests.torch.comparing import assert_same
from tests.torch.datasets_for_tests import Rows

from penstock.torch import DataLoader

Point = namedtuple("Point", ["x", "y"])


@dataclass(frozen=True)
class Boxes:
    """A frozen dataclass of a user."""

    xyxy_px: torch.Tensor
    label: np.ndarray
    note: str | None


class Image(torch.Tensor):
    """A subclass of Tensor."""


def image() -> Image:
    tensor = torch.arange(4800.0).view(3, 40, 40).as_subclass(Image)
    tensor.source = "camera 3"
    return tensor


def sparse_coo() -> torch.Tensor:
    positions = torch.stack([torch.arange(900), torch.arange(900) * 7 % 1000])
    return torch.sparse_coo_tensor(positions, torch.arange(900.0), (900, 1000))


def sparse_csr() -> torch.Tensor:
    return torch.sparse_csr_tensor(
        torch.arange(0, 1001, 2), torch.arange(1000) % 600, torch.arange(1000.0), (500, 600)
    )


def structured() -> np.ndarray:
    array = np.zeros(700, [("id", "i4"), ("where", "f8", (2,)), ("name", "U5")])
    array["id"], array["name"] = np.arange(700), "abc"
    return array


def objects() -> np.ndarray:
    array = np.empty(3, object)
    array[:] = ["text", {"a": 1}, None]
    return array


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(5000) % 2).to(dtype).view(50, 100)


BIG = torch.arange(6000.0).view(2, 30, 100)
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
)  # fmt: skip
TREES: dict[str, Any] = {
    "nested dicts": lambda: {"a": {"b": {"c": BIG.clone(), "d": {}}}, 3: BIG + 1, (1, 2): "key"},
    "ordered dict": lambda: OrderedDict(z=BIG, a=BIG + 1),
    "tuples": lambda: (BIG, (BIG + 1, (), (1,)), []),
    "named tuple": lambda: Point(BIG, Point(1, [BIG + 1])),
    "dataclass": lambda: Boxes(BIG, np.arange(3000), None),
    "strings": lambda: ["", "text", "ünï ☃", "x" * 10_000],
    "bytes": lambda: [b"", b"\0\1", b"y" * 10_000, bytearray(b"z" * 9000)],
    "None": lambda: None,
    "None inside": lambda: [None, {"a": None}, BIG],
    "numbers": lambda: (1, 2**80, 1.5, float("nan"), True, 2j, np.float32(3), np.bool_(True)),
    "sparse COO": sparse_coo,
    "sparse COO, coalesced": lambda: sparse_coo().coalesce(),
    "sparse CSR": sparse_csr,
    "sparse CSC": lambda: sparse_csr().to_sparse_csc(),
    "sparse BSR": lambda: sparse_csr().to_sparse_bsr((5, 6)),
    "nested tensor": lambda: torch.nested.nested_tensor([BIG[0], BIG[1, :7]]),
    "jagged tensor": lambda: torch.nested.nested_tensor([BIG[0], BIG[1, :7]], layout=torch.jagged),
    **{f"torch.{name}": lambda n=name: of_dtype(getattr(torch, n)) for name in DTYPES},
    "zero-size": lambda: [torch.empty(0), torch.empty(3, 0, 2, dtype=torch.int8), np.empty((0, 4))],
    "zero-dimensional": lambda: [torch.tensor(3), torch.tensor(2.5), np.array(4)],
    "transposed": lambda: BIG.permute(2, 0, 1),
    "stepped": lambda: BIG[:, ::3, 1::2],
    "channels last": lambda: (
        torch.arange(9600.0).view(2, 3, 40, 40).to(memory_format=torch.channels_last)
    ),
    "expanded": lambda: torch.arange(2000.0).view(2000, 1).expand(2000, 3),
    "conjugated": lambda: torch.randn(1000, dtype=torch.complex64).conj(),
    "view of a bigger one": lambda: BIG[1, 3:5],
    "tensor subclass": image,
    "parameter": lambda: torch.nn.Parameter(BIG.clone()),
    "frozen parameter": lambda: torch.nn.Parameter(BIG.clone(), requires_grad=False),
    "leaf that requires grad": lambda: BIG.clone().requires_grad_(),
    "structured array": structured,
    "object array": objects,
    "string array": lambda: np.array(["a", "bcd"] * 2000),
    "datetime array": lambda: np.arange("2020-01", "2060-01", dtype="M8[M]"),
    "big-endian array": lambda: np.arange(2000, dtype=">i4"),
    "Fortran order": lambda: np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
    "stepped array": lambda: np.arange(6000.0).reshape(60, 100)[::2, ::5],
    "dtype and size": lambda: [torch.float32, torch.Size([2, 3]), torch.device("cpu")],
}


class Made(Rows):
    """Batches are made by `collate_fn` alone."""

    def __getitem__(self, index: int) -> int:
        return index


class Maker:
    """A `collate_fn` that makes the named tree."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, samples: list[int]) -> Any:
        torch.manual_seed(1)
        return TREES[self.name]()


@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled",
    "ignore:Sparse .* tensor support is in beta",
    "ignore:The PyTorch API of nested tensors",
)
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("name", TREES)
def test_a_batch_comes_through_as_it_was_made(name: str, num_workers: int) -> None:
    loader = DataLoader(Made(3), num_workers=num_workers, collate_fn=Maker(name))
    expected = Maker(name)([])
    for batch in loader:
        if name == "stepped":  # only its elements are sent, not what lies between them
            assert torch.equal(batch, expected)
        elif name == "stepped array":
            assert np.array_equal(batch, expected)
        else:
            assert_same(expected, batch)


def ragged(samples: list[int]) -> torch.Tensor:
    index = samples[0]
    return torch.full((index * 37 % 50, 1 + index * 91 % 700), float(index))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_of_varying_shapes_come_through(num_workers: int) -> None:
    loader = DataLoader(Made(60), num_workers=num_workers, collate_fn=ragged)
    for index, batch in enumerate(loader):
        assert_same(ragged([index]), batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_writing_into_a_batch_shows_in_no_other(num_workers: int) -> None:
    held = []
    for step, (rows, indices) in enumerate(
        DataLoader(Rows(80), batch_size=2, num_workers=num_workers)
    ):
        assert torch.equal(rows, torch.stack([Rows()[2 * step][0], Rows()[2 * step + 1][0]]))
        assert indices.tolist() == [2 * step, 2 * step + 1]
        rows.fill_(-step)
        indices.fill_(-step)
        held.append((rows, indices))
    for step, (rows, indices) in enumerate(held):
        assert rows.unique().tolist() == indices.unique().tolist() == [-step]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_view_of_a_held_batch_stays_intact_while_200_more_are_made(num_workers: int) -> None:
    batches = iter(DataLoader(Rows(202), num_workers=num_workers))
    next(batches)
    view = next(batches)[0][0, ::3]  # the batch itself is dropped
    expected = Rows()[1][0][::3]
    assert sum(1 for _ in batches) == 200
    assert torch.equal(view, expected)
