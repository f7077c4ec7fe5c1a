"""Pickles torch tensors in copy mode: exactly their own elements.

A tensor is reduced in steps, each of which the receiver undoes:

1. Properties besides the values (a Parameter, a leaf that requires grad, a conjugate view, a
   subclass, attributes) are sent with the bare tensor (`_dressed`, `reduce_subclass`).
2. A tensor made of other tensors (sparse, nested, quantized) is sent as these (`parts`).  They are
   reduced like any tensor, so they keep their aliases.
3. Elements at steps in a storage are sent as bytes (`_dense`).  If other objects of the message
   lie in the same memory, they are sent as a place in a `Piece` (see `extents`).

`bytes_of` makes buffers of all dense memory, of arrays, too.  The sender never imports torch here,
because `_lazy_torch` is called only for an object of torch.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from functools import partial
from pickle import PickleBuffer
from typing import Any

from xpool._memory.system import buffer_at
from xpool._pickling import diagnose
from xpool._pickling.frame import INLINE_BELOW
from xpool._pickling.reducers import (
    FOR_SUBCLASSES,
    LAZY,
    NEW,
    REDUCERS,
    SHORT,
    Context,
    Head,
    in_place,
    is_message,
    of_module,
    register,
    set_attributes,
    tail,
)
from xpool._pickling.tensors import mapped, programs
from xpool._pickling.tensors.device_memory import about, keep, on_own_device, share_memory
from xpool._pickling.tensors.extents import Piece, Seen, extent
from xpool._pickling.tensors.sharing import (
    first_user,
    move,
    reduce_named,
    reduce_shared,
    storage_of,
)
from xpool.errors import TaskNotPicklable

_SPREAD = 4
"""Strides with gaps are kept, unless the gaps make the tensor this many times larger."""

_GRAD, _PARAMETER, _CONJ, _NEG = 1, 2, 4, 8


# The names of the dtypes whose tensors have only elements, and no conjugate bit.
_SIMPLE: dict[Any, str] = {}
_NAMES: dict[Any, str] = {}


class _FromBuffer(dict[str, Any]):
    """The functions that make a tensor over a buffer, by the names of the dtypes."""

    def __missing__(self, name: str) -> Any:
        _learn(mapped.imported_torch())
        return self.copy()[name]  # a plain dict, which raises for an unknown name


_FROM_BUFFER = _FromBuffer()

# Looked up in torch once, because for a small tensor lookups take much of the time.
_strided: Any = None
_has_names: Any = None  # in older versions of torch, axes may have names


def _lazy_torch() -> None:
    torch = sys.modules["torch"]
    _learn(torch)
    REDUCERS[torch.Tensor] = _reduce
    SHORT[torch.Tensor] = _short
    # A Parameter always has properties besides its elements.
    REDUCERS[torch.nn.Parameter] = reduce_any
    REDUCERS[torch.UntypedStorage] = _reduce_storage
    FOR_SUBCLASSES[torch.Tensor] = reduce_subclass
    typed = torch.storage.TypedStorage
    REDUCERS[typed] = lambda _, one: (_typed_storage, (one._untyped_storage, one.dtype))
    for kind in (torch.finfo, torch.iinfo):
        REDUCERS[kind] = lambda _, info: (type(info), (getattr(torch, info.dtype),))
    for kind in (torch.memory_format, torch.qscheme):
        # torch gives `pickle` a name without a module, for which it also looks in `__mp_main__`.
        REDUCERS[kind] = lambda _, one: (of_module, tuple(str(one).split(".")))


LAZY["torch"] = LAZY["torch.nn.parameter"] = LAZY["torch.storage"] = _lazy_torch


def _lazy_optimizer() -> None:
    base = sys.modules["torch.optim.optimizer"].Optimizer

    def reduce(pickler: Context, optimizer: Any) -> Any:
        """Pickle an optimizer in a global with its hooks and other attributes, which its own
        ``__getstate__`` leaves out."""
        kind = type(optimizer)
        methods = "__reduce__", "__reduce_ex__", "__getstate__"
        if pickler.group is None or any(getattr(kind, n) is not getattr(base, n) for n in methods):
            return NotImplemented
        return NEW, (kind,), vars(optimizer)

    FOR_SUBCLASSES[base] = reduce


LAZY["torch.optim.optimizer"] = _lazy_optimizer


LAZY["torch.jit"] = LAZY["torch.jit._script"] = programs.lazy_script
LAZY["torch.export.exported_program"] = programs.lazy_exported
LAZY["torch.fx.graph_module"] = programs.lazy_graphs
LAZY["torch._ops"] = programs.lazy_operators


def _learn(torch: Any) -> None:
    global _strided, _has_names
    _strided = torch.strided
    _has_names = getattr(torch.Tensor, "has_names", None)
    for dtype in list(vars(torch).values()):  # another thread may import more
        if isinstance(dtype, torch.dtype):
            name = str(dtype).removeprefix("torch.")
            _NAMES[dtype] = name
            _FROM_BUFFER[name] = partial(torch.frombuffer, dtype=dtype)
            if not dtype.is_complex and not name.startswith("q"):
                _SIMPLE[dtype] = name


# -- from elements to bytes ------------------------------------------------------------------------

# A view of memory from an address on.  Only the requested bytes are read.
_Window = ctypes.c_char * (sys.maxsize >> 1)


def bytes_of(start: int, size: int, owner: Any) -> bytearray | PickleBuffer:
    """Return ``size`` bytes of memory (> 0) as an object that is loaded as a writable buffer.

    Args:
        start: the address of the bytes, not 0.
        owner: the object that owns the memory.  It is kept alive as long as the result.
    """
    if size < INLINE_BELOW:
        # This copy becomes a part of the pickle, so the owner need not be kept alive.
        return bytearray(_Window.from_address(start)[:size])  # type: ignore[arg-type]
    return PickleBuffer(buffer_at(start, size, owner))


class Memory:
    """A `Piece` in the receiver."""

    __slots__ = ("_storage", "buffer")

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer
        self._storage: Any = None

    @property
    def storage(self) -> Any:
        """The torch storage that all tensors of the piece share."""
        if self._storage is None:
            self._storage = _FROM_BUFFER["uint8"](self.buffer).untyped_storage()
        return self._storage


register(Piece)(lambda _, one: (Memory, (bytes_of(one.start, one.stop - one.start, one),)))


# -- dense tensors -------------------------------------------------------------------------------


def _simple(tensor: Any) -> str | None:
    """Return the dtype's name if a tensor is only contiguous elements, else None."""
    name = _SIMPLE.get(tensor.dtype)
    if (
        # Complex dtypes are not in `_SIMPLE`, so the conjugate bit need not be checked.
        name is None
        or not tensor.is_cpu
        or tensor.layout is not _strided
        or tensor.is_nested
        or tensor.requires_grad
        or tensor._backward_hooks  # hooks remain if the tensor no longer requires a gradient
        or tensor.is_neg()
        or not tensor.is_contiguous()
        or tensor.__dict__
        or (_has_names is not None and _has_names(tensor))
    ):
        return None
    return name


