# SPDX-License-Identifier: Apache-2.0
"""Every way to hold a part of a batch, and what it shows: `python -m tests.hostile.aliases`.

    python -m tests.hostile.aliases process "numpy: slice" "tensor: expand"

An alias is made of a batch and held while the loader goes on; what it shows then has to be what the
same alias of a copy of the batch showed.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import itertools
import operator
import pickle
import queue
import re
import struct
import sys
import types
import warnings
import weakref
from collections import deque
from functools import partial

import numpy as np
import pyarrow as pa
import scipy.sparse
import torch
from PIL import Image
from torch.nn.utils.rnn import PackedSequence
from torch.utils import dlpack

from penstock.torch import DataLoader

ROWS, COLUMNS = (
    4,
    65_536,
)  # float32: 1 MiB a batch, from where on a loader in one process has a pool
FLOATS = ctypes.POINTER(ctypes.c_float)
MORE = 40  # batches that go by after the last alias was made
BACKENDS = {"process": (2, "process"), "thread": (2, "thread"), "serial": (0, "process")}


class Rows:
    """Sample k is a row full of numbers that no other has, and k."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return np.arange(COLUMNS, dtype=np.float32) + np.float32(index * 0.5), index


class Interfaced:
    """Shows its array by `__array_interface__` alone."""

    def __init__(self, array):
        self.__array_interface__ = array.__array_interface__
        self.kept = array


class Array(np.ndarray):
    """A subclass of numpy's."""


class Tensor(torch.Tensor):
    """A subclass of torch's."""


class Slotted:
    """An object without a dict."""

    __slots__ = ("part",)

    def __init__(self, part):
        self.part = part


def raised_with(array):
    """An error whose traceback alone holds the array."""
    try:
        part = array[1:]
        raise ValueError(part.shape)
    except ValueError as error:
        traceback = error.__traceback__
    return lambda: traceback.tb_frame.f_locals["part"]


def generator_over(array):
    """A generator that has begun."""
    rows = (row for row in array)
    return next(rows), lambda: list(rows)


def out_of_band(array):
    """A pickle whose buffers are the array's own memory."""
    buffers = []
    data = pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
    return lambda: pickle.loads(data, buffers=buffers)


def in_cycle(array):
    """Two objects that hold each other, and the array."""
    one, other = types.SimpleNamespace(), types.SimpleNamespace(part=array[2:])
    one.other, other.one = other, one
    return lambda: one.other.part


def in_queue(array):
    """A queue of threads."""
    waiting = queue.SimpleQueue()
    waiting.put(array[1:])
    return waiting.get


def in_weak_dict(array):
    """A weak dict, and what keeps its value."""
    values, part = weakref.WeakValueDictionary(), array[1:]
    values["part"] = part
    return lambda kept=part: values["part"]


def buffers_of_arrow(array):
    """pyarrow's array over the same memory."""
    return pa.Array.from_buffers(pa.float32(), array.size, [None, pa.py_buffer(array)])


