"""Two processes that share a folder of kept graphs, and learn of calls at the same time: neither forgets for the other.

A process is a library here, as it is right after its start: what it remembers, it has from the folder.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch
from restarted import HOST, Keeping
from torch import nn

from onediff_comfy import engines
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.capture.shape_range import ShapeRange
from onediff_comfy.capture.target.target import Target
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.store.artifact import Artifact, Part
from onediff_comfy.store.graph_file import unpack
from onediff_comfy.store.notes import Notes
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

KEY = "a" * 64
SIZES = ShapeRange(((2, 4),), {})
Patch = Callable[..., torch.Tensor]


class Net(nn.Module):
    """Hands what it computes to functions of two options, as ComfyUI's UNets do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, transformer_options: dict[str, Any]) -> torch.Tensor:
        x = self.linear(x)
        for name in ("patches", "patches_replace"):
            for patch in transformer_options.get(name, ()):
                x = patch(x, transformer_options)
        return x


def scaled(x: torch.Tensor, _options: dict[str, Any]) -> torch.Tensor:
    return x * 3


def late(x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    """Acts at one end of the schedule, as image prompts do."""
    return x + 5 if options["sigmas"][0].item() < 2.5 else x


class Process:
    """A process that serves calls of one model.

    Args:
        folder: that it shares with others.
        machine: whose seals it believes.
    """

    def __init__(self, folder: Path, machine: Path) -> None:
        torch.manual_seed(0)
        self.net = Net().eval().requires_grad_(False)
        self.store = GraphStore(folder, Trust(machine))
        self.library = GraphLibrary(GraphCache(1 << 30), Metrics(), self.store)
        self._dispatcher = Dispatcher("eager", self.library, HOST)

    def serve(self, rows: int = 2, **patches: Patch) -> dict[str, int]:
        """Return what was done for one call, which is right."""
        options: dict[str, Any] = {"sigmas": torch.tensor([1.0])} | {name: [patch] for name, patch in patches.items()}
        x = torch.randn(rows, 4)
        made = self._dispatcher(self.net, self.net.forward, (x, options), {})
        torch.testing.assert_close(made, self.net(x, options))
        counted = self.library.metrics.snapshot()
        return {name: counted[name] for name in ("captured", "compiled", "loaded", "served")}


LOADED = {"captured": 0, "compiled": 0, "loaded": 1, "served": 1}
COMPILED = {"captured": 1, "compiled": 1, "loaded": 0, "served": 1}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Process]:
    monkeypatch.setitem(engines.ENGINES, "eager", Keeping())
    return lambda folder="cache", machine="config": Process(tmp_path / folder, tmp_path / machine)


def test_two_that_learn_side_by_side_which_options_a_model_reads_spare_the_next_both(start: Any) -> None:
    first, second = start(), start()
    for process in (first, second):  # both began before either had learned anything
        process.library.index.options_read(_fingerprint(process))
    assert first.serve(patches=scaled) == second.serve(patches_replace=late) == COMPILED
    later = start()
    assert later.library.index.options_read(_fingerprint(later)) == {"patches", "patches_replace"}
    assert later.serve(patches=scaled) == LOADED
    assert start().serve(patches_replace=late) == LOADED


def test_a_call_whose_options_are_not_known_any_more_finds_its_graph_before_it_is_traced_whole(
    start: Any, tmp_path: Path
) -> None:
    assert start().serve(patches=scaled, patches_replace=late) == COMPILED
    shutil.rmtree(tmp_path / "cache" / "options")
    assert start().serve(patches=scaled, patches_replace=late) == LOADED


def test_a_file_from_another_machine_says_what_functions_of_nodes_read(start: Any, tmp_path: Path) -> None:
    assert start().serve(patches_replace=late) == COMPILED
    (kept,) = (tmp_path / "cache" / "graphs").iterdir()
    (artifact,) = unpack(kept.read_bytes())
    there = start("there", "config there")
    there.store.trust(artifact)
    there.library.index.adopt(artifact)
    learned: list[str] = []
    there.library.index.learn_option = lambda _reader, name: learned.append(name)
    assert there.serve(patches_replace=late) == LOADED
    assert not learned, "a trace was begun to find out what the file says"


