"""benchmarks/: what the figures mean, what variants' names say, and that the scripts run where there is no GPU."""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
import torch
from children import has_ended

from benchmarks import __main__ as everything
from benchmarks import processor, variants, whole
from benchmarks.any_card import Watched, missing_bytes
from benchmarks.files import file_name
from benchmarks.measures import psnr, relative_error, ssim
from benchmarks.plan import PLANS, Job, Step, with_other_torch
from benchmarks.processor import CoreTime, PythonSpeed, collector_seconds, processor_facts
from benchmarks.quality import against_float32, comparison
from benchmarks.sampling import ours_failed
from benchmarks.summary import table
from benchmarks.variants import Variant

ENVIRONMENT = {"date": "2026-01-02", "gpu": "NVIDIA H100 80GB HBM3", "torch": "2.13.0", "comfyui": "0.30.0"}


def image(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape or (1, 4, 16, 20), generator=torch.Generator().manual_seed(seed))


# -- measures --------------------------------------------------------------------------------------


def test_equal_images_have_no_error() -> None:
    one = image(1)
    assert relative_error(one, one) == 0
    assert psnr(one, one) == math.inf
    assert ssim(one, one) == pytest.approx(1, abs=1e-12)


def test_the_relative_error_of_an_image_that_is_a_tenth_larger_is_a_tenth() -> None:
    assert relative_error(1.1 * image(1).double(), image(1)) == pytest.approx(0.1)


def test_psnr_is_relative_to_the_references_range() -> None:
    """An error of 1% of the range everywhere is 40 dB, whatever the range is."""
    reference = torch.linspace(-3, 7, 256).reshape(1, 1, 16, 16)
    assert psnr(reference + 0.1, reference) == pytest.approx(40, abs=1e-3)
    assert psnr(50 * (reference + 0.1), 50 * reference) == pytest.approx(40, abs=1e-3)


def test_ssim_is_what_its_definition_gives_window_by_window() -> None:
    """Wang et al. 2004, equation 13, written out for each window of a small image."""
    x, y = image(1, 1, 2, 12, 13).double(), image(2, 1, 2, 12, 13).double() * 0.3 + image(1, 1, 2, 12, 13)
    row, column = torch.meshgrid(torch.arange(-5.0, 6), torch.arange(-5.0, 6), indexing="ij")
    weights = torch.exp(-(row**2 + column**2).double() / (2 * 1.5**2))
    weights /= weights.sum()
    span = float(y.max() - y.min())
    c1, c2 = (0.01 * span) ** 2, (0.03 * span) ** 2
    found = []
    for channel in range(2):
        for top in range(2):
            for left in range(3):
                a, b = (t[0, channel, top : top + 11, left : left + 11] for t in (x, y))
                mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
                var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
                cov = (weights * (a - mean_a) * (b - mean_b)).sum()
                top_part = (2 * mean_a * mean_b + c1) * (2 * cov + c2)
                found.append(top_part / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2)))
    assert ssim(x, y) == pytest.approx(float(sum(found) / len(found)))


def test_ssim_falls_with_noise_and_is_about_0_for_unrelated_images() -> None:
    one = image(1, 1, 4, 64, 64)
    values = [ssim(one + share * image(2, *one.shape), one) for share in (0, 0.1, 0.5, 2)]
    assert values == sorted(values, reverse=True)
    assert abs(ssim(image(2, *one.shape), one)) < 0.05


def test_lossless_is_an_error_to_float32_of_at_most_a_tenth_more_than_eagers_on_every_image() -> None:
    exact = [image(1), image(2)]
    noise = [image(3), image(4)]
    eager = [e + 0.001 * n for e, n in zip(exact, noise, strict=True)]

    def verdict(*shares: float) -> dict[str, Any]:
        latents = [e - s * n for e, n, s in zip(exact, noise, shares, strict=True)]
        return against_float32(latents, eager, exact)

    assert verdict(0.00109, 0.0005)["lossless"] is True
    assert verdict(0.00109, 0.0005)["error_to_eagers"] == pytest.approx(1.09, rel=1e-3)
    assert verdict(0.0005, 0.00112)["lossless"] is False


