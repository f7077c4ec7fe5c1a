"""Torch tensors, copied: exactly their own elements, as a protocol-5 buffer.

torch is never imported here on the sending side: an object of torch's must exist before
`register` is called.

Tensors of one message whose elements lie in overlapping parts of one storage arrive as
views of one storage.  The first pass over the message sends each tensor alone and notes
what it touched; if two overlap and the first does not cover the second, the message is
pickled once more, this time knowing the union of each overlapping group (`Spans`).

Tensors that are not strided, are quantized, on the meta device, or of a subclass take
torch's own reduction.  Those on a device arrive as CPU tensors.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, field
from pickle import PickleBuffer
from typing import Any, NamedTuple

from xpool.errors import TaskNotPicklable
from xpool.pickle.hooks import LAZY, REDUCERS, Context
from xpool.pickle.sharing import move_in, open_storage, share_storage

__all__ = ["Spans"]


class _Sent(NamedTuple):
    start: int  # first byte of the storage that was sent
    stop: int
    tensor: Any  # the object whose bytes these are
    base: int  # byte of the storage at which the sent buffer begins; -1 when it was compacted


@dataclass
class Spans:
    """What one run of a pickler knows about storages, by address."""

    unions: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    sent: dict[int, list[_Sent]] = field(default_factory=dict)
    again: bool = False  # an overlap was met that this run could not keep

    def merged(self) -> Spans:
        """What the second run has to know: overlapping ranges, merged."""
        unions = {}
        for address, entries in self.sent.items():
            if len(entries) < 2:
                continue
            groups: list[list[int]] = []
            for one in sorted(entries, key=lambda entry: entry.start):
                if groups and one.start < groups[-1][1]:
                    groups[-1][1] = max(groups[-1][1], one.stop)
                    groups[-1][2] += 1
                else:
                    groups.append([one.start, one.stop, 1])
            unions[address] = [(start, stop) for start, stop, count in groups if count > 1]
        return Spans(unions)


def register() -> None:
    """Put torch's types into the table of reducers."""
    torch = sys.modules["torch"]
    for name in _MODULES:
        LAZY.pop(name, None)
    REDUCERS[torch.Tensor] = _reduce
    REDUCERS[torch.nn.Parameter] = _reduce
    REDUCERS[torch.UntypedStorage] = _reduce_storage


_MODULES = ("torch", "torch.nn.parameter", "torch.storage")
for _module in _MODULES:
    LAZY[_module] = register


def _reduce(pickler: Context, tensor: Any) -> Any:
    torch = sys.modules["torch"]
    if (
        tensor.layout is not torch.strided
        or tensor.is_meta
        or tensor.is_quantized
        or tensor.is_nested
    ):
        return NotImplemented
    flags = 0 if type(tensor) is torch.Tensor else _PARAMETER
    plain = tensor
    if tensor.requires_grad:
        if not tensor.is_leaf:
            raise TaskNotPicklable(
                f"A tensor of shape {tuple(tensor.shape)} is the result of a computation that "
                "tracks gradients; the graph behind it cannot be sent to another process. "
                "Send x.detach() instead."
            )
        flags |= _GRAD
        plain = tensor.detach()
    if not tensor.is_cpu:
        args = _alone(torch, plain.detach().cpu(), flags)
    elif pickler.layout.arena is not None:
        storage = move_in(pickler, tensor)
        place = plain.storage_offset(), tuple(plain.shape), plain.stride()
        return _with_attributes(tensor, _of_storage, (storage, _name(plain), *place, flags))
    elif plain.is_conj() or plain.is_neg():
        args = _alone(torch, plain.detach().resolve_conj().resolve_neg(), flags)
    elif plain.numel() == 0:
        args = (None, _name(plain), tuple(plain.shape), None, 0, flags)
    else:
        args = _shared(pickler, torch, tensor, plain, flags)
        if isinstance(args[0], torch.Tensor):
            return _with_attributes(tensor, _view, args)
    return _with_attributes(tensor, _tensor, args)


_GRAD, _PARAMETER = 1, 2


def _reduce_storage(pickler: Context, storage: Any) -> Any:
    if pickler.layout.arena is not None:
        return open_storage, share_storage(pickler, storage)
    """As a tensor of bytes, since torch's own pickle of a storage does not load."""
    torch = sys.modules["torch"]
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _storage_of, (flat,)


def _storage_of(tensor: Any) -> Any:
    return tensor.untyped_storage()


def _of_storage(storage: Any, dtype: str, offset: int, shape: Any, strides: Any, flags: int) -> Any:
    import torch

    made = torch.empty(0, dtype=getattr(torch, dtype)).set_(storage, offset, shape, strides)
    return _finish(torch, made, flags)


