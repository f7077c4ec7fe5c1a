"""What a task sees: sends the functions, classes and globals of the program that a message uses.

Before the message, the receiver gets the *state*: all definitions and globals that it uses, as they
are at the call.  `Book` follows references to find them, for the workers of one pool:

* A **definition** (a plain function, a class) of ``__main__``, or of a module that a worker cannot
  import, is sent by value.  The receiver binds it to its name.
* **Data** is what the other globals and the attributes of classes refer to, also in modules that a
  worker can import.  Globals that refer to a common object are one *group*: they are pickled
  together, so that they share this object in the receiver, too.

Each of them has a serial number, which changes if its bytes change.  docs/dev/pickling.md says when
they are compared, and where a state lies.
"""

# No `from __future__ import annotations`: Python would compile each NamedTuple field from a text.

import atexit
import copyreg
import os
import pickle
import sys
import time
import weakref
from collections.abc import Collection
from pickle import PickleBuffer
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

from xpool._pickling import SETTINGS, Brought, Key, reducers
from xpool._pickling.by_value import (
    caches,
    checks,
    classes,
    compared,
    registered_calls,
    registry,
    settings,
)
from xpool._pickling.by_value.caches import CACHE
from xpool._pickling.by_value.compared import Compared, Node, attempt, same_bytes, same_parts
from xpool._pickling.by_value.entries import (
    HEAD,
    Entry,
    Kind,
    SentGroup,
    State,
    order,
    serials,
    write_values,
)
from xpool._pickling.by_value.functions import annotations_of, marshalled, parts_of_function
from xpool._pickling.by_value.names import (
    ATOMS,
    SHARED_BY_ALL,
    found_by_name,
    is_simple,
    script_top,
)
from xpool._pickling.by_value.origin import (
    IMPORTED,
    INSTALLED,
    MISSING,
    MODULES,
    OF_IMPORTS,
    OF_MODULES,
    SENT,
    about_module,
    aliases,
    canonical,
    globals_of_modules,
    home_of,
    is_imported,
    is_part,
    is_patch,
    name_of,
    namespace,
    origin_of,
    owner_of,
    renew_origins,
    send_edited,
    send_from_now,
    stamps,
    value_of,
    with_origin,
)
from xpool._pickling.by_value.reads import is_open, of_annotations, of_compiled, reads, wraps_own
from xpool._pickling.by_value.registered_calls import CALLS, registered
from xpool._pickling.frame import INLINE_BELOW, PREPARE, Layout, preparation
from xpool._pickling.pickler import write_global, write_group
from xpool._pickling.reducers import Group, Instead, in_place, of_module
from xpool._python import at_fork, hidden
from xpool._python.hidden import CachedFunction

_MOST_STATES = 256  # states that a book keeps

_NEW = Node(-1, None)
"""Takes the place of the node of a global that was not looked at before."""
_NEW.id = 0

_books: weakref.WeakSet["Book"] = weakref.WeakSet()


@atexit.register  # Python clears `__main__` while it can print, unless others refer to its globals
def _forget() -> None:
    for book in list(_books):
        book.forget()
    with_origin.clear()
    registered_calls.forget()
    caches.forget()
    if "xpool._pickling.by_value.script_top" in sys.modules:
        script_top().forget()


