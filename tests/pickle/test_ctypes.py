"""Libraries, structures and pointers of ctypes in a program."""

import sys

import pytest
from support import scripts
from support.tiers import also

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")

NATIVE = """
    import ctypes

    math = ctypes.CDLL("libm.so.6", use_errno=True)
    math.sqrt.restype, math.sqrt.argtypes = ctypes.c_double, [ctypes.c_double]
    sqrt = math.sqrt

    def roots(x):
        return math.sqrt(float(x)), sqrt(4.0), ctypes.CDLL(None).abs(-3)
"""

PROGRAM = """
    import ctypes
    import native
    import xpool
    from ctypes import POINTER, Structure, Union, c_double, c_int

    library = ctypes.CDLL("libm.so.6")
    library.pow.restype, library.pow.argtypes = c_double, (c_double, c_double)
    power = library.pow

    class Header(Structure):
        _pack_, _layout_ = 1, "ms"  # Python 3.14 asks for a layout
        _fields_ = [("kind", ctypes.c_uint8), ("value", ctypes.c_float), ("bits", c_int, 3)]

        def total(self):
            return self.kind + self.value

    class Longer(Header):
        _fields_ = [("numbers", c_int * 3)]

    class Node(Structure):
        pass

    Node._fields_ = [("value", c_int), ("next", POINTER(Node))]

    class Either(Union):
        _fields_ = [("whole", c_int), ("header", Header)]
        _anonymous_ = ("header",)

    header = Header(3, 0.5, 1)

    def task(x):
        either = Either()
        either.whole = 7
        longer = Longer(1, 2.0, 0, (c_int * 3)(4, 5, 6))
        node = Node(1, ctypes.pointer(Node(2)))
        copy = Header.from_buffer_copy(bytes(header))
        return [
            power(2.0, x), library.pow(3.0, x), native.roots(x * x), header.total(),
            ctypes.sizeof(Header), either.kind, list(longer.numbers), node.next.contents.value,
            copy.bits, Header.bits.size,
        ]

    def changed(given):
        given.kind += 1
        return given

    if __name__ == "__main__":
        with xpool.Pool(2, context={context}) as pool:
            assert pool.apply(task, (2.0,)) == task(2.0), pool.apply(task, (2.0,))
            assert pool.map(native.roots, [9]) == [(3.0, 2.0, 3)]
            header.kind = 9
            assert pool.map(task, [1.0, 2.0]) == [task(1.0), task(2.0)]
            back = pool.apply(changed, (header,))
            assert type(back) is Header and (back.kind, back.value, header.kind) == (10, 0.5, 9)
            Header.twice = lambda self: 2 * self.kind
            assert pool.apply(Header.twice, (header,)) == 18
"""


@pytest.mark.parametrize("context", ["None", *also("'spawn'", "'fork'")])
def test_libraries_and_structures(tmp_path, context):
    """Functions of libraries have their types in a worker, and structures their fields."""
    assert scripts.program(tmp_path, PROGRAM.format(context=context), native=NATIVE) == ""
