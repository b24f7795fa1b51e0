"""The command line: from any folder, by any Python, in sentences that a person can act on."""

from __future__ import annotations

import asyncio
import importlib.metadata
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import save
from test_trust_docs import artifact_of

from onediff_comfy import __version__, doctor_command, host_version, warmup_command
from onediff_comfy.__main__ import main
from onediff_comfy.doctor_command import MISSING, NOTE, OK, Finding, examine
from onediff_comfy.store.artifact import Artifact
from onediff_comfy.store.graph_file import pack
from onediff_comfy.store.store import GraphStore
from onediff_comfy.store.trust import Trust
from onediff_comfy.terminal import quoted
from onediff_comfy.warmup_command import Progress, _is_last, address_of

KEY = "5" * 64
Command = Callable[..., tuple[int, str]]


@pytest.fixture
def store(tmp_path: Path) -> GraphStore:
    kept = GraphStore(tmp_path / "cache", Trust(tmp_path / "config"))
    kept.save(artifact_of("UNetModel all sizes"))
    return kept


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs ``onediff-comfy …`` with the folders of ``store``; exit status, and everything printed."""
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEDIFF_CONFIG_DIR", str(tmp_path / "config"))

    def run(*arguments: str) -> tuple[int, str]:
        status = main([*arguments])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"onediff-comfy {__version__}\n")


# -- graphs --------------------------------------------------------------------------------------


def test_the_list_says_which_model_family_and_sizes(store: GraphStore, command: Command) -> None:
    status, printed = command("graphs", "list")
    assert status == 0
    assert "Stable Diffusion  all sizes" in printed and "UNetModel" not in printed
    assert printed.splitlines()[-1].startswith("1 graph, ")
    (row,) = json.loads(command("graphs", "list", "--json")[1])
    assert (row["family"], row["sizes"], row["target"]) == ("Stable Diffusion", "all sizes", "UNetModel all sizes")


def test_a_graph_is_removed_by_the_beginning_of_its_key(store: GraphStore, command: Command) -> None:
    assert command("graphs", "remove", "6")[0] == 1
    assert command("graphs", "remove", "")[0] == 1  # as a script has it whose variable is not set
    assert len(store.entries()) == 1
    status, printed = command("graphs", "remove", KEY[:5])
    assert (status, store.entries()) == (0, [])
    assert printed.startswith("removed 1 graph;")


def test_what_a_shared_folder_holds_is_not_removed(
    store: GraphStore, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEDIFF_SHARED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "own"))
    status, printed = command("graphs", "remove", KEY)
    assert status == 1 and "is in a shared folder" in printed
    assert len(store.entries()) == 1


def test_a_graph_that_is_named_twice_is_removed_once(store: GraphStore, command: Command) -> None:
    status, printed = command("graphs", "remove", KEY, KEY[:2])
    assert (status, store.entries()) == (0, []), printed
    assert printed.startswith("removed 1 graph;")


def test_what_cannot_be_removed_is_said(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "graphs" / f"{KEY}.graph"
    folder.mkdir(parents=True)
    status, printed = command("graphs", "remove", KEY)
    assert status == 1 and printed.startswith(f"onediff-comfy: {folder} cannot be removed: ")


def test_a_graph_that_is_here_and_in_a_shared_folder_is_one_graph(
    store: GraphStore, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tmp_path / "cache", tmp_path / "shared")
    monkeypatch.setenv("ONEDIFF_SHARED_CACHE_DIR", str(tmp_path / "shared"))
    for arguments in (["show", KEY], ["verify", KEY], ["export", KEY, str(tmp_path / "out.graph")], ["remove", KEY]):
        status, printed = command("graphs", *arguments)
        assert status == 0, printed
    assert store.entries() == [] and list((tmp_path / "shared" / "graphs").iterdir()) != []


@pytest.mark.parametrize("limit", ["-1", "nan", "inf", "1.5", "9" * 5000, "x"])
def test_a_limit_that_is_none_removes_nothing(store: GraphStore, command: Command, limit: str) -> None:
    with pytest.raises(SystemExit) as ended:
        command("graphs", "prune", "--limit-mb", limit)
    assert ended.value.code == 2 and len(store.entries()) == 1


def test_a_graph_is_written_over_a_graph_and_over_nothing_else(
    store: GraphStore, command: Command, tmp_path: Path
) -> None:
    ours, model, folder = tmp_path / "ours.graph", tmp_path / "my_model.safetensors", tmp_path / "folder"
    os.mkfifo(tmp_path / "pipe")
    folder.mkdir()
    model.write_bytes(save({"weight": torch.zeros(4)}))
    (tmp_path / "empty").touch()
    for _ in range(2):
        assert command("graphs", "export", KEY, str(ours))[0] == 0
    for path in (model, tmp_path / "empty", tmp_path / "pipe", folder, Path()):
        before = path.read_bytes() if path.is_file() else None
        status, printed = command("graphs", "export", KEY, "" if path == Path() else str(path))
        assert status == 1 and printed.startswith(f"onediff-comfy: {path} cannot be written: it is ")
        assert before is None or path.read_bytes() == before
    status, printed = command("graphs", "export", KEY, str(ours / "in a file.graph"))
    assert status == 1 and "Errno" not in printed and str(ours) in printed


@pytest.mark.skipif(os.name != "posix", reason="limits of POSIX")
@pytest.mark.parametrize("bytes_that_fit", [0, 100, 1000])
def test_what_could_not_be_kept_is_not_trusted(store: GraphStore, tmp_path: Path, bytes_that_fit: int) -> None:
    theirs = tmp_path / "theirs.graph"
    theirs.write_bytes(pack([artifact_of("Net float32[2x4]@cpu")]))
    assert theirs.stat().st_size > bytes_that_fit
    script = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({bytes_that_fit}, {bytes_that_fit}));"
        "from onediff_comfy.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {
        **os.environ,
        "ONEDIFF_CACHE_DIR": str(tmp_path / "cache"),
        "ONEDIFF_CONFIG_DIR": str(tmp_path / "config"),
    }
    done = subprocess.run(
        [sys.executable, "-c", script, "graphs", "import", "--trust", str(theirs)],
        cwd=Path(host_version.__file__).parent.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        f"onediff-comfy: {theirs}: {KEY} was not kept in {tmp_path / 'cache'}: File too large"
    )
    trusted = tmp_path / "config" / "trusted.json"
    assert not trusted.exists() or json.loads(trusted.read_text()) == []
    assert [entry.problem for entry in store.entries()] == [None]


def test_of_a_file_of_several_graphs_what_was_kept_is_said(command: Command, tmp_path: Path) -> None:
    first, second = artifact_of("Net"), replaced_key(artifact_of("Net"), "6" * 64)
    (tmp_path / "two.graph").write_bytes(pack([first, second]))
    (tmp_path / "cache" / "graphs" / f"{'6' * 64}.graph").mkdir(parents=True)
    assert command("graphs", "import", str(tmp_path / "two.graph"))[0] == 1
    assert not (tmp_path / "cache" / "graphs" / f"{KEY}.graph").exists(), "none is kept of which one is not believed"
    status, printed = command("graphs", "import", "--trust", str(tmp_path / "two.graph"))
    assert status == 1 and f"{'6' * 64} was not kept" in printed and f"kept of 2 graphs: {KEY}" in printed
    assert json.loads((tmp_path / "config" / "trusted.json").read_text()) == [first.digest]


def replaced_key(artifact: Artifact, key: str) -> Artifact:
    return Artifact(replace(artifact.manifest, key=key).to_json(), "", artifact.data)


def test_a_file_is_verified_and_shown_as_a_kept_graph_is(store: GraphStore, command: Command, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.graph", tmp_path / "theirs.graph"
    assert command("graphs", "export", KEY, str(ours))[0] == 0
    theirs.write_bytes(pack([artifact_of("UNetModel all sizes")]))
    assert command("graphs", "verify", str(ours), KEY[:9]) == (0, "2 of 2 graphs are whole and trusted\n")
    status, printed = command("graphs", "verify", str(theirs))
    assert status == 1 and printed.endswith("0 of 1 graph is whole and trusted\n")
    assert f"{theirs}: the graph in {theirs} was not compiled by this installation" in printed
    for what in (str(theirs), KEY):
        assert "Stable Diffusion all sizes" in command("graphs", "show", what)[1]


def test_a_damaged_part_of_a_file_is_found(store: GraphStore, command: Command, tmp_path: Path) -> None:
    (entry,) = store.entries()
    assert entry.artifact is not None
    damaged = Artifact(entry.artifact.manifest_text, entry.artifact.seal, {**entry.artifact.data, "constants": b"x"})
    (tmp_path / "damaged.graph").write_bytes(pack([damaged]))
    status, printed = command("graphs", "verify", str(tmp_path / "damaged.graph"))
    assert status == 1 and "part constants is damaged" in printed


@pytest.mark.parametrize("verb", ["import", "show", "verify"])
def test_a_foreign_file_is_named_with_a_remedy(command: Command, tmp_path: Path, verb: str) -> None:
    foreign = tmp_path / "unet.graph"
    foreign.write_bytes(b"of OneFlow")
    status, printed = command("graphs", verb, str(foreign))
    assert status == 1
    assert printed.startswith(f"onediff-comfy: {foreign}: the file is ")
    assert "run its workflow once" in printed


@pytest.mark.parametrize(
    "name", ["theirs.graph", "模型 图.graph", "$(true).graph", "a`true`.graph", '"; true ".graph', "it's.graph"]
)
@pytest.mark.parametrize("verb", ["import", "verify"])
def test_a_file_of_another_installation_is_named_with_the_command_that_takes_it(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, verb: str
) -> None:
    """Its name is whatever somebody wrote, and a shell runs none of it."""
    (tmp_path / name).write_bytes(pack([artifact_of("Net float32[2x4]@cpu")]))
    monkeypatch.chdir(tmp_path)
    status, printed = command("graphs", verb, name)
    assert status == 1 and "was not compiled by this installation" in printed
    remedy = printed.strip().partition("trust where it came from: ")[2].splitlines()[0]
    done = subprocess.run(remedy, shell=True, cwd="/", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"kept 1 graph from {tmp_path / name}\n"), done.stderr


@pytest.mark.parametrize("text", ["a&calc.graph", "triton-windows<3.4", "a b&c", "C:\\Users\\me\\a^b"])
def test_cmd_acts_on_no_part_of_an_argument(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with monkeypatch.context() as windows:
        windows.setattr(os, "name", "nt")
        arguments = quoted(text), quoted("C:\\ComfyUI\\python.exe")
    assert arguments == (f'"{text}"', "C:\\ComfyUI\\python.exe")


@pytest.mark.skipif(os.name != "posix", reason="shells of POSIX")
def test_a_pipe_that_nobody_reads_any_more_ends_quietly(store: GraphStore, tmp_path: Path) -> None:
    package = Path(host_version.__file__).parent
    script = f"{sys.executable} {package} graphs list | true; echo ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "ONEDIFF_CACHE_DIR": str(tmp_path / "cache"), "ONEDIFF_CONFIG_DIR": str(tmp_path)}
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_it_runs_from_any_folder_also_by_an_isolated_python(root: Path, tmp_path: Path) -> None:
    """Windows' embedded Python takes no PYTHONPATH and looks at no current folder, as -I does everywhere."""
    environment = {**os.environ, "ONEDIFF_CACHE_DIR": str(tmp_path)}
    for package in (root / "onediff_comfy", os.path.relpath(root / "onediff_comfy", tmp_path)):
        done = subprocess.run(
            # Python 3.12 and 3.13 would print this, and later ones end with it.
            [sys.executable, "-I", "-W", "error:__package__", str(package), "graphs", "list"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, f"no compiled graphs in {tmp_path}\n"), done.stderr


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8188", "http://localhost:8188"),
        ("192.168.1.7:8000/", "http://192.168.1.7:8000"),
        ("https://comfy.example/sub/", "https://comfy.example/sub"),
    ],
)
def test_a_server_is_named_by_host_and_port_or_by_url(given: str, url: str) -> None:
    assert address_of(given) == url


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "is not a regular file"),
        (b"[" * 100_000, "is no JSON"),
        (b"\xff\xfe", "is no JSON"),
        (b"[]", "is no workflow in API form"),
    ],
    ids=["pipe", "deep", "not UTF-8", "list"],
)
@pytest.mark.timeout(20)
def test_a_file_that_is_no_workflow_is_said_in_a_line(
    command: Command, tmp_path: Path, content: bytes | None, why: str
) -> None:
    path = tmp_path / "workflow.json"
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    status, printed = command("warmup", "--workflow", str(path))
    assert status == 1 and printed.startswith(f"onediff-comfy: {path} {why}") and printed.count("\n") == 1


