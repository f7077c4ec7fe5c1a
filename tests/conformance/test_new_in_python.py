"""What Python 3.14 and 3.15 have added: what a task sees is what the program has."""

import sys

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

ANNOTATIONS = """
    from annotationlib import Format, get_annotations
    from dataclasses import dataclass, fields
    from typing import get_type_hints
    import xpool

    @dataclass
    class Tree:
        value: int
        left: Tree | None = None
        others: list[Unknown] = None

    class Plain:
        later: Later
        missing: list[Missing]

        def method(self, x: Missing) -> Later: ...

    class Later: ...

    def within():
        class Local:
            x: list[Local]
            y: Missing
        return Local

    def function(x: Missing, y: Later = None) -> Tree: ...

    def sum_of(tree):
        return 0 if tree is None else tree.value + sum_of(tree.left)

    def types(tree):
        return repr([one.type for one in fields(tree)])

    def hints():
        left = fields(Tree)[1].type.evaluate()
        return repr(left), repr(get_type_hints(Tree, format=Format.FORWARDREF))

    def annotations(local):
        found = [get_annotations(one, format=Format.FORWARDREF) for one in (Plain, local)]
        text = get_annotations(Plain.method, format=Format.STRING)
        return [repr(one) for one in found], text, function(1)

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:  # a global that cannot be sent
            tree = Tree(1, Tree(2))
            calls = (sum_of, tree), (types, tree), (hints,), (annotations, within())
            for func, *args in calls:
                assert pool.apply(func, args) == func(*args), (pool.apply(func, args), func(*args))
            assert pool.apply(Tree, (3,)) == Tree(3)
            assert pool.map(lambda x: function(x), [1]) == [None]
            assert pool.map(sum_of, [tree], journal=__file__ + ".sums") == [3]
            assert pool.map(function, [tree], journal=__file__ + ".none") == [None]
        print("well")
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="annotations are deferred since 3.14")
def test_deferred_annotations(tmp_path):
    """Annotations with names that are not defined when they are read."""
    for _ in range(2):  # the second run has the journals of the first
        assert scripts.program(tmp_path, ANNOTATIONS) == "well\n"


TEMPLATES = """
    import functools
    import xpool

    name = [1]
    page = t"hello {name!r:>5}"
    remainder = functools.partial(divmod, functools.Placeholder, 3)

    def use(text):
        return remainder(7), page.strings, repr(page.interpolations), repr(text)

    with xpool.Pool(1) as pool:
        for n in range(2):
            assert pool.apply(use, (page,)) == use(page)
            name.append(n)
    print("well")
"""


@pytest.mark.skipif(sys.version_info < (3, 14), reason="t-strings are new in Python 3.14")
def test_templates_and_placeholders(tmp_path):
    """They are globals and arguments; a value in a template may change in place."""
    assert scripts.program(tmp_path, TEMPLATES) == "well\n"


SENTINELS = """
    import sys
    import own
    import xpool

    ABSENT = sentinel("ABSENT")
    table = frozendict(values=[1], absent=ABSENT)

    def use(given, other=ABSENT):
        assert given is other is ABSENT is table["absent"]
        assert own.NONE is own.default() and own.NONE.__module__ == "own"
        return table["values"], ABSENT, own.NONE, repr(ABSENT), ABSENT.__module__

    with xpool.Pool(1) as pool:
        local = sentinel("local")
        assert pool.apply(lambda x: (x is local, x), (local,)) == (True, local)
        for n in range(2):
            found = pool.apply(use, (ABSENT,))
            assert found == use(ABSENT), found
            assert found[1] is ABSENT and found[2] is own.NONE
            table["values"].append(n)
    print("well")
"""


@pytest.mark.skipif(sys.version_info < (3, 15), reason="sentinels are new in Python 3.15")
def test_sentinels_and_frozen_dicts(tmp_path):
    """A sentinel keeps its identity in a worker and back; a frozen dict has values that change."""
    own = 'NONE = sentinel("NONE")\ndef default(x=NONE):\n    return x\n'
    assert scripts.program(tmp_path, SENTINELS, own=own) == "well\n"
