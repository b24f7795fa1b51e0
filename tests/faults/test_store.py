"""Nothing that happens to a file or a process makes the store crash, load wrongly or lose a good graph.

Every test ends in one of two answers: the graph as it was written, or "not here" with a line in
the log. Both make right images; the second costs a compilation.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import stat
import subprocess
import sys
import textwrap
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.store import store as store_module
from onediff_comfy.store.artifact import FORMAT, Artifact, ArtifactError, Manifest, Part
from onediff_comfy.store.graph_file import pack, unpack
from onediff_comfy.store.notes import path_in
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust, Untrusted

ROOT = Path(__file__).resolve().parents[2]
KEY = "5" * 64
SHAPES = {"axes": [[[1, "s0"], 4]], "limits": {"s0": [1, None]}, "conditions": ["s0 < 100"]}


def make_artifact(key: str = KEY, size: int = 3000, format: int = FORMAT) -> Artifact:
    """An unsealed artifact with parts of recognisable bytes."""
    data = {"engine/artifact": bytes(i % 251 for i in range(size)), "constants": b"", "engine/k/a.so": b"\x7fELF" * 9}
    manifest = Manifest(
        key=key,
        capture="c" * 64,
        target="Net float32[2x4]@cpu",
        engine="inductor",
        options={},
        environment={"torch": "2.13.0", "gpu": "größer ✓"},
        signature=["tensor 0 float32[2x4]@cpu"],
        shapes=SHAPES,
        binding={"inputs": [["weight", "linear.weight", -1]], "output": "*", "folds": []},
        calls=["a" * 64],
        options_read={"f" * 64: ["sigmas"]},
        parts={name: Part.of(content) for name, content in data.items()},
        compile_seconds=1.5,
        created="2026-11-21T10:00:00+00:00",
        format=format,
    )
    return Artifact(manifest.to_json(), "", data)


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    return GraphStore(tmp_path / "cache with spaces, ümläut und 图", Trust(tmp_path / "config"))


def assert_whole(found: Artifact | None, expected: Artifact) -> None:
    assert found is not None
    assert found.manifest == expected.manifest
    assert dict(found.data) == dict(expected.data)


def test_what_is_saved_is_found_by_another_store_on_the_same_folders(store: GraphStore, tmp_path: Path) -> None:
    artifact = make_artifact()
    store.save(artifact)
    assert_whole(GraphStore(store.folder, Trust(tmp_path / "config")).find(KEY), artifact)
    assert store.find("6" * 64) is None


# -- damage ------------------------------------------------------------------------------------


def boundaries(content: bytes) -> list[int]:
    """Every place where the format changes its mind: header length, header, each tensor's end."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    starts = [entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"]
    places = {0, 1, 7, 8, 9, 8 + length - 1, 8 + length, 8 + length + 1}
    places |= {8 + length + offset for offset in (*starts, *ends)}
    return sorted(place for place in places if place < len(content))


def test_truncation_is_noticed_at_every_boundary_and_at_200_random_places(
    store: GraphStore, tally: Callable[[str], None]
) -> None:
    artifact = make_artifact()
    path = store.save(artifact)
    content = path.read_bytes()
    chance = random.Random(1)
    places = [*boundaries(content), *(chance.randrange(len(content)) for _ in range(200))]
    for place in places:
        path.write_bytes(content[:place])
        assert store.find(KEY) is None, f"a file cut at byte {place} of {len(content)} was accepted"
    path.write_bytes(content)
    assert_whole(store.find(KEY), artifact)


def test_1000_random_byte_flips_are_noticed_or_harmless(store: GraphStore, tally: Callable[[str], None]) -> None:
    artifact = make_artifact()
    path = store.save(artifact)
    content = path.read_bytes()
    chance = random.Random(2)
    noticed = 0
    # The header is small beside the payload: half of the flips go there on purpose.
    header_end = 8 + int.from_bytes(content[:8], "little")
    for number in range(1000):
        place = chance.randrange(header_end if number % 2 else len(content))
        damaged = bytearray(content)
        damaged[place] ^= 1 << chance.randrange(8)
        path.write_bytes(bytes(damaged))
        found = store.find(KEY)
        if found is None:
            noticed += 1
        else:  # padding, or the name of something nobody reads
            assert_whole(found, artifact)
    path.write_bytes(content)
    assert_whole(store.find(KEY), artifact)
    assert noticed > 900


