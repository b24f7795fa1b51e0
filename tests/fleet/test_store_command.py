"""``onediff-comfy store``: keys, probing, pushing, pulling and tidying, by what is printed and what it does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from machines import KEY, Machine, StoreFleet, graph
from stand_in import Bucket

from onediff_comfy.__main__ import _parser, main
from onediff_comfy.store.remote import tier as tier_module
from onediff_comfy.store.remote import upkeep
from onediff_comfy.store.remote.lease import LeaseTimes
from onediff_comfy.store.remote.tier_counters import COUNTED
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust

ROOT = Path(__file__).resolve().parents[2]
OTHER = "6" * 64
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[Machine], Command]:
    """Runs ``onediff-comfy store …`` on a machine; exit status, and everything printed."""

    def of(machine: Machine) -> Command:
        def run(*arguments: str) -> tuple[int, str]:
            monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(machine.folder / "cache"))
            monkeypatch.setenv("ONEDIFF_CONFIG_DIR", str(machine.folder / "config"))
            monkeypatch.setenv("ONEDIFF_STORE_URL", machine.url)
            status = main(["store", *arguments])
            captured = capsys.readouterr()
            return status, captured.out + captured.err

        return run

    return of


def compiled_on(machine: Machine, *keys: str) -> None:
    """Have a machine compile without a fleet, as before there was one."""
    local = GraphStore(machine.folder / "cache", Trust(machine.folder / "config"))
    for key in keys:
        local.save(graph(key))


def test_a_key_is_made_believed_elsewhere_and_revoked(
    store_fleet: StoreFleet, on: Callable[[Machine], Command], tmp_path: Path
) -> None:
    builder, worker = store_fleet.machine(), store_fleet.machine(builder=False)
    for machine in (builder, worker):
        shutil.rmtree(machine.folder / "config")
    compiled_on(builder, KEY)
    status, said = on(builder)("push")
    assert status == 1 and "store keygen" in said

    made = json.loads(on(builder)("keygen", "--json", "--label", "of the release")[1])
    assert Path(made["private_file"]).stat().st_mode & 0o777 == 0o600
    status, said = on(builder)("keygen")
    assert status == 1 and "--rotate" in said
    assert on(builder)("push") == (
        0,
        "published 1 graph; 0 were there, 0 are not this machine's or cannot be read\n",
    )
    assert on(builder)("push")[1].startswith("published 0 graphs; 1 were there")

    status, said = on(worker)("pull", "--all")
    assert status == 1 and "1 were refused" in said
    assert "no key is believed here" in on(worker)("status")[1]
    line = tmp_path / "public.txt"
    line.write_text(made["public"] + "\n")
    assert on(worker)("trust", str(line), "--label", "release")[0] == 0
    assert on(worker)("pull", "--all") == (
        0,
        "fetched 1 graph; 0 were here, 0 are for other machines, 0 were refused\n",
    )
    assert worker.store().find(KEY) is not None

    status, said = on(worker)("revoke", made["key"])
    assert status == 0 and "1 graph that it signed removed" in said
    assert not list((worker.folder / "cache" / "graphs").glob("*.graph"))
    status, said = on(worker)("trust", made["public"])
    assert status == 1 and "was revoked" in said
    assert f"key {made['key']} REVOKED" in on(worker)("status")[1]


def test_to_revoke_a_key_does_not_remove_what_is_compiled_here_meanwhile(
    folder_fleet: StoreFleet, on: Callable[[Machine], Command], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder_fleet.machine().tier().publish(graph())
    worker = folder_fleet.machine(builder=False)
    assert worker.store().find(KEY) is not None
    signed_by, own = upkeep.signed_by, graph(mark=b"made here")

    def listed(folder: Path, trust: Trust, key_id: str) -> list[str]:
        found = signed_by(folder, trust, key_id)
        GraphStore(folder, trust).save(own)
        return found

    monkeypatch.setattr(upkeep, "signed_by", listed)
    status, said = on(worker)("revoke", folder_fleet.signer.key_id)
    assert status == 0 and "0 graphs that it signed removed" in said
    found = worker.store().find(KEY)
    assert found is not None and found.digest == own.digest


@pytest.mark.parametrize("revoked", ["while it is fetched", "while it is kept"])
def test_a_graph_whose_key_is_revoked_on_its_way_in_is_not_kept(
    store_fleet: StoreFleet, on: Callable[[Machine], Command], monkeypatch: pytest.MonkeyPatch, revoked: str
) -> None:
    assert store_fleet.machine().tier().publish(graph())
    worker = store_fleet.machine(builder=False)
    store = worker.store()
    place, name = (tier_module, "_whole") if revoked == "while it is fetched" else (store, "adopt")
    before = getattr(place, name)

    def then_revoke(*arguments: Any) -> Any:
        status, said = on(worker)("revoke", store_fleet.signer.key_id)
        assert status == 0 and "0 graphs that it signed removed" in said
        return before(*arguments)

    monkeypatch.setattr(place, name, then_revoke)
    assert store.find(KEY) is None
    assert not list((worker.folder / "cache" / "graphs").glob("*.graph"))


@pytest.mark.parametrize("given", ["text", "not ascii", "undecodable", "folder", "pipe", "binary file"])
def test_what_is_no_public_key_is_said_in_a_line(
    folder_fleet: StoreFleet, on: Callable[[Machine], Command], tmp_path: Path, given: str
) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "binary file").write_bytes(b"\xff\xfe\0onediff-ed25519:")
    texts = {"text": "x", "not ascii": "onediff-ed25519:" + "ä" * 44, "undecodable": "onediff-ed25519:\udcff"}
    status, said = on(folder_fleet.machine())("trust", texts.get(given, str(tmp_path / given)))
    assert status == 1 and "no public key" in said and said.count("\n") == 1
    assert "codec" not in said and "Errno" not in said


def test_a_file_with_the_line_that_an_editor_marked_as_utf8_is_taken(
    folder_fleet: StoreFleet, on: Callable[[Machine], Command], tmp_path: Path
) -> None:
    (tmp_path / "key.txt").write_text(folder_fleet.signer.public + "\r\n", encoding="utf-8-sig")
    assert on(folder_fleet.machine())("trust", str(tmp_path / "key.txt"))[0] == 0


def test_pull_takes_what_is_for_this_torch_and_the_named_gpus(
    store_fleet: StoreFleet, on: Callable[[Machine], Command]
) -> None:
    store_fleet.machine().tier().publish(graph())  # of torch 2.13.0, for sm_90
    machine = store_fleet.machine(builder=False)
    done = json.loads(on(machine)("pull", "--json")[1])
    assert done["wanted"]["torch"] == [str(torch.__version__)] and done["other"] == [KEY]
    done = json.loads(on(machine)("pull", "--all", "--architecture", "sm_89", "--json")[1])
    assert done["other"] == [KEY] and done["fetched"] == []
    done = json.loads(on(machine)("pull", "--all", "--architecture", "sm_89", "--architecture", "sm_90", "--json")[1])
    assert done["fetched"] == [KEY]
    assert json.loads(on(machine)("pull", "--all", "--json")[1])["here"] == [KEY]


def test_push_publishes_what_this_machine_compiled_and_nothing_else(
    store_fleet: StoreFleet, on: Callable[[Machine], Command], tmp_path: Path
) -> None:
    machine = store_fleet.machine()
    compiled_on(machine, KEY)
    elsewhere = GraphStore(tmp_path / "elsewhere", Trust(tmp_path / "its config"))
    for key in (OTHER, "7" * 64):
        shutil.copy(elsewhere.save(graph(key)), machine.folder / "cache" / "graphs")
    Trust(machine.folder / "config").trust(graph(OTHER))  # it may be loaded here, and is not ours to sign
    assert on(machine)("push", "")[0] == 1  # as a script has it whose variable is not set
    done = json.loads(on(machine)("push", "--json")[1])
    assert (done["published"], sorted(done["left"])) == ([KEY], [OTHER, "7" * 64])
    status, said = on(machine)("push", "888")
    assert status == 1 and "no graph has a key that begins with 888" in said


def test_status_says_what_is_there_and_what_was_refused(
    store_fleet: StoreFleet, on: Callable[[Machine], Command]
) -> None:
    builder = store_fleet.machine()
    builder.tier().publish(graph())
    builder.tier().objects.create(f"v1/graphs/{OTHER}", b"rubbish")
    found = json.loads(on(store_fleet.machine(builder=False))("status", "--json")[1])
    assert found["graphs"] == 2 and found["role"] == "worker" and found["own_key"] is None
    assert {"architecture": "sm_90", "torch": "2.13.0", "target": "Net float32[2x4]@cpu", "graphs": 1} in found["kinds"]
    assert [key["key"] for key in found["keys"]] == [store_fleet.signer.key_id]
    assert found["kept_aside"] == 1


def test_prune_removes_the_oldest_and_what_nobody_believed_signed(
    store_fleet: StoreFleet, on: Callable[[Machine], Command]
) -> None:
    machine = store_fleet.machine()
    machine.tier().publish(graph())
    machine.tier().objects.create(f"v1/graphs/{OTHER}", b"rubbish")
    run = on(machine)
    assert run("prune")[0] == 1
    assert json.loads(run("prune", "--days", "1", "--limit-mb", "1", "--json")[1]) == []
    assert json.loads(run("prune", "--unbelieved", "--json")[1]) == [OTHER]
    assert machine.tier().statement(KEY) is not None
    assert run("prune", "--limit-mb", "0")[1].startswith("removed 1 graph;")
    left = [
        listed.path
        for kind in ("graphs", "calls", "options")
        for listed in machine.tier().objects.listed(f"v1/{kind}/")
    ]
    assert left == []


@pytest.mark.parametrize("keys", ["open to others", "damaged", "missing", "empty"])
def test_who_cannot_tell_whom_it_believes_removes_and_replaces_nothing(
    folder_fleet: StoreFleet, on: Callable[[Machine], Command], keys: str
) -> None:
    """A list of keys that cannot be read, or the folder of another machine, says nothing of what others signed."""
    folder_fleet.machine().tier().publish(graph())
    machine = folder_fleet.machine()
    compiled_on(machine, KEY)
    objects = machine.tier().objects
    objects.create(f"v1/graphs/{OTHER}", b"rubbish")
    path = machine.folder / "config" / "store_keys.json"
    if keys == "open to others":
        path.chmod(0o666)
    elif keys == "missing":
        path.unlink()
    else:
        path.write_text("{" if keys == "damaged" else '{"trusted": {}, "revoked": {}}')
    before = objects.listed("v1/")
    status, said = on(machine)("prune", "--unbelieved")
    assert status == 1 and said.startswith("onediff-comfy: nothing was removed: ") and str(path) in said
    status, said = on(machine)("push")
    assert status == 1 and str(path) in said
    assert objects.listed("v1/") == before


@pytest.mark.parametrize("limit", [("--days", "-1"), ("--days", "nan"), ("--days", "inf"), ("--limit-mb", "-1")])
def test_a_limit_that_is_none_removes_nothing(
    folder_fleet: StoreFleet, on: Callable[[Machine], Command], limit: tuple[str, str]
) -> None:
    machine = folder_fleet.machine()
    machine.tier().publish(graph())
    with pytest.raises(SystemExit) as ended:
        on(machine)("prune", *limit)
    assert ended.value.code == 2 and machine.tier().statement(KEY) is not None


def test_probe_finds_a_good_store_good_and_leaves_nothing(
    store_fleet: StoreFleet, on: Callable[[Machine], Command]
) -> None:
    machine = store_fleet.machine()
    status, said = on(machine)("probe", "--json")
    assert (status, [each["name"] for each in json.loads(said) if not each["ok"]]) == (0, [])
    assert machine.tier().objects.listed("v1/") == []


def test_probe_finds_a_store_that_is_not_atomic(racy_fleet: StoreFleet, on: Callable[[Machine], Command]) -> None:
    status, said = on(racy_fleet.machine())("probe")
    assert status == 1
    assert "FAILS  one of many writers at once wins" in said
    assert "may compile a graph more than once" in said


def test_a_store_that_does_not_answer_is_said_in_a_line(
    on: Callable[[Machine], Command], folder_fleet: StoreFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in Bucket("http://127.0.0.1:9", "fleet").environment.items():
        monkeypatch.setenv(name, value)
    machine = folder_fleet.machine(url="s3://fleet/x")
    for arguments in (["status"], ["probe"], ["pull"], ["prune", "--days", "1"]):
        status, said = on(machine)(*arguments)
        assert status == 1 and said.startswith("onediff-comfy: the store does not answer:")
        assert said.count("\n") == 1


WITHOUT = """
import sys
for name in {missing!r}: sys.modules[name] = None
from onediff_comfy.__main__ import _parser, main
from onediff_comfy.store.store import GraphStore, default_store
import logging
logging.basicConfig()
assert type(default_store()) is GraphStore
sys.exit(main(["store", "status"]))
"""


@pytest.mark.parametrize("missing", ["obstore", pytest.param("cryptography", marks=pytest.mark.slow)])  # of one list
def test_without_its_packages_graphs_are_kept_here_and_the_command_says_what_to_install(
    missing: str, tmp_path: Path
) -> None:
    done = run_python(WITHOUT.format(missing=[missing]), tmp_path, ONEDIFF_STORE_URL=tmp_path.as_uri())
    assert done.returncode == 1
    assert f"{missing}" in done.stderr and done.stderr.count("pip install obstore cryptography") == 2
    assert "Traceback" not in done.stderr


ALONE = """
import sys
from onediff_comfy.store.store import GraphStore, default_store
store = default_store()
assert type(store) is GraphStore and store.counters is None
assert not {"obstore", "cryptography"} & set(sys.modules), "nothing of a fleet is imported"
"""


def test_one_machine_imports_nothing_of_a_fleet(tmp_path: Path) -> None:
    done = run_python(ALONE, tmp_path, ONEDIFF_STORE_URL="")
    assert done.returncode == 0, done.stderr


def run_python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    folders = {"ONEDIFF_CACHE_DIR": str(folder / "cache"), "ONEDIFF_CONFIG_DIR": str(folder / "config")}
    every: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), **folders, **environment}
    return subprocess.run([sys.executable, "-c", code], env=every, capture_output=True, text=True, timeout=120)


def test_the_container_file_calls_commands_as_they_are() -> None:
    lines = (ROOT / "deploy" / "Containerfile").read_text().splitlines()
    commands = [line.partition("onediff_comfy store ")[2].split() for line in lines if "onediff_comfy store " in line]
    assert [command[0] for command in commands] == ["trust", "pull"]
    for command in commands:
        options = _parser().parse_args(["store", *command])
        assert callable(options.command)


def test_the_page_names_every_command_and_counter() -> None:
    page = (ROOT / "docs" / "store.md").read_text()
    assert {name for name in COUNTED if f"`{name}`" not in page} == set()
    for name in ("keygen", "trust", "revoke", "probe", "push", "pull", "prune", "status"):
        assert f"store {name}" in page
    times = LeaseTimes()
    assert times.ttl_s == 30 and "has not changed for 30 seconds" in page
    assert times.poll_s == 2 and "look every two seconds" in page
    assert times.longest_s == 3600 and "after an hour" in page
