"""Pickles arrays of numpy: only their own elements, as buffers.

numpy itself pickles arrays of Python objects.  The sender never imports numpy here.

Blocks of pandas that share an array arrive as views of one array, too.  pandas copies such an array
before it writes to one of them, so the blocks arrive with the object by which pandas knows them.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from xpool._pickling.by_value.origin import home_of
from xpool._pickling.frame import INLINE_BELOW
from xpool._pickling.reducers import (
    FOR_SUBCLASSES,
    LAZY,
    REDUCERS,
    SHORT,
    Context,
    Head,
    of_module,
    set_attributes,
    tail,
)
from xpool._pickling.tensors.dense import Memory, bytes_of
from xpool._pickling.tensors.extents import Seen, of_array
from xpool._pickling.tensors.mapped import map_file, place_of_array

# The characters of the dtypes that their string describes fully, in both byte orders.
_PLAIN = frozenset("?bBhHiIlLqQpPefdgFDGSUVmM")
_names: dict[Any, str] = {}  # the strings of such dtypes, of which there are few
_ndarray: Any = None


def _lazy_numpy() -> None:
    np = sys.modules["numpy"]
    REDUCERS[np.ndarray] = _reduce
    SHORT[np.ndarray] = _short
    REDUCERS[np.memmap] = _reduce_mapped
    FOR_SUBCLASSES[np.ndarray] = _reduce_subclass
    REDUCERS[np.ufunc] = _reduce_ufunc


def _reduce_ufunc(pickler: Context, ufunc: Any) -> Any:
    """Pickle a function such as `scipy.special.expit` by an installed module that has it.

    numpy gives `pickle` a name without a module, for which it also looks in ``__mp_main__``.
    """
    home = home_of(("__main__", ufunc.__name__), ufunc)
    if home is not None:
        return of_module, home
    if ufunc.__name__.endswith(" (vectorized)"):  # as `numpy.frompyfunc` names what it returns
        functions = [one for one in gc.get_referents(ufunc) if callable(one)]
        if len(functions) == 1:
            return _from_function, (functions[0], ufunc.nin, ufunc.nout, ufunc.identity)
    return NotImplemented


def _from_function(function: Any, nin: int, nout: int, identity: Any) -> Any:
    options = {} if identity is None else {"identity": identity}
    return sys.modules["numpy"].frompyfunc(function, nin, nout, **options)


def _lazy_masked() -> None:
    # Not `np.ma`: numpy imports the module when this is first read, and may have no descriptor.
    REDUCERS[sys.modules["numpy.ma"].MaskedArray] = _reduce_masked


def _lazy_pandas() -> None:
    pandas = sys.modules["pandas"]
    internals = sys.modules["pandas._libs.internals"]
    if hasattr(internals, "BlockValuesRefs"):  # from pandas 2.0 on
        REDUCERS[internals.BlockValuesRefs] = lambda _, references: (type(references), ())
        FOR_SUBCLASSES[internals.Block] = lambda _, one: (_block, (*one.__reduce__(), one.refs))
        FOR_SUBCLASSES[pandas.Index] = _reduce_index
        managers = sys.modules["pandas.core.internals.managers"]
        # A manager's own state has the array and not the block.
        REDUCERS[managers.SingleBlockManager] = lambda _, m: (type(m), (m.blocks[0], m.axes[0]))


LAZY["numpy"] = _lazy_numpy
# The module that `Index` names depends on pandas's version.
LAZY["pandas"] = LAZY["pandas.core.indexes.base"] = _lazy_pandas
LAZY["pandas._libs.internals"] = LAZY["pandas.core.internals.managers"] = _lazy_pandas
# The module that the class names depends on numpy's version.
LAZY["numpy.ma"] = LAZY["numpy.ma.core"] = _lazy_masked


def _described(dtype: Any) -> Any:
    """Return the string of a dtype if it describes the dtype fully, else the dtype itself."""
    if dtype.metadata is not None:  # equal dtypes may have different metadata
        return dtype
    name = _names.get(dtype)
    if name is not None:
        return name
    if dtype.char not in _PLAIN or dtype.names or dtype.subdtype:
        return dtype
    name = _names[dtype] = dtype.str
    return name


def _reduce(pickler: Context, array: Any) -> Any:
    dtype = array.dtype
    if dtype.hasobject:  # numpy's own pickle contains the objects
        return NotImplemented
    kind = _described(dtype)
    flags = array.flags
    size = array.nbytes
    if not size:
        return _array, (bytearray(), kind, array.shape, array.strides, 0, flags.writeable)
    base = array.base
    if base is not None and (in_file := _in_file(pickler, array)) is not None:
        return in_file
    if pickler.group is not None and id(base) in pickler.group.own and _may_be_base(base):
        # The base is a global, too: the view is one of it in the receiver.
        address, start = (one.__array_interface__["data"][0] for one in (array, base))
        place = base, address - start, kind, array.shape, array.strides, flags.writeable
        return view_of, place
    seen = Seen.of(pickler)
    # In the first run, addresses are determined at the end, and only if arrays can alias at all.
    if seen.plan is None:
        seen.arrays.append(array)
        if flags.c_contiguous and size < INLINE_BELOW:
            data = bytearray(array.tobytes())
            if flags.writeable:
                return _array, (data, kind, array.shape)
            return _array, (data, kind, array.shape, None, 0, False)
    return _dense(seen, array, kind)


def _may_be_base(base: Any) -> bool:
    # The elements of an array of objects are loaded before the array, even if they are views of it.
    own = type(base) is sys.modules["numpy"].ndarray and not base.dtype.hasobject
    return own and bool(base.flags.c_contiguous)


def view_of(base: Any, offset: int, kind: Any, shape: Any, strides: Any, writable: bool) -> Any:
    view = sys.modules["numpy"].ndarray(shape, kind, base, offset, strides)
    view.flags.writeable = writable
    return view


def _dense(seen: Seen, array: Any, kind: Any) -> Any:
    address, found, own = of_array(array)
    shape, strides, writable = array.shape, array.strides, array.flags.writeable
    piece = None if seen.plan is None else seen.plan.get(found)
    if piece is not None:
        return _array_view, (piece, address - piece.start, kind, shape, strides, writable)
    # With negative steps, the first element is not at the first byte.
    start, _, gaps = found
    if not gaps:
        data = bytes_of(start, own, array)
        return _array, (data, kind, shape, strides, address - start, writable)
    # Copy elements only once if an axis repeats them, and keep the axes in the order of memory.
    once = tuple(slice(None) if step else slice(1) for step in strides)
    compact = array[once].copy("K")
    data = bytes_of(compact.__array_interface__["data"][0], compact.nbytes, compact)
    pairs = zip(compact.strides, strides, strict=True)
    strides = tuple(new if old else 0 for new, old in pairs)
    return _array, (data, kind, shape, strides, 0, writable)


def _short(array: Any, by_number: bool) -> bytes | None:
    flags = array.flags
    size = array.nbytes
    # The array is the whole message, so it cannot alias another object.
    if size >= INLINE_BELOW or not flags.c_contiguous or not flags.writeable or not size:
        return None
    dtype = array.dtype
    kind = _names.get(dtype)
    if kind is None or dtype.metadata is not None:
        return None
    data: bytes = array.tobytes()
    return _head(size, by_number) + data + tail(kind, array.shape)


def _reduce_mapped(pickler: Context, array: Any) -> Any:
    """Reduce a memory-mapped file to its values, as `multiprocessing` does, because the receiver
    may not have the file.  A global is mapped there from the file, as a fork has it."""
    np = sys.modules["numpy"]
    if array.size and (in_file := _in_file(pickler, array)) is not None:
        return in_file
    return _reduce(pickler, np.ndarray.view(array, np.ndarray))


def _in_file(pickler: Context, array: Any) -> Any:
    """Reduce an array of a global to its place in a file; None: the receiver cannot map it."""
    group = pickler.group
    place = place_of_array(pickler, array) if group is not None and group.maps else None
    if group is None or place is None:
        return None
    group.mapped.append(array)
    address, (start, stop, _), _ = of_array(array)
    path, device, inode, offset = place
    where = path, device, inode, offset - (address - start), stop - start
    about = None
    if type(array) is not sys.modules["numpy"].ndarray:
        about = array.mode, array.filename, array.offset
    shape, strides, writable = array.shape, array.strides, array.flags.writeable
    return _mapped, (where, address - start, array.dtype, shape, strides, writable, about)


def _reduce_subclass(pickler: Context, array: Any) -> Any:
    """Reduce an array of a class without its own reducer to its values, class and attributes."""
    np = sys.modules["numpy"]
    cls = type(array)
    for name in ("__reduce__", "__reduce_ex__", "__setstate__"):
        if getattr(cls, name) is not getattr(np.ndarray, name):
            return NotImplemented
    # Calls numpy's own function, because the class may override or disable it.
    plain = np.ndarray.view(array, np.ndarray)
    attributes = getattr(array, "__dict__", None)
    if attributes:
        return _subclassed, (plain, cls), attributes, None, None, set_attributes
    return _subclassed, (plain, cls)


def _reduce_masked(pickler: Context, array: Any) -> Any:
    np = sys.modules["numpy"]
    # Uses `_fill_value`, because the property would make a value if none was set.
    mask = None if array.mask is np.ma.nomask else array.mask
    return _masked, (array.data, mask, array._fill_value, array.hardmask, array._optinfo)


def _reduce_index(pickler: Context, index: Any) -> Any:
    reduced = index.__reduce_ex__(5)
    references = vars(index).get("_references")  # a range has no array
    if references is None or len(reduced) != 3 or reduced[2] is not None:
        return reduced
    return _index, (*reduced[:2], references)


# -- the receiving side ----------------------------------------------------------------------------


def _array(
    data: Any, kind: Any, shape: Any, strides: Any = None, offset: int = 0, writable: bool = True
) -> Any:
    global _ndarray
    if _ndarray is None:
        from numpy import ndarray as _ndarray
    made = _ndarray(shape, kind, data, offset, strides)
    if not writable:
        made.setflags(write=False)
    return made


_head = Head(_array)


def _array_view(
    memory: Memory, offset: int, kind: Any, shape: Any, strides: Any, writable: bool
) -> Any:
    return _array(memory.buffer, kind, shape, strides, offset, writable)


def _mapped(
    where: Any, offset: int, kind: Any, shape: Any, strides: Any, writable: bool, about: Any
) -> Any:
    import numpy as np

    pages, skip = map_file(where, writable)
    cls = np.ndarray if about is None else np.memmap
    made: Any = np.ndarray.__new__(cls, shape, kind, pages, skip + offset, strides)
    if about is not None:
        made._mmap = pages
        made.mode, made.filename, made.offset = about
    return made


def _subclassed(plain: Any, cls: Any) -> Any:
    return plain.view(cls)


def _masked(data: Any, mask: Any, fill_value: Any, hard: bool, about: dict[Any, Any]) -> Any:
    np = sys.modules["numpy"]
    given = np.ma.nomask if mask is None else mask
    made: Any = np.ma.MaskedArray(data, given, copy=False, hard_mask=hard, keep_mask=False)
    made._fill_value = fill_value
    made._optinfo.update(about)
    return made


def _block(make: Any, args: tuple[Any, ...], references: Any) -> Any:
    block = make(*args)
    block.refs = references
    references.add_reference(block)
    return block


def _index(make: Any, args: tuple[Any, ...], references: Any) -> Any:
    index = make(*args)
    index._references = references
    references.add_index_reference(index)
    return index
