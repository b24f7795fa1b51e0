"""Time the first image after a restart: the same model in one process after another.

    COMFYUI_PATH=... python -m benchmarks.restart --model sdxl

For ours and for ComfyUI's own compile node, a first process starts with nothing on disk, and a
second one finds what the first left: our artifact store with Inductor's cache empty, Inductor's
cache for the host's node. Time is from the loaded model to the finished image. Each process runs one variant alone, so
its peak memory is that variant's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from .files import write
from .sampling import MODELS
from .variants import names


def main() -> int:
    """Run the processes; write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="sdxl")
    parser.add_argument("--size", help="image width x height in pixels (default: what the model was made for)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--variants", type=names, default="eager,torch_compile,onediff-inductor")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    rows = []
    environment: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for variant in options.variants:
            for process in ("first", "second"):
                report = _sample(options, variant, Path(folder), process)
                environment, options.size = report["environment"], report["what"]["size"]
                rows.append(_row(variant, process, report, Path(folder)))
                print(rows[-1], flush=True)
    result: dict[str, Any] = {
        "what": {k: v for k, v in vars(options).items() if k != "output"},
        "environment": environment,
    }
    result["processes"] = rows
    write(result, options.output)
    width = max(map(len, options.variants))
    print(f"\n{'variant':{width}} {'process':8} {'first image s':>13}", end=" ")
    print(f"{'captured':>8} {'compiled':>8} {'loaded':>6} {'load s':>6}")
    for row in rows:
        load = f"{row['load_s']:.2f}" if row["load_s"] else "-"
        print(
            f"{row['variant']:{width}} {row['process']:8} {row['first_image_s']:13.2f} {row['captured']:8} "
            f"{row['compiled']:8} {row['loaded']:6} {load:>6}",
            flush=True,
        )
    return 0


def _sample(options: argparse.Namespace, variant: str, folder: Path, process: str) -> dict[str, Any]:
    output = folder / "report.json"
    command = [sys.executable, "-m", "benchmarks.sampling", "--model", options.model]
    command += ["--size", options.size] if options.size else []
    command += ["--steps", str(options.steps), "--rounds", "1", "--variants", variant, "--output", str(output)]
    if not variant.startswith("onediff"):
        command += ["--inductor-cache", str(folder / f"inductor-{variant}")]
    folders = {"ONEDIFF_CACHE_DIR": str(folder / "store"), "ONEDIFF_CONFIG_DIR": str(folder / "config")}
    done = subprocess.run(command, env={**os.environ, **folders}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{variant}, {process} process failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    report = dict(json.loads(output.read_text()))
    if "failed" in report["variants"][variant]:
        raise SystemExit(f"{variant}, {process} process failed: {report['variants'][variant]['failed']}")
    return report


def _row(variant: str, process: str, report: dict[str, Any], folder: Path) -> dict[str, Any]:
    onediff = report["onediff"]
    return {
        "variant": variant,
        "process": process,
        "first_image_s": report["variants"][variant]["first_image_s"],
        "next_image_s": report["variants"][variant]["image_s"],
        "peak_mib": report["variants"][variant]["peak_mib"],
        **{name: onediff[name] for name in ("captured", "compiled", "loaded")},
        "load_s": next((graph["seconds"] for graph in onediff["graphs"] if graph["how"] == "loaded"), None),
        "compile_s": next((graph["seconds"] for graph in onediff["graphs"] if graph["how"] == "compiled"), None),
        "artifact_bytes": sum(path.stat().st_size for path in folder.glob("store/graphs/*.graph")) or None,
    }


if __name__ == "__main__":
    sys.exit(main())
