"""docs/trust.md: what it shows is so, and every sentence of it has a test. And where graphs are."""

from __future__ import annotations

import ast
import hmac
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from onediff_comfy.__main__ import main
from onediff_comfy.folders import cache_folder
from onediff_comfy.store.artifact import FORMAT, Artifact, Manifest, Part
from onediff_comfy.store.graph_file import pack
from onediff_comfy.store.store import _limit
from onediff_comfy.store.trust import Trust


def artifact_of(target: str) -> Artifact:
    """A graph that nobody sealed yet, of little bytes."""
    data = {"constants": b"", "engine/artifact": b"code"}
    parts = {name: Part.of(content) for name, content in data.items()}
    shapes: dict[str, Any] = {"axes": [], "limits": {}, "conditions": []}
    manifest = Manifest(
        key="5" * 64,
        capture="c" * 64,
        created="2026-11-23T10:00:00+00:00",
        options={},
        options_read={},
        shapes=shapes,
        binding={"inputs": [], "output": "", "folds": []},
        target=target,
        engine="inductor",
        environment={"device": "cpu"},
        signature=[],
        calls=[],
        parts=parts,
        compile_seconds=0.0,
    )
    return Artifact(manifest.to_json(), "0" * 64, data)


def test_the_lines_on_the_page_print_what_is_in_a_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (root / "docs" / "trust.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "sdxl 1024x1024.graph").write_bytes(pack([artifact_of("UNet"), artifact_of("Größe")]))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == [
        f"{target} inductor {{'device': 'cpu'}} ['constants', 'engine/artifact']" for target in ("UNet", "Größe")
    ]


def test_the_page_says_what_a_file_looks_like(root: Path) -> None:
    page = (root / "docs" / "trust.md").read_text()
    content = pack([artifact_of("UNet")])
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert f"`{header['__metadata__']['format']}`" in page
    assert {name for name in header if name != "__metadata__"} == {"0/constants", "0/engine/artifact"}
    assert {header[name]["dtype"] for name in header if name != "__metadata__"} == {"U8"}
    assert f"`format` in the manifest is {FORMAT}." in page


