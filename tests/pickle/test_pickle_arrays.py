"""Arrays of numpy and other libraries, and buffers of the standard library."""

from __future__ import annotations

import array
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from receiver import trip

from xpool._pickling import frame
from xpool._pickling.frame import INLINE_BELOW
from xpool._pickling.pickler import write_group
from xpool._pickling.reducers import Group
from xpool.errors import TaskNotPicklable
from xpool.pickle import decode, dumps, encode, loads

np = pytest.importorskip("numpy", reason="numpy is not installed")

BIG = 50_000


def trips(obj: Any) -> list[Any]:
    """Return the object after each trip: in place, copied, by a plain pickle, by dill's pickler."""
    message = encode(obj)
    by_dill = decode(encode((obj, {1: 2}.keys())))[0]
    return [decode(bytearray(message)), decode(message), loads(dumps(obj)), by_dill]


DTYPES = ["?", "i1", "<i4", ">i4", "<u8", "<f2", ">f8", "<c16", "g", "M8[ns]", "m8[3D]"]
DTYPES += ["S5", "<U3", ">U3", "V7", "M8[10D]"]
RECORD = [("a", "<i4"), ("b", ">f8", (2,)), ("c", [("d", "S3")])]


@pytest.mark.parametrize("size", [0, 3, BIG])
@pytest.mark.parametrize(
    "kind", [*DTYPES, RECORD, np.dtype([("a", "u1"), ("b", "f8")], align=True)]
)
def test_dtypes(kind: Any, size: int) -> None:
    """Every dtype of either byte order arrives unchanged and writable."""
    dtype = np.dtype(kind)
    raw = (np.arange(size * dtype.itemsize) % 2).astype(np.uint8)
    one = np.frombuffer(raw, dtype) if size else np.empty(0, dtype)
    one = one.copy()
    before = one.tobytes()
    for back in trips(one):
        assert back.dtype == one.dtype
        assert back.tobytes() == one.tobytes()
        assert back.flags.writeable
        assert type(back) is np.ndarray
        back[...] = np.zeros((), dtype)
    assert one.tobytes() == before
    large = size * dtype.itemsize >= INLINE_BELOW
    assert (encode(one)[0] == frame.FRAMED) == large


def test_gaps() -> None:
    """Bytes between elements are not sent, and the received array has none. Repeated elements are
    sent once."""
    assert len(encode(np.broadcast_to(np.arange(3), (BIG, 3)))) < 400
    x = np.arange(60_000).reshape(300, 200)
    for one in (x[:, ::2], x[::-3, 5], x.T[::2], x[:, :1], x["i4"] if x.dtype.names else x[1:, 1:]):
        assert len(encode(one)) < one.nbytes + 500
        for back in trips(one):
            assert (back == one).all()
            assert back.strides[0] * (one.strides[0] or 1) > 0 or len(one.shape) == 1
    assert trip(x.T[::2]).flags.f_contiguous == x.T[::2].copy("K").flags.f_contiguous


@pytest.mark.parametrize("size", [4, BIG])
def test_read_only(size: int) -> None:
    """A read-only array arrives read-only, and the receiver may make it writable."""
    one = np.arange(size)
    one.flags.writeable = False
    for back in trips(one):
        assert not back.flags.writeable
        back.flags.writeable = True
        back[0] = 7
    view, base = trip([one, np.arange(3)])
    assert not view.flags.writeable
    assert base.flags.writeable


def test_of_objects() -> None:
    """Arrays of Python objects arrive, also one that contains itself."""
    one = np.array([1, "a", None, [2]], dtype=object)
    one[2] = one
    back = trip(one)
    assert back[2] is back
    assert back.tolist()[3] == [2]
    record = np.array([(1, "x")], dtype=[("a", "i4"), ("b", "O")])
    assert trip(record).tolist() == record.tolist()
    if hasattr(np, "dtypes") and hasattr(np.dtypes, "StringDType"):
        text = np.array(["a", "long" * 20], dtype=np.dtypes.StringDType())
        assert trip(text).tolist() == text.tolist()
        assert trip(text).dtype == text.dtype


class Units(np.ndarray):  # type: ignore[type-arg]
    """numpy's documented example: views inherit an attribute."""

    unit: Any

    def __array_finalize__(self, obj: Any) -> None:
        self.unit = getattr(obj, "unit", None)


