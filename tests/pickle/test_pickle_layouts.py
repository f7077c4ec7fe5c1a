"""Every kind of tensor arrives unchanged, or is refused with a remedy."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from receiver import Receiver, trip
from support import scripts

import xpool
from xpool._pickling import frame
from xpool._pickling.pickler import write_group
from xpool._pickling.reducers import Group
from xpool.errors import TaskNotPicklable
from xpool.pickle import dumps, encode, loads

torch = pytest.importorskip("torch", reason="torch is not installed")
anything = pytest.importorskip("anything", reason="needs numpy and hypothesis")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse CS:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse BS:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]

EYE = [[1.0, 0, 0, 2], [0, 0, 0, 0], [0, 3, 0, 0], [4, 0, 0, 5]]


def quantized(dtype: Any, channels: bool) -> Any:
    x = torch.arange(12.0).view(3, 4)
    if not channels:
        return torch.quantize_per_tensor(x, 0.5, 3, dtype)
    scales, zeros = torch.tensor([0.1, 0.2, 0.5]), torch.tensor([1, 0, 2])
    return torch.quantize_per_channel(x, scales, zeros, 0, dtype)


def four_bits() -> Any:
    x, scales = torch.arange(8.0).view(2, 4), torch.tensor([0.5, 0.7])
    return torch.quantize_per_channel(x, scales, torch.zeros(2), 0, torch.quint4x2)


def leaf(x: Any) -> Any:
    return x.requires_grad_()


KINDS: dict[str, Callable[[], Any]] = {
    "coo": lambda: torch.tensor(EYE).to_sparse(),
    "coo, not coalesced": lambda: torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,)),
    "coo, hybrid": lambda: torch.sparse_coo_tensor([[0, 2]], torch.ones(2, 4), (3, 4)),
    "coo, empty": lambda: torch.sparse_coo_tensor(size=(3, 0)),
    "coo, grad": lambda: leaf(torch.tensor(EYE).to_sparse()),
    "coo, parameter": lambda: torch.nn.Parameter(torch.tensor(EYE).to_sparse()),
    "csr": lambda: torch.tensor(EYE).to_sparse_csr(),
    "csc": lambda: torch.tensor(EYE).to_sparse_csc(),
    "bsr": lambda: torch.tensor(EYE).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.tensor(EYE).to_sparse_bsc((2, 2)),
    "csr, grad": lambda: leaf(torch.tensor(EYE).to_sparse_csr()),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)]),
    "nested, grad": lambda: torch.nested.nested_tensor([torch.ones(2)], requires_grad=True),
    "mkldnn": lambda: torch.tensor(EYE).to_mkldnn(),
    "meta": lambda: torch.empty(3, 2, device="meta").t(),
    "meta, parameter": lambda: torch.nn.Parameter(torch.empty(3, device="meta")),
    "quantized": lambda: quantized(torch.qint8, False),
    "quantized, 32 bits": lambda: quantized(torch.qint32, False).t(),
    "quantized, a row": lambda: quantized(torch.quint8, False)[1],
    "quantized, channels": lambda: quantized(torch.quint8, True),
    "quantized, 4 bits": four_bits,
    "conjugate": lambda: torch.tensor([1 + 2j, 3j]).conj(),
    "negative": lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    "conjugate, grad": lambda: leaf(torch.tensor([1 + 2j]).conj().detach()),
    "made in inference mode": lambda: torch.inference_mode()(torch.ones)(3),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fnuz),
    "complex of halves": lambda: torch.ones(3, dtype=torch.complex32),
    "windows": lambda: torch.arange(10.0).unfold(0, 4, 2),
    "expanded": lambda: torch.arange(6.0).view(2, 1, 3).expand(2, 5, 3),
    "expanded, with gaps": lambda: torch.arange(12.0)[::2].view(6, 1).expand(6, 7),
    "an axis of length 1": lambda: torch.ones(3, 5)[:, :1],
    "empty, with strides": lambda: torch.ones(4, 5)[2:2].t(),
    "no axes": lambda: torch.tensor(3.5),
    "channels last": lambda: torch.ones(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "frozen parameter": lambda: torch.nn.Parameter(torch.arange(6), requires_grad=False),
}
if hasattr(torch, "float4_e2m1fn_x2"):
    KINDS["float4"] = lambda: torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)


@pytest.mark.parametrize("name", KINDS)
def test_kinds(name: str) -> None:
    """Values, layout, strides and `anything.facts` are kept."""
    sent = KINDS[name]()
    before = anything.fingerprint(sent)
    for back in (trip(sent), loads(dumps(sent)), trip([torch.ones(2), sent])[1]):
        assert anything.fingerprint(back) == before
        assert not anything.strides_lost(sent, back)
        assert back.is_sparse == sent.is_sparse
        if sent.layout is torch.sparse_coo:
            assert back.is_coalesced() == sent.is_coalesced()
            assert torch.equal(back.to_dense(), sent.to_dense())
        if sent.is_quantized:
            assert torch.equal(back.dequantize(), sent.dequantize())
            assert back.stride() == sent.stride()


def test_kinds_of_threads(make_pool: Callable[..., Any]) -> None:
    """A worker thread returns the tensor itself, even if its size cannot be computed."""
    made = {name: make() for name, make in KINDS.items()}
    pool = make_pool(xpool.ThreadPool, 1)
    for name, back in zip(made, pool.imap(made.get, made)):
        assert back is made[name]


def test_large_parts_are_outside_the_pickle() -> None:
    """The parts of a large sparse tensor are sent outside the pickle."""
    sent = torch.ones(300, 300).to_sparse_csr()
    message = encode(sent)
    assert message[0] == frame.FRAMED
    assert len(message) < 1.1 * (sent.values().nbytes + sent.col_indices().nbytes + 3000)
    assert torch.equal(trip(sent).to_dense(), sent.to_dense())


def test_parts_keep_their_aliases() -> None:
    """A sparse tensor still shares its values with a separate tensor."""
    values = torch.arange(4.0)
    places = torch.arange(4)[None]
    sparse = torch.sparse_coo_tensor(places, values, (4,), check_invariants=False)
    back, seen = trip([sparse, values])
    seen.zero_()
    assert not back.to_dense().any()


@pytest.mark.skipif(not hasattr(torch, "jagged"), reason="this torch has no jagged layout")
def test_jagged() -> None:
    """Jagged nested tensors, their views, and tensors that share offsets arrive unchanged."""
    one = torch.nested.nested_tensor(
        [torch.ones(2), torch.zeros(3)], layout=torch.jagged, requires_grad=True
    )
    back = trip(one)
    assert type(back) is type(one)
    assert back.requires_grad
    assert [x.tolist() for x in back.unbind()] == [x.tolist() for x in one.unbind()]
    lengths = (torch.tensor([0, 1]), torch.tensor([2, 3]))
    narrow = torch.nested.narrow(torch.arange(10.0).view(2, 5), 1, *lengths, layout=torch.jagged)
    assert [x.tolist() for x in trip(narrow).unbind()] == [x.tolist() for x in narrow.unbind()]
    same = one.detach() * 2
    first, second = trip([one.detach(), same])
    assert (first + second).shape == first.shape  # both still have the same ragged axis


# -- subclasses -----------------------------------------------------------------------------------


class Tagged(torch.Tensor):  # type: ignore[misc, name-defined]
    """Has attributes in ``__dict__`` and in a slot."""

    __slots__ = ("slot",)


class Own(torch.Tensor):  # type: ignore[misc, name-defined]
    """Has its own ``__reduce_ex__``."""

    def __reduce_ex__(self, protocol: int) -> Any:
        return _own, (self.as_subclass(torch.Tensor) + 1,)


def _own(x: Any) -> Any:
    return x.as_subclass(Own)


class WithState(torch.Tensor):  # type: ignore[misc, name-defined]
    """Has its own state."""

    def __getstate__(self) -> Any:
        return {"kept": 1}

    def __setstate__(self, state: Any) -> None:
        self.kept = state["kept"] + 1


class Weight(torch.nn.Parameter):  # type: ignore[misc, name-defined]
    """A subclass of Parameter."""


class Wrapper(torch.Tensor):  # type: ignore[misc, name-defined]
    """Has no memory; the wrapped tensor is an attribute."""

    @staticmethod
    def __new__(cls, inner: Any, grad: bool = False) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=grad
        )

    def __init__(self, inner: Any, grad: bool = False) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, context: Any, size: Any, stride: Any) -> Any:
        return Wrapper(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = [one.inner if isinstance(one, Wrapper) else one for one in args]
        out = func(*plain, **(kwargs or {}))
        return Wrapper(out) if isinstance(out, torch.Tensor) else out


class Dispatching(torch.Tensor):  # type: ignore[misc, name-defined]
    """Has memory and its own dispatch."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


