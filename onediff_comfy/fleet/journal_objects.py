"""The objects of a journal, in any object store or in a folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import AsyncIterator, Iterable, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

_READ_AT_A_TIME = 50


class JournalObjects:
    """The objects of a journal, most of them JSON.

    Args:
        url: of an object store (``s3://bucket/folder``, ``gs://``, ``az://``) or of a folder (``file:///folder``).

    Raises:
        ValueError: no store can have this URL.
    """

    def __init__(self, url: str) -> None:
        from obstore.exceptions import BaseError
        from obstore.store import LocalStore, from_url

        self.errors: tuple[type[Exception], ...] = (BaseError, OSError)
        try:
            self._store = from_url(url, mkdir=True) if url.startswith("file:") else from_url(url)
        except BaseError as error:
            raise ValueError(f"the journal cannot be at {url}: {error}") from error
        self._folder = Path(self._store.prefix or "/") if isinstance(self._store, LocalStore) else None

    async def put(self, name: str, content: bytes | AsyncIterator[bytes]) -> None:
        """Write an object, in the place of another if there is one."""
        await self._store.put_async(name, content)

    async def create(self, name: str, value: Mapping[str, Any]) -> bool:
        """Write JSON where nothing is; False if something is there."""
        from obstore.exceptions import AlreadyExistsError

        try:
            await self._store.put_async(name, json.dumps(value).encode(), mode="create")
        except AlreadyExistsError:
            return False
        return True

    async def content(self, name: str) -> bytes | None:
        """Return an object's bytes, if it is there."""
        try:
            return bytes(await (await self._store.get_async(name)).bytes_async())
        except (FileNotFoundError, ValueError):  # ValueError: no object can have this name
            return None

    async def value(self, name: str) -> dict[str, Any] | None:
        """Return JSON, if it is there. None of what is damaged, as by a machine that lost power."""
        content = await self.content(name)
        if content is None:
            return None
        try:
            found = json.loads(content)
            if isinstance(found, dict) and isinstance(found.get("entry", {}), dict):
                return found
        except (ValueError, RecursionError):
            pass
        log.error("%s in the journal is damaged, and is left alone", name)
        return None

    async def values(self, names: Iterable[str]) -> list[dict[str, Any]]:
        """Return what of these is there, in this order."""
        limit = asyncio.Semaphore(_READ_AT_A_TIME)

        async def read(name: str) -> dict[str, Any] | None:
            async with limit:
                return await self.value(name)

        return [value for value in await asyncio.gather(*map(read, names)) if value is not None]

    async def listed(self, folder: str) -> dict[str, Any]:
        """Return the paths of the objects in a folder, each with when it was written by the store's clock."""
        if self._folder is not None:  # obstore stops at the first name that it does not take
            return await asyncio.to_thread(_files_in, self._folder, folder)
        return {each["path"]: each["last_modified"] async for some in self._store.list(folder) for each in some}

    async def delete(self, names: Iterable[str]) -> None:
        """Remove what of these is there."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                await self._store.delete_async(name)


def _files_in(root: Path, folder: str) -> dict[str, Any]:
    """Return the paths of the files in a folder, each with when it was written.

    Links, what is being written, and what has a name that no gateway gives, are not looked at.

    Raises:
        OSError: the folder cannot be read.
    """
    found: dict[str, Any] = {}
    try:
        entries = list(os.scandir(root / folder))
    except FileNotFoundError:
        return found
    for entry in entries:
        path = f"{folder}/{entry.name}"
        if not entry.name.isprintable() or "#" in entry.name:
            continue
        if entry.is_dir(follow_symlinks=False):
            found |= _files_in(root, path)
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                found[path] = entry.stat().st_mtime_ns
    return found
