"""Are pictures right in every way that ComfyUI keeps weights in memory? Real servers, compared with eager.

    python -m benchmarks.memory_modes                       every mode on this machine's GPU, some 15 minutes
    python -m benchmarks.memory_modes --modes default,lowvram --models sdxl --engines inductor

For each memory mode one server is started, and for each model two sequences of the same pictures are made in it:
without the speedup node, and with it. A sequence changes the seed, puts a LoRA on, changes its strength, takes it
off, adds it behind the speedup node, unloads all models (the host's /free), lets another model take its turn, and
follows one that was interrupted. Prints one line per picture, and ends with 1 if any is wrong. The models are tiny:
what is tested is where their weights are, not how fast they are.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dev.environment import comfyui_path, repository
from dev.host import ComfyServer, RunResult
from tools.models.checkpoints import checkpoint_file, ensure_checkpoints
from tools.workflows import Workflow, text_to_image

from .files import write

MODES: dict[str, tuple[str, ...]] = {
    "default": (),  # Dynamic VRAM, on NVIDIA
    "static": ("--disable-dynamic-vram",),
    "highvram": ("--highvram",),
    "gpu-only": ("--gpu-only",),
    "lowvram": ("--lowvram",),
    "static-lowvram": ("--lowvram", "--disable-dynamic-vram"),
    "novram": ("--novram",),
    "no-smart-memory": ("--disable-smart-memory",),
}
"""The host's memory modes by a name of ours, as command-line arguments."""

CPU_MODES: dict[str, tuple[str, ...]] = {
    "cpu": (),
    "cpu-no-smart-memory": ("--disable-smart-memory",),
    "cpu-no-cache": ("--cache-none",),  # every node runs for every picture: all is loaded anew
}
"""Those that a machine without a GPU has; the host lets --cpu go with no other VRAM mode."""

MODELS = {
    "sd15": ("sd15_min", {"tokens": 77, "dim": 768, "pooled_dim": 0}, 7.0),
    "sdxl": ("sdxl_min", {"tokens": 77, "dim": 2048, "pooled_dim": 1280}, 7.0),
    "flux": ("flux_min", {"tokens": 77, "dim": 64, "pooled_dim": 32}, 1.0),
}
"""Checkpoint, conditioning and guidance of the models by name."""

ENGINES = ("eager", "cudagraph", "inductor")
_MANY_STEPS = 10_000  # of a picture that is interrupted, which takes longer than it is waited for
_BEGUN_S = 1.0  # after which it is sampled
_ENDED_S = 60


@dataclass(frozen=True)
class Picture:
    """One picture of a sequence, and what is done to the host before it.

    Attributes:
        what: for people.
        seed: of its noise; every picture has its own, so that the host answers none out of its cache.
        lora: the strength of a LoRA; None for no LoRA node at all.
        behind: whether the LoRA node comes after the speedup node.
        unload: whether all models are unloaded first, and everything kept is thrown away.
        other_first: whether another model makes a picture first.
        interrupted: whether one of the same model is begun first, and interrupted while it is sampled.
    """

    what: str
    seed: int
    lora: float | None = None
    behind: bool = False
    unload: bool = False
    other_first: bool = False
    interrupted: bool = False


SEQUENCE = (
    Picture("first", 1),
    Picture("another seed", 2),
    Picture("LoRA 0.8", 3, lora=0.8),
    Picture("LoRA 0.3", 4, lora=0.3),
    Picture("LoRA 0.3 again", 5, lora=0.3),
    Picture("LoRA off", 6),
    Picture("LoRA 0.5 behind", 7, lora=0.5, behind=True),
    Picture("unloaded, with LoRA", 8, lora=0.3, unload=True),
    Picture("unloaded", 9, unload=True),
    Picture("after another model", 10, other_first=True),
    Picture("after an interruption", 11, interrupted=True),
    Picture("last", 12),
)


@dataclass(frozen=True)
class Row:
    """How one accelerated picture compares with the host's own.

    Attributes:
        off: the largest difference, as a share of the latent's range.
        allowed: the most that rounding explains.
        served: model calls that compiled graphs answered.
        eager: model calls that ran eager, by reason.
        recorded: CUDA graph recordings that were made.
        compiled: graphs that were compiled.
        seconds: the picture's, compilation included.
    """

    mode: str
    model: str
    engine: str
    picture: str
    off: float
    allowed: float
    served: int
    eager: dict[str, int]
    recorded: int
    compiled: int
    seconds: float

    @property
    def right(self) -> bool:
        return self.off <= self.allowed

    def __str__(self) -> str:
        verdict = "" if self.right else "  WRONG"
        counts = f"{self.served:3} served {sum(self.eager.values()):3} eager {self.recorded} recorded"
        line = f"{self.mode:15} {self.model:5} {self.engine:9} {self.picture:20} {self.off:8.1e} {counts} "
        return f"{line}{self.compiled} compiled {self.seconds:6.1f} s{verdict}" + "".join(
            f"\n    {count} eager: {reason}" for reason, count in self.eager.items()
        )