def bare(x: Any) -> Any:
    return torch.Tensor._make_subclass(torch.Tensor, x)


def test_subclass() -> None:
    """Class, attributes and memory are kept, also of a large tensor."""
    for size in (3, 40_000):
        base = torch.arange(float(size))
        sent = base.as_subclass(Tagged)
        sent.tag, sent.slot, sent.itself = "mine", [1], sent
        back, seen = trip([sent, base])
        assert type(back) is Tagged
        assert (back.tag, back.slot) == ("mine", [1])
        assert back.itself is back
        seen.zero_()
        assert not bare(back).any()
        del sent.itself, back.itself


def test_subclass_with_grad() -> None:
    """requires_grad is kept; a computed tensor with a graph is refused."""
    sent = torch.ones(3).as_subclass(Tagged).requires_grad_()
    assert trip(sent).requires_grad
    assert trip(sent).is_leaf
    with pytest.raises(TaskNotPicklable, match=r"detach\(\)"):
        encode(sent * 2)


def test_subclass_with_its_own_pickling() -> None:
    """``__reduce_ex__``, ``__getstate__`` and ``__setstate__`` of a subclass are used."""
    back = trip(torch.ones(2).as_subclass(Own))
    assert type(back) is Own
    assert bare(back).tolist() == [2, 2]
    assert trip(torch.ones(2).as_subclass(WithState)).kept == 2