def test_damage_is_answered_by_writing_the_graph_again(store: GraphStore) -> None:
    artifact = make_artifact()
    store.save(artifact).write_bytes(b"rubbish")
    assert store.find(KEY) is None
    store.save(artifact)
    assert_whole(store.find(KEY), artifact)


def test_a_good_graph_in_another_folder_serves_when_the_first_is_damaged(store: GraphStore, tmp_path: Path) -> None:
    artifact = make_artifact()
    fleet = GraphStore(tmp_path / "fleet", Trust(tmp_path / "config"))
    fleet.save(artifact)
    both = GraphStore(store.folder, Trust(tmp_path / "config"), [fleet.folder])
    store.save(artifact).write_bytes(b"")
    assert_whole(both.find(KEY), artifact)


def test_a_manifest_of_a_future_format_is_explained(store: GraphStore, caplog: pytest.LogCaptureFixture) -> None:
    path = store.folder / "graphs" / f"{KEY}.graph"
    path.parent.mkdir(parents=True)
    future = make_artifact(format=FORMAT + 1)
    path.write_bytes(pack([future]))
    assert store.find(KEY) is None
    assert f"format {FORMAT + 1}" in caplog.text and "update the pack" in caplog.text
    assert path.exists()  # it is somebody's good graph


def test_a_manifest_of_an_earlier_format_is_explained(store: GraphStore, caplog: pytest.LogCaptureFixture) -> None:
    """Its graph was for one set of sizes and says so nowhere that we read."""
    path = store.folder / "graphs" / f"{KEY}.graph"
    path.parent.mkdir(parents=True)
    path.write_bytes(pack([make_artifact(format=FORMAT - 1)]))
    assert store.find(KEY) is None
    assert f"format {FORMAT - 1}" in caplog.text and "compile it again" in caplog.text


def test_a_file_under_another_graphs_name_is_not_served(store: GraphStore) -> None:
    path = store.save(make_artifact("6" * 64))
    path.rename(path.with_name(f"{KEY}.graph"))
    assert store.find(KEY) is None


# -- trust -------------------------------------------------------------------------------------