def test_no_note_is_lost_when_many_write_at_once(tmp_path: Path) -> None:
    begin = threading.Barrier(4)

    def learn(number: int) -> None:
        notes = Notes([tmp_path / "cache"], Trust(tmp_path / "config"))
        begin.wait()
        for i in range(20):
            notes.add_options("target", [f"option {number} {i}"])
            notes.add_call("call", f"{number} {i}", SIZES.to_json())

    Trust(tmp_path / "config").seal("")  # makes the machine's key
    threads = [threading.Thread(target=learn, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    notes = Notes([tmp_path / "cache"], Trust(tmp_path / "config"))
    assert len(notes.read("options", "target")) == len(notes.calls("call")) == 80


def test_one_that_was_stopped_while_it_wrote_a_note_holds_up_nobody(tmp_path: Path) -> None:
    notes = Notes([tmp_path / "cache"], Trust(tmp_path / "config"))
    notes.add_options("target", ["patches"])
    begun = time.monotonic()
    with filelock.FileLock(tmp_path / "cache" / "locks" / "notes.lock"):
        for number in range(10):
            notes.add_options("target", [f"sigmas {number}"])
    assert time.monotonic() - begun < 10, "it waited each time"
    assert len(notes.read("options", "target")) == 11


def test_a_graph_that_another_process_found_wrong_stays_wrong_whatever_is_proved_later(start: Any) -> None:
    first, second = start().library, start().library
    first.verdicts.proved(KEY, (1,))
    second.verdicts.retire(KEY, "off by 0.2 at another size")
    first.verdicts.proved(KEY, (2,))
    assert start().library.verdicts.retired(KEY)


def test_a_graph_that_is_found_wrong_while_another_process_notes_a_proof_stays_wrong(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a lock nor by luck: that of the other process may have waited in vain for it."""
    proves, finds_wrong = start().library, start().library
    write, began = Notes.write, []

    def late(notes: Notes, kind: str, name: str, value: Any) -> None:
        if not began:
            began.append(kind)
            finds_wrong.verdicts.retire(KEY, "off by 0.2 at another size")
        write(notes, kind, name, value)

    monkeypatch.setattr(Notes, "write", late)
    proves.verdicts.proved(KEY, (1,))
    assert start().library.verdicts.retired(KEY)


def test_one_that_was_stopped_and_goes_on_is_waited_for_again(tmp_path: Path) -> None:
    notes, other = (Notes([tmp_path / "cache"], Trust(tmp_path / "config")) for _ in range(2))
    lock = filelock.FileLock(tmp_path / "cache" / "locks" / "notes.lock")
    notes.add_options("target", ["patches"])
    with lock:
        notes.add_options("target", ["sigmas"])  # in vain
    notes.add_options("target", ["cond_or_uncond"])
    in_the_middle, written = threading.Event(), threading.Event()

    def slowly(noted: Any) -> list[str]:
        in_the_middle.set()
        written.wait(0.2)
        return [*noted, "slow"]

    slow = threading.Thread(target=other.update, args=("options", "target", slowly))
    slow.start()
    assert in_the_middle.wait(20)
    notes.add_options("target", ["quick"])
    written.set()
    slow.join(20)
    assert notes.options("target") == ["cond_or_uncond", "patches", "quick", "sigmas", "slow"]


def test_a_proof_of_one_compilation_is_none_of_another_that_has_come_in_its_place(start: Any, tmp_path: Path) -> None:
    """Another machine's file, and its compiler was broken, is loaded while this process serves its own graph."""
    here = start()
    assert here.serve(rows=6) == COMPILED
    (kept,) = (tmp_path / "cache" / "graphs").iterdir()
    (own,) = unpack(kept.read_bytes())
    code = own.data["engine/code"].replace(b"return (", b"return (7.0 * ").replace(b"return [", b"return [7.0 * ")
    assert code != own.data["engine/code"]
    manifest = json.loads(own.manifest_text)
    manifest["parts"]["engine/code"] = asdict(Part.of(code))
    wrong = Artifact(json.dumps(manifest, sort_keys=True, separators=(",", ":")), "", {**own.data, "engine/code": code})
    here.store.trust(wrong)
    here.library.index.adopt(wrong)
    here.serve(rows=8)  # by its own graph, which is proved for that size now
    later = start()
    later.serve(rows=8)
    assert later.library.metrics.snapshot()["retired"] == 1


def test_proofs_and_times_of_two_processes_are_known_to_the_next(start: Any) -> None:
    first, second = start().library, start().library
    for library, size in ((first, 1), (second, 2)):
        assert not library.verdicts.is_proved(KEY, (size,)) and not library.verdicts.eager_samples(KEY, (size,))
    for library, size, seconds in ((first, 1, 0.25), (second, 2, 0.5)):
        library.verdicts.proved(KEY, (size,))
        library.verdicts.eager_took(KEY, (size,), seconds)
    later = start().library.verdicts
    assert later.is_proved(KEY, (1,)) and later.is_proved(KEY, (2,))
    assert later.eager_samples(KEY, (1,)) == [0.25] and later.eager_samples(KEY, (2,)) == [0.5]


def test_a_proof_that_two_processes_made_counts_once(start: Any) -> None:
    """So many numbers of a function are proved, and no more."""
    processes = [start().library.verdicts for _ in range(3)]
    for verdicts in processes:
        assert not verdicts.is_proved(KEY, (1, 5))
    for verdicts in processes:
        verdicts.proved(KEY, (1, 5))
    assert start().library.verdicts.proofs(KEY) == [[1, 5]]


@pytest.mark.parametrize("numbers", [60, 3])
def test_however_much_functions_read_their_graph_is_kept(start: Any, numbers: int) -> None:
    """The name of a sum has the names of all that is in it. A manifest has no room for any."""
    values = {f"a rather long name of a number that a node holds, {i}": 0.5 for i in range(numbers)}

    def scale(x: torch.Tensor, _options: dict[str, Any]) -> torch.Tensor:
        return x * int(sum(values.values()))

    assert start().serve(patches=scale) == COMPILED
    assert start().serve(patches=scale) == LOADED


def _fingerprint(process: Process) -> str:
    return Target(process.net, HOST.code, HOST.formats).fingerprint