def _reduce(pickler: Context, tensor: Any) -> Any:
    """Reduce a tensor whose type is exactly `torch.Tensor`; this handles the most frequent kind."""
    name = _simple(tensor)
    if name is None:
        return reduce_any(pickler, tensor)
    start = tensor.data_ptr()
    arena = pickler.layout.arena
    if arena is not None and start:  # share mode
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        count, odd = divmod(storage.nbytes(), tensor.element_size())
        block = arena.holding(address)
        file: Any = None
        if block is None and hasattr(storage, "xpool_place"):  # the storage was sent before
            file = mapped.place_of(pickler, storage)
        known = (block is not None or file is not None) and not odd
        if known and first_user(pickler, address, tensor) is tensor:
            place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            if block is not None:
                return _shared, (in_place(pickler, block), name, count, *place)
            lent = mapped.lend(pickler, storage, file, partial(about, tensor))
            return _in_file, (lent, name, count, *place)
        return _dense(pickler, sys.modules["torch"], tensor, name)
    if pickler.layout.named and start:
        return _dense(pickler, sys.modules["torch"], tensor, name)
    seen = Seen.of(pickler)
    shape = tuple(tensor.shape)
    # An axis of length 1 may have any stride.
    if seen.plan is not None or 1 in shape or not start:
        return reduce_any(pickler, tensor)
    # In the first run, the tensor is sent alone, and recorded.
    size = tensor.nbytes
    seen.append((start, start + size, (), tensor))
    data = bytes_of(start, size, tensor)
    return _tensor, ((data, name) if len(shape) == 1 else (data, name, shape))


