"""An image of a module whose parts are proxies: the host's own forward runs on it, and each part is served."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .module_image import ModuleImage
from .module_proxy import ModuleProxy, Serve


class Skeleton:
    """An image of a module whose parts are proxies. All else is the module's own.

    Args:
        module: what it is an image of.
        is_part: asked of a module and a child of it, at any depth. What has no weights is no part.
    """

    def __init__(self, module: torch.nn.Module, is_part: Callable[[torch.nn.Module, torch.nn.Module], bool]) -> None:
        self._serve: Serve | None = None  # while the image is in use
        self._is_part, self._images = is_part, list[ModuleImage]()
        root = self._image_of(module)
        if root is None:
            root = ModuleImage(module)
            self._images.append(root)
        self._root = root
        self._children = [list(image.module._modules.values()) for image in self._images]

    def is_of(self, module: torch.nn.Module) -> bool:
        """Return True if it is an image of ``module``, with the children that it had."""
        if self._root.module is not module:
            return False
        now = (list(image.module._modules.values()) for image in self._images)
        return all(len(a) == len(b) and all(map(operator.is_, a, b)) for a, b in zip(now, self._children, strict=True))

    @contextlib.contextmanager
    def current(self, serve: Serve) -> Iterator[torch.nn.Module]:
        """Yield the image. What happens to attributes of it inside happens to the module's.

        A forward may come to be called within another, by a function of an extension's that runs the model once more.

        Args:
            serve: answers the calls of each part, inside.
        """
        outer = self._serve
        if outer is not None:
            self._put_back()
        self._show()
        self._serve = serve
        try:
            yield self._root.image
        finally:
            self._serve = outer
            self._put_back()
            if outer is not None:
                self._show()

    def _show(self) -> None:
        for image in self._images:
            image.show()

    def _put_back(self) -> None:
        for image in self._images:
            image.put_back()

    def _serve_part(
        self, part: torch.nn.Module, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        assert self._serve is not None  # whoever has the image runs it inside
        return self._serve(part, forward, args, kwargs)

    def _image_of(self, module: torch.nn.Module) -> ModuleImage | None:
        """Return the image of a module in which there are parts; None if there are none."""
        children: dict[str, Any] = dict(module._modules)
        for name, child in module._modules.items():
            if child is None:
                continue
            if self._is_part(module, child) and next(child.parameters(), None) is not None:
                children[name] = ModuleProxy(child, self._serve_part, ("forward",))
            else:
                image = self._image_of(child)
                children[name] = child if image is None else image.image
        if all(map(operator.is_, children.values(), module._modules.values())):
            return None
        found = ModuleImage(module, instead={"_modules": children})
        self._images.append(found)
        return found