def test_a_person_reads_where_graphs_are_and_how_large_that_may_become(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (root / "docs" / "nodes.md").read_text()
    for variable in ("ONEDIFF_CACHE_DIR", "XDG_CACHE_HOME", "ONEDIFF_CACHE_LIMIT_MB"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/home/person")
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        assert f"`{cache_folder()}`".replace("/home/person", "~") in page
    assert f"at most {_limit() / 2**30:.0f} GB" in page
    assert "`ONEDIFF_CACHE_DIR`" in page and "`ONEDIFF_CACHE_LIMIT_MB`" in page
    monkeypatch.setenv("ONEDIFF_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("ONEDIFF_CACHE_LIMIT_MB", "3")
    assert (cache_folder(), _limit()) == (tmp_path, 3 << 20)


# -- every sentence --------------------------------------------------------------------------------

_TWO_PROCESSES = "faults/test_store::test_of_two_processes_that_need_one_graph_at_once_exactly_one_compiles"

# How a sentence of the page begins, and the test that fails where it is not so. Those that only lead to others have "".
SENTENCES = {
    "Kept graphs take at most 20 GB": "faults/test_store::test_the_least_recently_used_graph_goes_first",
    "Machine code takes at most 4 GB": "unit/test_trust_code::test_a_folder_that_has_grown_too_large_is_emptied",
    "The cache folder may be deleted": "faults/test_trust_attacks::test_a_cache_folder_that_was_deleted_is_made_again",
    "Several ComfyUI processes": _TWO_PROCESSES,
    "While one compiles a graph": _TWO_PROCESSES,
    "One safetensors file": "unit/test_trust_docs::test_the_page_says_what_a_file_looks_like",
    "Its metadata holds": "unit/test_trust_docs::test_the_page_says_what_a_file_looks_like",
    "There are no weights in it": "host/test_compile_once::test_save_writes_one_file_and_says_what_is_inside",
    "The manifest says:": "faults/test_trust_old_files::test_the_manifest_of_a_compiled_graph_is_read_as_it_was",
    "`manifest` is a string": "unit/test_trust_docs::test_the_page_says_what_a_file_looks_like",
    "In it, keys are sorted": "faults/test_trust_attacks::test_json_that_readers_could_disagree_on_is_refused",
    "`seal` is 64": "unit/test_trust_docs::test_the_page_says_what_a_file_looks_like",
    "Parts are:": "",
    "`format` in the manifest is 2": "unit/test_trust_docs::test_the_page_says_what_a_file_looks_like",
    "It is raised when": "faults/test_store::test_a_manifest_of_a_future_format_is_explained",
    "What is only added": "faults/test_trust_attacks::test_what_a_later_version_added_is_passed_over",
    "This prints what is in a file": "unit/test_trust_docs::test_the_lines_on_the_page_print_what_is_in_a_file",
    "It runs nothing of it": "unit/test_trust_docs::test_the_lines_on_the_page_print_what_is_in_a_file",
    "Files are written to a temporary": "faults/test_store::test_a_full_disk_keeps_what_was_there",
    "What is damaged all the same": "faults/test_store::test_damage_is_answered_by_writing_the_graph_again",
    "Everything that is written": "unit/test_trust_files::test_graphs_notes_and_the_list_of_trusted_ones_are_private",
    "What is read is a regular": "unit/test_trust_files::test_what_is_no_file_of_bounded_size_is_refused_at_once",
    "A file that cannot be read": "faults/test_trust_attacks::test_one_bad_file_is_one_bad_row",
    "Nothing that a file says": "faults/test_fuzz::test_200_changed_files_through_every_command_that_reads_one",
    "A manifest is checked": "faults/test_trust_attacks::test_without_pydantic_the_message_says_what_is_missing",
    "**A compiled graph is": "faults/test_store::test_a_foreign_graph_is_refused_until_it_is_trusted",
    "Loading one runs": "unit/test_trust_code::test_planted_code_does_not_run_and_code_cut_short_is_replaced",
    "So nobody's graph": "faults/test_store::test_a_foreign_graph_is_refused_until_it_is_trusted",
    "Against somebody who": "",
    "A graph is loaded only": "faults/test_trust_attacks::test_there_is_no_verified_artifact_without_verification",
    "The seal is HMAC": "unit/test_trust_docs::test_the_seal_is_what_the_page_says",
    "A manifest is read as": "faults/test_trust_attacks::test_nothing_is_deserialised_before_it_is_verified",
    "Then its seal is checked": "faults/test_trust_attacks::test_nothing_is_deserialised_before_it_is_verified",
    "A part more": "faults/test_trust_attacks::test_a_file_with_a_part_that_its_manifest_does_not_name_is_refused",
    "A graph with another seal": "faults/test_store::test_a_foreign_graph_is_refused_until_it_is_trusted",
    "`graphs import --trust` remembers": "faults/test_store::test_trust_is_in_a_graph_as_it_is_and_not_in_its_name",
    "A trusted file too": "faults/test_trust_attacks::test_a_trusted_manifest_names_no_file_outside_the_store",
    "A graph under another": "faults/test_trust_attacks::test_a_graph_under_another_graphs_name_is_not_whole",
    "The notes that say": "faults/test_store::test_a_note_that_somebody_changed_is_ignored",
    "Against other users": "",
    "The signing key is": "faults/test_store::test_the_key_is_private_and_made_once",
    "One that others can": "unit/test_trust_files::test_a_key_that_others_can_read_is_refused_with_the_remedy",
    "A list of trusted": "faults/test_trust_attacks::test_a_list_of_trusted_graphs_that_others_can_write_to_is_refused",
    "Machine code is written": "unit/test_trust_code::test_inductor_is_told_of_a_private_folder_for_a_while",
    "It is ours (mode 0700)": "unit/test_trust_code::test_where_no_private_folder_can_be_there_is_one_for_this_process",
    "PyTorch's own choice": "unit/test_trust_code::test_planted_code_does_not_run_and_code_cut_short_is_replaced",
    "Neither are compiled": "unit/test_trust_code::test_headers_that_another_user_could_have_compiled_are_not_used",
    "A kernel has a name": "unit/test_trust_code::test_kernels_have_the_names_that_inductor_gives_or_are_refused",
    "A file that lies": "unit/test_trust_code::test_what_lies_where_code_is_put_is_replaced",
    "What else Inductor": "unit/test_trust_code::test_planted_code_does_not_run_and_code_cut_short_is_replaced",
    "PyTorch is told of": "unit/test_trust_code::test_inductor_is_told_of_a_private_folder_for_a_while",
    "Somebody who can read": "faults/test_trust_attacks::test_whoever_has_the_key_speaks_for_the_installation",
    "A file that you trusted": "faults/test_store::test_a_foreign_graph_is_refused_until_it_is_trusted",
    "A folder that you chose": "unit/test_trust_code::test_a_folder_that_a_person_chose_is_taken",
    "Other threads that": "unit/test_trust_code::test_other_threads_use_the_folder_meanwhile",
    "Whoever shares one key": "faults/test_trust_attacks::test_whoever_has_the_key_speaks_for_the_installation",
    "Who can write to the cache": "faults/test_trust_attacks::test_a_cache_folder_that_was_deleted_is_made_again",
    "Where the key can be": "unit/test_trust::test_where_no_key_can_be_kept_there_is_one_for_this_process",
    "**A fleet**": "faults/test_trust_attacks::test_whoever_has_the_key_speaks_for_the_installation",
    "A graph serves where": "unit/test_keys::test_any_one_difference_changes_the_digest",
    "The Load node names": "host/test_saved_graphs::test_a_graph_for_another_dtype_is_explained",
    "A file may hold graphs": "host/test_saved_graphs::test_everything_that_a_workflow_accelerates_goes_into_one_file",
    "After an update of torch": "unit/test_keys::test_any_one_difference_changes_the_digest",
    "After an update of ComfyUI": "unit/test_dispatch::test_another_host_shares_the_graph_after_a_capture_of_its_own",
    "A graph is compared with": "unit/test_dispatch::test_a_proof_is_made_once_per_graph",
    "When another compilation": "unit/test_general::test_a_graph_that_took_the_place_of_a_proved_one_is_compared",
    "Graphs from elsewhere": "unit/test_general::test_a_graph_that_took_the_place_of_a_proved_one_is_compared",
}


def sentences(page: str) -> list[str]:
    """What the page says in prose: no headings, tables and code."""
    found: list[str] = []
    for block in re.split(r"\n\s*?\n|\n(?=- )", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        if block.strip() and not block.lstrip("\n").startswith(("#", "|", "    ")):
            text = " ".join(block.split()).removeprefix("- ")
            found += re.split(r"(?<=[.:])\*{0,2} (?=[A-Z*`])", text)
    return found


def test_every_sentence_of_the_page_has_a_test(root: Path) -> None:
    found = sentences((root / "docs" / "trust.md").read_text())
    assert [text for text in found if sum(map(text.startswith, SENTENCES)) != 1] == []
    assert [start for start in SENTENCES if not any(text.startswith(start) for text in found)] == []
    named: dict[str, set[str]] = {}
    for place in filter(None, SENTENCES.values()):
        file, _, test = place.partition("::")
        named.setdefault(file, set()).add(test)
    for file, tests in named.items():
        tree = ast.parse((root / "tests" / f"{file}.py").read_text())
        assert tests <= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, file


def test_the_seal_is_what_the_page_says(tmp_path: Path) -> None:
    trust = Trust(tmp_path)
    seal = trust.seal("text")
    assert seal == hmac.new((tmp_path / "signing.key").read_bytes(), b"text", "sha256").hexdigest()
    data = artifact_of("UNet").data
    assert artifact_of("UNet").manifest.parts == {name: Part.of(content) for name, content in data.items()}


def test_every_command_on_the_page_is_one(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (root / "docs" / "trust.md").read_text()
    commands = re.findall(r"^    onediff-comfy graphs (\w+)", page, re.MULTILINE)
    assert len(commands) == 7
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            main(["graphs", command, "--help"])
        assert ended.value.code == 0