def _short(tensor: Any, by_number: bool) -> bytes | None:
    name = _simple(tensor)
    if name is None:
        return None
    size = tensor.nbytes
    shape = tuple(tensor.shape)
    try:
        start = tensor.data_ptr()
    except RuntimeError:  # in a transform of torch.func; the pickler will raise the error
        return None
    # The tensor is the whole message, so it cannot alias another object.
    if size >= INLINE_BELOW or 1 in shape or not start:
        return None
    end = tail(name) if len(shape) == 1 else tail(name, shape)
    data: bytes = _Window.from_address(start)[:size]  # type: ignore[assignment]
    return _head(size, by_number) + data + end


def reduce_any(pickler: Context, tensor: Any) -> Any:
    if tensor.requires_grad or tensor._backward_hooks:
        if not tensor.is_leaf and not is_message(pickler):
            return without_graph, (tensor.detach(),)
        check(tensor)
    # In share mode, a worker keeps the tensor on its device and sends a handle.
    kept = keep(pickler, tensor)
    if kept is not None:
        return kept
    torch = sys.modules["torch"]
    flags = 0
    if tensor.is_conj():
        flags |= _CONJ
    if tensor.is_neg():
        flags |= _NEG
    if tensor.requires_grad:
        flags |= _GRAD
    if type(tensor) is torch.nn.Parameter:
        flags |= _PARAMETER
    if not flags and not tensor.__dict__:
        return _bare(pickler, torch, tensor)
    if pickler.layout.arena is not None and tensor.is_cpu and tensor.layout is _strided:
        # Moved now, because `bare` will also use the storage.
        _storage_in_arena(pickler, tensor)
    bare = tensor.detach()
    if flags & _CONJ:
        # A second `conj` removes the bit, so the elements are sent as they are in memory.
        bare = bare.conj()
    if flags & _NEG:
        bare = torch._neg_view(bare)
    if tensor.__dict__:
        return _dressed, (bare, flags), tensor.__dict__, None, None, set_attributes
    return _dressed, (bare, flags)


def _bare(pickler: Context, torch: Any, tensor: Any) -> Any:
    made_of = parts(torch, tensor)
    if made_of is not None:
        return made_of
    name = _NAMES[tensor.dtype]
    if tensor.is_meta:
        return _empty, (name, tuple(tensor.shape), tensor.stride(), "meta")
    if _has_names is not None and _has_names(tensor):
        raise TaskNotPicklable(
            f"{about(tensor)} has named axes {tensor.names}, which cannot be sent to "
            "another process. Send x.rename(None), and the names beside it."
        )
    if not tensor.is_cpu:
        return _on_device(pickler, tensor)
    if tensor.numel() == 0:
        return _empty, (name, tuple(tensor.shape), tensor.stride(), "cpu")
    return _dense(pickler, torch, tensor, name)


def _on_device(pickler: Context, tensor: Any) -> Any:
    """Reduce a tensor on a device: as shared memory if this message allows it, else as a copy."""
    if tensor.is_cuda:
        shared = share_memory(pickler, tensor)
        if shared is not None:
            return shared
        copied = _into_block(pickler, tensor)
        if copied is not None:
            return copied
    return on_own_device, (tensor.cpu(),)


def _into_block(pickler: Context, tensor: Any) -> Any:
    """Copy a large tensor of a GPU into the block in which it travels, or return None.

    A copy in new host memory, which is then copied into a block, takes several times as long,
    because the system clears each new page.
    """
    count, itemsize, lessor = tensor.numel(), tensor.element_size(), pickler.layout.lessor
    if lessor is None or count * itemsize < INLINE_BELOW:
        return None
    block: Any = lessor(count * itemsize)
    if block is None:
        return None
    block.filled = True
    torch, name, shape = sys.modules["torch"], _NAMES[tensor.dtype], tuple(tensor.shape)
    strides = torch.empty_like(tensor, device="meta").stride()  # the strides of `tensor.cpu()`
    _shared(memoryview(block), name, count, 0, shape, strides).copy_(tensor)
    return _device_copy, (in_place(pickler, block), name, count, shape, strides)


