"""`PushPullModelServer`: serves one model in strictly ordered versions."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from xpool.distributed._group_errors import GroupError
from xpool.distributed._rpc_group import RpcGroup
from xpool.server._ordered import OrderedServerBase, OrderedServerSimple, OrderedServerSimpleImpl

if TYPE_CHECKING:
    from torch import Tensor, nn


def on_cpu(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, because other processes may lack their devices."""
    return {name: one.detach().to("cpu", copy=True) for name, one in tensors.items()}


def load(model: nn.Module, state: dict[str, Tensor], name: str) -> None:
    """Copy a pulled state into a model, on the model's own devices."""
    own = {key: tuple(one.shape) for key, one in model.state_dict().items()}
    pulled = {key: tuple(one.shape) for key, one in state.items()}
    if own != pulled:  # checked first: torch would load the parts that fit, and then raise
        differ = sorted(
            key for key in own.keys() | pulled.keys() if own.get(key) != pulled.get(key)
        )
        raise GroupError(
            f"The server's {name!r} is not the given model: they differ in "
            f"{', '.join(differ)}. The server's has {', '.join(pulled)}."
        )
    model.load_state_dict(state)


class PushPullModelServer:
    """The client of a model server.

    Members of the group get it by ``group.get_paired(server_name).to_here()``.  A model's version
    is its attribute ``pp_version``, which `push` and `pull` set.  Without it, the version is 0.
    Calls raise the errors of `OrderedServerSimple`, too.
    """

    def __init__(self, model_name: str, o_server: OrderedServerBase) -> None:
        self.model_name, self.o_server = model_name, o_server

    def push(self, model: nn.Module, pull_on_fail: bool = True) -> bool:
        """Push the model's state, as its version + 1.  Return whether the server stored it.

        The server does not store it if another process has pushed since this model was pulled.
        Then, with ``pull_on_fail``, the newest state is loaded into ``model``, but no gradients.

        Raises:
            VersionError: the model's version is higher than any that the server has had.
            GroupError: the server's model has other names or shapes.
        """
        version: int = getattr(model, "pp_version", 0)
        state = on_cpu(model.state_dict())
        pushed = self.o_server.push(self.model_name, state, version + 1, version)
        if pushed:
            model.pp_version = version + 1
        elif pull_on_fail:
            self.pull(model)
        return pushed

    def pull(self, model: nn.Module) -> bool:
        """Load the newest state into ``model`` if it is newer.  Return whether the server has one.

        Raises:
            GroupError: the server's model has other names or shapes.
        """
        pulled = self.o_server.pull(self.model_name)
        if pulled is None:
            return False
        state, version = pulled
        # A model without a version loads any version, including 0.
        if getattr(model, "pp_version", -1) < version:
            load(model, state, self.model_name)
            model.pp_version = version
        return True


class PushPullModelServerImpl:
    """A server of one model, in this process.

    Args:
        server_name: a name that is unique in the group.  The client is paired under it.
        group: an `RpcGroup` that contains this process.
        model_name: the model's key in the ordered server.
        o_server: the client of another ordered server.  None: this process makes a server.

    Raises:
        GroupKeyError: the name is taken.
        NotAMember: this process is not in the group.
    """

    def __init__(
        self,
        server_name: str,
        group: RpcGroup,
        model_name: str = "model",
        o_server: OrderedServerBase | None = None,
    ) -> None:
        self.server_name, self.group, self.model_name = server_name, group, model_name
        with ExitStack() as undo:
            if o_server is None:
                inner = f"{server_name}_o_server"
                self._o_server_impl = OrderedServerSimpleImpl(inner, group)
                undo.push(self._o_server_impl.undo)
                o_server = OrderedServerSimple(inner, group)
            self.o_server = o_server
            group.pair(server_name, PushPullModelServer(model_name, o_server))
            undo.pop_all()  # all succeeded, so undo nothing

    def __repr__(self) -> str:
        return f"<PushPullModelServerImpl {self.server_name!r} in {self.group!r}>"
