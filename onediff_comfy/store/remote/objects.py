"""An object store by URL: pieces of objects, put-if-absent, replace-if-unchanged.

What the store cannot do in time is ``Unreachable``, and so is everything else for some seconds after that: whoever
makes a picture waits for a dead store once, and not at every question.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

import filelock
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import LocalStore, from_url

_CLOUDS = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl")
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")

_CONNECT = "1500ms"
_ANSWER = "5s"
_UPLOAD = "120s"
_RETRY: Mapping[str, Any] = {"max_retries": 2, "retry_timeout": timedelta(seconds=3)}
_PAUSE_S = 30.0
"""For how long a store that did not answer is left alone."""
_MOST_LISTED = 100_000
_LOCK_S = 5.0


class Unreachable(Exception):
    """The store did not answer, or refused: network, credentials, a full disk. Says which, in a line.

    Attributes:
        known: the store was not asked: it did not answer some seconds ago.
    """

    known = False


@dataclass(frozen=True)
class Piece:
    """Some bytes of an object.

    Attributes:
        content: the bytes.
        size: of the whole object, in bytes.
        version: its ETag: another one after every change.
    """

    content: bytes
    size: int
    version: str


@dataclass(frozen=True)
class Listed:
    """An object as a listing shows it: its path, its size in bytes, and when it was written, in seconds since 1970."""

    path: str
    size: int
    written: float


@dataclass(frozen=True)
class Looked:
    """An object as it was at one moment.

    Attributes:
        version: see ``Piece``.
        written: when, in seconds since 1970; a cloud tells whole seconds here.
    """

    version: str
    written: float


class Objects:
    """The objects below one URL.

    Args:
        url: ``s3://bucket/prefix``, ``gs://…`` or ``az://…``. Credentials and endpoint are the cloud's own
            environment variables.
        pause_s: seconds for which a store that did not answer is not asked again.

    Raises:
        ValueError: the URL names no store that several machines could share.
    """

    def __init__(self, url: str, pause_s: float = _PAUSE_S) -> None:
        self.url = shown(url)
        self._pause_s = pause_s
        self._asked_again_at = 0.0
        self._reason = ""
        self._quick, self._patient = _connected(url)

    def read(self, path: str, start: int, end: int) -> Piece | None:
        """Return the bytes from ``start`` to before ``end``, or to the object's end; None if there is no object.

        Raises:
            Unreachable: the store did not answer.
        """
        with self._asking():
            try:
                answer = obstore.get(self._quick, path, options={"range": (start, end)})
                return Piece(bytes(answer.bytes()), answer.meta["size"], answer.meta["e_tag"] or "")
            except (NotFoundError, FileNotFoundError):
                return None
            except BaseError:  # of an object that ends before ``start``, too
                try:
                    meta = obstore.head(self._quick, path)
                except (NotFoundError, FileNotFoundError):
                    return None
                if meta["size"] > start:
                    raise
                return Piece(b"", meta["size"], meta["e_tag"] or "")

    def create(self, path: str, content: bytes) -> str | None:
        """Write an object that is not there yet; return its version, or None if there is one.

        Of any number of callers at once, one gets a version. A caller whose answer got lost on the way gets None.

        Raises:
            Unreachable: the store did not answer; the object may be there or not.
        """
        with self._asking():
            try:
                return self._put(path, content, "create")
            except AlreadyExistsError:
                return None

    def replace(self, path: str, content: bytes, version: str) -> str | None:
        """Write an object anew that still is of this version; return the new version, or None if it is not.

        Raises:
            Unreachable: the store did not answer; the object may be written or not.
        """
        with self._asking():
            try:
                return self._put(path, content, {"e_tag": version})
            except (NotFoundError, FileNotFoundError):
                return None
            except PreconditionError:
                if self._version(path) != version:
                    return None
            # Refused, though it is the same: radosgw (16) compares ETags without their quotes.
            try:
                return self._put(path, content, {"e_tag": version.strip('"')})
            except (PreconditionError, NotFoundError, FileNotFoundError):
                return None

    def listed(self, prefix: str, most: int = _MOST_LISTED) -> list[Listed]:
        """Return the objects whose path begins with the folder ``prefix``, at most ``most``.

        Raises:
            Unreachable: the store did not answer.
        """
        with self._asking():
            found: list[Listed] = []
            for batch in obstore.list(self._quick, prefix=prefix, chunk_size=min(most, 1000)):
                found += [Listed(meta["path"], meta["size"], meta["last_modified"].timestamp()) for meta in batch]
                if len(found) >= most:
                    break
            return found[:most]

    def delete(self, path: str) -> None:
        """Remove an object, if it is there.

        Raises:
            Unreachable: the store did not answer.
        """
        with self._asking(), contextlib.suppress(NotFoundError, FileNotFoundError):
            obstore.delete(self._quick, path)

    def delete_if(self, path: str, may_go: Callable[[Looked], bool]) -> bool:
        """Remove an object if what is there now may go. Return True if it was removed.

        No cloud's client has a removal by ETag: what takes the object's place within the one question that the removal
        takes is removed all the same.

        Args:
            path: of the object.
            may_go: says so of what is there; asked right before it is removed.

        Raises:
            Unreachable: the store did not answer.
        """
        with self._asking():
            there = self._looked(path)
            if there is None or not may_go(there):
                return False
            with contextlib.suppress(NotFoundError, FileNotFoundError):
                obstore.delete(self._quick, path)
            return True

    def exists(self, path: str) -> bool:
        """Return True if there is an object.

        Raises:
            Unreachable: the store did not answer.
        """
        with self._asking():
            return self._looked(path) is not None

    def _looked(self, path: str) -> Looked | None:
        try:
            meta = obstore.head(self._quick, path)
        except (NotFoundError, FileNotFoundError):
            return None
        return Looked(meta["e_tag"] or "", meta["last_modified"].timestamp())

    def _version(self, path: str) -> str | None:
        looked = self._looked(path)
        return None if looked is None else looked.version

    def _put(self, path: str, content: bytes, mode: Any) -> str:
        # One request: of an upload in parts, several writers could each complete one.
        return obstore.put(self._patient, path, content, mode=mode, use_multipart=False)["e_tag"] or ""

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        if time.monotonic() < self._asked_again_at:
            known = Unreachable(self._reason)
            known.known = True
            raise known
        try:
            yield
        except (BaseError, OSError, NotImplementedError, filelock.Timeout) as error:
            self._reason = str(error).strip().partition("\n")[0][:300] or type(error).__name__
            self._asked_again_at = time.monotonic() + self._pause_s
            raise Unreachable(self._reason) from error


class FolderObjects(Objects):
    """The same in a folder that machines share. It has no ETags to replace by: a lock of the file system stands in.

    Creating is a hard link, which exactly one of any number of writers can make. Replacing is read, compare and
    rename under a lock, and a removal that depends on what is there asks under it too: both are as good as the locks
    of that folder.
    """

    def __init__(self, url: str, pause_s: float = _PAUSE_S) -> None:
        super().__init__(url, pause_s)
        self._folder = _folder_of(url)

    def read(self, path: str, start: int, end: int) -> Piece | None:
        """See ``Objects.read``. A pipe would hold whoever opens it, so it is no object."""
        try:
            regular = stat.S_ISREG(os.stat(self._folder / path).st_mode)
        except OSError:  # what is missing is said below, as for other stores
            regular = True
        return super().read(path, start, end) if regular else Piece(b"", 0, "")

    def replace(self, path: str, content: bytes, version: str) -> str | None:
        """See ``Objects.replace``."""
        with self._asking(), self._locked(path):
            return self._put(path, content, "overwrite") if self._version(path) == version else None

    def delete_if(self, path: str, may_go: Callable[[Looked], bool]) -> bool:
        """See ``Objects.delete_if``; nothing is replaced meanwhile."""
        with self._asking(), self._locked(path):
            return super().delete_if(path, may_go)

    @contextlib.contextmanager
    def _locked(self, path: str) -> Iterator[None]:
        lock = self._folder / "locks" / hashlib.sha256(path.encode()).hexdigest()
        lock.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(lock, timeout=_LOCK_S):
            yield


def open_store(url: str, pause_s: float = _PAUSE_S) -> Objects:
    """Return the store at a URL; asks it nothing yet.

    Raises:
        ValueError: the URL names no store that several machines could share; says what to give.
    """
    return (FolderObjects if urlsplit(url).scheme == "file" else Objects)(url, pause_s)


def shown(url: str) -> str:
    """Return a URL without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _folder_of(url: str) -> Path:
    return Path(url2pathname(urlsplit(url).path))


def _connected(url: str) -> tuple[Any, Any]:
    """Return the store for short questions, and the same for long uploads."""
    scheme, of_a_folder = urlsplit(url).scheme, urlsplit(url).netloc in ("", "localhost")
    try:
        if scheme == "file" and of_a_folder and _folder_of(url).is_absolute():
            folder = LocalStore(_folder_of(url), mkdir=True)
            return folder, folder
        if scheme in _CLOUDS:
            # Everything in the store is signed, so one beside us may be asked without TLS where a person says so.
            plain = any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)
            options: dict[str, Any] = {"connect_timeout": _CONNECT, "allow_http": plain}
            quick, patient = (
                from_url(url, client_options={**options, "timeout": timeout}, retry_config=_RETRY)  # type: ignore[call-overload]
                for timeout in (_ANSWER, _UPLOAD)
            )
            return quick, patient
    except (BaseError, OSError) as error:
        raise ValueError(f"{shown(url)} cannot be opened: {str(error).partition(chr(10))[0]}") from error
    raise ValueError(
        f"{shown(url)} is no store that machines can share; give s3://bucket/prefix, gs://bucket/prefix, "
        "az://account/container/prefix or file:///folder"
    )