def _dense(pickler: Context, torch: Any, tensor: Any, name: str) -> Any:
    start = tensor.data_ptr()
    if not start:
        tensor = _with_memory(tensor)
        start = tensor.data_ptr()
    shape, strides, itemsize = tuple(tensor.shape), tensor.stride(), tensor.element_size()
    # In share mode, the storage is sent by name, and the tensor as a place in it.
    if pickler.layout.named:
        return _at, (tensor.untyped_storage(), tensor.storage_offset(), name, shape, strides)
    if pickler.layout.arena is not None:
        storage = _storage_in_arena(pickler, tensor)
        user = first_user(pickler, storage.data_ptr(), storage)
        return _at, (user, tensor.storage_offset(), name, shape, strides)
    found, own = extent(start, shape, [stride * itemsize for stride in strides], itemsize)
    seen = Seen.of(pickler)
    if seen.plan is None:
        # This keeps the tensor alive, so that no other object gets its address.
        seen.append((*found, tensor))
    elif (piece := seen.plan.get(found)) is not None:
        return _view, (piece, start - piece.start, name, shape, strides)
    _, stop, gaps = found
    # Send the bytes as they are in memory, with any order of the axes.
    if not gaps:
        return _tensor, (bytes_of(start, own, tensor), name, shape, strides)
    # Copy elements only once if an axis repeats them.
    once = tuple(1 if stride == 0 else n for n, stride in zip(shape, strides, strict=True))
    compact = tensor.as_strided(once, strides).contiguous()
    data = bytes_of(compact.data_ptr(), compact.nbytes, compact)
    # If the gaps are small, the receiver makes them again.
    if stop - start <= _SPREAD * own:
        return _spread, (data, name, once, shape, strides)
    # Otherwise it gets a tensor without gaps, in which stride 0 still repeats elements.
    pairs = zip(compact.stride(), strides, strict=True)
    return _tensor, (data, name, shape, tuple(new if old else 0 for new, old in pairs))


def _storage_in_arena(pickler: Context, tensor: Any) -> Any:
    storage, layout = tensor.untyped_storage(), pickler.layout
    arena = layout.arena
    # A storage that was shared before, or received, is already in the arena.  `reduce_shared`
    # handles storages that other processes may have mapped.
    if (
        arena is not None
        and storage.nbytes()
        and not arena.holds(storage.data_ptr())
        and storage.resizable()
        and not storage.is_shared()
    ):
        move(arena, layout, storage, partial(about, tensor), tensor)
    return storage


def _with_memory(tensor: Any) -> Any:
    if tensor._is_zerotensor():  # autograd's zeros without memory
        return tensor.clone()
    raise TaskNotPicklable(
        f"{about(tensor)} has no values: its storage was resized to 0 bytes. Send it "
        "when its storage has been filled again, or leave it out."
    )


def _reduce_storage(pickler: Context, storage: Any) -> Any:
    """Reduce a storage to a tensor of bytes, because torch's own pickle of it cannot be loaded."""
    if storage.device.type == "cpu":
        if pickler.layout.named:
            return reduce_named(pickler, storage)
        if pickler.layout.arena is not None:
            return reduce_shared(pickler, storage)
    torch = sys.modules["torch"]
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return storage_of, (flat,) if flat.is_cpu else (flat.cpu(), True)


# -- the receiving side ----------------------------------------------------------------------------
# Devices are named, because the receiver may have another default device.


def _tensor(buffer: Any, name: str, shape: Any = None, strides: Any = None) -> Any:
    """Return a tensor over a buffer: contiguous without strides, flat without a shape."""
    made = _FROM_BUFFER[name](buffer)
    # Changed in place, so that the tensor is not a view of another one.  The sizes are passed one
    # by one, because torch parses a tuple slowly.
    if shape is None:
        return made
    if strides is not None:
        return made.as_strided_(shape, strides)
    return made.resize_(*shape) if shape else made.resize_(shape)


_head = Head(_tensor)