def test_there_is_no_verdict_where_eager_computes_in_float32_itself() -> None:
    exact = [image(1)]
    found = against_float32([image(1) + 1e-6], exact, exact)
    assert found["lossless"] is None and found["error_to_eagers"] is None


def test_reports_tell_the_median_and_the_worst_and_are_json() -> None:
    eager = [image(seed) for seed in (1, 2, 3)]
    found = comparison([eager[0], eager[1] * 1.1, eager[2] * 1.3], eager)["against_eager"]
    assert found["relative_error"]["median"] == pytest.approx(0.1, abs=1e-5)
    assert found["relative_error"]["worst"] == pytest.approx(0.3, abs=1e-5)
    assert found["psnr_db"]["worst"] == min(value for value in found["psnr_db"]["all"] if value is not None)
    assert found["psnr_db"]["all"][0] is None  # equal
    json.dumps(found, allow_nan=False)


# -- variants --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("eager", Variant("eager", None, "lossless", None, None)),
        ("torch_compile", Variant("torch_compile", None, "lossless", None, None)),
        ("torch_compile-cudagraphs", Variant("torch_compile", "cudagraphs", "lossless", None, None)),
        ("onediff-inductor", Variant("onediff", "inductor", "lossless", None, None)),
        ("onediff-inductor+steps:0.1", Variant("onediff", "inductor", "lossless", "steps", 0.1)),
        ("onediff-inductor+easycache:0.2", Variant("onediff", "inductor", "lossless", "easycache", 0.2)),
        ("onediff-inductor+fp8", Variant("onediff", "inductor", "fp8", None, None)),
        ("onediff-eager+fp8+steps:0.1", Variant("onediff", "eager", "fp8", "steps", 0.1)),
        ("easycache", Variant("eager", None, "lossless", "easycache", None)),
        ("easycache:0.2", Variant("eager", None, "lossless", "easycache", 0.2)),
    ],
)
def test_what_a_name_says(name: str, expected: Variant) -> None:
    assert Variant.parse(name) == expected
    assert Variant.parse(name).lossy == any(part in name for part in ("fp8", "steps", "easycache"))


@pytest.mark.parametrize(
    "name",
    [
        *("", "fast", "onediff", "onediff-fast", "eager-inductor", "torch_compile-cudagraph", "eager+", "eager:0.1"),
        *(
            "onediff-inductor+steps",
            "eager+steps:0.1",
            "onediff-inductor+steps:x",
            "easycaches",
            "easycache:",
            "eager+fp8",
            "torch_compile+fp8",
            "onediff-inductor+fp16",
        ),
    ],
)
def test_other_names_are_refused_by_name(name: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(repr(name))):
        variants.names(f"eager,{name}")


def _command_line(step: Step) -> list[str]:
    return [f"benchmarks.{step.module}", *step.arguments, "--output", "nowhere"]


