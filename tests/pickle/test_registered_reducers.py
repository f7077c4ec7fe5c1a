"""What a program registers for pickling comes first, in arguments, results and workers."""

import pytest
from support import scripts

pytestmark = pytest.mark.xpool_only

# The same program with a fork pool of `multiprocessing` is the oracle.
PROGRAM = """
    import copy, copyreg, multiprocessing, ssl
    from multiprocessing.reduction import ForkingPickler
    import xpool
    {imports}

    class Plain:
        def __init__(self, v):
            self.v = v

    copyreg.pickle(Plain, lambda obj: (Plain, (obj.v + 1,)))

    class Failure(Exception):
        def __init__(self, a, b):
            super().__init__("text")
            self.a, self.b = a, b

    copyreg.pickle(Failure, lambda exc: (Failure, (exc.a, exc.b + 1)))

    class Meta(type):
        pass

    def remade(name):
        return Meta(name, (), {{"how": "remade"}})

    copyreg.pickle(Meta, lambda cls: (remade, (cls.__name__,)))

    class Forking:
        def __init__(self, v):
            self.v = v

    ForkingPickler.register(Forking, lambda obj: (Forking, (obj.v + 10,)))

    class ForkingFailure(Exception):
        pass

    ForkingPickler.register(ForkingFailure, lambda exc: (ForkingFailure, ("registered",)))
    copyreg.pickle(ssl.SSLContext, lambda context: (ssl.SSLContext, (context.protocol,)))
    {more}

    def same(x):
        return x

    def fail(x):
        raise ForkingFailure("as it was raised")

    def copied(x):
        return copy.copy(Plain(1)).v

    MAKE = dict(
        plain=lambda: Plain(1),
        failure=lambda: Failure(1, 2),
        made=lambda: Meta("Made", (), {{}}),
        forking=lambda: Forking(1),
        forking_failure=lambda: ForkingFailure("unchanged"),
        context=lambda: ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),
        {made}
    )

    def make(name):
        return MAKE[name]()

    def about(obj):
        found = [getattr(obj, name, None) for name in ("v", "a", "b", "how", "args", "protocol")]
        return type(obj).__name__, found

    def results(pool):
        found = [about(one) for one in pool.map(same, [made() for made in MAKE.values()])]
        found += [about(one) for one in pool.map(make, MAKE)]
        found.append(pool.map(copied, [1]))
        try:
            pool.map(fail, [1])
        except ForkingFailure as exc:
            found.append(exc.args)
        return found

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            right = results(pool)
        for kind in {kinds}:
            copyreg.pickle(complex, copyreg.pickle_complex)
            with kind(1) as pool:
                assert results(pool) == right, (results(pool), right)
                copyreg.pickle(complex, lambda number: (complex, (number.real + 1, number.imag)))
                assert pool.map(same, [1j]) == [2 + 1j], "both ways: as it is at the call"
"""

ARRAYS = """
    class Array(np.ndarray):
        pass

    def array(values, how):
        made = np.asarray(values).view(Array)
        made.how = how
        return made

    copyreg.pickle(Array, lambda obj: (array, (obj.tolist(), "registered")))

    class Tensor(torch.Tensor):
        pass

    def tensor(values):
        made = torch.tensor(values).as_subclass(Tensor)
        made.how = "registered"
        return made

    copyreg.pickle(Tensor, lambda obj: (tensor, (obj.tolist(),)))
    copyreg.pickle(np.memmap, lambda obj: (np.asarray, ([1],)))
    copyreg.pickle(np.ndarray, lambda obj: (array, (obj.tolist(), "for ndarray itself")))
"""


def test_what_a_program_registers_comes_first(tmp_path):
    """Classes, exceptions and metaclasses, in `copyreg` and in the pickler of multiprocessing."""
    text = PROGRAM.format(imports="", more="", made="", kinds="xpool.Pool, xpool.P2PPool")
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


