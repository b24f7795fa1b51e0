"""What the code of functions reaches by name: other code, variables of modules, and what nobody can foresee."""

from __future__ import annotations

import _abc  # type: ignore[import-not-found]
import builtins
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from ...messages import message
from ..fingerprint.code_ownership import CodeOwnership, HostCode, is_impostor
from ..fingerprint.reachable_code import CodeReachability
from ..values.code_values import identity
from ..values.global_reads import Path, cells, module_named, names, paths, strings
from ..values.name_resolution import Resolved, resolve
from ..values.value_text import PLAIN, Indescribable
from .forms import text_of
from .held_state import HeldState, StateDescriber
from .writes import types_compared, writes

_FORESEEN_OF_PYTHON = frozenset(
    (
        *(
            "abc",
            "_abc",
            "builtins",
            "collections",
            "_collections",
            "_collections_abc",
            "contextlib",
            "copy",
            "copyreg",
        ),
        *("dataclasses", "enum", "fractions", "functools", "_functools", "itertools", "logging", "math", "cmath"),
        *("_operator", "operator", "numbers", "re", "_sre", "string", "textwrap", "types", "typing", "_typing"),
        *("bisect", "_bisect", "heapq", "_heapq", "json", "base64", "hashlib", "struct", "_struct", "warnings"),
        *("__future__", "posixpath", "ntpath", "genericpath", "os", "posix", "nt", "statistics"),
    )
)
"""Modules of Python's own whose functions give the same at each call, but for those in ``_UNFORESEEN``."""
_UNFORESEEN_MODULES = frozenset(("numpy.random", "torch.random", "torch.hub", "requests", "torch.backends"))
_STATES_OF_TORCH = """
    get_default_dtype set_default_dtype get_default_device set_default_device set_default_tensor_type seed manual_seed
    get_num_threads set_num_threads get_float32_matmul_precision set_float32_matmul_precision set_flush_denormal
    use_deterministic_algorithms are_deterministic_algorithms_enabled set_deterministic_debug_mode initial_seed
    get_deterministic_debug_mode is_deterministic_algorithms_warn_only_enabled get_rng_state set_rng_state
    is_inference_mode_enabled is_compiling is_exporting is_dynamo_compiling is_tracing is_scripting
    """
"""What PyTorch keeps for the whole process, and whether it traces: a trace finds another thing than the host."""
_INSIDES = """
    __annotations__ __globals__ __builtins__ __closure__ cell_contents __subclasses__ f_back f_locals f_globals gi_frame
    tb_frame _torchdynamo_wrapper_id
    """
"""By which code reaches what is neither held nor named, or an address, which is no part of what is held."""
_UNFORESEEN = frozenset(
    (
        *("posix.urandom", "posix.stat", "posix.listdir", "posix.scandir", "posix.open", "posix.read", "posix.times"),
        *(
            "nt.urandom",
            "nt.stat",
            "nt.listdir",
            "nt.scandir",
            "nt.open",
            "nt.read",
            "nt.times",
            "os.walk",
            "os.getpid",
        ),
        *("genericpath.exists", "genericpath.isfile", "genericpath.getmtime", "genericpath.getsize"),
        *("os._Environ", "os.getenv", "os.getenvb"),
        *("torch.serialization.load", "torch.serialization.save", "torch._C.Generator", "torch.from_file"),
    )
)
_UNFORESEEN_BUILTINS = frozenset(
    ("open", "input", "eval", "exec", "globals", "locals", "__import__", "id", "hash", "compile")
)
_CONSTANTS = frozenset(
    (
        "None",
        "True",
        "False",
        "Ellipsis",
        "NotImplemented",
        "__debug__",
        "__name__",
        "__doc__",
        "__spec__",
        "__package__",
    )
)
_SETS_BY_NAME = frozenset(("setattr", "delattr"))
_CODE = (type, types.FunctionType, types.BuiltinFunctionType, functools._lru_cache_wrapper, torch._ops.OpOverload)


