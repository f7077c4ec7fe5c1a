"""Tensors and arrays in copy mode."""

from __future__ import annotations

from typing import Any

import pytest
from receiver import trip

from xpool._pickling import frame
from xpool.pickle import decode, dumps, encode, loads

np = pytest.importorskip("numpy", reason="numpy is not installed")
torch = pytest.importorskip("torch", reason="torch is not installed")

NAMES = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "bool", "uint8"]
NAMES += ["int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]
NAMES += ["float8_e4m3fn", "float8_e5m2"]
DTYPES = [name for name in NAMES if hasattr(torch, name)]


def same(one: Any, two: Any) -> bool:
    if (one.dtype, one.shape, one.requires_grad) != (two.dtype, two.shape, two.requires_grad):
        return False
    if type(one) is not type(two):
        return False
    return as_bytes(one) == as_bytes(two)


def as_bytes(tensor: Any) -> bytes:
    flat = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach()).flatten()
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


@pytest.mark.parametrize("size", [0, 1, 7, 40_000])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes(dtype: str, size: int) -> None:
    """Every dtype arrives, inside the pickle and outside."""
    raw = torch.randint(0, 2, (size * getattr(torch, dtype).itemsize,), dtype=torch.uint8)
    one = raw.view(getattr(torch, dtype)) if size else torch.empty(0, dtype=getattr(torch, dtype))
    message = encode(one)
    assert (message[0] == frame.FRAMED) == (raw.numel() >= 64 * 1024)
    for back in (decode(message), trip(one), loads(dumps(one))):
        assert same(back, one)
        back.zero_()
    assert (one.view(torch.uint8) == raw).all() if size else True


def test_in_place() -> None:
    """A large tensor in a bytearray uses the message's memory."""
    message = bytearray(encode(torch.zeros(100_000)))
    back = decode(message)
    back.fill_(1)
    assert bytes(message).count(b"\x00\x00\x80\x3f") >= 100_000
    assert back.data_ptr() % 16 == 0


def test_modules() -> None:
    """A model keeps tied weights tied."""
    layer = torch.nn.Linear(3, 3)
    model = torch.nn.Sequential(layer, torch.nn.ReLU(), layer)
    back = trip(model)
    assert back[0].weight is back[2].weight
    x = torch.ones(1, 3)
    assert (back(x) == model(x)).all()


def test_modules_with_parametrizations() -> None:
    """They arrive, although their classes, which torch makes, refuse to be pickled."""
    parametrizations = torch.nn.utils.parametrizations
    layer = parametrizations.weight_norm(torch.nn.Linear(3, 2))
    model = torch.nn.Sequential(layer, parametrizations.orthogonal(torch.nn.Linear(2, 2)))
    x, back = torch.ones(1, 3), trip([model, layer])
    assert back[0][0] is back[1]
    assert isinstance(back[1], torch.nn.Linear)
    assert (back[0](x) == model(x)).all()
    back[1].parametrizations.weight.original0.data.zero_()
    assert (back[1](x) == layer.bias).all()


def test_limits_of_dtypes() -> None:
    """``LIMITS = torch.finfo(torch.float32)`` at the top of a script."""
    for one in torch.finfo(torch.bfloat16), torch.iinfo(torch.int8):
        assert repr(trip(one)) == repr(one)


def test_functions_of_torch_and_numpy() -> None:
    """Functions of torch and numpy go by name."""
    for function in (torch.relu, torch.nn.functional.relu, torch.Tensor.sum, np.add, np.mean):
        assert decode(encode(function)) is function or function is torch.relu
    assert decode(encode(torch.relu))(torch.tensor(-1.0)) == 0
    function, _ = decode(encode((np.add, {1: 2}.keys())))
    assert function is np.add


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning"
)
@pytest.mark.parametrize("make", ["script", "trace", "function"])
def test_torchscript(make: str) -> None:
    """Modules and functions of TorchScript arrive, with their weights and mode."""
    x = torch.ones(1, 200)
    if make == "function":
        one = torch.jit.trace(lambda x: x * 0.5, x)  # a ScriptFunction
    else:
        module = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Dropout()).eval()
        one = torch.jit.script(module) if make == "script" else torch.jit.trace(module, x)
    first, second = trip([one, one])
    assert first is second and first(x).equal(one(x))
    assert encode(one) == encode(one), "a global would be sent again at each call"


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_another_default_device() -> None:
    """Tensors on the CPU stay there, also those that share memory, sparse ones, and storages."""
    base = torch.arange(40_000.0)
    eye = torch.eye(3)
    sent = [
        [base, base[3:]], [eye, eye[1]], base[:200].reshape(10, 20)[::2, ::2], base[::2],
        eye.to_sparse(), eye.to_sparse_csr(), eye[:0], eye.untyped_storage(), torch.nn.Linear(2, 2),
        eye.to(torch.complex64).conj(),
    ]  # fmt: skip
    with torch.device("meta"):
        back = [decode(encode(one)) for one in sent]
    for one, other in zip(sent, back):
        for a, b in zip(one, other) if isinstance(one, list) else [(one, other)]:
            if isinstance(a, torch.nn.Module):
                a, b = a.weight, b.weight
            assert b.device == a.device == torch.device("cpu")
            if isinstance(a, torch.Tensor):
                assert a.to_dense().equal(b.to_dense())
    back[0][0][3] = 7
    assert back[0][1][0] == 7