OF_ARRAY = {
    "itself": lambda a: a,
    "row": lambda a: a[1],
    "slice": lambda a: a[1:3, 5:-5],
    "element as a 0-d view": lambda a: a[2, 7, ...],
    "stepped": lambda a: a[::2, ::3],
    "reversed": lambda a: a[::-1, ::-1],
    "transposed": lambda a: a.T,
    "reshaped": lambda a: a.reshape(-1, 8),
    "ravelled": lambda a: a.ravel(),
    "diagonal": lambda a: a.diagonal(3),
    "with more axes": lambda a: a[None, :, None],
    "axes swapped": lambda a: np.swapaxes(a, 0, 1),
    "broadcast": lambda a: np.broadcast_to(a[0], (3, COLUMNS)),
    "as_strided": lambda a: np.lib.stride_tricks.as_strided(a, (100, 10), (400, 4)),
    "sliding window": lambda a: np.lib.stride_tricks.sliding_window_view(a[0], 9)[::997],
    "view as bytes": lambda a: a.view(np.uint8),
    "element's imaginary part": lambda a: a.view(np.complex64)[0, 3:4].imag,
    "view as complex, its imaginary part": lambda a: a.view(np.complex64).imag,
    "view of a view of a view": lambda a: a[1:][:2].T[3:].view(np.uint32),
    "field of structs": lambda a: a.view([("x", "f4"), ("y", "f4")])["y"],
    "recarray's attribute": lambda a: a.view([("x", "f4"), ("y", "f4")], np.recarray).x,
    "void scalar": lambda a: a.view([("x", "f4"), ("y", "f4")])[0, 9],
    "subclass": lambda a: a.view(Array)[1],
    "matrix": lambda a: np.asmatrix(a)[1:],
    "masked array": lambda a: np.ma.masked_array(a, a > 70_000, copy=False),
    "flat iterator": lambda a: partial(lambda flat: flat[5:], a.flat),
    "iterator of rows": lambda a: partial(list, iter(a)),
    "nditer": lambda a: partial(lambda it: list(map(float, it))[::999], np.nditer(a[2])),
    "memoryview": lambda a: memoryview(a),
    "memoryview's slice": lambda a: memoryview(a)[1:],
    "memoryview, cast": lambda a: memoryview(a).cast("B")[64:],
    "memoryview, read-only": lambda a: memoryview(a).toreadonly(),
    "array of a memoryview": lambda a: np.asarray(memoryview(a)[2:]),
    "frombuffer": lambda a: np.frombuffer(a, np.uint16),
    "ndarray over a buffer": lambda a: np.ndarray((50,), "f4", buffer=a, offset=400),
    "__array_interface__": lambda a: np.asarray(Interfaced(a)),
    "ctypes by from_buffer": lambda a: (ctypes.c_float * 99).from_buffer(a, 800),
    "ctypes by ctypeslib": lambda a: np.ctypeslib.as_ctypes(a),
    "array of ctypes": lambda a: np.ctypeslib.as_array(np.ctypeslib.as_ctypes(a)),
    "ctypes' pointer": lambda a: partial(lambda p: p[:99], a.ctypes.data_as(FLOATS)),
    "from_dlpack": lambda a: np.from_dlpack(a)[1],
    "DLPack's capsule": lambda a: partial(dlpack.from_dlpack, a.__dlpack__()),
    "torch.from_numpy": lambda a: torch.from_numpy(a)[1:],
    "torch.as_tensor": lambda a: torch.as_tensor(a).t(),
    "torch.frombuffer": lambda a: torch.frombuffer(a, dtype=torch.int32),
    "pickle, out of band": out_of_band,
    "copy.copy of a memoryview's holder": lambda a: copy.copy(Slotted(memoryview(a))).part,
    "iter_unpack": lambda a: partial(lambda it: list(it)[::99], struct.iter_unpack("64f", a[0])),
    "match of a pattern": lambda a: partial(lambda m: m.string, re.compile(b"(?s).{99}").match(a)),
    "partial": lambda a: partial(operator.getitem, a, 3),
    "bound method": lambda a: a[1:].copy,
    "attribute of slots": lambda a: partial(getattr, Slotted(a[3]), "part"),
    "in an object array": lambda a: np.array([a[0], None], object)[:1],
    "in a deque, chained": lambda a: list(deque([[a[3]], (a[2],)])),
    "in a queue": in_queue,
    "in a mapping proxy": lambda a: partial(types.MappingProxyType({1: a[1]}).get, 1),
    "in a cycle": in_cycle,
    "in a generator": lambda a: generator_over(a)[1],
    "in an iterator's tee": lambda a: partial(list, itertools.tee(iter(a))[1]),
    "in a traceback": raised_with,
    "in a default argument": lambda a: (lambda part=a[2:]: part),
    "in a weak value's owner": in_weak_dict,
    "pyarrow's buffer": buffers_of_arrow,
    "Pillow's image": lambda a: Image.frombuffer(
        "L", (512, 512), a.view(np.uint8).reshape(-1)[: 512 * 512], "raw", "L", 0, 1
    ),
    "scipy's sparse data": lambda a: scipy.sparse.csr_matrix(
        (a[0, :9], np.arange(9), np.array([0, 4, 9])), shape=(2, 9), copy=False
    ),
}  # fmt: skip


def saved_for_backward(x):
    """A graph that has saved the batch to compute a gradient with."""
    weight = torch.ones((), requires_grad=True)
    product = (weight * x[1]).sum()
    return lambda: torch.autograd.grad(product, weight)[0]


def in_module(x):
    """A module with the batch as a buffer."""
    module = torch.nn.Module()
    module.register_buffer("mean", x[1])
    return lambda: module.state_dict()["mean"]


def as_gradient(x):
    """A parameter whose gradient it is."""
    parameter = torch.nn.Parameter(torch.zeros(x.shape))
    parameter.grad = x
    return lambda: parameter.grad