def test_kinds_of_parameter() -> None:
    """A subclass of Parameter, and a Parameter of a subclass, keep their types."""
    sent = Weight(torch.ones(2), requires_grad=False)
    back = trip(sent)
    assert type(back) is Weight
    assert not back.requires_grad
    around = trip(torch.nn.Parameter(torch.ones(2).as_subclass(Tagged)))
    assert type(around) is Tagged
    assert isinstance(around, torch.nn.Parameter)
    assert around.requires_grad


@pytest.mark.exhaustive
def test_local_subclass(receiver: Receiver) -> None:
    """A class that the receiver cannot import is sent by value."""

    class Local(torch.Tensor):  # type: ignore[misc, name-defined]
        def double(self) -> Any:
            return bare(self) * 2

    sent = torch.ones(2).as_subclass(Local)
    assert receiver.call(lambda x: x.double().tolist(), sent) == [2, 2]
    assert type(receiver.call(lambda x: x, sent)) is Local


@pytest.mark.parametrize("grad", [False, True])
def test_wrapper(grad: bool) -> None:
    """The wrapped tensor arrives inside the wrapper and keeps its aliases."""
    inner = torch.arange(4.0)
    back, seen = trip([Wrapper(inner, grad), inner[1:]])
    assert type(back) is Wrapper
    assert back.requires_grad == grad
    seen.fill_(9)
    assert back.inner.tolist() == [0, 9, 9, 9]
    parameter = trip(torch.nn.Parameter(Wrapper(inner)))
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.inner.tolist() == inner.tolist()


