"""Machines of a fleet: each a process with folders of its own, in which to compile is to sleep, or to wait for a test.

What takes part is the library's own store, tier, lease and signatures. Processes are forked from one that has
imported PyTorch, so that a fleet of them starts at once; they share nothing but the store.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import obstore
import pytest

from onediff_comfy.store.artifact import Artifact, Manifest, Part
from onediff_comfy.store.remote.lease import LeaseTimes
from onediff_comfy.store.remote.objects import open_store
from onediff_comfy.store.remote.refusals import Refusals
from onediff_comfy.store.remote.tier import Tier
from onediff_comfy.store.remote.tier_counters import TierCounters
from onediff_comfy.store.remote.tiered_store import TieredStore
from onediff_comfy.store.signing.key_ring import KeyRing
from onediff_comfy.store.signing.own_key import OwnKey
from onediff_comfy.store.store import Superseded
from onediff_comfy.store.trust import Trust

KEY = "5" * 64
CALL = "a" * 64
FINGERPRINT = "f" * 64
SHAPES = {"axes": [[[1, "s0"], 4]], "limits": {"s0": [1, None]}, "conditions": ["s0 < 100"]}
TIMES = LeaseTimes(ttl_s=3.6, poll_s=0.2, longest_s=60.0)
_SOON_S = 60.0
_COMPILE_S = 1.0


def graph(key: str = KEY, size: int = 3000, mark: bytes = b"") -> Artifact:
    """An unsealed graph; ``mark`` makes it another compilation."""
    data = {"engine/artifact": bytes(i % 251 for i in range(size)) + mark, "constants": b""}
    manifest = Manifest(
        key=key,
        capture="c" * 64,
        target="Net float32[2x4]@cpu",
        engine="inductor",
        options={},
        environment={"torch": "2.13.0", "architecture": "sm_90", "device": "cuda"},
        signature=["tensor 0 float32[2x4]@cpu"],
        shapes=SHAPES,
        binding={"inputs": [["weight", "linear.weight", -1]], "output": "*", "folds": []},
        calls=[CALL],
        options_read={FINGERPRINT: ["sigmas"]},
        parts={name: Part.of(content) for name, content in data.items()},
        compile_seconds=1.5,
        created="2026-11-21T10:00:00+00:00",
    )
    return Artifact(manifest.to_json(), "", data)


@dataclass
class Machine:
    """One machine: its folders, and the process that runs on it.

    Attributes:
        url: of the store.
        folder: its cache, configuration and log.
        builder: it has a key to sign with.
        environment: variables by which it finds the store.
    """

    url: str
    folder: Path
    builder: bool
    environment: Mapping[str, str] = field(default_factory=dict)
    process: BaseProcess | None = None

    @property
    def keys(self) -> KeyRing:
        return KeyRing(self.folder / "config")

    def tier(self, times: LeaseTimes = TIMES, pause_s: float = 1.0) -> Tier:
        """Its tier, in this process. The variables by which it finds the store are to be set."""
        keys, counters = self.keys, TierCounters()
        if self.builder:
            keys.signer()
        refusals = Refusals(self.folder / "cache" / "refused", counters)
        return Tier(open_store(self.url, pause_s), keys, OwnKey(keys, self.builder), refusals, counters, times)

    def store(self, tier: Tier | None = None) -> TieredStore:
        """Its store, in this process."""
        return TieredStore(self.folder / "cache", Trust(self.folder / "config"), tier or self.tier())

    # -- as a process ------------------------------------------------------------------------------

    def start(self, key: str = KEY, held: bool = False, pause_s: float = 1.0) -> None:
        """Have it get a graph: from the store, or compiled; if it is held, that lasts until it is let go."""
        process = multiprocessing.get_context("forkserver").Process(target=_get, args=(self, key, held, pause_s))
        process.start()
        self.process = process

    def let_go(self) -> None:
        """Have it be done with compiling."""
        self._go.touch()

    @property
    def _go(self) -> Path:
        return self.folder / "go"

    def compile(self, held: bool) -> None:
        """Take as long as a compiler does."""
        if not held:
            time.sleep(_COMPILE_S)
        while held and not self._go.exists():
            time.sleep(0.02)

    def said(self) -> list[dict[str, Any]]:
        """What it did so far, in order."""
        path = self.folder / "log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def has_said(self, what: str) -> bool:
        return any(line["did"] == what for line in self.said())

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None and self.process.pid is not None
        os.kill(self.process.pid, number)

    def end(self) -> dict[str, Any]:
        """Wait until it is done; its last words."""
        assert self.process is not None
        self.process.join(_SOON_S)
        assert self.process.exitcode == 0, (self.process.exitcode, self.said())
        return self.said()[-1]

    def stop(self) -> None:
        if self.process is not None and self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass
class StoreFleet:
    """Machines on one store that believe one builder's key, each with a copy of it if it is a builder."""

    url: str
    folder: Path
    environment: Mapping[str, str]
    machines: list[Machine] = field(default_factory=list)

    def __post_init__(self) -> None:
        start_forkserver()
        keys = KeyRing(self.folder / "keys")
        self.signer, self.own_key = keys.make("the fleet's"), OwnKey(keys, builder=True)

    def machine(self, builder: bool = True, url: str | None = None) -> Machine:
        """A new machine with empty folders."""
        machine = Machine(url or self.url, self.folder / f"m{len(self.machines)}", builder, self.environment)
        config = machine.folder / "config"
        config.mkdir(parents=True)
        for name in ("store_keys.json", *(["store_builder.key"] if builder else [])):
            shutil.copy2(self.folder / "keys" / name, config / name)
        self.machines.append(machine)
        return machine

    def stop(self) -> None:
        for machine in self.machines:
            machine.stop()