class OwnWay(np.ndarray):  # type: ignore[type-arg]
    """Pickles itself to keep an attribute."""

    def __reduce__(self) -> Any:
        function, args, state = super().__reduce__()
        return function, args, (*state, "more")

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state[:-1])
        self.more = state[-1]


def test_subclasses() -> None:
    """Subclasses keep their class and attributes, and their own pickling is used."""
    for size in (3, BIG):
        one = np.arange(size).view(Units)
        one.unit = "m"
        for back in trips(one):
            assert type(back) is Units
            assert back.unit == "m"
            assert (np.asarray(back) == np.arange(size)).all()
        base = np.arange(size)
        back, seen = trip([base.view(Units), base])
        seen[:] = 0
        assert not np.asarray(back).any()
    back = trip(np.arange(3).view(OwnWay))
    assert (type(back), back.more) == (OwnWay, "more")
    records = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
    assert type(trip(records)) is np.recarray
    assert trip(records).b.tolist() == [2, 4]
    assert trip(records)[0].a == 1
    assert type(trip(np.zeros((1, 2)).view(np.matrix))) is np.matrix


def test_masked() -> None:
    """Masked arrays keep mask, fill value and hard mask; large ones are sent outside the pickle."""
    one = np.ma.masked_array(np.arange(BIG), np.arange(BIG) % 3 == 0, fill_value=-7, hard_mask=True)
    assert encode(one)[0] == frame.FRAMED
    for back in trips(one):
        assert type(back) is np.ma.MaskedArray
        assert (back.mask == one.mask).all()
        assert back.fill_value == -7
        assert back.hardmask
        assert (back.filled() == one.filled()).all()
    plain = trip(np.ma.masked_array([1, 2]))
    assert plain.mask is np.ma.nomask
    plain[0] = np.ma.masked
    assert plain.count() == 1
    record = np.ma.masked_array([(1, 2.0)], [(True, False)], dtype=[("a", "i4"), ("b", "f8")])
    assert trip(record).tolist() == record.tolist()
    assert trip(np.ma.masked) is np.ma.masked


def test_mapped(tmp_path: Path) -> None:
    """A memory-mapped array arrives as an ordinary array."""
    one = np.memmap(tmp_path / "file", "f4", "w+", shape=(100, 200))
    one[:] = 3
    back, seen = trip([one, one[1]])
    assert type(back) is np.ndarray
    assert (back == 3).all()
    back[:] = 4
    assert (seen == 4).all()
    assert (one == 3).all()
    del one


def test_scalars_dtypes_and_generators() -> None:
    """Scalars, dtypes and generators arrive unchanged."""
    small = [np.float32(1.5), np.datetime64("2020-01-02"), np.bool_(True), np.str_("x")]
    back = trip(small)
    assert back == small
    assert [type(one) for one in back] == [type(one) for one in small]
    record = np.zeros(2, RECORD)[0]
    assert repr(trip(record)) == repr(record)
    assert trip(np.dtype(RECORD)) == np.dtype(RECORD)
    tagged = np.zeros(2, np.dtype("i4", metadata={"a": 1}))
    assert trip(tagged).dtype.metadata == {"a": 1}
    generator = np.random.default_rng(3)
    back = trip(generator)
    assert back.random() == generator.random()