@pytest.mark.parametrize("server", ["me:secret@127.0.0.1:1", "http://me:sec/ret@127.0.0.1:1", "http://me:secret@[bad"])
def test_a_password_in_an_address_is_not_printed(command: Command, tmp_path: Path, server: str) -> None:
    (tmp_path / "workflow.json").write_text('{"1": {"class_type": "OneDiffWarmUp", "inputs": {}}}')
    status, printed = command("warmup", "--workflow", str(tmp_path / "workflow.json"), "--server", server)
    assert status == 1 and "sec" not in printed and "me:" not in printed
    assert printed.startswith("onediff-comfy: ") and printed.count("\n") == 1


def test_who_stops_a_warm_up_while_the_server_still_checks_it_leaves_none_behind() -> None:
    async def stopped() -> list[tuple[str, Any]]:
        asked, checking = list[tuple[str, Any]](), asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/ws":
                socket = web.WebSocketResponse()
                await socket.prepare(request)
                await socket.receive()
                return socket
            asked.append((request.path, await request.json()))
            if request.path == "/prompt":
                checking.set()
                await asyncio.sleep(0.3)
            return web.json_response({"prompt_id": "ours", "node_errors": {}})

        application = web.Application()
        application.router.add_route("*", "/{path}", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        workflow = {"1": {"class_type": "OneDiffWarmUp", "inputs": {}}}
        server = f"http://127.0.0.1:{runner.addresses[0][1]}"
        command = asyncio.create_task(warmup_command._run(server, workflow, Progress()))
        await asyncio.wait_for(checking.wait(), 20)
        command.cancel()
        with pytest.raises(asyncio.CancelledError):
            await command
        await runner.cleanup()
        return asked[1:]

    assert asyncio.run(stopped()) == [("/queue", {"delete": ["ours"]}), ("/interrupt", {"prompt_id": "ours"})]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _follow_two_of_three(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO) -> str:
    """What stands on standard error when a server has prepared two of three buckets."""
    monkeypatch.setattr(sys, "stderr", stream)
    progress = Progress()
    workflow = {"7": {"class_type": "OneDiffWarmUp", "inputs": {}}}
    about = {"prompt_id": "ours", "max": 3}
    for value in (1, 2):
        progress.say(f"{value + 1} of 3: 64x64 b{value} …")
        assert not _is_last(
            {"type": "progress", "data": {**about, "node": "7", "value": value}}, "ours", workflow, progress
        )
    _is_last({"type": "progress", "data": {**about, "node": "another", "value": 3}}, "ours", workflow, progress)
    progress.close()
    return stream.getvalue()


def test_on_a_terminal_a_bar_shows_how_far_a_warm_up_is(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = _follow_two_of_three(monkeypatch, _Terminal())
    assert "2/3 |#" in shown or "2/3 |█" in shown
    assert "3 of 3: 64x64 b2" in shown and "3/3" not in shown
    assert "\n3 of 3" not in shown


def test_what_a_server_says_moves_no_cursor(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(_server: str, _workflow: object, progress: Progress) -> list[dict[str, object]]:
        progress.say("\x1b[2Jpreparing")
        return [{"bucket": "\x1b]0;x\x07", "seconds": 1.0, "compiled": 1, "loaded": 0, "problem": "\x1b[1A"}]

    monkeypatch.setattr(warmup_command, "_run", run)
    (tmp_path / "workflow.json").write_text('{"1": {"class_type": "OneDiffWarmUp", "inputs": {}}}')
    for options in ([], ["--json"]):
        status, printed = command("warmup", *options, "--workflow", str(tmp_path / "workflow.json"))
        assert status == 1 and "preparing" in printed and printed.replace("\n", "").isprintable()


def test_elsewhere_each_bucket_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _follow_two_of_three(monkeypatch, io.StringIO()) == "2 of 3: 64x64 b1 …\n3 of 3: 64x64 b2 …\n"


# -- doctor --------------------------------------------------------------------------------------


def found(name: str, comfyui: Path | None = None) -> Finding:
    (finding,) = (finding for finding in examine(comfyui) if finding.name == name)
    return finding


class _Cuda(SimpleNamespace):
    def is_available(self) -> bool:
        return True

    def get_device_properties(self, _number: int) -> Any:
        return SimpleNamespace(name="GeForce", major=self.major, minor=6, total_memory=12 << 30)


def gpu_torch(major: int = 8, version: str = "2.11.0+cu128") -> Any:
    return SimpleNamespace(__version__=version, version=SimpleNamespace(cuda="12.8", hip=None), cuda=_Cuda(major=major))


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "_imported_torch", gpu_torch)


def pretend_installed(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Packages have these versions, or are not there."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in versions:
            return real(name)
        if (pretended := versions[name]) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return pretended

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_all_is_well_where_all_is_there(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """In the developer environment."""
    status, printed = command("doctor")
    assert (status, printed.splitlines()[-1]) == (0, "nothing is missing"), printed
    status, printed = command("doctor", "--json")
    assert status == 0 and {finding["state"] for finding in json.loads(printed)} <= {OK, NOTE}


def test_a_missing_torch_is_named_with_the_command_and_nothing_else_of_it(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor_command, "_imported_torch", lambda: None)
    status, printed = command("doctor")
    assert status == 1
    assert f"run: {sys.executable} -m pip install --upgrade torch torchvision torchaudio" in printed
    assert "Triton" not in printed and "GPU" not in printed


def test_an_old_torch_keeps_its_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_command, "_imported_torch", lambda: gpu_torch(version="2.9.1+cu126"))
    finding = found("torch")
    assert finding.state == MISSING and "2.10 or newer" in finding.text
    assert finding.command.endswith("--index-url https://download.pytorch.org/whl/cu128")


def test_triton_is_asked_for_where_there_is_a_gpu(on_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_installed(monkeypatch, triton="3.6.0")
    assert found("Triton").state == OK
    pretend_installed(monkeypatch, triton=None, **{"triton-windows": None})
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: ["filelock", "triton==3.6.0; platform == 'Linux'"])
    finding = found("Triton")
    assert (finding.state, finding.command) == (MISSING, f"{sys.executable} -m pip install triton==3.6.0")


@pytest.mark.parametrize(("major", "state"), [(8, OK), (6, NOTE)])
def test_the_gpu_is_named_with_its_capability(monkeypatch: pytest.MonkeyPatch, major: int, state: str) -> None:
    monkeypatch.setattr(doctor_command, "_imported_torch", lambda: gpu_torch(major))
    finding = found("GPU")
    assert finding.state == state
    assert finding.text.startswith(f"GeForce, 12 GB, compute capability {major}.6")
    assert ("engine cudagraph" in finding.text) == (state == NOTE)


def test_a_compiler_that_compiles_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", shutil.which("false") or "false")
    monkeypatch.setattr(shutil, "which", lambda name: name if name.endswith(("false", "apt-get")) else None)
    finding = found("C++ compiler")
    assert finding.state == MISSING and "compiles nothing" in finding.text
    assert finding.command == "sudo apt-get install g++"


def test_a_folder_that_cannot_be_written_to_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path / "file"))
    finding = found("cache folder")
    assert finding.state == MISSING and str(tmp_path / "file") in finding.text
    assert finding.command.startswith("export ONEDIFF_CACHE_DIR=")


def test_the_host_is_found_around_the_pack_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert found("ComfyUI").state == NOTE
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.18.2"\n')
    assert found("ComfyUI") == Finding("ComfyUI", OK, f"0.18.2 in {tmp_path}")
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.16.2"\n')
    finding = found("ComfyUI", tmp_path)
    assert (finding.state, finding.command) == (MISSING, f"git -C {tmp_path} pull")
    assert "0.16.3 or newer" in finding.text
    pack_file = tmp_path / "custom_nodes" / "onediff-comfy" / "onediff_comfy" / "host_version.py"
    monkeypatch.setattr(host_version, "__file__", str(pack_file))
    monkeypatch.chdir("/")
    assert host_version.find_comfyui() == tmp_path


def test_the_oldest_host_is_the_one_that_the_registry_is_told(root: Path) -> None:
    wanted = ".".join(map(str, host_version.MINIMUM_COMFYUI))
    assert f'requires-comfyui = ">={wanted}"' in (root / "pyproject.toml").read_text(encoding="utf-8")