def test_dispatching() -> None:
    """A subclass with its own dispatch and memory arrives unchanged."""
    sent = torch.Tensor._make_subclass(Dispatching, torch.arange(3.0))
    back = trip(sent)
    assert type(back) is Dispatching
    assert bare(back).tolist() == [0, 1, 2]


def test_masked() -> None:
    """torch's masked tensors arrive unchanged."""
    mask = torch.tensor([True, False, True])
    sent = torch.masked.masked_tensor(torch.arange(3.0), mask)
    back = trip(sent)
    assert back.get_mask().tolist() == mask.tolist()
    assert back.get_data()[mask].tolist() == [0, 2]


# -- what belongs to models -----------------------------------------------------------------------


def test_buffers_and_uninitialized_parameters() -> None:
    """Buffer, UninitializedParameter and UninitializedBuffer keep their types."""
    from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

    if hasattr(torch.nn, "Buffer"):
        back = trip(torch.nn.Buffer(torch.ones(2), persistent=False))
        assert isinstance(back, torch.nn.Buffer)
        assert back.persistent is False
    for kind in (UninitializedParameter, UninitializedBuffer):
        assert type(trip(kind())) is kind
    assert trip(torch.nn.LazyLinear(3))(torch.ones(1, 2)).shape == (1, 3)


def test_models_and_optimizers() -> None:
    """A model with hooks, its state and its optimizer's state arrive after a training step."""
    net = torch.nn.Sequential(torch.nn.LSTM(3, 2), torch.nn.BatchNorm1d(2))
    net[0].register_forward_hook(_hook)
    net[1].register_buffer("mine", torch.ones(1), persistent=False)
    optimizer = torch.optim.Adam(net.parameters())
    net[0](torch.ones(2, 3))[0].sum().backward()
    optimizer.step()
    back, state, steps = trip([net, net.state_dict(), optimizer.state_dict()])
    for one, two in zip(net.parameters(), back.parameters(), strict=True):
        assert torch.equal(one, two)
        assert two.requires_grad
        assert two.grad is None  # as with torch.multiprocessing
    assert back[1].mine.tolist() == [1]
    assert list(state) == list(net.state_dict())
    # The tensors of state_dict are views of the parameters, also after the trip.
    state["1.weight"].zero_()
    assert not back[1].weight.any()
    assert steps["state"][0]["exp_avg"].shape == net[0].weight_ih_l0.shape
    assert back[0](torch.ones(2, 3))[0].shape == (2, 2)


def test_optimizers_in_globals() -> None:
    """They keep their hooks and attributes, also the one by which a scheduler sees a step."""
    net = torch.nn.Linear(1, 1)
    one, two = torch.optim.SGD(net.parameters(), lr=0.5), torch.optim.LBFGS(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, gamma=0.1)
    one.register_step_pre_hook(lambda optimizer, *_: optimizer.calls.append(1))
    one.calls = []
    values = [net, one, two, scheduler]
    group = Group({id(value): ("__main__", str(id(value))) for value in values}, {})
    net, one, two, scheduler = pickle.loads(b"".join(write_group(values, group, False).chunks))
    before = net.weight.item()

    def loss() -> Any:
        net.zero_grad()
        value = net(torch.ones(1, 1)).square().sum()
        value.backward()
        return value

    loss()
    one.step()
    scheduler.step()
    assert (one.calls, one.param_groups[0]["lr"]) == ([1], pytest.approx(0.05))
    assert net.weight.item() != before
    two.step(loss)
    assert loss().item() < 1e-6


def _hook(module: Any, args: Any, out: Any) -> None:
    return None


class Squares(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((2,), float(index)), "y": index}