def main() -> int:
    """Run the modes; print a table. 0 if every picture is right."""
    import torch

    on_gpu = torch.cuda.is_available()
    modes = MODES if on_gpu else CPU_MODES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", default=",".join(modes), help="default: all")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--engines", default=",".join(engine for engine in ENGINES if on_gpu or engine != "cudagraph"))
    parser.add_argument("--reserve-vram", type=float, help="GB of the GPU that the host must leave free")
    parser.add_argument("--output", help="JSON file to write")
    options = parser.parse_args()
    rows, problems = [], []
    with tempfile.TemporaryDirectory(prefix="onediff-memory-") as folder:
        for mode in options.modes.split(","):
            arguments = modes[mode]
            if options.reserve_vram is not None:
                arguments += ("--reserve-vram", str(options.reserve_vram))
            with server(Path(folder) / mode, arguments, cpu=not on_gpu) as running:
                for model in options.models.split(","):
                    for row in measure(running, mode, model, options.engines.split(",")):
                        print(row, flush=True)
                        rows.append(row)
                problems += [f"{mode}: {line}" for line in running.log_text().splitlines() if "Traceback" in line]
    if options.output:
        write({"environment": _environment(), "rows": [asdict(row) for row in rows]}, options.output)
    wrong = [row for row in rows if not row.right]
    eager = sum(not row.served for row in rows)
    print(
        f"\n{len(rows)} pictures: {len(wrong)} wrong, {eager} without acceleration, {len(problems)} tracebacks in logs"
    )
    for line in [*map(str, wrong), *problems]:
        print(line)
    return 1 if wrong or problems else 0


def server(base: Path, arguments: Sequence[str], cpu: bool) -> ComfyServer:
    """A server in ``base`` with the tiny checkpoints and a LoRA for each; not started yet.

    What is compiled is kept beside ``base``: servers there share it.
    """
    comfyui, kept = comfyui_path(), repository() / ".cache" / "checkpoints"
    kept.mkdir(parents=True, exist_ok=True)
    ensure_checkpoints(comfyui, kept, [checkpoint for checkpoint, _, _ in MODELS.values()])
    loras = base / "models" / "loras"
    loras.mkdir(parents=True, exist_ok=True)
    for checkpoint, _, _ in MODELS.values():
        _make_lora(kept / checkpoint_file(checkpoint), loras / checkpoint_file(checkpoint))
    made = ComfyServer(
        comfyui,
        base,
        cpu=cpu,
        packs=[("tiny_nodes", repository() / "tests" / "host" / "tiny_nodes")],
        args=arguments,
        env={
            "TORCHINDUCTOR_CACHE_DIR": str(base.parent / "inductor"),
            "ONEDIFF_CACHE_DIR": str(base.parent / "graphs"),
            "ONEDIFF_CONFIG_DIR": str(base.parent / "config"),
        },
    )
    if not made.checkpoints.exists():
        made.checkpoints.symlink_to(kept, target_is_directory=True)
    return made


def measure(running: ComfyServer, mode: str, model: str, engines: Sequence[str]) -> Iterator[Row]:
    """Make ``SEQUENCE`` without the node and once with each of ``engines``, and compare.

    Raises:
        RuntimeError: a run failed, with the host's error; or the LoRA changes nothing, so that all this proves nothing.
    """
    import torch

    # In 16 bits, rounding in another order is as far off as this; the bounds are those of the tests.
    allowed = 2e-2 if torch.cuda.is_available() else 1e-4
    plain = {}
    for picture in SEQUENCE:
        _prepare(running, model, None, picture)
        plain[picture] = _make(running, model, None, picture)[0]
    with_lora = next(picture for picture in SEQUENCE if picture.lora)
    if off(_make(running, model, None, replace(with_lora, lora=None))[0], plain[with_lora]) < 5 * allowed:
        raise RuntimeError(f"the LoRA for {model} does not change the picture")
    for engine in engines:
        for picture, expected in plain.items():
            _prepare(running, model, engine, picture)
            before = running.get_json("/onediff/report")
            actual, seconds = _make(running, model, engine, picture)
            after = running.get_json("/onediff/report")
            fell_back = {
                reason: count - before["fallbacks"].get(reason, 0) for reason, count in after["fallbacks"].items()
            }
            counts = {name: after[name] - before[name] for name in ("served", "recorded", "compiled")}
            yield Row(
                mode=mode,
                model=model,
                engine=engine,
                picture=picture.what,
                off=off(actual, expected),
                allowed=allowed,
                eager={reason: count for reason, count in fell_back.items() if count},
                seconds=round(seconds, 3),
                **counts,
            )