def _view(memory: Memory, offset: int, name: str, shape: Any, strides: Any) -> Any:
    torch = mapped.imported_torch()
    dtype = getattr(torch, name)
    index, odd = divmod(offset, dtype.itemsize)
    if not odd:
        return torch.empty(0, dtype=dtype, device="cpu").set_(memory.storage, index, shape, strides)
    # The offset is not a multiple of the element size, so `set_` cannot express it.
    rest = memoryview(memory.buffer)[offset:]
    # `frombuffer` accepts only whole elements.
    whole = rest[: len(rest) // dtype.itemsize * dtype.itemsize]
    return _FROM_BUFFER[name](whole).as_strided_(shape, strides)


def _shared(buffer: Any, name: str, count: int, offset: int, shape: Any, strides: Any) -> Any:
    """Return a tensor in shared memory that has ``count`` elements."""
    made = _FROM_BUFFER[name](buffer, count=count)
    return made.as_strided_(shape, strides, offset)


def _device_copy(buffer: Any, name: str, count: int, shape: Any, strides: Any) -> Any:
    return on_own_device(_shared(buffer, name, count, 0, shape, strides))


def _in_file(lent: Any, name: str, count: int, offset: int, shape: Any, strides: Any) -> Any:
    _, *place = lent
    return _shared(mapped.open_buffer(*place), name, count, offset, shape, strides)


def _at(user: Any, offset: int, name: str, shape: Any, strides: Any) -> Any:
    torch = sys.modules["torch"]
    storage = user if isinstance(user, torch.UntypedStorage) else user.untyped_storage()
    made = torch.empty(0, dtype=getattr(torch, name), device=storage.device)
    return made.set_(storage, offset, shape, strides)


def _spread(buffer: Any, name: str, once: Any, shape: Any, strides: Any) -> Any:
    compact = _tensor(buffer, name, once)
    like = {"dtype": compact.dtype, "device": compact.device}
    made = sys.modules["torch"].empty_strided(once, strides, **like)
    return made.copy_(compact).as_strided_(shape, strides)


def _empty(name: str, shape: Any, strides: Any, device: str) -> Any:
    torch = mapped.imported_torch()
    return torch.empty_strided(shape, strides, dtype=getattr(torch, name), device=device)


def _dressed(tensor: Any, flags: int) -> Any:
    torch = sys.modules["torch"]
    if flags & _NEG:
        tensor = torch._neg_view(tensor).detach()
    if flags & _CONJ:
        tensor = tensor.conj().detach()
    if flags & _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & _GRAD))
    return tensor.requires_grad_() if flags & _GRAD else tensor


# -- tensors made of other tensors -----------------------------------------------------------------
# The receiver has the parts before it calls one of these functions, and so has imported torch.


def parts(torch: Any, tensor: Any) -> Any:
    """Return how to rebuild a bare tensor from others, or None if it is elements in a storage."""
    layout = tensor.layout
    if layout is torch.strided:
        if tensor.is_quantized:
            return _quantized_parts(torch, tensor)
        # torch reduces nested tensors to other tensors.
        return NotImplemented if tensor.is_nested else None
    shape = tuple(tensor.shape)
    if layout is torch.sparse_coo:
        # The public methods refuse an uncoalesced tensor.
        members = (tensor._indices(), tensor._values())
        return _sparse, (*members, shape, tensor.is_coalesced())
    if layout in (torch.sparse_csr, torch.sparse_bsr):
        rows, columns = tensor.crow_indices(), tensor.col_indices()
        return _compressed, (rows, columns, tensor.values(), shape, layout)
    if layout in (torch.sparse_csc, torch.sparse_bsc):
        columns, rows = tensor.ccol_indices(), tensor.row_indices()
        return _compressed, (columns, rows, tensor.values(), shape, layout)
    # The memory belongs to mkldnn, so the values are converted in both directions.
    if tensor.is_mkldnn:
        return _mkldnn, (tensor.to_dense(),)
    return NotImplemented  # torch pickles it, or says that it cannot


def _quantized_parts(torch: Any, tensor: Any) -> Any:
    """Reduce to the whole storage, because four-bit elements need not begin at a byte.

    torch's own reduction is not used: when it is loaded, it warns of a deprecated kind of storage.
    """
    scheme: Any = tensor.qscheme()
    if scheme == torch.per_tensor_affine:
        how: Any = (scheme, tensor.q_scale(), tensor.q_zero_point())
    else:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        how = (scheme, scales, zeros, tensor.q_per_channel_axis())
    place = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
    return _quantized, (tensor.untyped_storage(), tensor.dtype, *place, how)


def _sparse(indices: Any, values: Any, shape: Any, coalesced: bool) -> Any:
    torch = sys.modules["torch"]
    how = {"is_coalesced": coalesced, "check_invariants": False, "device": values.device}
    return torch.sparse_coo_tensor(indices, values, shape, **how)


def _compressed(outer: Any, inner: Any, values: Any, shape: Any, layout: Any) -> Any:
    torch = sys.modules["torch"]
    how = {"layout": layout, "check_invariants": False, "device": values.device}
    return torch.sparse_compressed_tensor(outer, inner, values, shape, **how)


def _mkldnn(dense: Any) -> Any:
    return dense.to_mkldnn()