class ReachedState:
    """The code that functions run and the variables that it reads, described and watched.

    Args:
        held: what the functions hold, walked through.
        describer: has met the code of what they hold.
        host: the host's own code, which reads what it reads for a model without functions too.

    Attributes:
        sources: of the code, watched.
        asks_for_types: code that is neither the host's nor a library's calls ``type``, not only to compare what that
            gives with a class that no number is of.
    """

    def __init__(self, held: HeldState, describer: StateDescriber, host: HostCode) -> None:
        copied = held.of_kind(types.FunctionType)
        walked = frozenset(function.__module__.partition(".")[0] for function in copied if function.__module__)
        self._owner, self._snapshot = CodeOwnership(host, walked), describer.snapshot
        describer.known = frozenset(map(id, copied))
        self._held = held
        self._reached = CodeReachability(describer, host, walked)
        self._describer = describer
        self.sources = self._reached.sources
        self.asks_for_types = False

    def lines(self) -> list[str]:
        """Return the text that identifies what is reached.

        Raises:
            Indescribable: some of it cannot be part of a graph's identity, or is another at each call.
        """
        self._reached.follow()
        if self._reached.identity.refusal is not None:
            raise Indescribable(self._reached.identity.refusal)
        self._describer.code.append(torch.Tensor)  # whose methods code calls without naming them
        self._snapshot.add(torch.Tensor)
        self._reached.follow()
        for value in list(self._reached.sources.met.values()):
            if isinstance(value, types.FunctionType) and not self._is_known(value):
                self._look_at(value)
            elif isinstance(value, type):
                self._look_at_class(value)
        self._reached.follow()
        for code in self._describer.code:
            if isinstance(code, types.ModuleType):
                self._watch_module(code)
        if not self._describer.described.isdisjoint(self._held.objects):
            raise Indescribable(message("an object that is kept in a variable of a module too"))
        return self._reached.identity.sorted()

    def _is_known(self, function: types.FunctionType) -> bool:
        if is_impostor(function.__globals__):
            raise Indescribable(message("a module that is called like another"))
        return self._owner.is_library(function.__globals__) or self._owner.is_as_written(function)

    def _look_at_class(self, kind: type) -> None:
        """Watch a class whose methods run; a library's too where layers are of it, for anybody may replace those.

        Raises:
            Indescribable: somebody said that other classes are this one, or kinds of it.
        """
        counts = self._owner.counts(kind.__module__) and not self._is_hosts(kind)
        if counts or issubclass(kind, torch.nn.Module):
            self._snapshot.add(kind)
        if counts:
            self._reached.identity.add(f"{identity(kind)} of {[identity(base) for base in kind.__mro__]}")
        if any(self._owner.counts(other.__module__) for other in _registered_as(kind)):
            raise Indescribable(message("{name}, which other classes were said to be", name=kind.__qualname__))

    def _is_hosts(self, kind: type) -> bool:
        return kind.__module__.partition(".")[0] == self._owner.host.package

    def _look_at(self, function: types.FunctionType) -> None:
        """Watch what a function keeps and reads.

        Raises:
            Indescribable: it reads what is another at each call, or what a copy of it would not find.
        """
        inside = frozenset(_INSIDES.split()).intersection(strings(function.__code__) | names(function.__code__))
        if inside:
            raise _unforeseen(min(inside), function)
        if id(function) not in self._describer.known:
            self._describer.describe([function.__defaults__, function.__kwdefaults__])
            self._snapshot.add(function)
            self._reached.identity.add(f"{identity(function)} {text_of(function)}")
        self._look_at_what_is_set(function)
        for compared in types_compared(function.__code__):
            kind = resolve(compared, function) if compared is not None else None
            of_no_number = kind is not None and isinstance(kind.value, type) and not issubclass(float, kind.value)
            self.asks_for_types |= not of_no_number
        for path in paths(function.__code__):
            read = resolve(path, function)
            if read is None and path.root == "global" and _is_unforeseen(path.name):
                raise _unforeseen(path.name, function)
            if read is None:
                self._watch_unset(path, function)
                continue
            for value in _on_the_way(read):
                self._check(path, value, function)
                if not isinstance(value, _CODE) and not self._owner.is_of_library(read.owner):
                    self._snapshot.add(value)
            if isinstance(read.value, types.ModuleType):
                self._watch_module(read.value)
            self._watch(path, read, function)

    def _watch_module(self, module: types.ModuleType) -> None:
        """Watch all variables of a module that is handed on, or asked for one by a name that nobody can foresee."""
        if self._owner.counts(module.__name__) and not self._owner.is_host(vars(module)):
            self._snapshot.add(vars(module))

    def _look_at_what_is_set(self, function: types.FunctionType) -> None:
        """Watch variables and attributes that a function may set, and have what they are count.

        Whoever reads them may be somebody whom nobody has looked at.
        """
        written = writes(function.__code__)
        scope, package = function.__globals__, str(function.__globals__.get("__package__") or "")
        for name in written.variables:
            self._set_variable(scope, name)
        named = [scope.get(name) for name in written.names] + [value for _, value in cells(function)]
        for value in (*named, *(module_named(name, package) for name in written.imported)):
            if isinstance(value, types.ModuleType):
                any_name = not _SETS_BY_NAME.isdisjoint(written.names) and self._owner.counts(value.__name__)
                for name in (name for name in vars(value) if name[:2] != "__") if any_name else written.attributes:
                    self._set_variable(vars(value), name)
        for path in written.objects:
            read = resolve(path, function)
            if read is not None and not isinstance(read.value, (types.ModuleType, torch.nn.Module)):
                self._snapshot.add(read.value)
                if id(read.value) not in self._held.objects:
                    self._reached.identity.add(f"{path.text(read.steps)} set: {self._describer.describe(read.value)}")

    def _set_variable(self, scope: dict[str, Any], name: str) -> None:
        self._snapshot.add_variable(scope, name)
        if name in scope:
            text = self._describer.describe(scope[name])
            self._reached.identity.add(f"{scope.get('__name__')}.{name} set: {text}")

    def _check(self, path: Path, value: Any, function: types.FunctionType) -> None:
        """Refuse a value that code reads by a name.

        Raises:
            Indescribable: what it gives is another at each call, or it is held by a function too, which has a copy.
        """
        if isinstance(value, functools._lru_cache_wrapper):
            wrapped = value.__wrapped__
            if not (isinstance(wrapped, types.FunctionType) and self._is_known(wrapped)):
                raise Indescribable(message("{name}, which remembers what it gave", name=path.text(len(path.steps))))
        origin, name = _origin(value)
        package = origin.partition(".")[0]
        of_python = package in sys.stdlib_module_names and package not in _FORESEEN_OF_PYTHON
        if of_python or package in _UNFORESEEN_MODULES or origin in _UNFORESEEN_MODULES:
            raise _unforeseen(path.text(len(path.steps)), function)
        of_torch = package in ("torch", "builtins") and getattr(value, "__name__", "") in _STATES_OF_TORCH.split()
        if of_torch or f"{origin}.{name}" in _UNFORESEEN:
            raise _unforeseen(path.text(len(path.steps)), function)
        if path.root != "cell" and id(value) in self._held.objects:
            what = path.text(len(path.steps))
            raise Indescribable(message("{name}, which is kept in a variable of a module too", name=what))

    def _watch(self, path: Path, read: Resolved, function: types.FunctionType) -> None:
        """Watch the variables of modules that a path leads through, and the table that it ends in."""
        if path.root == "global":
            self._watch_variable(function.__globals__, path.name)
        for holder, (kind, name) in zip(read.way, path.steps, strict=False):
            if not (isinstance(holder, types.ModuleType) and kind == "."):
                return
            self._watch_variable(vars(holder), name)

    def _watch_unset(self, path: Path, function: types.FunctionType) -> None:
        """Watch for a variable that is not there yet, or stands before one of Python's own."""
        if path.root == "global":
            for scope in (function.__globals__, vars(builtins)):
                self._snapshot.add_variable(scope, path.name)

    def _watch_variable(self, scope: dict[str, Any], name: str) -> None:
        value = scope.get(name)
        if callable(value) or type(value) in PLAIN or self._owner.counts(str(scope.get("__name__") or "")):
            self._snapshot.add_variable(scope, name)
            if isinstance(value, (dict, list, set)) and not self._owner.is_library(scope):
                self._snapshot.add(value)