def test_batches_and_sequences() -> None:
    """Batches of a DataLoader, packed sequences and distributions arrive unchanged."""
    batches = list(torch.utils.data.DataLoader(Squares(), batch_size=2))
    back = trip(batches)
    assert [batch["y"].tolist() for batch in back] == [[0, 1], [2, 3], [4]]
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)])
    padded = torch.nn.utils.rnn.pad_packed_sequence
    assert torch.equal(padded(trip(packed))[0], padded(packed)[0])
    assert type(trip(packed)) is type(packed)
    assert trip(torch.distributions.Normal(torch.zeros(2), 1.0)).mean.tolist() == [0, 0]


def test_small_objects_of_torch() -> None:
    """Size, device, dtype, layout and memory format are kept; a generator keeps its state."""
    small = [torch.Size([1, 2]), torch.device("cuda", 1), torch.bfloat16, torch.sparse_csr]
    small += [torch.channels_last, torch.per_tensor_affine]
    assert trip(small) == small
    assert type(trip(small)[0]) is torch.Size
    generator = torch.Generator().manual_seed(7)
    torch.rand(3, generator=generator)
    back = trip(generator)
    assert torch.rand(2, generator=back).tolist() == torch.rand(2, generator=generator).tolist()


def test_storages() -> None:
    """Storages arrive, and a tensor still shares its storage's memory."""
    x = torch.arange(4.0)
    back, typed, tensor = trip([x.untyped_storage(), x.storage(), x])
    assert typed.dtype is torch.float32
    tensor.fill_(1)
    assert typed.tolist() == [1] * 4
    assert back.data_ptr() == tensor.data_ptr()
    assert trip(torch.UntypedStorage(0)).nbytes() == 0


# -- what is refused ------------------------------------------------------------------------------


def hooked(x: Any) -> Any:
    x.register_hook(lambda grad: grad)
    return x


def freed() -> Any:
    x = torch.ones(3)
    x.untyped_storage().resize_(0)
    return x