def start_forkserver() -> None:
    """Start the process that machines are forked from, if it does not run: it imports what they need."""
    multiprocessing.get_context("forkserver").set_forkserver_preload([__name__])
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # it finds nothing otherwise, and says nothing of it
        forkserver.ensure_running()


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that is to happen soon."""
    end = time.monotonic() + _SOON_S
    while not condition():
        assert time.monotonic() < end, f"not in {_SOON_S:.0f} s: {what}"
        time.sleep(0.02)


def _get(machine: Machine, key: str, held: bool, pause_s: float) -> None:
    """What a machine's process does: as ``GraphBuilder.compiled``, with a sleep for the compiler."""
    asked = _questions()
    os.environ.update(machine.environment)
    begun = time.monotonic()

    def say(did: str, **facts: Any) -> None:
        with (machine.folder / "log").open("a") as log:
            log.write(json.dumps({"did": did, "seconds": round(time.monotonic() - begun, 2), **facts}) + "\n")

    store = machine.store(machine.tier(pause_s=pause_s))
    count = store.tier.counters.count

    def counts(name: str, amount: float = 1) -> None:
        count(name, amount)
        if name == "waits":
            say("waits")

    store.tier.counters.count = counts  # type: ignore[method-assign]
    say("starts")
    with store.compiling(key):
        found = store.find(key)
        if found is None:
            say("compiles")
            machine.compile(held)
            try:
                store.save(graph(key, mark=os.urandom(8)))
            except Superseded:
                say("was second")
            found = store.find(key)
    assert found is not None
    say("has", digest=found.digest, counters=store.tier.counters.snapshot(), asked=asked)


def _questions() -> list[str]:
    """A list of what this process asks the store from now on, which grows."""
    asked: list[str] = []

    def noted(name: str, ask: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **options: asked.append(name) or ask(*arguments, **options)

    for name in ("get", "head", "put", "list", "delete"):
        setattr(obstore, name, noted(name, getattr(obstore, name)))
    return asked