def test_registered_arrays_and_tensors(tmp_path):
    """Subclasses of arrays and tensors, and `numpy.ndarray` itself."""
    pytest.importorskip("torch", reason="torch is not installed")
    made = (
        "array=lambda: np.arange(2).view(Array), tensor=lambda: torch.ones(2).as_subclass(Tensor)"
    )
    made += ", plain_array=lambda: np.arange(2)"
    imports = "import functools, torch, numpy as np"
    kinds = "[functools.partial(xpool.Pool, context='fork')]"  # imports torch once
    text = PROGRAM.format(imports=imports, more=ARRAYS, made=made, kinds=kinds)
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""


REPLACED = """
    from multiprocessing.reduction import ForkingPickler
    import xpool

    class Plain:
        def __init__(self, v):
            self.v = v

    def same(x):
        return x

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            for step in 1, 10, 100:
                ForkingPickler.register(Plain, lambda obj, step=step: (Plain, (obj.v + step,)))
                assert pool.apply(same, (Plain(0),)).v == 2 * step, step
"""


def test_a_reducer_in_place_of_another(tmp_path):
    """The next task's result is pickled by the reducer that the program has now."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", REPLACED)]) == ""


CODECS = """
    import codecs
    import xpool

    codecs.register_error("question", lambda error: ("?", error.end))
    xpool.everywhere(codecs.register_error, "star", lambda error: ("*", error.end))

    def decoded(name):
        return b"a\\xff".decode("ascii", name)

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.apply(decoded, ("star",)) == "a*"
            try:
                pool.apply(decoded, ("question",))
            except LookupError as exc:
                import traceback

                text = "".join(traceback.format_exception(None, exc, exc.__traceback__))
                assert "xpool.everywhere(codecs.register_error" in text, text
            else:
                raise AssertionError
"""


def test_handlers_of_codecs(tmp_path):
    """Python cannot list them, so an error says how workers get them."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", CODECS)]) == ""


LATER = """
    import decimal
    import xpool

    def set_up():
        decimal.getcontext().prec = 7

    def plug_in():
        decimal.getcontext().prec = 3

    def precision(_):
        return decimal.getcontext().prec

    if __name__ == "__main__":
        with xpool.Pool(1, set_up) as pool:
            assert pool.map(precision, [0]) == [7]
            xpool.everywhere(plug_in)
            decimal.getcontext().prec = 28
            assert pool.map(precision, [0]) == [7]
"""


def test_a_call_that_is_registered_later_keeps_the_workers_settings(tmp_path):
    """A worker's own settings, such as those of its initializer, stay."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", LATER)]) == ""


DEVICE = """
    import torch
    import xpool

    torch.set_default_device("meta")

    def device(_):
        return torch.ones(1).device.type

    if __name__ == "__main__":
        torch.set_default_device(None)
        with xpool.Pool(1) as pool:
            assert pool.map(device, [0]) == ["cpu"]
"""


@pytest.mark.torch
def test_a_call_at_the_top_whose_effect_the_program_has_reset(tmp_path):
    """A worker makes the call, too, and has the program's setting after it."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", DEVICE)]) == ""


HIDDEN = """
    import xpool

    class Proxy:
        def __init__(self, held):
            self.held = held

        def __reduce__(self):
            return Proxy, (self.held,)

        @property
        def __class__(self):
            return type(self.held)

        def own(self):
            return Proxy

    class Bare:
        @property
        def __class__(self):
            return dict

    def task(x):
        return isinstance(x, dict), x.held, x.own() is type(x)

    if __name__ == "__main__":
        with xpool.Pool(1) as pool:
            assert pool.map(task, [Proxy({1: 2})]) == [(True, {1: 2}, True)]
            assert pool.map(task, [Proxy(3)]) == [(False, 3, True)]
            (found,) = pool.map(lambda x: Proxy(x), [[4]])
            assert type(found) is Proxy and isinstance(found, list) and found.held == [4]
            try:
                pool.apply(task, (Bare(),))
            except xpool.TaskNotPicklable as exc:
                assert "a Bare object" in str(exc) and "as argument 0 of task()" in str(exc), exc
"""


def test_a_class_that_hides_itself(tmp_path):
    """A class with a property `__class__` is sent; an instance that pickle refuses is named."""
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", HIDDEN)]) == ""