def off(actual: Any, expected: Any) -> float:
    """Return how far a latent is from another at most, as a share of the other's range."""
    return float((actual - expected).abs().max() / (expected.max() - expected.min()))


def _prepare(running: ComfyServer, model: str, engine: str | None, picture: Picture) -> None:
    if picture.unload:
        running.free()
    if picture.other_first:
        other = next(name for name in MODELS if name != model)
        _latents(running.run(_workflow(other, engine, replace(SEQUENCE[0], seed=1000 + picture.seed))))
    if picture.interrupted:
        _interrupt(running, _workflow(model, engine, replace(picture, seed=1000 + picture.seed)))


def _interrupt(running: ComfyServer, workflow: Workflow) -> None:
    """Begin a picture of many steps, and interrupt it.

    Raises:
        RuntimeError: it did not end for that.
    """
    workflow["sampler"]["inputs"]["steps"] = _MANY_STEPS
    prompt = running.post("/prompt", {"prompt": workflow})["prompt_id"]
    time.sleep(_BEGUN_S)
    running.post("/interrupt", {"prompt_id": prompt})
    ended = time.monotonic() + _ENDED_S
    while not (history := running.get_json(f"/history/{prompt}")):
        if time.monotonic() > ended:
            raise RuntimeError(f"a picture went on for {_ENDED_S} s after it was interrupted")
        time.sleep(0.1)
    told = [what for what, _ in history[prompt]["status"]["messages"]]
    if "execution_interrupted" not in told:
        raise RuntimeError(f"a picture that was interrupted ended otherwise: {told}")


def _make(running: ComfyServer, model: str, engine: str | None, picture: Picture) -> tuple[Any, float]:
    """The picture's latent, and the seconds that it took."""
    from safetensors.torch import load

    result = running.run(_workflow(model, engine, picture))
    ((_, data),) = _latents(result)
    return load(data)["latent_tensor"].float(), result.seconds


def _latents(result: RunResult) -> list[tuple[str, bytes]]:
    if result.status != "success":
        raise RuntimeError(f"the host could not make a picture: {result.error}")
    return result.latents


def _workflow(model: str, engine: str | None, picture: Picture) -> Workflow:
    checkpoint, conditioning, cfg = MODELS[model]
    workflow = text_to_image(
        checkpoint_file(checkpoint),
        width=128,
        height=128,
        steps=4,
        cfg=cfg,
        seed=picture.seed,
        engine=engine,
        conditioning=conditioning,
        save_latent=True,
    )
    for name in ("decode", "save"):
        del workflow[name]
    if picture.lora is not None:
        # Between loader and speedup node, or between speedup node and sampler.
        after = "speedup" if picture.behind and engine is not None else "loader"
        before = "sampler" if after == "speedup" or engine is None else "speedup"
        lora = {"lora_name": checkpoint_file(checkpoint), "strength_model": picture.lora, "model": [after, 0]}
        workflow["lora"] = {"class_type": "LoraLoaderModelOnly", "inputs": lora}
        workflow[before]["inputs"]["model"] = ["lora", 0]
    return workflow


def _make_lora(checkpoint: Path, destination: Path) -> None:
    """A LoRA of rank 4 on every matrix of a checkpoint's diffusion model, strong enough to be another picture."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(5)
    prefix, lora = "model.diffusion_model.", {}
    for name, weight in load_file(checkpoint).items():
        if name.startswith(prefix) and name.endswith(".weight") and weight.ndim == 2:
            layer = f"diffusion_model.{name.removeprefix(prefix).removesuffix('.weight')}"
            rows, columns = weight.shape
            lora[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.2
            lora[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * columns**-0.5
    save_file(lora, destination)


def _environment() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    if torch.cuda.is_available():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["gpu"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    return found


if __name__ == "__main__":
    sys.exit(main())
