"""Whose code it is: a library's, the host's as the host wrote it, or somebody else's."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..values.code_values import functions_in, identity, is_code, package_of
from ..values.global_reads import cells
from ..values.name_resolution import Resolved

_LIBRARY_FOLDERS = ("site-packages", "dist-packages")
_KNOWN_LIBRARIES = ("torch", "torchvision", "torchaudio", "triton")  # wherever they are installed
_PYTHONS_FOLDERS = tuple(
    f"{folder}/".replace("\\", "/")
    for folder in {
        *(os.path.dirname(os.__file__), sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")),
        *(os.path.dirname(sys.executable), os.path.join(sys.base_prefix, "DLLs")),  # where Windows has some
    }
)
_FROZEN = "<frozen"


@dataclass(frozen=True)
class HostCode:
    """The host's own code, which is part of every key.

    Attributes:
        package: its Python package.
        machinery: modules, of it or of libraries that its layers are from, that are about where weights lie and not
            about what is computed with them. What the host's call is not followed, and the variables of all are
            bookkeeping, which changes all the time.
        notes: names of attributes in which that machinery keeps its notes on a module. They are others in each process,
            and count only where code of the module reads them.
    """

    package: str = ""
    machinery: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()


NO_HOST = HostCode()


class CodeOwnership:
    """Tells whose a function, a class or a module is.

    Args:
        host: the host's own code.
        walked: packages that are followed though they may be installed as libraries: those of the layers.
    """

    def __init__(self, host: HostCode, walked: frozenset[str]) -> None:
        self.host = host
        self._walked = walked
        self._libraries: dict[tuple[Any, Any], bool] = {}  # modules by name and file, whether they are a library's

    def is_library(self, scope: dict[str, Any]) -> bool:
        """Return True if these are the variables of a library's module."""
        module = scope.get("__name__"), scope.get("__file__")
        known = self._libraries.get(module)
        if known is None:
            known = self._libraries[module] = self._is_of_library(package_of(scope), str(module[1] or ""))
        return known

    def is_host(self, scope: dict[str, Any]) -> bool:
        """Return True if these are the variables of a module of the host's."""
        return package_of(scope) == self.host.package

    def is_as_written(self, function: types.FunctionType) -> bool:
        """Return True if this is the host's function, from the host's file."""
        scope = function.__globals__
        return self.is_host(scope) and function.__code__.co_filename == scope.get("__file__")

    def has_methods_of_others(self, kind: type) -> bool:
        """Return True if a class, or one that it is derived from, has code that the host did not write; torch's aside.

        What is called and is no function may run anything.
        """
        own = (base for base in kind.__mro__ if base not in torch.nn.Module.__mro__)
        return not all(self._is_hosts(member) for base in own for member in _members(base))

    def _is_hosts(self, member: Any) -> bool:
        functions = list(functions_in(member))
        runs = callable(member) or hasattr(type(member), "__get__")
        return all(map(self._is_hosts_function, functions)) if functions else not runs

    def _is_hosts_function(self, function: types.FunctionType) -> bool:
        """Return True if the host wrote a function, and those that it is made of; a decorator may be a library's."""
        held = [inner for _, value in cells(function) for inner in functions_in(value)]
        own = self.is_as_written(function) or (bool(held) and self.is_as_library_wrote(function))
        return own and all(map(self._is_hosts_function, held))

    def is_of_extension(self, function: types.FunctionType) -> bool:
        """Return True if this is neither the host's function nor of anything that is installed, walked or not."""
        scope, written = function.__globals__, function.__code__.co_filename
        if self.is_host(scope):  # what is made while it is imported, as a data class's methods, is from no file
            return written != scope.get("__file__") and not written.startswith("<")
        return not (self.is_library(scope) or _is_installed(str(scope.get("__file__") or "")))

    def is_machinery(self, function: types.FunctionType) -> bool:
        """Return True if this is a function of the host's machinery, as the host wrote it."""
        return function.__globals__.get("__name__") in self.host.machinery and self.is_as_written(function)

    def is_bookkeeping(self, read: Resolved) -> bool:
        """Return True for what the host's machinery keeps in its variables: which layer is the largest, say.

        A variable or a member of a class may be called, and somebody may have put another function there. That counts.
        """
        if read.owner not in self.host.machinery or isinstance(read.value, types.ModuleType):
            return False
        if is_code(read.value) or any(functions_in(read.value)):
            return False
        holder = read.way[read.steps - 1] if read.steps else None
        return not callable(read.value) or not (holder is None or isinstance(holder, (types.ModuleType, type)))

    def is_as_imported(self, value: Any, name: str) -> bool:
        """Return True if what the host calls by ``name`` was defined under this name, in the host or in a library."""
        for function in functions_in(value):
            if not (self.is_as_written(function) or self.is_library(function.__globals__)):
                return False
        return identity(value).rpartition(".")[2] == name

    def counts(self, module: str) -> bool:
        """Return True if variables of a module count: not a library's, nor those of the host's machinery."""
        return module not in self.host.machinery and not self.is_library(_variables_of(module))

    def is_of_library(self, module: str) -> bool:
        """Return True if the module of this name is a library's."""
        return self.is_library(_variables_of(module))

    def is_as_library_wrote(self, function: types.FunctionType) -> bool:
        """Return True if this is a library's function, from the file of the module that it belongs to.

        Code that is made while a library is imported is not. It is the same in every process, so it may count.
        """
        written, scope = function.__code__.co_filename, function.__globals__
        return self.is_library(scope) and (written == scope.get("__file__") or written.startswith(_FROZEN))

    def _is_of_library(self, package: str, file: str) -> bool:
        file = file.replace("\\", "/")
        if package in _KNOWN_LIBRARIES:
            return _lies_in(file, f"{os.path.dirname(str(_variables_of(package).get('__file__')))}/")
        if package in sys.stdlib_module_names:  # or an extension's module that is called like one of Python's
            return _lies_in(file, *_PYTHONS_FOLDERS)
        return package not in self._walked and _is_installed(file)


def _members(kind: type) -> Iterator[Any]:
    """Yield what a class has, but for what Python gives each class to look into its objects."""
    return (member for member in vars(kind).values() if type(member) is not types.GetSetDescriptorType)


def is_impostor(scope: dict[str, Any]) -> bool:
    """Return True for variables of a module that has no file, and is not the one of its name.

    A name alone makes nobody part of the interpreter.
    """
    name = str(scope.get("__name__") or "")
    package = name.partition(".")[0]
    known = name in sys.modules or package in sys.stdlib_module_names or package in _KNOWN_LIBRARIES
    return known and not scope.get("__file__") and _variables_of(name) is not scope


def _is_installed(file: str) -> bool:
    return any(f"/{folder}/" in file.replace("\\", "/") for folder in _LIBRARY_FOLDERS)


def _lies_in(file: str, *folders: str) -> bool:
    """Return True if a file is in one of the folders, or if there is none: it is part of the interpreter."""
    return not file or file.startswith(tuple(folder.replace("\\", "/") for folder in folders))


def _variables_of(module: str) -> dict[str, Any]:
    """Return the variables of a module, by its name."""
    return getattr(sys.modules.get(module), "__dict__", {"__name__": module})
