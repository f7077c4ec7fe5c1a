"""Pickles tensors that are made of other tensors, and tensors of subclasses.

Each is sent as its parts.  These are reduced like any tensor, so they keep their aliases.  The
receiver has them before it calls a function of this module, and so has imported torch.
"""

from __future__ import annotations

import sys
from typing import Any

from xpool._pickling.reducers import Context, builder
from xpool._pickling.tensors.device_memory import is_kept
from xpool.errors import TaskNotPicklable


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


@builder
def _sparse(indices: Any, values: Any, shape: Any, coalesced: bool) -> Any:
    torch = sys.modules["torch"]

    return torch.sparse_coo_tensor(
        indices, values, shape, is_coalesced=coalesced, check_invariants=False
    )


@builder
def _compressed(outer: Any, inner: Any, values: Any, shape: Any, layout: Any) -> Any:
    torch = sys.modules["torch"]

    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, check_invariants=False
    )


@builder
def _mkldnn(dense: Any) -> Any:
    return dense.to_mkldnn()


@builder
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


def check(tensor: Any) -> None:
    """Check that a tensor does not refer to the autograd graph of this process.

    Raises:
        TaskNotPicklable: the tensor is a result that tracks gradients, or it has hooks.
    """
    if tensor.requires_grad and not tensor.is_leaf:
        raise TaskNotPicklable(
            f"{about(tensor)} is the result of a computation that tracks gradients; the graph "
            "behind it cannot be sent to another process. Send x.detach() instead."
        )
    hooks = [*(tensor._backward_hooks or {}).values()]
    hooks += [*(getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values()]
    hooks = [hook for hook in hooks if not hasattr(hook, "__torch_unserializable__")]
    if hooks:
        raise TaskNotPicklable(
            f"{about(tensor)} has hooks for its gradient ({hooks[0]!r}), which cannot be sent "
            "to another process. Remove them (the handle that register_hook returned has "
            "remove()), send x.detach(), or say that a hook may be left behind by decorating it "
            "with torch.utils.hooks.unserializable_hook."
        )


def about(tensor: Any) -> str:
    """Return a description of a tensor for an error's text."""
    shape = "nested" if tensor.is_nested else f"of shape {tuple(tensor.shape)}"
    return f"A tensor {shape}, {tensor.dtype}, on {tensor.device}"


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
        if is_kept(pickler.layout, tensor):
            assert pickler.layout.keep is not None
            return pickler.layout.keep(pickler, tensor)
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
    except RuntimeError:  # it has no storage, so it has no address
        return True


@builder
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


def reduce_typed_storage(pickler: Context, storage: Any) -> Any:
    """Reduce a storage with a dtype, such as the old class ``FloatStorage``."""
    return _typed_storage, (storage._untyped_storage, storage.dtype)


@builder
def _typed_storage(storage: Any, dtype: Any) -> Any:
    torch = sys.modules["torch"]

    return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