@pytest.mark.parametrize(
    "step",
    [step for plan in PLANS.values() for job in plan for step in (job.measuring(), *job.compiling())],
    ids=lambda step: step.what,
)
def test_every_process_of_the_plans_is_understood_by_its_script(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each script reads its command line before it does anything else, and would end with 2."""

    class Understood(Exception):
        pass

    def understood(*_: Any, **__: Any) -> None:
        raise Understood

    script = importlib.import_module(f"benchmarks.{step.module}")
    monkeypatch.setattr(script, "_sample" if step.module == "restart" else "start_host", understood)
    monkeypatch.setattr(sys, "argv", _command_line(step))
    with pytest.raises(Understood):
        script.main()


def test_no_variant_of_a_plan_is_there_twice() -> None:
    for job in (job for plan in PLANS.values() for job in plan):
        assert len(job.variants) == len(set(job.variants)), job


# -- table, plan ------------------------------------------------------------------------------------


def sampling_report(**failed: str) -> dict[str, Any]:
    steps = {"eager": 40.0, "onediff-inductor": 20.0, "onediff-inductor+steps:0.1": 10.0, "easycache:0.2": 32.0}
    counted = {
        "calls": 20,
        "calls_reused": 5,
        "calls_eager": 0,
        "peak_mib": 100.0,
        "first_image_s": 1.5,
        "first_image_compiled": 1,
    }
    rows: dict[str, Any] = {
        name: {"step_ms": ms, "step_ms_min": ms - 1, "step_ms_max": ms + 2, **counted} for name, ms in steps.items()
    }
    rows |= {name: {"failed": reason} for name, reason in failed.items()}
    what = {"model": "tiny", "size": "128x128", "batch": 1, "steps": 20}
    return {"what": what, "environment": ENVIRONMENT, "variants": rows}


def quality_report() -> dict[str, Any]:
    measured = {"psnr_db": {"median": 30.0, "worst": 25.0}}
    row = {"against_eager": measured, "error_to_eagers": 1.02, "lossless": True}
    names = ("eager", "onediff-inductor", "onediff-inductor+steps:0.1", "easycache:0.2")
    return {**sampling_report(), "variants": dict.fromkeys(names, row)}


def test_files_are_called_after_date_gpu_and_content() -> None:
    assert file_name(sampling_report(), "vae") == "2026-01-02-h100-80gb-hbm3-vae.json"
    assert file_name({"environment": {"date": "2026-01-02"}}, "vae") == "2026-01-02-cpu-vae.json"


def job(module: str, report: dict[str, Any], status: int = 0) -> dict[str, Any]:
    return {"module": module, "status": status, "s": 1.0, "report": report}


def test_the_table_has_a_cell_for_everything_that_was_measured_and_nothing_else() -> None:
    parts = {"text_s": 0.1, "steps_s": 2.0, "decoding_s": 0.3, "peak_mib": 10.0}
    of_all = {"whole_s": 2.4, "whole_s_min": 2.3, "whole_s_max": 2.5, **parts}
    restarts = [
        {"variant": "eager", "process": which, "first_image_s": s} for which, s in (("first", 9), ("second", 4))
    ]
    vae = [{"case": "decode 64", "way": way, "module_ms": ms} for way, ms in (("eager", 8.0), ("general", 4.0))]
    jobs = {
        "tiny": job("sampling", sampling_report(torch_compile="RuntimeError: no")),
        "video": job("whole", {"variants": {"eager": of_all, "onediff-inductor": {**of_all, "whole_s": 1.2}}}),
        "vae": job("vae", {"rows": vae}),
        "restart": job("restart", {"processes": restarts, "environment": ENVIRONMENT}),
        "background": job("any_size", {"background": {"eager_image_s": 1.0, "image_meanwhile_s": 1.25}}),
        "quality-tiny": job("quality", quality_report()),
        "broken": {"module": "sampling", "status": 3, "s": 1.0},
    }
    lines = table({"jobs": jobs})
    assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert lines[2] == (
        "| tiny | eager | 40.0 (39.0 to 42.0) ms a step | 1.00x | 100 | 30.0 (worst 25.0) | 1.02 | yes | 5 of 20 |"
    )
    assert "failed: RuntimeError: no" in lines[6]
    assert lines[8].startswith(
        "| video | onediff-inductor | 1.200 (2.300 to 2.500) s: text 0.100, steps 2.000, decoding 0.300 | 2.00x | 10 |"
    )
    assert lines[10].startswith("| vae decode 64 | general | 4.0 ms | 2.00x |")
    assert lines[12].startswith("| restart | eager | 4.0 s: first image of the second process, PyTorch 2.13.0 |")
    assert lines[14].startswith("| background | while another process compiles | 1.250 s an image | 0.80x |")
    assert lines[15].startswith("| broken |  | failed with 3 |") and len(lines) == 16


def test_figures_of_ours_that_eager_made_are_said_to_be_so() -> None:
    report = sampling_report(torch_compile="RuntimeError: no")
    assert not ours_failed(report)  # the host's node failed, which is a result
    report["variants"]["onediff-inductor"]["calls_eager"] = 3
    assert ours_failed(report)
    assert "3 calls ran eager" in table({"jobs": {"tiny": job("sampling", report)}})[3]


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ({"text_eager": 0, "steps_eager": 0, "decoding_eager": 3}, 0),  # a video's first pieces are ComfyUI's
        ({"text_eager": 1, "steps_eager": 0}, 1),
        ({"steps_eager": 0, "calls": 0}, 1),
        ({"failed": "RuntimeError: no"}, 1),
    ],
)
def test_a_whole_of_which_a_part_ran_eager_is_not_ours(
    row: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = {"variants": {"eager": {"text_eager": 9}, "onediff-inductor": {"calls": 5, **row}}}
    monkeypatch.setattr(sys, "argv", ["whole", "--model", "tiny"])
    for name, value in {"start_host": None, "reported": report, "_print_table": None}.items():
        monkeypatch.setattr(whole, name, lambda *_, value=value, **__: value)
    assert whole.main() == status


def test_a_script_that_fails_loses_nothing_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = set()

    def status(
        command: Sequence[str], environment: dict[str, str], _patience: float, cores: Sequence[int], said: BinaryIO
    ) -> int:
        assert environment["ONEDIFF_CACHE_DIR"]
        used.add((environment["CUDA_VISIBLE_DEVICES"], tuple(cores)))
        said.write(b"done")
        time.sleep(0.1)
        if command[2] == "benchmarks.broken":
            return 1
        if command[2] == "benchmarks.silent":
            return 0
        Path(command[command.index("--output") + 1]).write_text(json.dumps(sampling_report()))
        return 1 if command[2] == "benchmarks.partly" else 0

    monkeypatch.setattr(everything, "_status", status)
    bench = everything.Bench("tiny", tmp_path, tmp_path / "results")
    monkeypatch.setattr(everything, "_cores", lambda: [3, 4, 5, 6])
    bench.measure([Job(name, name, "--model tiny") for name in ("broken", "silent", "partly", "whole")], ["0", "7"])
    assert used == {("0", (3, 4)), ("7", (5, 6))}
    assert bench.failed and bench.path is not None and bench.path.name == "2026-01-02-h100-80gb-hbm3-bench.json"
    jobs = json.loads(bench.path.read_text())["jobs"]
    assert {name: job["status"] for name, job in jobs.items()} == {
        "broken": 1,
        "silent": 1,  # it wrote nothing
        "partly": 1,
        "whole": 0,
    }
    assert "report" not in jobs["broken"] and jobs["partly"]["report"] == jobs["whole"]["report"] == sampling_report()
    if sys.platform == "linux":
        assert all(0 <= job["stolen"] <= 1 for job in jobs.values())


def test_of_each_job_it_is_said_how_long_others_had_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(processor, "_STAT", stat)
    #                 user nice system idle iowait irq softirq steal guest guest_nice
    stat.write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\ncpu3 10 0 5 100 7 0 0 2 8 0\ncpu4 0 0 0 50 0 0 0 0 0 0\ncpu5 9 9 9 9 9 9 9 9 9 9\n"
    )
    before = CoreTime.of([3, 4])
    assert before == CoreTime(17, 2)
    stat.write_text("cpu3 60 0 10 120 9 0 0 12 30 0\ncpu4 20 0 5 60 0 0 1 9 0 0\nintr 5\n")
    now = CoreTime.of([3, 4])
    assert before is not None and now is not None
    assert now.stolen_since(before) == pytest.approx((10 + 9) / (50 + 5 + 10 + 20 + 5 + 1 + 9))
    assert before.stolen_since(before) == 0
    stat.unlink()
    assert CoreTime.of([3]) is None


def test_how_long_pythons_collector_takes_is_noted_and_no_longer_than_asked_for() -> None:
    gc.disable()
    try:
        with collector_seconds() as found:
            gc.collect()
            gc.collect(0)
        gc.collect()
    finally:
        gc.enable()
    assert len(found) == 2 and found[0] > found[1] > 0


def test_python_is_slow_where_looks_take_longer_than_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = [0.00031] * 10 + [0.0003] * 990 + [0.00029, 0.0005]
    clock = itertools.accumulate(itertools.chain.from_iterable((1.0, each) for each in taken))
    monkeypatch.setattr(processor.time, "perf_counter", lambda: next(clock))
    python = PythonSpeed()
    assert not python.was_slow([0.355] * 20) and python.was_slow([0.365] * 20)
    assert python.look() == pytest.approx(0.29), "and from now on that is the fastest"
    assert python.was_slow([0.355] * 20) and not python.was_slow([0.29] * 15 + [0.5] * 5)
    assert python.look() == pytest.approx(0.5)


class Neighbour(Watched):
    """Makes images on a processor that somebody else slows down during some of them."""

    def __init__(self, slow: str) -> None:
        self.options = argparse.Namespace(variants=["ours"], rounds=3)
        self.images, self.slowed, self.models = {"ours": []}, {"ours": []}, {"ours": None}
        self._slow, self._python = iter(slow), self  # type: ignore[assignment]

    def first_images(self, _names: object = None) -> None: ...

    def round(self, _names: object = None) -> None:
        state = next(self._slow)
        if state == "x":
            self.models.clear()
        else:
            self.images["ours"].append({"python_ms": state})

    def was_slow(self, state: str) -> bool:
        return state == "s"

    def report(self) -> dict[str, Any]:
        assert next(self._slow, None) is None, "no more are made than have to be"
        return {}


@pytest.mark.parametrize(
    ("made", "counted", "passed_over"),
    [
        ("fff", "fff", ""),
        ("sfff", "fff", "s"),
        ("fssfsf", "fff", "sss"),
        ("sssssss", "sss", "ssss"),
        ("ssssssf", "ssf", "ssss"),
        ("fsx", "f", "s"),
    ],
)
def test_images_on_a_slowed_processor_do_not_count_as_long_as_others_may_follow(
    made: str, counted: str, passed_over: str
) -> None:
    found = Neighbour(made).run()
    kept, rest = ("".join(image["python_ms"] for image in found[which]["ours"]) for which in ("images", "slowed"))
    assert (kept, rest) == (counted, passed_over)


def test_a_file_names_the_processor_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "cpuinfo")
    facts = processor_facts()
    assert facts["processor"] is None and isinstance(facts["python_loop_ms"], float) and facts["python_loop_ms"] > 0
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: One: of a kind\nmodel name\t: Other\n")
    assert processor_facts()["processor"] == "One: of a kind"


def test_first_images_are_measured_with_another_torch_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes find that one first, and the file's environment is not theirs."""
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "torch.py").write_text("__version__ = '9.9'")
    code = """
import json, sys, torch
json.dump({"environment": {"date": "2026-01-02", "gpu": "NVIDIA H100", "torch": torch.__version__}, "processes": []},
          open(sys.argv[-1], "w"))
"""
    monkeypatch.setattr(everything.Bench, "_command", lambda _, __, output: [sys.executable, "-c", code, str(output)])
    bench = everything.Bench("tiny", tmp_path, tmp_path / "results")
    jobs = list(with_other_torch([job for job in PLANS["tiny"] if job.module != "whole"], str(packages)))
    assert [job.what for job in jobs] == ["tiny", "restart-tiny", "restart-tiny-other-torch", "quality-tiny"]
    bench.measure(jobs[1:3], [""])
    found = {what: job["report"]["environment"]["torch"] for what, job in bench.report["jobs"].items()}
    assert found == {"restart-tiny": torch.__version__, "restart-tiny-other-torch": "9.9"}
    assert bench.report["environment"]["torch"] == torch.__version__