class Book:
    """The state that the workers of one pool have been told of."""

    def __init__(self) -> None:
        self.told: frozenset[Key] = frozenset()
        self.of_contexts: frozenset[Key] = frozenset()  # what the workers' contexts use
        self._nodes: dict[Key, Node] = {}
        self._groups: dict[tuple[Key, ...], SentGroup] = {}
        self._sent: set[Key] = set()
        # Keys of the globals that every message brings: those that have changed since they were
        # first sent, too.
        self._always: frozenset[Key] = frozenset()
        # The states that match the globals as `_noted` has recorded them, by the messages' names;
        # `_noted` has this dict.
        self._fresh: dict[frozenset[Key], State] = {}
        self._epoch = 0
        self._settings: settings.Snapshot | None = None
        self._imports: tuple[str, ...] = ()
        self._generation = 0  # the generation of the origins of modules
        self._looked_at: Any = None  # the calls of `registered`, and the reducers of the program
        self._nones: frozenset[str] = frozenset()  # names that `__main__` binds to None
        # The values that `preface` compares, and `_fresh`.  None: the last change is incomplete.
        self._noted: Any = None
        self._compared: Compared | None = None
        self._tuples: set[int] = set()  # ids of globals that are tuples
        # By id: the objects without state that are globals of modules which workers import.
        self._named: dict[int, tuple[Any, ...]] = {}
        self._maps = False  # whether all receivers are on this machine
        # In one search: the argument of `Group`, and that of `reads`.
        self._checked, self._known = dict[int, Any](), dict[int, Any]()
        self._made: set[tuple[Key, ...]] = set()  # the large groups that are as they are now
        self._used: dict[frozenset[Key], set[Key]] = {}  # what globals use
        self._own: tuple[set[str], list[Any]] = set(), []  # modules for workers to import
        _books.add(self)

    def forget(self) -> None:
        """Let all objects of the program go."""
        self._nodes, self._noted, self._compared = {}, None, None
        self._checked, self._known = {}, {}
        self.told, self._named = frozenset(), {}
        self._fresh = {}

    # -- comparing --------------------------------------------------------------------------------

    def preface(
        self, pickled: Any, layout: Layout, told: frozenset[Key]
    ) -> tuple[bytes, list[PickleBuffer]] | None:
        """Return the state that a message needs and its buffers, or None if it needs none.

        ``pickled``: a pickler or a `Pickled`, with the names and the blocks of the message.
        """
        names = pickled.names
        if self.of_contexts:
            names = names | self.of_contexts
        if reducers.everyone and layout.book is not None:
            names = names | reducers.everyone
        # A task of an installed function gets the settings, too.
        if told.issuperset(names) and (told or layout.book is None):
            return None
        now, noted = settings.snapshot(), self._noted
        known = holds = False
        state = None
        if noted is not None:
            # Most calls need no more than this, and not the lock, as `noted` is never changed.
            (calls, table, forking), at_once, last, fresh = noted
            spaces, main, count, same, functions, more = at_once
            known = (
                copyreg.dispatch_table == table
                and hidden.forking == forking
                and ([*registered] == calls if registered else not calls)
            )
            for space, size in spaces:
                if len(space) != size:
                    known = False
            holds = known and len(main) == count
            try:
                for holder, name, value in same:
                    if holder[name] is not value:
                        holds = False
                        break
            except KeyError:
                holds = False
            for function, code, defaults, kwdefaults, named, attributes, _ in functions:
                if (
                    function.__code__ is not code
                    or function.__defaults__ is not defaults
                    or function.__kwdefaults__ is not kwdefaults
                    or (named is not None and [*kwdefaults, *map(id, kwdefaults.values())] != named)
                    or len(function.__dict__) != attributes
                ):
                    holds = False
                    break
            if holds and now is last and not more:
                state = fresh.get(frozenset(names))
        if state is None:
            with registry.lock:
                if noted is not self._noted:  # another thread has changed it since then
                    known = holds = False
                state = self._state(frozenset(names), layout, now, known, holds)
        if type(told) is Brought:
            told.keys, told.names = state.brings | SETTINGS, frozenset(names)
        blocks = [in_place(pickled, token) for token in state.tokens] if state.tokens else []
        return state if layout.out_of_band else state.by_name, blocks

    def _compare_used(self, names: frozenset[Key]) -> bool:
        """Whether the groups that these globals use are unchanged; forget the changed ones.

        Large groups are compared with their copies.  A global that could not be sent is pickled
        again, and the reasons are compared: the program may have mended the object in place.
        """
        if self._compared is None or not self._compared.if_used:
            return True
        used, equal = self._used_by(names), True
        for group, places in self._compared.if_used:
            if used.isdisjoint(group.keys) or group.keys in self._made:
                continue
            begun = time.perf_counter()
            values = [holder.get(name) for holder, name in places]
            written, why = attempt(write_values, group.keys, values, self._named, self._maps, True)
            if group.kind == Kind.PLACED:
                about = f"{group.data.nbytes:,} bytes pickled"
                same = written is not None and written.lies_in(group.data.content())
            else:
                about, same = "which cannot be sent", why == group.data
            if same:
                checks.took(group.keys[0], about, time.perf_counter() - begun)
            else:
                equal = False
                for key in group.keys:
                    self._nodes.pop(key, None)
        return equal

    def _used_by(self, names: frozenset[Key]) -> set[Key]:
        """Return these globals, the globals that they use, and the others in the groups of both."""
        used = self._used.get(names)
        if used is None:
            used, todo, groups = set(names), [*names], set[int]()
            for key in todo:
                node = self._nodes.get(key, _NEW)
                found = {*node.names, (key[0], key[1].partition(".")[0])}  # an attribute's class
                if node.group is not None and id(node.group) not in groups:
                    groups.add(id(node.group))
                    found.update(node.group.keys)
                todo += found - used
                used |= found
            self._used[names] = used
        return used

    # -- finding ----------------------------------------------------------------------------------

    def _state(
        self,
        wanted: frozenset[Key],
        layout: Layout,
        now: settings.Snapshot,
        known: bool,
        holds: bool,
    ) -> State:
        """Return the state for a message that uses these names.  The caller holds `registry.lock`.

        ``known``: whether there are the same globals and calls as before.  ``holds``: whether
        those that are compared without the lock are the same.
        """
        was = self._compared
        known = known and self.told.issuperset(wanted)
        changed = not (known and holds and was is not None and was.holds())
        state = None if changed or now is not self._settings else self._fresh.get(wanted)
        if state is not None and was is not None and not was.if_used:
            return state
        if not self.told:
            send_edited()
        moved = changed and self._note_redefined()
        # Another object after each change of `sys.path` and of the working folder.
        generation = renew_origins(now)
        grown = was is not None and was.has_grown()
        if moved or generation != self._generation or grown:
            self._generation, self._noted, known, changed = generation, None, False, True
            for node in self._nodes.values():
                if node.kind == compared.NAMED:  # so that the node is made again
                    node.id = 0
                elif node.kind == compared.FUNCTION:
                    node.parts = None
        self._made.clear()
        # None until all is consistent: a signal handler may raise in code of the program that runs.
        if changed:
            self._noted = None
            if not known:
                self._always = self._always.union(self._of_all())
            self._find(layout, self.told.union(wanted, self._always))
        if not self._compare_used(wanted):
            changed, self._noted = True, None
            self._find(layout, self.told)
        if changed or now is not self._settings:
            self._noted = None
            self._settings, self._fresh, self._epoch = now, {}, next(serials)
            assert self._compared is not None
            self._noted = self._looked_at, self._compared.at_once, now, self._fresh
        elif state is not None:
            return state
        if len(self._fresh) >= _MOST_STATES:
            self._fresh.clear()
        state = self._fresh[wanted] = self._write(layout, wanted)
        return state

    def _of_all(self) -> set[Key]:
        """Return the keys of the globals and calls that every worker gets."""
        top = script_top().top_of_main()
        self._imports, self._nones = top.imports, top.nones
        registered_calls.look_at_script(top.calls)
        tables = dict(copyreg.dispatch_table), dict(hidden.forking)
        registered_calls.look_at_reducers()
        self._looked_at = [*registered], *tables
        calls = ((CALLS, name) for name in registered)
        # `inspect` needs the file for the source of a class, and `multiprocessing` for a spawn.
        file = [("__main__", "__file__")] if "__file__" in namespace("__main__") else []
        return {*file, *top.assigned, *aliases(), *calls}

    def _note_redefined(self) -> bool:
        """Send modules that the program has loaded again since workers have imported them.

        Return whether a name has another module, in which functions use other globals, than before.
        """
        moved = False
        for key, node in self._nodes.items():
            value, now = node.value, value_of(key)
            if id(now) != node.id and (name_of(now) or name_of(value)):
                moved = True
            if node.kind != compared.NAMED or node.parts is None:
                continue
            if now is MISSING:
                self._sent.add(key)  # workers that have imported it remove it
            if now is MISSING or compared.is_made_again(key, node, now):
                send_from_now(key[0])
        return moved

    def _find(self, layout: Layout, wanted: frozenset[Key]) -> None:
        """Find all nodes again, from these globals on: a changed global may use other ones."""
        self._maps = layout.publisher is not None
        self._checked, self._known = {}, {}
        nodes, todo = dict[Key, Node](), set(wanted)
        shared, named = globals_of_modules(SHARED_BY_ALL)
        self._named = {**named}
        spaces = {module: namespace(module) for module, _ in wanted}.values()
        every = (value for space in spaces for value in list(space.values()))
        self._tuples = {id(value) for value in every if type(value) is tuple}
        values = [value_of(place[:2]) for place in named.values()]
        stateless = [value for value in values if hasattr(value, "__dict__")]
        while todo:
            key = todo.pop()
            node = nodes[key] = self._look(key)
            node.names |= of_compiled(key)
            # Not `names - nodes.keys()`, which visits all nodes.
            for one in node.objects & shared.keys():
                todo.update(other for other in shared[one] if other not in nodes)
            todo.update(other for other in node.names if other not in nodes)
        self._checked, self._known = {}, {}
        # A worker may have objects that use these globals, even if the task's function does not.
        before = self._nodes
        some = {key for key, node in nodes.items() if before.get(key, node).serial != node.serial}
        self._nodes, self.told, self._used = nodes, frozenset(nodes), {}
        old = self._regroup(layout)
        groups = self._groups.values()
        self._always = self._always.union(some, *(one.keys for one in groups if not one.first))
        if old:
            self._nodes = {key: node for key, node in nodes.items() if key not in old}
            self._find(layout, wanted)
            return
        self._compared = Compared(nodes, groups, self._named, stateless, self._maps)

    def _look(self, key: Key) -> Node:
        module, path = key
        value = value_of(key)
        old = self._nodes.get(key, _NEW)
        if old.id == id(value):
            defined = issubclass(type(value), (FunctionType, type))
            unchanged = (
                (old.kind in (compared.GONE, compared.PLAIN, compared.NAMED) and not defined)
                or (
                    old.kind == compared.FUNCTION
                    and same_parts(old.parts, parts_of_function(value))
                    and not is_open(value)
                )
                or (old.kind == compared.DATA and old.large)
            )
            if unchanged:
                return old
        if value is MISSING:
            return Node(compared.GONE, value)
        if module == CALLS:
            return self._call(key, value)
        origin = origin_of(module)
        if path in OF_MODULES or (path in OF_IMPORTS and origin != SENT):
            return Node(compared.NAMED, value)
        if type(value) in ATOMS or is_imported(value):
            return self._plain(key, value)
        is_class = issubclass(type(value), type)
        if "." in path and origin == IMPORTED:
            owner = owner_of(key)
            if issubclass(type(owner), type) and not classes.is_assigned(
                owner, path.rpartition(".")[2], value
            ):
                return Node(compared.NAMED, value)  # the class statement has made it
        if "." not in path and (
            is_class or issubclass(type(value), (FunctionType, CachedFunction))
        ):
            own = canonical(value.__module__) == module and value.__qualname__ == path
            if own and is_class and origin == IMPORTED and classes.is_made_again(value):
                send_from_now(module)
                origin = SENT
            if own and origin == IMPORTED and not is_patch(value, module):
                node = Node(compared.NAMED, value, reads(value, self._known))
                node.parts = compared.parts_of(value)
                if is_class:
                    if old.kind == compared.NAMED and old.id == node.id:
                        node.parts = {**old.parts, **node.parts}  # parts that were replaced, too
                    compared.note_class(node, value, module, path)
                else:
                    compared.note_function(node, value, module, path)
                    compared.note_cache(node, key, value)
                if old.kind == compared.NAMED and repr(old.defaults) == repr(node.defaults):
                    node.serial = old.serial
                elif node.defaults:
                    node.serial = next(serials)
                return node
            own = own and origin == SENT
            if own and is_class and classes.is_defined_by_statement(value):
                return self._class(key, value)
            if own and type(value) is FunctionType and is_simple(value):
                return self._function(key, value)
        node = self._data(key, value)
        compared.note_cache(node, key, value)
        if node.error and path.endswith(CACHE):
            return Node(compared.NAMED, value)  # each worker calls the function itself
        if node.error and origin == IMPORTED and wraps_own(value) and found_by_name(value):
            return Node(compared.NAMED, value, reads(value, self._known))  # with its own results
        if node.error and "." in path and origin == IMPORTED:
            of_method = type(owner_of(key)) is FunctionType and path.count(".") > 1
            if is_part(key) or of_method or classes.is_descriptor(type(value)):
                return Node(compared.NAMED, value)  # what the import has made
        return node

    def _plain(self, key: Key, value: Any) -> Node:
        """Return the node of a value that never changes."""
        node = Node(compared.PLAIN, value)
        if issubclass(type(value), ModuleType) and origin_of(value.__name__) == SENT:
            node.names = frozenset({(canonical(value.__name__), "__name__")})
        if type(value) in (str, bytes) and len(value) >= INLINE_BELOW:
            node.written = write_group(value, Group({}, {}), True)
        return node

    def _function(self, key: Key, function: FunctionType) -> Node:
        node = Node(compared.FUNCTION, function, reads(function, self._known))
        node.parts = parts_of_function(function)
        annotations = annotations_of(function)
        written = b""
        if annotations:
            node.names |= of_annotations(annotations, key[0])
            pickled, _ = attempt(write_global, annotations)
            if pickled is not None:
                written = b"".join(pickled.chunks)
                node.names |= pickled.names
        code, defaults, _, doc, kwdefaults = node.parts[:5]
        data = marshalled(code), defaults, kwdefaults, doc
        old = self._nodes.get(key, _NEW)
        same = old.kind == compared.FUNCTION and old.id == node.id
        ident = old.entry[0] if same else next(serials)
        self._number(key, node, (ident, data, written))
        return node

    def _number(self, key: Key, node: Node, entry: tuple[Any, ...]) -> None:
        """Set the entry of a definition, with a new serial number unless it is as before."""
        old = self._nodes.get(key, _NEW)
        node.entry = entry
        same = old.kind == node.kind and old.entry == entry
        if node.kind == compared.FUNCTION:
            same = same and repr(old.entry) == repr(entry)  # True equals 1
        node.serial = old.serial if same else next(serials)

    def _class(self, key: Key, cls: type) -> Node:
        definition = classes.definition_of(cls)
        node = Node(compared.CLASS, cls, definition.names)
        node.parts = definition
        token = registry.token_of(cls)
        self._number(key, node, (token, definition.version, definition.blob, definition.names))
        compared.note_class(node, cls, *key)
        return node

    def _call(self, key: Key, call: tuple[Any, ...]) -> Node:
        written = write_group(call, Group({id(call): key}, self._named), False)
        node = Node(compared.CALL, call, written.names)
        node.written = written
        return node

    def _data(self, key: Key, value: Any) -> Node:
        if checks.is_of_import(key, value):
            # The worker's own object takes the place of this one.
            return Node(compared.NAMED, value)
        home = home_of(key, value)
        if home is not None:  # the worker's own, by its name
            self._named[id(value)] = home
            node = Node(compared.PLAIN, value)
            node.written = write_group(Instead(of_module, home), Group({}, {}), True)
            return node
        node = Node(compared.DATA, value)
        group = Group({id(value): key}, self._named, [], self._maps, self._checked)
        assert group.objects is not None
        node.written, node.error = attempt(write_group, value, group, True)
        if node.written is None:
            return node
        checks.warn_of(key, value, group)
        node.names = frozenset(node.written.names)
        # Kept until all are grouped: an id is that of one object only as long as this exists.
        node.alive, node.objects = compared.shared_objects(group.objects)
        # Reducers make tuples whose ids are used again; those of globals are not.
        if self._tuples:
            node.objects |= self._tuples.intersection(map(id, group.objects))
        node.objects.add(id(value))
        if (
            issubclass(type(value), (FunctionType, type, BuiltinFunctionType))
            and found_by_name(value)
            and not is_patch(value, value.__module__)
        ):
            sent = origin_of(value.__module__) == SENT and type(value) is FunctionType
            if not sent or is_simple(value):  # it goes by its name
                node.kind, node.value = compared.PLAIN, value
        node.large = node.written.nbytes >= INLINE_BELOW
        return node

    # -- grouping ---------------------------------------------------------------------------------

    def _regroup(self, layout: Layout) -> set[Key]:
        """Divide the data into groups, and pickle those that are new or have changed.

        Returns large globals in these whose nodes are old: they may refer to other objects now.
        """
        old = set[Key]()
        of_object: dict[int, list[Key]] = {}
        for key, node in self._nodes.items():
            if node.kind == compared.DATA and node.written is not None:
                for one in node.objects:
                    of_object.setdefault(one, []).append(key)
        together: dict[Key, set[Key]] = {}
        for common in of_object.values():
            if len(common) > 1:
                whole = set[Key]().union(*(together.get(key, {key}) for key in common))
                for key in whole:
                    together[key] = whole
        groups: dict[tuple[Key, ...], SentGroup] = {}
        done = set[Key]()
        for key in sorted(self._nodes):
            node = self._nodes[key]
            if key in done or node.kind in (compared.FUNCTION, compared.CLASS):
                self._sent.add(key)
                continue
            if node.kind in (compared.NAMED, compared.GONE) and key not in self._sent:
                continue
            if node.error and origin_of(key[0]) == INSTALLED:
                checks.warn_of_refused(key, value_of(key), node.error)
                continue  # the worker's own attribute of an installed module stays
            # Attributes come first: code that loads the others may use them.
            keys = tuple(sorted(together.get(key, {key}), key=lambda one: ("." not in one[1], one)))
            done.update(keys)
            nodes = {member: self._nodes[member] for member in keys}
            reused = {one for one, node in nodes.items() if node.large and node.group is not None}
            group = groups[keys] = self._group(keys, layout)
            if group is not self._groups.get(keys):
                old |= reused
            for node in nodes.values():
                node.group = group
        self._groups = groups
        for node in self._nodes.values():
            node.alive = node.alive if node.large else []
        return old

    def _group(self, keys: tuple[Key, ...], layout: Layout) -> SentGroup:
        old = self._groups.get(keys)
        node = self._nodes[keys[0]]
        leads = any(self._nodes[key].names for key in keys)
        data: Any
        if node.kind == compared.CALL and node.written is not None:
            return old or SentGroup(keys, Kind.CALL, b"".join(node.written.chunks))
        # Functions and classes to which the values refer by name: others may have these names now.
        defined = {
            name: one.entry[0]
            for key in keys
            for name in self._nodes[key].names
            if (one := self._nodes[name]).kind in (compared.FUNCTION, compared.CLASS)
        }
        # A class that is defined again has none of its attributes yet.
        for key in keys:
            if "." in key[1] and origin_of(key[0]) == SENT:
                owner = owner_of(key)
                if issubclass(type(owner), type):
                    defined[key] = registry.token_of(owner)
            if key[1].endswith(CACHE):
                made = self._nodes[key[0], key[1].rpartition(".")[0]].group
                defined[key] = made and made.serial  # a new function has no results yet
        if old is not None and old.defined != defined:
            old = None
        if node.kind in (compared.GONE, compared.NAMED):
            kind, data = Kind.REMOVED, node.kind == compared.NAMED
        elif issubclass(type(node.value), ModuleType):
            kind, data = Kind.IMPORTED_AS, (canonical(node.value.__name__),)
        elif node.kind == compared.PLAIN and node.written is None:
            kind, data = Kind.VALUES, [node.value]
        elif node.written is None:
            kind, data = self._refusal(keys[0], node)
        else:
            kind, data = self._pickled(keys, old, layout)
        if old is not None and kind == old.kind and same_bytes(data, old.data):
            old.leads = leads
            return old
        group = SentGroup(keys, kind, data)
        group.defined = defined
        group.leads = leads
        group.first = self._sent.isdisjoint(keys)
        self._sent.update(keys)
        return group

    def _refusal(self, key: Key, node: Node) -> tuple[int, str]:
        nones = self._nones if key[0] == "__main__" else script_top().nones_of(key[0])
        # Data that are nested too deeply belong to no process, and None would be a wrong value.
        left = key[1] in nones and "maximum recursion depth" not in node.error
        return Kind.LEFT_NONE if left else Kind.REFUSED, node.error

    def _pickled(
        self, keys: tuple[Key, ...], old: SentGroup | None, layout: Layout
    ) -> tuple[int, Any]:
        nodes = [self._nodes[key] for key in keys]
        written = nodes[0].written
        assert written is not None
        kept = old is not None and old.kind == Kind.PLACED
        if kept and all(node.group is old for node in nodes):  # as `_compare_used` has found
            assert old is not None
            return Kind.PLACED, old.data
        values: Any = [value_of(key) for key in keys]
        if len(keys) > 1:
            written = write_values(keys, values, self._named, self._maps, True)
        large = written.nbytes >= INLINE_BELOW
        for node in nodes:
            node.large = large
        if large:
            if kept and written.lies_in(old.data.content()):  # type: ignore[union-attr]
                return Kind.PLACED, old.data  # type: ignore[union-attr]
            if layout.publisher is not None:
                self._made.add(keys)
                return Kind.PLACED, layout.publisher(written.message, type(values[0]).__name__)
            written = write_values(keys, values, self._named, self._maps, False)
        return Kind.VALUES, b"".join(written.chunks)

    # -- writing ----------------------------------------------------------------------------------

    def _entries(self, keys: Collection[Key]) -> tuple[list[Entry], list[Any]]:
        nodes, now = {key: self._nodes[key] for key in sorted(keys)}, self._settings
        entries: list[Entry] = []
        if now is not None and now.rows:
            entries.append((Kind.SETTINGS, now.serial, False, (), now.rows))
        modules = {key[0] for key in nodes} - {CALLS, MODULES, "__main__"}
        modules |= {name[:at] for name in modules for at, one in enumerate(name) if one == "."}
        sent = sorted(name for name in modules if origin_of(name) == SENT)
        if self._imports:
            entries.append((Kind.IMPORTS, 0, False, (), self._imports))
        if sent:
            entries.append((Kind.MODULE, 0, False, (), tuple(map(about_module, sent))))
        functions = [(key, node) for key, node in nodes.items() if node.kind == compared.FUNCTION]
        for key, node in functions:
            ident, data, _ = node.entry
            entries.append((Kind.FUNCTION, node.serial, False, (key,), (ident, *data)))
        # Calls, names in `sys.modules`, and what these need come first: the rest may need them.
        calls = frozenset(key for key in nodes if key[0] in (CALLS, MODULES))
        first = self._used_by(calls) if calls else set()
        groups = [one for one in self._groups.values() if not nodes.keys().isdisjoint(one.keys)]
        groups.sort(key=lambda one: (first.isdisjoint(one.keys), *order(one.keys, one.leads)))
        rest: list[Entry] = [
            (Kind.CLASS, node.serial, False, (key,), node.entry)
            for key, node in nodes.items()
            if node.kind == compared.CLASS
        ]
        rest += [group.entry() for group in groups]
        # What an import has made has its name again before its attributes have theirs, and before
        # other objects are loaded by this name.
        entries += sorted(rest, key=lambda one: (first.isdisjoint(one[3]), *_after_removed(one)))
        defaults = [(key[0], *one) for key, node in nodes.items() for one in node.defaults]
        if defaults:
            entries.append((Kind.DEFAULTS, 0, False, (), defaults))
        for (module, name), node in functions:
            if annotations := node.entry[2]:
                keys = ((module, f"{name}.__annotations__"),)
                entries.append((Kind.VALUES, node.serial, False, keys, annotations))
        used = {key[0] for key in nodes if key[1] not in OF_MODULES}
        own = {name for name in used if origin_of(name) == IMPORTED}
        if own != self._own[0]:  # in the order in which the program has begun their imports
            files = stamps if self._maps else {}  # other machines have other files
            self._own = own, [(one, files.get(one)) for one in [*sys.modules] if one in own]
        if own:
            entries.append((Kind.USED, 0, False, (), self._own[1]))
        return entries, [group.data for group in groups if group.kind == Kind.PLACED]

    def _write(self, layout: Layout, names: frozenset[Key]) -> State:
        """Return the state for messages that use these names."""
        brings = frozenset(self._used_by(names | self._always) & self._nodes.keys())
        entries, places = self._entries(brings)
        written = pickle.dumps(entries, 5)
        if len(written) >= INLINE_BELOW and brings != self.told:  # there is one large state
            if self.told not in self._fresh:
                self._fresh[self.told] = self._write(layout, self.told)
            return self._fresh[self.told]
        tokens = [token for place in places if (token := place._token) is not None]
        place = about = None
        if len(written) >= INLINE_BELOW and layout.publisher is not None:
            place = layout.publisher(lambda _: written, "program's state")
            token, about = place._token, place._about
            if token is not None:
                tokens.append(token)
            written = b""
        exact = layout.book is not None
        head = HEAD.pack(
            reducers.script.sender, next(serials), self._epoch, exact, place is not None
        )
        body = head + (written if about is None else pickle.dumps(about, 5))
        state = State(preparation(body, len(tokens)))
        state.by_name = preparation(body, len(tokens), _BY_NAME)
        state.tokens, state.brings, state.place = tokens, brings, place
        return state


def _after_removed(entry: Entry) -> tuple[bool, bool]:
    return entry[0] != Kind.REMOVED, entry[0] == Kind.REMOVED and "." in entry[3][0][1]


copyreg.add_extension("xpool._pickling.by_value.received", "prepare", PREPARE)
_BY_NAME = b"cxpool._pickling.by_value.received\nprepare\n"  # the opcode GLOBAL


# -- the sender -----------------------------------------------------------------------------------


class _Program:
    """Answers the pickler's questions about the program."""

    def __init__(self) -> None:
        self.sender = os.urandom(16)
        self.anyone = Book()  # for messages that belong to no pool

    def pickled_namespace(self, values: dict[Any, Any]) -> Any:
        """Reduce the globals of ``__main__``.  Return `NotImplemented` for any other dict."""
        if values is namespace("__main__"):
            return namespace, ("__main__",)
        return NotImplemented


reducers.script = _Program()


at_fork.renew(vars(reducers), script=_Program)  # a child is another sender