def test_a_foreign_graph_is_refused_until_it_is_trusted(
    store: GraphStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = make_artifact()
    theirs = GraphStore(tmp_path / "theirs", Trust(tmp_path / "their config"))
    content = theirs.save(artifact).read_bytes()
    (foreign,) = unpack(content)
    with pytest.raises(Untrusted, match="graphs import --trust"):
        store.adopt(foreign)
    path = store.folder / "graphs" / f"{KEY}.graph"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    assert store.find(KEY) is None
    assert "not compiled by this installation" in caplog.text

    store.trust(foreign)
    assert_whole(store.find(KEY), artifact)
    assert store.notes.read("calls", "a" * 64) is None
    store.adopt(foreign)
    assert store.notes.calls("a" * 64) == [(KEY, SHAPES)]
    assert store.notes.read("options", "f" * 64) == ["sigmas"]


def test_trust_is_in_a_graph_as_it_is_and_not_in_its_name(store: GraphStore) -> None:
    store.trust(make_artifact(size=3000))
    with pytest.raises(Untrusted):
        store.adopt(make_artifact(size=3001))


def test_parts_that_do_not_match_a_trusted_manifest_are_refused(store: GraphStore) -> None:
    artifact = make_artifact()
    store.trust(artifact)
    swapped = Artifact(artifact.manifest_text, "", {**artifact.data, "engine/k/a.so": b"\x7fELF" * 8 + b"evil"})
    with pytest.raises(ArtifactError, match="damaged"):
        store.adopt(swapped)


def test_the_key_is_private_and_made_once(tmp_path: Path) -> None:
    seals = {Trust(tmp_path).seal("text") for _ in range(3)}
    assert len(seals) == 1
    assert stat.S_IMODE((tmp_path / "signing.key").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["signing.key"]


def test_a_note_that_somebody_changed_is_ignored(store: GraphStore) -> None:
    store.notes.add_call("a" * 64, KEY, SHAPES)
    assert store.notes.calls("a" * 64) == [(KEY, SHAPES)]
    path = store.folder / "calls" / f"{'a' * 64}.json"
    for old, new in [(KEY, "6" * 64), ("s0 < 100", "s0 < 999")]:
        store.notes.add_call("a" * 64, KEY, SHAPES)
        text = path.read_text()
        path.write_text(text.replace(old, new))
        assert path.read_text() != text
        assert store.notes.calls("a" * 64) == []
    other = path.with_name(f"{'b' * 64}.json")
    store.notes.add_call("a" * 64, KEY, SHAPES)
    path.rename(other)  # a valid seal, over another name
    assert store.notes.calls("b" * 64) == []


def test_one_call_may_have_several_graphs_and_each_its_latest_range(store: GraphStore, tmp_path: Path) -> None:
    exact = {"axes": [[2, 4]], "limits": {}, "conditions": []}
    store.notes.add_call("a" * 64, KEY, exact)
    store.notes.add_call("a" * 64, "6" * 64, exact)
    store.notes.add_call("a" * 64, KEY, SHAPES)
    assert len(store.notes.calls("a" * 64)) == 2
    assert dict(store.notes.calls("a" * 64)) == {KEY: SHAPES, "6" * 64: exact}
    assert dict(GraphStore(store.folder, Trust(tmp_path / "config")).notes.calls("a" * 64)) == dict(
        store.notes.calls("a" * 64)
    )


# -- pulling the plug --------------------------------------------------------------------------

# Forks one writer for each line it reads: importing PyTorch for each would take seconds.
_WRITERS = """
import os, signal, sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from test_store import KEY, GraphStore, Trust, make_artifact
store = GraphStore(Path(sys.argv[1]), Trust(Path(sys.argv[2])))
store.save(make_artifact())  # what saving imports is there before the first fork
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the dead are not waited for
parent = os.getpid()
for _ in sys.stdin:
    if os.fork() == 0:
        os.write(1, b"%d\\n" % os.getpid())  # in one piece: another may be writing its own
        size = 200_000
        while os.getppid() == parent:  # a test that fails kills nobody
            size += 1
            store.save(make_artifact(size=size))
"""


def test_kill_9_during_writing_50_times_leaves_a_whole_graph(
    store: GraphStore, tmp_path: Path, tally: Callable[[str], None]
) -> None:
    script = tmp_path / "writers.py"
    script.write_text(textwrap.dedent(_WRITERS.format(root=str(ROOT), tests=str(Path(__file__).parent))))
    store.save(make_artifact())
    command = [sys.executable, str(script), str(store.folder), str(tmp_path / "config")]
    chance = random.Random(3)

    def in_the_middle() -> list[Path]:
        return list((store.folder / "graphs").glob(".*"))

    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write("\n" * 4)
        killed = 0
        # Which moments are hit is chance, and a slow machine's writers have hardly begun in theirs.
        while killed < 50 or (not in_the_middle() and killed < 1000):
            time.sleep(chance.random() * 0.02)
            parent.stdin.write("\n")
            _kill(int(parent.stdout.readline()))  # the one that has written for longest
            killed += 1
            found = store.find(KEY)
            assert found is not None, f"no whole graph after kill number {killed}"
            assert found.checked_parts()
        for _ in range(4):
            _kill(int(parent.stdout.readline()))
    assert in_the_middle(), "nobody was killed in the middle of writing"
    tally(f"{killed} processes killed while they wrote a graph: always a whole one on disk")


def _kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(process, 0)


def test_a_full_disk_keeps_what_was_there(store: GraphStore, tmp_path: Path) -> None:
    """Writing stops in the middle, as on a full disk: the system allows no file beyond 100 kB."""
    good = make_artifact()
    store.save(good)
    code = f"""
        import resource, signal, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(Path(__file__).parent)!r}]
        from pathlib import Path
        from test_store import GraphStore, Trust, make_artifact
        store = GraphStore(Path(sys.argv[1]), Trust(Path(sys.argv[2])))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            store.save(make_artifact(size=500_000))
        except OSError as error:
            print("refused:", error)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(store.folder), str(tmp_path / "config")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "refused" in done.stdout
    assert_whole(store.find(KEY), good)
    assert [path.name for path in (store.folder / "graphs").iterdir()] == [f"{KEY}.graph"]


@pytest.fixture
def unwritable(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nobody can write, root included: its subfolders are files."""
    folder = tmp_path / "unwritable"
    folder.mkdir()
    for name in ("graphs", "calls", "options", "locks"):
        (folder / name).write_text("")
    return folder


def test_a_folder_that_cannot_be_written_to_costs_only_the_keeping(unwritable: Path, tmp_path: Path) -> None:
    artifact = make_artifact()
    fleet = GraphStore(tmp_path / "fleet", Trust(tmp_path / "config"))
    fleet.save(artifact)
    fleet.notes.add_call("a" * 64, KEY, SHAPES)
    overlaid = GraphStore(unwritable, Trust(tmp_path / "config"), [fleet.folder])
    assert_whole(overlaid.find(KEY), artifact)
    assert overlaid.notes.calls("a" * 64) == [(KEY, SHAPES)]
    overlaid.notes.add_call("b" * 64, KEY, SHAPES)  # says nothing, changes nothing
    assert overlaid.notes.calls("b" * 64) == []
    with pytest.raises(OSError, match="graphs"):
        overlaid.save(make_artifact("6" * 64))
    with overlaid.compiling(KEY):
        pass
    assert overlaid.prune(limit=0) == []
    assert overlaid.entries()


def test_the_read_only_folder_of_a_fleet_is_never_written_to(store: GraphStore, tmp_path: Path) -> None:
    fleet = GraphStore(tmp_path / "fleet", Trust(tmp_path / "config"))
    fleet.save(make_artifact())
    before = sorted(path.relative_to(fleet.folder) for path in fleet.folder.rglob("*"))
    both = GraphStore(store.folder, Trust(tmp_path / "config"), [fleet.folder])
    both.save(make_artifact("6" * 64))
    both.remove(KEY)
    both.prune(limit=0)
    assert both.find(KEY) is not None
    assert sorted(path.relative_to(fleet.folder) for path in fleet.folder.rglob("*")) == before


# -- room and time -----------------------------------------------------------------------------


def test_the_least_recently_used_graph_goes_first(store: GraphStore) -> None:
    keys = [digit * 64 for digit in "123"]
    for key in keys:
        store.save(make_artifact(key))
    assert store.find(keys[0]) is not None  # used again, so the second is now the oldest
    size = (store.folder / "graphs" / f"{KEY}.graph").with_name(f"{keys[0]}.graph").stat().st_size
    removed = store.prune(limit=2 * size)
    assert [path.stem for path in removed] == [keys[1]]


def test_a_clock_that_was_set_back_does_not_cost_the_newest_graph(
    store: GraphStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = "1" * 64, "2" * 64
    store.save(make_artifact(old))
    now = time.time_ns()
    monkeypatch.setattr(store_module.time, "time_ns", lambda: now - 10 * 365 * 24 * 3600 * 10**9)
    store.limit = (store.folder / "graphs" / f"{old}.graph").stat().st_size + 1
    store.save(make_artifact(new))
    assert store.find(new) is not None
    assert store.find(old) is None


@pytest.mark.parametrize("since", ["written anew", "used"])
def test_a_graph_that_is_not_as_it_was_listed_any_more_stays(
    since: str, store: GraphStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process has compiled it, or found it, while this one made its list."""
    old, new = store.save(make_artifact("1" * 64)), store.save(make_artifact("2" * 64))
    other = GraphStore(store.folder, Trust(tmp_path / "config"))
    in_order = sorted

    def listed(files: list[Any]) -> list[Any]:
        monkeypatch.delattr(store_module, "sorted")
        found = in_order(files)
        if since == "used":
            assert other.find(old.stem) is not None
        else:
            other.save(make_artifact(old.stem))
        return found

    monkeypatch.setattr(store_module, "sorted", listed, raising=False)
    assert store.prune(limit=new.stat().st_size) == [new]
    assert old.exists()


def test_a_graph_is_the_latest_from_the_moment_that_it_is_there(
    store: GraphStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock was set back, and another process prunes as soon as it sees the file."""
    old, new = store.save(make_artifact("1" * 64)), path_in(store.folder, "graphs", "2" * 64)
    os.utime(old, (time.time() + 86400,) * 2)
    other, replace = GraphStore(store.folder, Trust(tmp_path / "config")), os.replace

    def seen(source: Path, target: Path) -> None:
        replace(source, target)
        if target == new:
            other.prune(limit=old.stat().st_size)

    monkeypatch.setattr(os, "replace", seen)
    store.save(make_artifact(new.stem))
    assert new.exists() and not old.exists()


def test_the_graphs_that_were_used_last_are_different_ones(store: GraphStore, tmp_path: Path) -> None:
    """A fleet's folder has those of this machine, too, and often as new."""
    trust, keys = Trust(tmp_path / "config"), [each * 64 for each in "123"]
    shared = GraphStore(tmp_path / "shared", trust)
    for at, key in enumerate(keys):
        for folder in (store, shared):
            os.utime(folder.save(make_artifact(key)), (at, at))
    both = GraphStore(store.folder, trust, read_only=[shared.folder])
    assert [manifest.key for manifest in both.latest(2)] == [keys[2], keys[1]]


def test_what_is_removed_is_what_was_judged(store: GraphStore) -> None:
    ours, theirs = make_artifact(), make_artifact(size=4000)
    path = store.save(ours)
    assert not store.remove(KEY, lambda artifact: artifact.manifest_text == theirs.manifest_text)
    assert_whole(store.find(KEY), ours)
    path.write_bytes(b"damaged")
    assert not store.remove(KEY, lambda _artifact: True) and path.exists(), "nobody can tell what it is"
    store.save(ours)
    assert store.remove(KEY, lambda artifact: artifact.manifest_text == ours.manifest_text)
    assert not store.remove(KEY) and store.find(KEY) is None


def test_what_crashed_writers_left_is_cleared_away(store: GraphStore) -> None:
    path = store.save(make_artifact())
    stale, fresh = path.with_name(".1-a.onediff-part"), path.with_name(".2-b.onediff-part")
    theirs = store.folder / "Downloads" / ".debian.iso.part"  # a person's home may be the cache folder
    theirs.parent.mkdir()
    for file in (stale, fresh, theirs):
        file.write_text("x")
    os.utime(stale, (0, 0))
    os.utime(theirs, (0, 0))
    store.prune()
    assert not stale.exists()
    assert fresh.exists()  # somebody may be writing it now
    assert theirs.exists()


# -- memory ------------------------------------------------------------------------------------


@contextlib.contextmanager
def _memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Yield what returns the bytes that Python holds now, and has held at most."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


def test_a_file_that_nobody_vouches_for_takes_no_memory(store: GraphStore) -> None:
    """Of a gigabyte in the header and nothing on the disk."""
    text, large = make_artifact().manifest_text, 1 << 30
    fields = {"format": "onediff-comfy compiled graphs", "graphs": json.dumps([{"manifest": text, "seal": ""}])}
    part = {"dtype": "U8", "shape": [large], "data_offsets": [0, large]}
    header = json.dumps({"__metadata__": fields, "0/constants": part}).encode()
    path = store.folder / "graphs" / f"{KEY}.graph"
    path.parent.mkdir(parents=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + large)
    with _memory() as held:
        assert store.find(KEY) is None
        (entry,) = store.entries()
        assert entry.problem is not None and "was not compiled by this installation" in entry.problem
        assert held()[1] < 10 << 20


def test_a_list_of_graphs_holds_none_of_them(store: GraphStore) -> None:
    size = 4 << 20
    for number in range(10):
        store.save(make_artifact(f"{number:064x}", size))
    with _memory() as held:
        entries = store.entries()
        now, most = held()
    assert [entry.problem for entry in entries] == [None] * 10
    assert now < size < most < 4 * size  # one at a time, to be looked at
    artifact = entries[0].artifact
    assert artifact is not None and len(artifact.checked_parts()["engine/artifact"]) == size


def test_parts_that_do_not_lie_one_behind_the_other_are_damage(store: GraphStore) -> None:
    """A part that lies in two places, or bytes that belong to none, would be read by some and not by others."""
    good = store.save(make_artifact()).read_bytes()
    length = int.from_bytes(good[:8], "little")
    header, data = json.loads(good[8 : 8 + length]), good[8 + length :]
    name = "0/engine/artifact"
    begin, end = header[name]["data_offsets"]
    for changed, behind in (
        ({"data_offsets": [begin, end - 1], "shape": [end - begin - 1]}, b""),
        ({"data_offsets": [begin + 1, end], "shape": [end - begin - 1]}, b""),
        ({"data_offsets": [end, begin]}, b""),
        ({"data_offsets": [begin, end + 0.5]}, b""),
        ({"shape": [end - begin, 1]}, b""),
        ({"dtype": "I8"}, b""),
        ({}, b"more"),
    ):
        text = json.dumps({**header, name: {**header[name], **changed}}).encode()
        content = len(text).to_bytes(8, "little") + text + data + behind
        with pytest.raises(ArtifactError):
            unpack(content)
        path = store.folder / "graphs" / f"{KEY}.graph"
        path.write_bytes(content)
        assert store.find(KEY) is None


# -- several processes -------------------------------------------------------------------------

_COMPILER = """
import json, sys
sys.path.insert(0, {root!r})
import torch
from pathlib import Path
from onediff_comfy.cache.memory import GraphCache
from onediff_comfy.compilation.compile_graph import HostServices
from onediff_comfy.serving.dispatcher import Dispatcher
from onediff_comfy.compilation.library import GraphLibrary
from onediff_comfy.metrics import Metrics
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    def forward(self, x, options={{}}):
        return self.b(torch.sin(self.a(x)) * 3)

torch.manual_seed(int(sys.argv[3]))
net, x = Net().eval().requires_grad_(False), torch.randn(4, 8)
library = GraphLibrary(GraphCache(1 << 30), Metrics(), GraphStore(Path(sys.argv[1]), Trust(Path(sys.argv[2]))))
dispatcher = Dispatcher("inductor", library, HostServices("host", "options", {{}}, lambda: None, lambda layers: None))
with torch.inference_mode():
    error = float((dispatcher(net, net.forward, (x,), {{}}) - net(x)).abs().max())
counts = library.metrics.snapshot()
print(json.dumps({{name: counts[name] for name in ("compiled", "loaded", "captured", "served")}} | {{"error": error}}))
"""


def _run_compilers(tmp_path: Path, count: int) -> list[dict[str, float]]:
    script = tmp_path / "compiler.py"
    script.write_text(_COMPILER.format(root=str(ROOT)))
    command = [sys.executable, str(script), str(tmp_path / "shared cache"), str(tmp_path / "config")]
    running = [
        subprocess.Popen([*command, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for seed in range(count)
    ]
    results = []
    for process in running:
        output, errors = process.communicate(timeout=900)
        assert process.returncode == 0, errors[-3000:]
        results.append(json.loads(output.splitlines()[-1]))
    return results


def test_of_two_processes_that_need_one_graph_at_once_exactly_one_compiles(tmp_path: Path) -> None:
    results = _run_compilers(tmp_path, 2)
    assert sorted(result["compiled"] for result in results) == [0, 1]
    assert sorted(result["loaded"] for result in results) == [0, 1]
    assert all(result["served"] == 1 and result["error"] < 1e-5 for result in results)
    # And a third, later one needs not even a capture.
    (later,) = _run_compilers(tmp_path, 1)
    assert (later["compiled"], later["captured"], later["loaded"]) == (0, 0, 1)