OF_TENSOR = {
    "itself": lambda x: x,
    "row": lambda x: x[1],
    "element": lambda x: x[2, 5],
    "stepped": lambda x: x[:, ::3],
    "transposed": lambda x: x.t(),
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "permuted": lambda x: x.permute(1, 0),
    "moved axes": lambda x: x.movedim(0, 1),
    "flattened": lambda x: x.flatten(),
    "unflattened": lambda x: x.unflatten(1, (256, -1)),
    "view": lambda x: x.view(-1, 32),
    "view as bytes": lambda x: x.view(torch.uint8),
    "expand": lambda x: x[:1].expand(5, -1),
    "broadcast": lambda x: torch.broadcast_to(x[3], (2, COLUMNS)),
    "as_strided": lambda x: x.as_strided((100, 10), (100, 1), 7),
    "unfold": lambda x: x.unfold(1, 8, 4096),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "select": lambda x: x.select(1, 9),
    "diagonal": lambda x: x.diagonal(),
    "squeezed": lambda x: x[None, None].squeeze(0),
    "chunk": lambda x: x.chunk(2)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[2],
    "unbind": lambda x: x.unbind()[3],
    "iterator": lambda x: partial(list, iter(x)),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "alias": lambda x: torch.ops.aten.alias(x),
    "view_as_complex": lambda x: torch.view_as_complex(x.view(-1, 2)),
    "conjugated": lambda x: torch.view_as_complex(x.view(-1, 2)).conj(),
    "imaginary part": lambda x: torch.view_as_complex(x.view(-1, 2)).imag,
    "negated": lambda x: torch._neg_view(x),
    "subclass": lambda x: x.as_subclass(Tensor),
    "parameter": lambda x: torch.nn.Parameter(x),
    "requires_grad": lambda x: x.requires_grad_()[1],
    "untyped storage": lambda x: x.untyped_storage(),
    "typed storage": lambda x: x.storage(),
    "set_ to the storage": lambda x: torch.empty(0).set_(x.untyped_storage()),
    "__reduce_ex__": lambda x: partial(lambda made: made[0](*made[1]), x.__reduce_ex__(2)),
    "copy.copy": lambda x: copy.copy(x),
    "from_dlpack": lambda x: torch.from_dlpack(x)[1],
    "numpy by from_dlpack": lambda x: np.from_dlpack(x)[1:],
    "DLPack's capsule": lambda x: partial(dlpack.from_dlpack, dlpack.to_dlpack(x)),
    "numpy by __array__": lambda x: x.__array__()[1],
    "numpy by asarray": lambda x: np.asarray(x)[:, 3:],
    "sparse COO's values": lambda x: torch.sparse_coo_tensor(
        torch.arange(64)[None], x[1, :64], (64,), is_coalesced=True
    ),
    "sparse CSR's values": lambda x: torch.sparse_csr_tensor(
        torch.tensor([0, 32, 64]), torch.arange(64) % 32, x[1, :64], (2, 32)
    ),
    "quantized": lambda x: torch._make_per_tensor_quantized_tensor(x.view(torch.uint8), 0.1, 3),
    "packed sequence": lambda x: PackedSequence(x[:3], torch.tensor([2, 1])),
    "saved for backward": saved_for_backward,
    "buffer of a module": in_module,
    "gradient": as_gradient,
    "in a list of a dict": lambda x: {"a": [x[1], {"b": x[2]}]},
    "default_convert": lambda x: torch.utils.data.default_convert({"x": x})["x"],
    "functional_call's argument": lambda x: partial(torch.mul, x, 2),
}  # fmt: skip

ALIASES = {
    **{f"tensor: {name}": make for name, make in OF_TENSOR.items()},
    **{f"numpy: {name}": lambda x, m=make: m(x.numpy()) for name, make in OF_ARRAY.items()},
}


def shown_by(held):
    """Return all bytes that an alias shows, whatever it is."""
    if isinstance(held, torch.Tensor):
        held = held.detach()
        held = held.to_dense() if held.layout is not torch.strided else held
        held = held.int_repr() if held.is_quantized else held.resolve_conj().resolve_neg()
        return held.as_subclass(torch.Tensor).contiguous().numpy().tobytes()
    if isinstance(held, torch.UntypedStorage):
        return shown_by(torch.empty(0, dtype=torch.uint8).set_(held)[: ROWS * COLUMNS * 4])
    if isinstance(held, torch.storage.TypedStorage):
        return shown_by(held.untyped())
    if isinstance(held, np.ndarray) and held.dtype.hasobject:
        return shown_by(held.tolist())
    if isinstance(held, (np.ndarray, np.generic, memoryview)):
        return held.tobytes()
    if isinstance(held, ctypes.Array):
        return bytes(held)
    if isinstance(held, dict):
        return shown_by(list(held.values()))
    if isinstance(held, (list, tuple)):
        return b"".join(shown_by(part) for part in held)
    if isinstance(held, pa.Array):
        return held.buffers()[1].to_pybytes()
    if hasattr(held, "toarray"):  # scipy's
        return held.toarray().tobytes()
    if callable(held):
        return shown_by(held())
    return (
        held
        if isinstance(held, bytes)
        else held.tobytes()
        if held is not None and hasattr(held, "tobytes")
        else repr(held).encode()
    )


def lost(backend, names=(), **options):
    """Hold each alias of a batch of its own while many go by; return those that show another."""
    names = list(names or ALIASES)
    num_workers, backend = BACKENDS[backend]
    loader = DataLoader(
        Rows(ROWS * (len(names) + MORE)),
        batch_size=ROWS,
        num_workers=num_workers,
        backend=backend,
        **options,
    )
    held, wrong = {}, []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of sparse and nested tensors, and of typed storages
        stream = iter(loader)
        for name in names:
            x, _ = next(stream)
            expected = shown_by(ALIASES[name](x.clone()))
            held[name] = (ALIASES[name](x), expected)
            del x
        gc.collect()
        for step, (x, numbers) in enumerate(stream, start=len(names)):
            if not torch.equal(x[:, 0], numbers * 0.5) or numbers[0] != ROWS * step:
                wrong.append(f"batch {step} itself")
        for name, (alias, expected) in held.items():
            if shown_by(alias) != expected:
                wrong.append(name)
    return wrong


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(f"lost: {lost(sys.argv[1], sys.argv[2:])}")