def _with_attributes(tensor: Any, make: Any, args: Any) -> Any:
    if tensor.__dict__:
        return make, args, tensor.__dict__, None, None, _set_attributes
    return make, args


def _set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def _name(tensor: Any) -> str:
    name = _names.get(tensor.dtype)
    if name is None:
        name = _names[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    return name


_names: dict[Any, str] = {}


def _shared(pickler: Context, torch: Any, tensor: Any, plain: Any, flags: int) -> Any:
    """Arguments for `_view` when an earlier tensor has the bytes, else for `_tensor`."""
    size = plain.element_size()
    start = plain.storage_offset() * size
    count = plain.numel()
    strides = None
    if plain.is_contiguous():
        stop = start + count * size
        dense = True
    else:
        strides = plain.stride()
        last = sum((n - 1) * step for n, step in zip(plain.shape, strides, strict=True))
        stop = start + (last + 1) * size
        # Dense in another order (transposed, channels last): no element is missing inside.
        dense = stop - start == count * size and _no_repeats(plain)
    spans = pickler.tensors
    if spans is None:
        spans = pickler.tensors = Spans()
    storage = plain.untyped_storage()
    address = storage.data_ptr()
    entries = spans.sent.get(address)
    if entries is None:
        entries = spans.sent[address] = []
    for one in entries:
        if one.start < stop and start < one.stop:
            if one.base >= 0 and one.start <= start and stop <= one.stop:
                offset = start - one.base
                return one.tensor, offset, _name(plain), tuple(plain.shape), strides, flags
            spans.again = True
    base, end = (start, stop) if dense else (-1, -1)
    if spans.unions:
        for union_start, union_stop in spans.unions.get(address, ()):
            if union_start <= start and stop <= union_stop:
                base, end = union_start, union_stop
    entries.append(_Sent(start, stop, tensor, -1) if base < 0 else _Sent(base, end, tensor, base))
    if base < 0 or (strides is None and end - base == count * size):
        return _alone(torch, plain, flags)
    whole = torch.empty(0, dtype=torch.uint8).set_(storage, base, (end - base,), (1,))
    buffer = PickleBuffer(_array(whole))
    return buffer, _name(plain), tuple(plain.shape), plain.stride(), start - base, flags


def _no_repeats(tensor: Any) -> bool:
    """Whether the strides, in some order, are those of a contiguous tensor."""
    expected = 1
    axes = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for step, length in axes:
        if length != 1:
            if step != expected:
                return False
            expected *= length
    return True


def _alone(torch: Any, plain: Any, flags: int) -> Any:
    plain = plain.contiguous()
    name, shape = _name(plain), tuple(plain.shape)
    if name not in _OF_NUMPY:
        # Not view(-1): that keeps the odd stride that an axis of length 1 may have.
        plain = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
    return PickleBuffer(_array(plain)), name, shape, None, 0, flags


_OF_NUMPY = frozenset(
    {"float64", "float32", "float16", "complex64", "complex128", "bool"}
    | {"int8", "int16", "int32", "int64", "uint8"}
)


def _array(tensor: Any) -> Any:
    try:
        return tensor.numpy()
    except RuntimeError:  # this torch was built without numpy, or cannot load it
        size = tensor.numel() * tensor.element_size()
        return bytearray(ctypes.string_at(tensor.data_ptr(), size))


# -- the receiving side -------------------------------------------------------------------


def _tensor(buffer: Any, dtype: str, shape: Any, strides: Any, offset: int, flags: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if buffer is None:
        made = torch.empty(shape, dtype=kind)
    elif strides is None:
        size = 1
        for length in shape:
            size *= length
        made = torch.frombuffer(buffer, dtype=kind, count=size).view(shape)
    else:
        storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        made = _place(torch, storage, offset, kind, shape, strides)
    return _finish(torch, made, flags)


def _view(base: Any, offset: int, dtype: str, shape: Any, strides: Any, flags: int) -> Any:
    import torch

    kind = getattr(torch, dtype)
    made = _place(torch, base.untyped_storage(), offset, kind, shape, strides)
    return _finish(torch, made, flags)


def _place(torch: Any, storage: Any, offset: int, kind: Any, shape: Any, strides: Any) -> Any:
    empty = torch.empty(0, dtype=kind)
    if strides is None:
        strides = torch.empty(shape, device="meta").stride()
    return empty.set_(storage, offset // kind.itemsize, shape, strides)


def _finish(torch: Any, tensor: Any, flags: int) -> Any:
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags else tensor
