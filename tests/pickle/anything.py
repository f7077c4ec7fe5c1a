"""Nested structures of tensors, arrays and buffers that may share memory; how to compare them.

A task uses `fingerprint` too, to describe a structure before it sends it back.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

TORCH = ["float32", "float64", "int16", "uint8", "bfloat16", "float8_e4m3fn", "complex64"]
TORCH = [name for name in [*TORCH, "uint16", "uint32"] if hasattr(torch, name)]
NUMPY = ["<f4", ">f4", "<i8", "u1", "<c8", "<M8[s]", "S3", "<U1", "V5", [("a", "<i2"), ("b", "u1")]]
SIZES = [16, 48, 240, 150_000]  # sizes in bytes; the last one is sent outside the pickle


class Sub(torch.Tensor):  # type: ignore[misc]
    """A subclass of Tensor without any code."""


class SubArray(np.ndarray):  # type: ignore[type-arg]
    """A subclass of ndarray without any code."""


@dataclasses.dataclass
class Pair:
    one: Any
    two: Any


# -- taking structures apart -----------------------------------------------------------------------


def leaves(obj: Any) -> Iterator[Any]:
    """Yield all objects that are not containers, in order; a function contains its closure."""
    if isinstance(obj, (list, tuple)) and not isinstance(obj, torch.Size):
        for one in obj:
            yield from leaves(one)
    elif isinstance(obj, dict):
        for key, one in obj.items():
            yield key
            yield from leaves(one)
    elif isinstance(obj, Pair):
        yield from leaves([obj.one, obj.two])
    elif isinstance(obj, functools.partial):
        yield from leaves([obj.func, *obj.args])
    elif getattr(obj, "__closure__", None):
        yield from leaves([cell.cell_contents for cell in obj.__closure__])
    else:
        yield obj


def parts(leaf: Any) -> list[Any]:
    """Return the dense tensors and arrays that make up a leaf, without their subclasses."""
    if isinstance(leaf, torch.Tensor):
        bare = torch.Tensor._make_subclass(torch.Tensor, leaf)
        if bare.is_mkldnn:
            return [bare.to_dense()]
        if bare.layout is torch.sparse_coo:
            return [bare._indices(), bare._values()]
        if bare.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [bare.crow_indices(), bare.col_indices(), bare.values()]
        if bare.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [bare.ccol_indices(), bare.row_indices(), bare.values()]
        if bare.is_quantized:
            return [torch.empty(0, dtype=torch.uint8).set_(bare.untyped_storage())]
        if bare.is_nested:
            return [bare.values()]
        return [] if bare.is_meta else [bare]
    if isinstance(leaf, np.ma.MaskedArray):
        mask = [] if leaf.mask is np.ma.nomask else [np.ndarray.view(leaf.mask, np.ndarray)]
        return [np.ndarray.view(leaf.data, np.ndarray), *mask]
    if isinstance(leaf, np.ndarray):
        return [] if leaf.dtype.hasobject else [np.ndarray.view(leaf, np.ndarray)]
    return []


class _Bytes:
    """Gives numpy the memory of a dense tensor or array."""

    def __init__(self, part: Any) -> None:
        self.part = part
        if isinstance(part, torch.Tensor):
            address, size = part.data_ptr(), part.element_size()
            steps = [step * size for step in part.stride()]
        else:
            address, size = part.__array_interface__["data"][0], part.itemsize
            steps = list(part.strides)
        self.__array_interface__ = {
            "version": 3, "typestr": "|u1", "data": (address, False),
            "shape": (*part.shape, size), "strides": (*steps, 1),
        }  # fmt: skip


def memory(part: Any) -> Any:
    """Return all bytes of all elements as a writable array with one more axis."""
    if 0 in part.shape or not part.nbytes:
        return np.empty(0, np.uint8)
    return np.asarray(_Bytes(part))


def ties(obj: Any) -> list[list[int]]:
    """For each dense part of each leaf, return the parts that a write to it changes."""
    memories = [memory(part) for leaf in leaves(obj) for part in parts(leaf)]
    found = []
    for one in memories:
        before = [other.tobytes() for other in memories]
        saved = one.copy()
        one[...] = 255  # no drawn structure has this byte
        found.append([j for j, other in enumerate(memories) if other.tobytes() != before[j]])
        one[...] = saved
    return found


# -- comparing ------------------------------------------------------------------------------------


def facts(leaf: Any) -> Any:
    """Return all that must stay equal in a leaf, except memory and strides."""
    if isinstance(leaf, torch.Tensor):
        quant = ""
        if leaf.is_quantized:
            quant = str(leaf.qscheme())
        flags = (leaf.requires_grad, leaf.is_conj(), leaf.is_neg(), leaf.is_leaf, quant)
        shape = str(leaf._nested_tensor_size() if leaf.is_nested else tuple(leaf.shape))
        where = (str(leaf.dtype), str(leaf.layout), str(leaf.device), shape)
        return type(leaf).__name__, *where, flags, sorted(leaf.__dict__)
    if isinstance(leaf, np.ma.MaskedArray):
        return type(leaf).__name__, str(leaf.dtype), leaf.shape, str(leaf.fill_value)
    if isinstance(leaf, np.ndarray):
        objects = leaf.tolist() if leaf.dtype.hasobject else None
        writable = leaf.flags.writeable
        return type(leaf).__name__, str(leaf.dtype), leaf.shape, writable, str(objects)
    if isinstance(leaf, memoryview):
        return "memoryview", leaf.format, leaf.shape, leaf.readonly, leaf.tobytes()
    if isinstance(leaf, torch.UntypedStorage):
        return "storage", bytes(leaf.tolist())
    return type(leaf).__name__, repr(leaf)


def fingerprint(obj: Any) -> list[Any]:
    """Return all that must stay equal in a structure."""
    found: list[Any] = []
    seen: list[Any] = []
    for leaf in leaves(obj):
        first = next((i for i, one in enumerate(seen) if one is leaf), len(seen))
        seen.append(leaf)
        # Digests keep the worker's answer short.
        digests = [hashlib.md5(memory(part).tobytes()).hexdigest() for part in parts(leaf)]
        found.append((first, facts(leaf), digests))
    return [*found, ties(obj)]


def shared(sent: Any, back: Any) -> bool:
    """Whether corresponding dense tensors of both structures have the same memory."""
    ones = [part for leaf in leaves(sent) for part in parts(leaf) if torch.is_tensor(part)]
    twos = [part for leaf in leaves(back) for part in parts(leaf) if torch.is_tensor(part)]
    pairs = [(one, two) for one, two in zip(ones, twos, strict=True) if one.numel()]
    return all(one.data_ptr() == two.data_ptr() for one, two in pairs)


def strides_lost(sent: Any, back: Any) -> list[Any]:
    """Return the parts that lost their strides although the strides are promised."""
    lost = []
    names = [(id(leaf), i) for leaf in leaves(sent) for i, _ in enumerate(parts(leaf))]
    tied = [{names[index] for index in row} for row in ties(sent)]
    ones = [part for leaf in leaves(sent) for part in parts(leaf)]
    twos = [part for leaf in leaves(back) for part in parts(leaf)]
    for index, (one, two) in enumerate(zip(ones, twos, strict=True)):
        steps = one.stride() if isinstance(one, torch.Tensor) else one.strides
        found = two.stride() if isinstance(two, torch.Tensor) else two.strides
        size = one.element_size() if isinstance(one, torch.Tensor) else 1
        own, span = 1, 1
        for length, step in zip(one.shape, steps, strict=True):
            if step and length > 1:
                own *= length
                span += abs(step) * size * (length - 1)
        itemsize = one.element_size() if isinstance(one, torch.Tensor) else one.itemsize
        own, span = own * itemsize, span - 1 + itemsize
        kept = len(tied[index]) > 1 or span <= own * (4 if isinstance(one, torch.Tensor) else 1)
        # numpy ignores the stride of an axis of length 1.
        least = -1 if isinstance(one, torch.Tensor) else 1
        differ = [
            n for n, a, b in zip(one.shape, steps, found, strict=True) if a != b and n > least
        ]
        if kept and 0 not in one.shape and differ:
            lost.append((index, one.shape, steps, found))
    return lost


# -- drawing --------------------------------------------------------------------------------------

Draw = Callable[..., Any]


def _bytes(size: int) -> Any:
    return (np.arange(size) * 37 % 251).astype(np.uint8)


def _memory(draw: Draw) -> tuple[Any, Any]:
    """Draw a memory, as a tensor and as an array."""
    data = _bytes(draw(st.sampled_from(SIZES)))
    tensor = torch.from_numpy(data)
    if draw(st.booleans()):
        tensor = tensor.clone()
        data = tensor.numpy()
    return tensor, data


def _steps(draw: Draw, room: int, least: int) -> tuple[list[int], list[int], int]:
    """Draw lengths, steps and offset that stay within ``room`` elements."""
    shape, steps = [], []
    low = high = 0
    count = 1
    for _ in range(draw(st.integers(0, 3))):
        length = draw(st.sampled_from([0, 1, 2, 3, 4, 5, 9000]))
        step = draw(st.integers(least, 6))
        reach = (max(length, 1) - 1) * step
        if high - low + abs(reach) >= room or count * length > 30_000:
            length, reach = 1, 0
        count *= length
        low, high = low + min(reach, 0), high + max(reach, 0)
        shape.append(length)
        steps.append(step)
    return shape, steps, draw(st.integers(0, room - 1 - (high - low))) - low


def _tensor(draw: Draw, flat: Any) -> Any:
    dtype = getattr(torch, draw(st.sampled_from(TORCH)))
    whole = torch.empty(0, dtype=dtype).set_(flat.untyped_storage())
    tensor = whole.as_strided(*_steps(draw, whole.numel(), 0)).detach()
    dress = draw(st.sampled_from(["", "", "", "grad", "parameter", "sub", "attribute", "conj"]))
    if dress == "conj" and dtype.is_complex:
        return draw(st.sampled_from([torch.conj, lambda x: x.conj().imag]))(tensor)
    if dress == "grad" and dtype.is_floating_point:
        return tensor.requires_grad_()
    if dress == "parameter":
        return torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
    if dress == "sub":
        return tensor.as_subclass(Sub)
    if dress == "attribute":
        tensor.tag = "mine"
    return tensor


def _array(draw: Draw, data: Any) -> Any:
    dtype = np.dtype(draw(st.sampled_from(NUMPY)))
    room = data.nbytes // dtype.itemsize
    shape, steps, first = _steps(draw, room, -6)
    strides = [step * dtype.itemsize for step in steps]
    array = np.ndarray(shape, dtype, data, first * dtype.itemsize, strides)
    if draw(st.integers(0, 4)) == 0:
        array.setflags(write=False)
    return array.view(SubArray) if draw(st.integers(0, 4)) == 0 else array


def _sparse(draw: Draw, flat: Any) -> Any:
    values = torch.empty(0, dtype=torch.float32).set_(flat.untyped_storage())[:4]
    make = draw(st.sampled_from(["coo", "csr", "csc"]))
    places = torch.arange(4)
    if make == "coo":
        return torch.sparse_coo_tensor(places[None], values, (7,), check_invariants=False)
    layout = torch.sparse_csr if make == "csr" else torch.sparse_csc
    with warnings.catch_warnings():  # torch 2.11 warns that it does not check, as asked
        warnings.simplefilter("ignore")
        return torch.sparse_compressed_tensor(
            torch.arange(5), places, values, (4, 4), layout=layout, check_invariants=False
        )


def _quantized(draw: Draw, flat: Any) -> Any:
    tensor = torch.arange(6.0).view(2, 3)
    if draw(st.booleans()):
        return torch.quantize_per_tensor(tensor, 0.5, 1, torch.quint8)
    scales = torch.tensor([0.1, 0.2])
    return torch.quantize_per_channel(tensor, scales, torch.zeros(2), 0, torch.qint8)


OTHERS: list[Callable[[], Any]] = [
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.empty(2, 3, device="meta"),
    lambda: torch.tensor([True, False]),
    lambda: torch.arange(4).untyped_storage(),
    lambda: np.array([1, "a", None], dtype=object),
    lambda: np.ma.masked_array(np.arange(4), [0, 1, 0, 0]),
    lambda: np.float32(1.5),
    lambda: memoryview(bytearray(12)).cast("i", (3, 1)),
    lambda: memoryview(b"read only"),
    lambda: bytearray(b"bytes"),
    lambda: torch.Size([1, 2]),
    lambda: torch.float16,
    lambda: "text",
]


@st.composite
def structures(draw: Draw, arrays: bool = True) -> Any:
    """Draw containers and closures of tensors, arrays and other objects, some with common
    memory."""
    memories = [_memory(draw) for _ in range(draw(st.integers(1, 3)))]
    items: list[Any] = []
    for _ in range(draw(st.integers(1, 7))):
        tensor, array = draw(st.sampled_from(memories))
        kind = draw(st.sampled_from("tttttaaasqoor" if arrays else "tttttsqoor"))
        if kind == "t":
            items.append(_tensor(draw, tensor))
        elif kind == "a":
            items.append(_array(draw, array))
        elif kind == "s":
            items.append(_sparse(draw, tensor))
        elif kind == "q":
            items.append(_quantized(draw, tensor))
        elif kind == "o" or not items:
            items.append(draw(st.sampled_from(OTHERS))())
        else:
            items.append(items[draw(st.integers(0, len(items) - 1))])
    while len(items) > 1:
        cut = draw(st.integers(0, len(items) - 1))
        items = [*items[:cut], _contained(draw, items[cut:])]
        if len(items) > 1 and draw(st.booleans()):
            items = [_contained(draw, items)]
    return items[0]


def _contained(draw: Draw, items: list[Any]) -> Any:
    how = draw(st.sampled_from(["list", "tuple", "dict", "pair", "closure", "partial"]))
    if how == "tuple":
        return tuple(items)
    if how == "dict":
        return dict(enumerate(items))
    if how == "pair":
        return Pair(items[0], items[1:])
    if how == "closure":
        return lambda: items
    if how == "partial":
        return functools.partial(print, *items)
    return items