def _quantized(storage: Any, dtype: Any, offset: int, shape: Any, strides: Any, how: Any) -> Any:
    torch = sys.modules["torch"]
    options = {"dtype": dtype, "device": "cpu"}
    if how[0] == torch.per_tensor_affine:
        _, scale, zero = how
        made = torch._empty_affine_quantized(shape, scale=scale, zero_point=zero, **options)
    else:
        _, scales, zeros, axis = how
        made = torch._empty_per_channel_affine_quantized(
            shape, scales=scales, zero_points=zeros, axis=axis, **options
        )
    return made.set_(storage, offset, shape, strides)


def without_graph(tensor: Any) -> Any:
    """Return a tensor of a global that tracks gradients; to go back beyond it raises an error.

    A model may keep such a tensor, as a distribution of its last actions, and no task needs it.
    """
    return _graph_of_program().apply(tensor.requires_grad_())


@functools.cache
def _graph_of_program() -> Any:
    torch: Any = sys.modules["torch"]

    class GraphOfTheProgram(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, tensor: Any) -> Any:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise RuntimeError(
                "This tensor of a global of the program is the result of a computation that tracks "
                "gradients, and the graph behind it was not sent to this worker. Compute it in the "
                "task, or set the global to x.detach()."
            )

    return GraphOfTheProgram


def check(tensor: Any) -> None:
    """Check that a tensor does not refer to the autograd graph of this process.

    Raises:
        TaskNotPicklable: the tensor is a result that tracks gradients, or it has hooks.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        why = (
            "it is the result of a computation that tracks gradients, and the graph behind it "
            "cannot be sent"
        )
        raise diagnose.refused(tensor, about(tensor), why, "Send x.detach() instead.")
    hooks = [*(tensor._backward_hooks or {}).values()]
    hooks += [*(getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()]
    hooks = [hook for hook in hooks if not hasattr(hook, "__torch_unserializable__")]
    if hooks:
        raise diagnose.refused(
            tensor,
            about(tensor),
            f"it has hooks for its gradient ({hooks[0]!r}), which cannot be sent",
            "Remove them (the handle that register_hook returned has remove()), send x.detach(), "
            "or say that a hook may be left behind by decorating it with "
            "torch.utils.hooks.unserializable_hook.",
        )


# -- subclasses -----------------------------------------------------------------------------------


def reduce_subclass(pickler: Context, tensor: Any) -> Any:
    """Reduce a tensor of a class without its own reducer to its values, class and attributes.

    A wrapper has no memory, and its attributes are the wrapped tensors.  torch pickles it.
    """
    torch = sys.modules["torch"]
    cls = type(tensor)
    own_ways = (torch.Tensor.__reduce_ex__, torch.nn.Parameter.__reduce_ex__)
    if cls.__reduce_ex__ not in own_ways or cls.__reduce__ is not torch.Tensor.__reduce__:
        return NotImplemented
    # Otherwise each use of the tensor would call the `__torch_function__` of its class.
    with torch._C.DisableTorchFunctionSubclass():
        check(tensor)
        kept = keep(pickler, tensor)
        if kept is not None:
            return kept
        if _is_wrapper(torch, tensor):
            return NotImplemented
        grad = tensor.requires_grad
        # Make a plain tensor of the same memory, without calling the class's `__torch_dispatch__`.
        with torch._C._DisableTorchDispatch():
            bare = torch.Tensor._make_subclass(torch.Tensor, tensor)
    state = torch._utils._get_obj_state(tensor)
    if state:
        return _subclassed, (bare, cls, grad), state, None, None, _set_state
    return _subclassed, (bare, cls, grad)


def _is_wrapper(torch: Any, tensor: Any) -> bool:
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return False
    try:
        return bool(tensor.numel() > 0 and tensor.data_ptr() == 0)
    except RuntimeError:  # the tensor has no storage, so it has no address
        return True


def _subclassed(bare: Any, cls: Any, grad: bool) -> Any:
    torch = sys.modules["torch"]
    with torch._C._DisableTorchDispatch():
        return torch.Tensor._make_subclass(cls, bare, grad)


def _set_state(tensor: Any, state: Any) -> None:
    torch = sys.modules["torch"]
    if type(tensor).__setstate__ is torch.Tensor.__setstate__:
        torch._utils._set_obj_state(tensor, state)
    else:
        tensor.__setstate__(state)


def _typed_storage(storage: Any, dtype: Any) -> Any:
    """Return a storage with a dtype, such as the old class ``FloatStorage``."""
    torch = sys.modules["torch"]
    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
