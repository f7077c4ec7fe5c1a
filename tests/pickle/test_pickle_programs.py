"""Programs of torch: modules of TorchScript, exported programs, graphs, operators."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from receiver import trip
from support import scripts

from xpool.pickle import decode, encode

torch = pytest.importorskip("torch", reason="torch is not installed")

quiet = pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning", "ignore:`torch.jit:FutureWarning"
)


@quiet
def test_weights_of_torchscript_stay_shared() -> None:
    """An optimizer trains a module of TorchScript, and its weights are in the message once."""
    layer = torch.nn.Linear(200, 200)
    module = torch.nn.Sequential(layer, torch.nn.BatchNorm1d(200), layer)
    script = torch.jit.script(module)
    optimizer = torch.optim.SGD(script.parameters(), lr=0.5)
    tensors = {**script.state_dict(keep_vars=True)}
    assert len(encode(script)) < 2 * layer.weight.nbytes
    for one in trip([script, optimizer, tensors]), [copy.deepcopy(script), None, None]:
        back, its_optimizer, its_tensors = one
        x = torch.ones(2, 200)
        back.eval()
        assert back(x).equal(script.eval()(x))
    back, its_optimizer, its_tensors = trip([script, optimizer, tensors])
    before = back(x)
    back(x).sum().backward()
    its_optimizer.step()
    assert not back(x).equal(before)
    for name, tensor in back.state_dict(keep_vars=True).items():
        assert tensor is its_tensors[name]


@quiet
def test_a_module_with_a_part_in_torchscript() -> None:
    """Its parameters are those of the part, also a tied one and one that needs no gradient."""

    class Head(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 3)))
            self.weight = next(self.body.parameters())
            next(iter(self.body.children())).bias.requires_grad_(False)

    one = trip(torch.nn.ModuleList([Head()]))[0]
    assert one.weight is next(one.body.parameters())
    assert [tensor.requires_grad for tensor in one.body.parameters()] == [True, False]


def test_exported_programs() -> None:
    """torch's own pickle of one cannot be loaded."""
    x = torch.ones(2, 3)
    program = torch.export.export(torch.nn.Linear(3, 2), (x,))
    assert encode(program) == encode(program), "a global would be sent again at each call"
    assert trip(program).module()(x).equal(program.module()(x))
    message = encode(program)
    with torch.device("meta"):
        back = decode(message)
    assert back.module()(x).equal(program.module()(x))


def test_graphs_keep_their_hooks() -> None:
    """Hooks of the module and of its parts, buffers, the mode and the class's name."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)).eval()
    graph = torch.fx.symbolic_trace(model)
    graph.register_forward_hook(lambda module, args, result: result * 7)
    graph.register_forward_pre_hook(lambda module, args: module.calls.append(1))
    getattr(graph, "0").register_forward_hook(lambda module, args, result: result + 1)
    graph.register_buffer("kept", torch.ones(2), persistent=False)
    graph.calls = []
    x = torch.ones(2, 3)
    back = trip(graph)
    assert back(x).equal(graph(x)) and back.calls == graph.calls == [1]
    assert back.state_dict().keys() == graph.state_dict().keys() and back.kept.tolist() == [1, 1]
    assert not back.training and type(back).__name__ == type(graph).__name__
    assert trip(back)(x).equal(graph(x))


def test_graphs_call_functions_without_a_name() -> None:
    """The nodes of the graph stay calls of these functions, which are not traced."""
    shift = [1.0]

    def shifted(x: Any) -> Any:
        return x + shift[0] if x.sum() > 0 else x

    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    for function in shifted, (lambda x: x * shift[0]), torch.ops.aten.neg.default, torch.relu:
        node = graph.call_function(function, (node,))
    graph.output(node)
    module = torch.fx.GraphModule({}, graph)
    x = torch.ones(2)
    for back in trip(module), trip(trip(module)):
        assert back(x).equal(module(x))
        assert [one.op for one in back.graph.nodes] == [one.op for one in module.graph.nodes]


def test_operators() -> None:
    """They arrive as the receiver's own, also as keys, and so do their namespaces."""
    aten = torch.ops.aten
    for one in aten.mm, aten.mm.default, aten.add.Tensor, aten.add_.Tensor, aten, torch.ops:
        assert trip(one) is one
    assert trip({aten.mm.default: 1})[aten.mm.default] == 1


def test_programs_in_a_script(tmp_path: Path) -> None:
    """The globals of a script, as a fork has them."""
    text = """
        import torch
        import torch.fx
        from torch.utils._python_dispatch import TorchDispatchMode

        from xpool import Pool

        aten, ops = torch.ops.aten, torch.ops
        NAMES = {torch.ops.aten.add.Tensor: "add", aten.mul.Tensor: "mul"}
        offset = 2.0
        torch.fx.wrap("moved")

        def moved(x):
            return x + offset if x.sum() > 0 else x

        class Model(torch.nn.Module):
            def forward(self, x):
                return moved(x) * 2

        class Names(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                names.append(NAMES.get(function))
                return function(*args, **(kwargs or {}))

        names = []
        model = Model()
        graph = torch.fx.symbolic_trace(model)
        lines = torch.fx.symbolic_trace(torch.nn.Linear(1, 1))
        program = torch.export.export(torch.nn.ReLU(), (torch.ones(2),))

        def called(x):
            with Names():
                x + x * x
            optimizer = torch.optim.SGD([x], lr=1)
            return aten.add(x, x).tolist(), ops.aten.mul.Tensor(x, x).tolist(), names

        def traced(x):
            return torch.fx.symbolic_trace(model)(x).tolist(), graph(x).tolist()

        def others(x):
            return lines(x[:1]).tolist(), program.module()(x).tolist()

        if __name__ == "__main__":
            x = torch.ones(2)
            with Pool(1) as pool:
                assert pool.apply(others, (x,)) == others(x)
                assert pool.apply(called, (x,)) == called(x) == ([2, 2], [1, 1], ["mul", "add"])
                for offset in 2.0, 5.0:
                    assert pool.apply(traced, (x,)) == traced(x)
                    assert pool.apply(graph, (x,)).equal(graph(x))
                assert pool.apply(aten.neg.default, (x,)).tolist() == [-1, -1]
                assert pool.apply(lambda space: space.neg(x), (aten,)).tolist() == [-1, -1]
        """
    assert scripts.run_ok([scripts.write(tmp_path / "program.py", text)]) == ""