@pytest.mark.parametrize(
    ("processes", "gpus", "at_once"),
    [(2, {"0": 100}, 2), (4, {"0": 20}, 2), (4, {"0": 5}, 1), (4, {"0": 10, "3": 10}, 2), (4, {"0": 5, "3": 5}, 2)],
)
def test_as_many_graphs_are_made_side_by_side_as_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int, gpus: dict[str, int], at_once: int
) -> None:
    """Each process writes down when it began and ended; one that takes more than a GPU has runs alone there."""
    code = """
import os, sys, time
start = time.time()
time.sleep(0.8)
print(start, time.time(), os.environ["CUDA_VISIBLE_DEVICES"])
sys.exit('2' in sys.argv)
"""
    monkeypatch.setattr(everything.Bench, "_command", lambda _, step, __: [sys.executable, "-c", code, step.what])
    bench = everything.Bench("tiny", tmp_path, tmp_path)
    bench.compile([Step(str(number), "sampling", (), 10) for number in range(4)], processes, gpus)
    lines = [(tmp_path / f"{number}.log").read_text().split() for number in range(4)]
    times = [(float(start), float(end)) for start, end, _ in lines]
    assert max(sum(start <= begun < end for start, end in times) for begun, _ in times) == at_once
    assert {gpu for _, _, gpu in lines} == set(gpus)
    assert [bench.report["compiling"][str(number)]["status"] for number in range(4)] == [0, 0, 1, 0]
    assert bench.failed