def after_backward(x: Any) -> Any:
    x.register_post_accumulate_grad_hook(lambda x: None)
    return x


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "computed": (lambda: leaf(torch.ones(2)) * 2, r"\(2,\), torch.float32.*x\.detach\(\)"),
    "hooks": (lambda: hooked(leaf(torch.ones(2))), r"hooks.*remove\(\).*x\.detach\(\)"),
    "hooks of a subclass": (lambda: hooked(leaf(torch.ones(2).as_subclass(Tagged))), "hooks"),
    "hooks after backward": (lambda: after_backward(leaf(torch.ones(2))), "hooks"),
    "freed": (freed, "resized to 0 bytes.*leave it out"),
    "computed, sparse": (lambda: leaf(torch.tensor(EYE)).to_sparse(), r"x\.detach\(\)"),
    "computed, nested": (
        lambda: torch.nested.nested_tensor([torch.ones(2)], requires_grad=True) * 2,
        r"nested.*x\.detach\(\)",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """The error names the tensor and the remedy."""
    make, message = REFUSED[name]
    sent = make()
    for wrapped in (sent, [sent], lambda: sent, ({1: 2}.keys(), sent)):
        with pytest.raises(TaskNotPicklable, match=message):
            encode(wrapped)


def test_unserializable_hooks_are_dropped() -> None:
    """A hook marked as unserializable is dropped, as torch does."""
    x = leaf(torch.ones(2))
    x.register_hook(torch.utils.hooks.unserializable_hook(lambda grad: grad))
    assert not trip(x)._backward_hooks


def test_inside_a_transform() -> None:
    """Inside vmap a tensor is refused, because it has no memory, and vmap continues."""
    seen = []

    def task(x: Any) -> Any:
        for wrapped in (x, [x]):
            with pytest.raises(TaskNotPicklable):
                encode(wrapped)
        seen.append(x.shape)
        return x * 2

    out = torch.func.vmap(task)(torch.ones(3, 2))
    assert out.tolist() == [[2, 2]] * 3
    assert seen == [(2,)]


# -- memory ---------------------------------------------------------------------------------------


def test_gaps() -> None:
    """A view sends only its elements; its strides are kept unless most bytes are gaps."""
    x = torch.arange(300_000.0).view(300, 1000)
    near, far = x[:, ::2], x[:, 3]
    assert len(encode(near)) < near.nbytes + 1000
    assert trip(near).stride() == near.stride()
    assert len(encode(far)) < far.nbytes + 1000
    back = trip(far)
    assert back.stride() == (1,)
    assert back.untyped_storage().nbytes() < 4 * far.nbytes
    assert torch.equal(back, far)
    rows = far.expand(5, 300)
    assert trip(rows).stride() == (0, 1)
    assert torch.equal(trip(rows), rows)


def test_neighbours() -> None:
    """Columns of a matrix send only their own elements, because they do not overlap."""
    x = torch.zeros(1000, 100)
    assert len(encode([x[:, 0], x[:, 50]])) < 10_000
    assert len(encode([x[:, i] for i in range(0, 100, 2)])) < 2 * x.nbytes
    assert len(encode([x[3:6], x[5:7]])) < 3000  # what overlaps is sent once
    one, two, three = trip([x[:, 0:3], x[:, 2:4], x[:, 60]])
    one.fill_(1)
    assert two[:, 0].all()
    assert not two[:, 1].any()
    assert not three.any()


def test_zeros_without_memory() -> None:
    """Zero tensors of autograd, which have no memory, arrive as ordinary zeros."""
    assert trip(torch._efficientzerotensor((3,))).tolist() == [0, 0, 0]


def test_many_rows() -> None:
    """Thousands of views of one storage are compared quickly."""
    x = torch.arange(40_000.0).view(10_000, 4)
    back = trip(list(x))
    assert torch.equal(torch.stack(back), x)
    first, *_, last = trip([*x, x])
    last.zero_()
    assert not first.any()


def test_temporary_memory() -> None:
    """Tensors made during pickling are not taken for aliases of freed ones."""
    back = trip([Temporary(i, size) for size in (4, 30_000) for i in range(20)])
    gc.collect()
    assert [one.x[0].item() for one in back] == [*range(20)] * 2
    one = trip([Temporary(3, 30_000), x := torch.zeros(10), x[2:]])[0]
    assert one.x.eq(3).all()


class Temporary:
    def __init__(self, value: int, size: int) -> None:
        self.value, self.size = value, size

    def __getstate__(self) -> Any:
        return {"x": torch.full((self.size,), float(self.value))}


def test_views_from_odd_bytes() -> None:
    """A view at an odd address still shares memory."""
    data = bytearray(range(41))
    odd = torch.frombuffer(data, dtype=torch.int32, offset=1, count=10)
    whole = torch.frombuffer(data, dtype=torch.uint8)
    back, seen = trip([odd, whole])
    assert back.tolist() == odd.tolist()
    seen.zero_()
    assert not back.any()


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
from xpool.pickle import decode, dumps, encode, loads
x = torch.arange(40_000.0)
sent = [x, x[:10], x.view(200, 200).t(), x[::2], x.to(torch.bfloat16), torch.tensor(3.0)]
sent += [torch.tensor([1 + 2j]).conj(), torch.nn.Parameter(x[:3]), torch.eye(3).to_sparse()]
for one in sent:
    for back in (decode(encode(one)), loads(dumps(one)), loads(dumps([one]))[0]):
        assert type(back) is type(one)
        assert torch.equal(back.to_dense(), one.to_dense())
a, b = decode(encode([x, x[5:]]))
a.zero_()
assert not b.any()
print("ok")
"""


@pytest.mark.exhaustive
def test_without_numpy() -> None:
    """Sending tensors needs no numpy, also if ``__main__`` cannot be imported."""
    assert scripts.run_ok(["-W", "error", "-"], WITHOUT_NUMPY) == "ok\n"