# -- the standard library's -----------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 10, 200_000])
def test_bytes(size: int) -> None:
    """bytes, bytearray and array.array keep values, types and writability."""
    for one in (bytes(size), bytearray(size), array.array("d", bytes(size // 8 * 8))):
        for back in trips(one):
            assert back == one
            assert type(back) is type(one)
    back = trip(array.array("H", [1, 2]))
    assert back.typecode == "H"
    back[0] = 3


def test_memoryviews() -> None:
    """A memoryview arrives as a memoryview of its elements, and read-only stays read-only."""
    big = bytearray(range(250)) * 1000
    views = [memoryview(big), memoryview(big)[10:20], memoryview(big)[::50], memoryview(b"abc")]
    views += [memoryview(bytearray(48)).cast("d", (3, 2)), memoryview(bytearray(0))]
    views += [memoryview(np.zeros((3, 4), order="F")), memoryview(bytearray(8)).cast("d", ())]
    for one in views:
        for back in trips(one):
            assert type(back) is memoryview
            assert back == one
            assert (back.format, back.shape) == (one.format, one.shape)
            assert back.readonly == one.readonly
    assert encode(memoryview(big))[0] == frame.FRAMED
    assert len(encode(memoryview(big)[::50])) < 6000
    with pytest.raises(TaskNotPicklable, match="tobytes"):
        encode([memoryview(np.zeros(3, ">i4"))])


def test_short_messages_are_pickles() -> None:
    """Any unpickler can load a message that was written without a pickler."""
    one = np.arange(12.0).reshape(3, 4)
    for data in (encode(one), dumps(one), dumps([one])):
        back = pickle.loads(data)
        back = back[0] if isinstance(back, list) else back
        assert (back == one).all()
    assert b"extension" not in dumps(one)
    assert pickle.loads(dumps(one)).flags.writeable


def test_a_global_array_of_records_with_objects_and_arrays() -> None:
    """Its elements, which are loaded before it, are not views of it."""
    one = np.array([(1, "a", [1.0, 2.0])], [("i", "i4"), ("s", "O"), ("v", "f8", 2)])
    written = write_group(one, Group({id(one): ("__main__", "one")}, {}), False)
    back = pickle.loads(b"".join(written.chunks))
    assert back.dtype == one.dtype
    assert repr(back) == repr(one)


# -- other libraries ------------------------------------------------------------------------------


def test_arrow() -> None:
    """Arrow's buffers, arrays and tables are sent outside the pickle by protocol 5."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    buffer = pa.py_buffer(bytes(range(200)) * 1000)
    column = pa.array([*range(BIG), None])
    table = pa.table({"a": column, "b": pa.array(["text", None] * (BIG // 2) + ["x"])})
    for one in (buffer, column, table, column.slice(10, 5), table.schema):
        for back in trips(one):
            assert back.equals(one)
    assert encode(table)[0] == frame.FRAMED
    at = trip(buffer).address
    assert at % frame.ALIGN == 0


def test_pandas() -> None:
    """Frames arrive equal and writable, with their columns outside the pickle."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    one = pd.DataFrame({"a": np.arange(BIG), "b": np.arange(float(BIG)), "c": ["x"] * BIG})
    one["d"] = pd.Categorical(one["c"])
    one["e"] = pd.date_range("2020", periods=BIG, freq="s")
    assert encode(one)[0] == frame.FRAMED
    for back in trips(one):
        pd.testing.assert_frame_equal(back, one)
        back.loc[0, "a"] = 9
    assert one.loc[0, "a"] == 0


SHARING: dict[str, Any] = {
    "column": lambda frame: frame["a"],
    "renamed": lambda frame: frame.rename(columns=str.upper),
    "assigned": lambda frame: frame.assign(c=1),
    "shallow": lambda frame: frame.copy(deep=False),
    "index": lambda frame: sys.modules["pandas"].Index(frame["a"]),
    "dates": lambda frame: frame["t"],
    "extension": lambda frame: frame["n"].reset_index(drop=True),
    "objects": lambda frame: frame[["o"]],
}


@pytest.mark.parametrize("size", [3, INLINE_BELOW // 8 + 1])
@pytest.mark.parametrize("name", SHARING)
def test_a_write_to_a_frame_changes_no_other(name: str, size: int) -> None:
    """Frames, series and indexes that share arrays until one is written to still do so."""
    pd = pytest.importorskip("pandas", minversion="3", reason="pandas 3 is not installed")
    frame = pd.DataFrame({"a": np.arange(size), "b": np.arange(float(size))})
    frame["t"] = pd.date_range("2020", periods=size, freq="s")
    frame["n"] = pd.array(range(size), dtype="Int64")
    frame["o"] = [(one,) for one in range(size)]
    other = SHARING[name](frame)
    for mine, its in trips((frame, other)):
        assert np.shares_memory(mine["b"], frame["b"]) is False
        for column in ("a", "t", "n", "o"):
            mine.loc[0, column] = mine.loc[1, column]
        assert its.equals(other)
        assert not mine.equals(frame)


def test_functions_of_frompyfunc() -> None:
    """A ufunc that is made of a Python function is sent with this function."""
    times = 3
    ufunc = np.frompyfunc(lambda one, other: (one + other) * times, 2, 1)
    joined = np.frompyfunc(lambda one, other: one + other, 2, 1, identity=0)
    for copy, sums in trips((ufunc, joined)):
        assert copy([1, 2], 3).tolist() == [12, 15]
        assert (copy.nin, copy.nout, copy.identity, copy.__name__) == (2, 1, None, ufunc.__name__)
        assert sums.reduce([]) == 0 and sums.reduce([1, 2]) == 3
    assert loads(dumps(np.add)) is np.add