# -- the scripts -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_tiny_plan_runs_on_a_cpu(tmp_path: Path, root: Path) -> None:
    """Tiny models, an engine that compiles nothing: what is written is what the table reads."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks", "--plan", "tiny", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = tmp_path.glob("*-cpu-bench.json")
    report = json.loads(path.read_text())
    assert list(report["jobs"]) == [job.what for job in PLANS["tiny"]]
    rows = report["jobs"]["tiny"]["report"]["variants"]
    cached = rows["onediff-eager+steps:0.1"]
    assert cached["calls"] > cached["calls_reused"] > 0 and cached["calls_eager"] == 0
    assert rows["eager"]["step_ms_min"] <= rows["eager"]["step_ms"] <= rows["eager"]["step_ms_max"]
    video = report["jobs"]["whole-tiny"]["report"]["variants"]["onediff-eager"]
    assert video["calls"] > 0 and video["relative_error"] < 1e-3
    assert video["text_s"] + video["steps_s"] + video["decoding_s"] == pytest.approx(video["whole_s"], rel=0.1)
    eager = report["jobs"]["quality-tiny"]["report"]["variants"]["eager"]
    assert eager["against_eager"]["ssim"]["worst"] == pytest.approx(1)
    assert "s: first image of the second process" in done.stdout


@pytest.mark.parametrize("model", ["tiny", pytest.param("tiny-wan", marks=pytest.mark.slow)])  # images stand for videos
def test_what_a_vae_makes_is_compared_with_that_of_another_process(tmp_path: Path, root: Path, model: str) -> None:
    folders = {"ONEDIFF_CACHE_DIR": str(tmp_path / "store"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
    environment = {**os.environ, **folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for variant in ("eager", "onediff-eager"):
        output = tmp_path / f"{variant}.json"
        options = f"--model {model} --variant {variant} --folder {tmp_path} --output {output}"
        command = [sys.executable, "-m", "benchmarks.decoding", *options.split()]
        subprocess.run(command, cwd=root, env=environment, check=True, timeout=600)
    rows = json.loads((tmp_path / "onediff-eager.json").read_text())["rows"]
    assert max(row["off"] for row in rows) <= 1e-5 and min(row["s"] for row in rows) > 0
    assert [row["served"] > 0 for row in rows] == [row["may_be_served"] for row in rows]


def test_prompts_are_compared_with_those_of_another_process(tmp_path: Path, root: Path) -> None:
    folders = {"ONEDIFF_CACHE_DIR": str(tmp_path / "store"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
    environment = {**os.environ, **folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    reports = []
    for variant in ("eager", "onediff-eager"):
        output = tmp_path / f"{variant}.json"
        options = f"--model tiny --form fp8 --variant {variant} --folder {tmp_path} --output {output}"
        command = [sys.executable, "-m", "benchmarks.prompts", *options.split()]
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        reports.append(json.loads(output.read_text()))
    eager, ours = reports
    assert (eager["served"], ours["served"], ours["fallbacks"]) == (0, 24, {})
    assert max(ours["off"]) <= 1e-5 and min(map(min, ours["prompts_s"])) > 0


def test_first_images_of_a_workflow_are_timed_part_by_part(tmp_path: Path, root: Path) -> None:
    folders = {"ONEDIFF_CACHE_DIR": str(tmp_path / "store"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
    environment = {**os.environ, **folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    output = tmp_path / "report.json"
    options = f"--model tiny --variant onediff-eager --folder {tmp_path} --output {output}"
    command = [sys.executable, "-m", "benchmarks.first_workflow", *options.split()]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(output.read_text())
    assert report["counted"]["served"] == 3 * (2 + 4 + 1), "of three images: two stacks, four steps, and a decoding"
    for image in report["images"]:
        assert min(image.values()) > 0
        assert image["text_s"] + image["steps_s"] + image["decoding_s"] == pytest.approx(image["whole_s"])


@pytest.mark.slow
def test_scripts_of_no_plan_run_on_a_cpu(tmp_path: Path, root: Path) -> None:
    arguments = {
        "kernels": "--model tiny --variant onediff-eager",
        "cpu": "--model tiny --variant onediff-eager --steps 6",
    }
    reports = {}
    for script, options in arguments.items():
        output = tmp_path / f"{script}.json"
        command = [sys.executable, "-m", f"benchmarks.{script}", *options.split(), "--output", str(output)]
        folders = {"ONEDIFF_CACHE_DIR": str(tmp_path / "store"), "ONEDIFF_CONFIG_DIR": str(tmp_path / "config")}
        environment = {**os.environ, **folders, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        reports[script] = json.loads(output.read_text())
    cpu = reports["cpu"]
    assert cpu["graphs"] == [] and sum(function["own_ms"] for function in cpu["functions"]) > 0
    kernels = reports["kernels"]
    assert {"attention", "matrix products"} <= set(kernels["kinds"])
    assert sum(kind["ms"] for kind in kernels["kinds"].values()) == pytest.approx(kernels["busy_ms"])


@pytest.mark.parametrize("measured", [True, False])
def test_what_a_script_leaves_behind_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: bool
) -> None:
    """A compiler's process that goes on would slow the next script, and write to a folder that is being removed."""
    started = tmp_path / "started"
    code = (
        "import pathlib, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\n"
        "sys.exit(3)"
    )
    command = [sys.executable, "-c", code]
    if measured:
        with (tmp_path / "log").open("wb") as said:
            assert everything._status(command, dict(os.environ), 60, [], said) == 3
    else:
        bench = everything.Bench("tiny", tmp_path, tmp_path / "results")
        monkeypatch.setattr(bench, "_command", lambda *_: command)
        bench.compile([Step("a script", "script", (), 1)], 1, {"": 10})
        assert bench.report["compiling"]["a script"]["status"] == 3
    assert has_ended(int(started.read_text()))


def test_what_is_missing_of_each_block_is_by_its_layers_pages() -> None:
    """A layer counts whole where one of its pages is not there, for it is brought whole."""
    page = 32 << 20
    vbar = SimpleNamespace(base_addr=1 << 40, get_residency=lambda: [1, 3, 0, 2, 1])
    layers = [torch.nn.Linear(1, 1) for _ in range(5)]
    places = [(0, page), (page, page // 2), (page + page // 2, page), (2 * page, 512), (4 * page, 1)]
    for layer, (start, size) in zip(layers, places, strict=True):
        layer._v = (vbar, vbar.base_addr + start, size)
    blocks = torch.nn.Sequential(*layers[:2]), torch.nn.Sequential(*layers[2:]), layers[4], torch.nn.Linear(1, 1)
    assert list(map(missing_bytes, blocks)) == [0, page + 512, 0, 0]
