"""Pickles programs of torch: modules of TorchScript, exported programs, graphs, operators.

`pickle` refuses most of them, or loses what they share with other objects of the message.
"""

from __future__ import annotations

import io
import operator
import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from pickle import PickleBuffer
from types import FunctionType
from typing import Any

from xpool._pickling.by_value.origin import INSTALLED, origin_of
from xpool._pickling.reducers import FOR_SUBCLASSES, REDUCERS, Context, set_attributes
from xpool._pickling.tensors.mapped import imported_torch

# -- TorchScript -----------------------------------------------------------------------------------


def lazy_script() -> None:
    """Register a reducer for functions and modules of TorchScript, which `pickle` refuses."""
    jit = sys.modules["torch.jit"]
    REDUCERS[jit.ScriptFunction] = lambda _, one: (
        _load_script,
        (PickleBuffer(one.save_to_buffer()),),
    )
    FOR_SUBCLASSES[jit.ScriptModule] = _reduce_script_module


def _reduce_script_module(pickler: Context, script: Any) -> Any:
    """Reduce a module to its code, and its parameters and buffers: an optimizer may have these."""
    torch = sys.modules["torch"]
    bare = torch.jit._recursive.wrap_cpp_module(_without_tensors(torch, script._c, {}))
    own = [tensor for *_, tensor in _tensors_of(torch, script._c)]
    return _load_script, (PickleBuffer(bare.save_to_buffer()), own)


def _without_tensors(torch: Any, module: Any, made: dict[Any, Any]) -> Any:
    if module in made:
        return made[module]
    bare = made[module] = module._replicate_for_data_parallel()
    for name, tensor in _own_tensors(torch, module):
        empty = tensor.detach().new_empty(0)
        bare.setattr(name, empty.requires_grad_(tensor.requires_grad))
    for name, below in torch._C.ModuleDict(module).items():
        bare.setattr(name, _without_tensors(torch, below, made))
    return bare


def _tensors_of(torch: Any, module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the parameters and buffers of a module and the modules in it: owner, name, tensor."""
    owners = [module]
    for owner in owners:  # grows
        for name, tensor in _own_tensors(torch, owner):
            yield owner, name, tensor
        below = (one for _, one in torch._C.ModuleDict(owner).items())
        owners += (one for one in below if one not in owners)


def _own_tensors(torch: Any, module: Any) -> list[tuple[str, Any]]:
    every = [*torch._C.ParameterDict(module).items(), *torch._C.BufferDict(module).items()]
    return [(name, tensor) for name, tensor in every if tensor is not None]


def _load_script(written: Any, tensors: Any = ()) -> Any:
    torch = imported_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer torch says so of `load`
        script = torch.jit.load(io.BytesIO(written))
    if tensors:
        places = list(_tensors_of(torch, script._c))
        for (owner, name, _), tensor in zip(places, tensors, strict=True):
            owner.setattr(name, tensor)
    return script


# -- exported programs -----------------------------------------------------------------------------


def lazy_exported() -> None:
    kind = sys.modules["torch.export.exported_program"].ExportedProgram
    REDUCERS[kind] = _reduce_exported


def _reduce_exported(pickler: Context, program: Any) -> Any:
    """Reduce an exported program to its file: torch's own pickle of it cannot be loaded."""
    written = io.BytesIO()
    sys.modules["torch"].export.save(program, written)
    return _load_exported, (PickleBuffer(written.getvalue()),)


def _load_exported(written: Any) -> Any:
    with imported_torch().device("cpu"):  # another default device would be an error
        return import_module("torch.export").load(io.BytesIO(written))


# -- graphs ----------------------------------------------------------------------------------------


def lazy_graphs() -> None:
    FOR_SUBCLASSES[sys.modules["torch.fx.graph_module"].GraphModule] = _reduce_graph


def _reduce_graph(pickler: Context, module: Any) -> Any:
    """Pickle a module of a graph with its hooks, and with the functions of the program in it.

    torch's own pickle has no hooks, and imports functions by their names.
    """
    torch = sys.modules["torch"]
    graph_module = sys.modules["torch.fx.graph_module"]
    if type(module).__reduce__ is not graph_module.GraphModule.__reduce__:
        return NotImplemented
    used = module.recompile().globals
    own = {name: one for name, one in used.items() if _is_of_program(one)}
    others = {name: one for name, one in used.items() if name not in own}
    imports = graph_module._format_import_block(others, torch.package.sys_importer)
    body = {**vars(module), "_graphmodule_cls_name": type(module).__name__}
    del body["_graph"]
    after = [one for one in body if "_hook" in one or one == "_non_persistent_buffers_set"]
    hooks = {name: body[name] for name in after if body[name]}
    body.update((name, type(one)()) for name, one in hooks.items())
    return _load_graph, (body, imports, own), hooks, None, None, set_attributes


def _is_of_program(one: Any) -> bool:
    return issubclass(type(one), (type, FunctionType)) and origin_of(one.__module__) != INSTALLED


def _load_graph(body: dict[str, Any], imports: str, own: dict[str, Any]) -> Any:
    graph_module: Any = import_module("torch.fx.graph_module")
    forward = graph_module._forward_from_src(imports + body["_code"], own)
    # torch traces the code again.  Calls of these functions are nodes of the graph: do not enter.
    wrapped = sys.modules["torch.fx._symbolic_trace"]._wrapped_fns_to_patch
    values = forward.__globals__
    wrapped.update(((id(values), name), values) for name in own)
    try:
        return graph_module._deserialize_graph_module(forward, body)
    finally:
        for name in own:
            wrapped.pop((id(values), name), None)


# -- operators -------------------------------------------------------------------------------------


def lazy_operators() -> None:
    """Register reducers for ``torch.ops.aten.mm`` and ``torch.ops.aten.mm.default``."""
    ops = sys.modules["torch._ops"]
    REDUCERS[ops.OpOverloadPacket] = lambda _, one: _by_path(*one._qualified_op_name.split("::"))
    REDUCERS[ops.OpOverload] = lambda _, one: _by_path(
        *one._schema.name.split("::"), one._overloadname
    )


def _by_path(*path: str) -> Any:
    return _operator, (".".join(path),)


def _operator(path: str) -> Any:
    return operator.attrgetter(path)(imported_torch().ops)