def _registered_as(kind: type) -> list[type]:
    """Return the classes of which somebody said that they are a kind of this one."""
    if "_abc_impl" not in vars(kind):
        return []
    registered = (reference() for reference in _abc._get_dump(kind)[0])
    return [other for other in registered if other is not None]


def _on_the_way(read: Resolved) -> Iterator[Any]:
    """Yield what a path leads to, and what it leads to on the way there."""
    yield from (value for value in read.way[: read.steps] if not isinstance(value, types.ModuleType))
    yield read.value


def _origin(value: Any) -> tuple[str, str]:
    """Return the Python module that a value comes from, and its name there."""
    if isinstance(value, types.ModuleType):
        return value.__name__, ""
    bound = getattr(value, "__self__", None) if callable(value) else None
    if bound is not None and not isinstance(bound, types.ModuleType):
        value_of = bound if isinstance(bound, type) else type(bound)
        return str(value_of.__module__), str(getattr(value, "__name__", ""))
    named = value if isinstance(getattr(value, "__module__", None), str) and callable(value) else type(value)
    return str(named.__module__), str(getattr(named, "__qualname__", ""))


def _is_unforeseen(name: str) -> bool:
    """Return True for a function of Python's that gives another thing each time, and for what is not Python's own."""
    value = vars(builtins).get(name)
    if name in _UNFORESEEN_BUILTINS:
        return True
    return (callable(value) and getattr(value, "__module__", None) not in ("builtins", "io", "_sitebuiltins")) or (
        not callable(value) and name in vars(builtins) and name not in _CONSTANTS
    )


def _unforeseen(name: str, function: types.FunctionType) -> Indescribable:
    return Indescribable(
        message(
            "{name} (in {function}), which may give something else at each call",
            name=name,
            function=function.__qualname__,
        )
    )
