"""Accelerate a copy of a ComfyUI VAE.

A VAE has neither ``clone`` nor wrappers. The copy holds a proxy of the VAE's module whose ``decode`` and ``encode`` are
served. The patcher, the memory management and the tiling stay the host's. The VAE that came in is not touched.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...buckets import BucketSet
from ...capture.call import Signature
from ...capture.shape_range import batch_tensor
from ...engines.cudagraph import CudaGraphEngine
from ...messages import Message, message
from ...serving.dispatcher import Dispatcher
from ...serving.options import Options, no_sizes
from ...store.artifact import Manifest
from ..process.process import metrics
from ..weights.dynamic_vram import needs_resident_form, resident_clone
from .adapter import Adapter, module_at
from .attach import dispatcher_for, pass_through, unfit, with_methods_of
from .module_proxy import ModuleProxy, module_behind, served_instead, server_behind, serves
from .part import Arguments, WholeModule
from .placement import ModelServer
from .video_pieces import VideoDispatcher

log = logging.getLogger(__name__)


def accelerate_vae(
    vae: Any,
    engine: str,
    node_id: str | None = None,
    compile: str = "wait",
    buckets: BucketSet | None = None,
    methods: Collection[str] = ("decode", "encode"),
) -> Any:
    """Return a copy of ``vae`` whose decoding and encoding are served by compiled graphs.

    Args:
        vae: a ComfyUI VAE.
        engine: one of ``settings.ENGINE_NAMES``.
        node_id: the node that shows what is going on.
        compile: one of ``settings.COMPILE_CHOICES``.
        buckets: sizes of images that get graphs of their own.
        methods: which of "decode" and "encode" are served.

    Returns:
        The accelerated copy; or, where nothing can be captured, ``vae`` itself, after a warning that says why.
        A workflow never fails because it could not be made faster.
    """
    module = module_behind(getattr(vae, "first_stage_model", None))
    reason = _impossible(vae, module)
    if reason is not None:
        return pass_through(vae, reason, node_id, name="the VAE")
    options = Options(
        specialize=no_sizes if buckets is None else _sizes_of(buckets, vae.spacial_compression_decode()),
        compile=compile,
        # Launching kernels is a small part of what a large image costs. A recording would keep the memory of all its
        # activations, gigabytes from 1024x1024 on, and push the recordings of the diffusion model out of their budget.
        record_only_launch_bound=engine != CudaGraphEngine.name,
    )
    dispatcher = dispatcher_for("VAE", engine, node_id, options, VideoDispatcher)
    kind: type = type(vae)
    copy: Any = object.__new__(with_methods_of(_Runs, kind))
    vars(copy).update(vars(vae))
    copy.patcher, module = _to_serve(vae, module)
    server = ModelServer(_Module(module, vae.vae_dtype), dispatcher, in_blocks=False)
    copy.first_stage_model = ModuleProxy(module, server, methods)
    return copy


def preparing(vae: Any, exact: bool = False) -> Any:
    """Return a copy of an accelerated VAE whose calls wait for their graphs, whatever was chosen on the node.

    Args:
        vae: what ``accelerate_vae`` gave. A VAE that is not accelerated comes back as it is.
        exact: wait for the graph of one size too, if the size is in the node's buckets.
    """
    server = _server_of(vae)
    if server is None:
        return vae
    copy: Any = object.__new__(type(vae))
    vars(copy).update(vars(vae))
    copy.first_stage_model = served_instead(vae.first_stage_model, server.preparing(exact))
    return copy


def find_vae_dispatcher(vae: Any) -> Dispatcher | None:
    """Return what serves the calls of an accelerated VAE; None if it is not accelerated."""
    server = _server_of(vae)
    return None if server is None else server.dispatcher


def _server_of(vae: Any) -> ModelServer | None:
    server = server_behind(getattr(vae, "first_stage_model", None))
    return server if isinstance(server, ModelServer) else None


def _impossible(vae: Any, module: Any) -> Message | None:
    """Return why nothing of a VAE can be captured, or None."""
    if not isinstance(module, torch.nn.Module):
        return unfit("vae", vae, message("a VAE with layers of its own"))
    if getattr(module, "comfy_has_chunked_io", False):
        # LTX. It also draws random numbers while it decodes.
        return message(
            "a {kind} writes its images piece by piece into a buffer, which no graph can yet",
            kind=type(module).__qualname__,
        )
    return None


class _Module(WholeModule):
    """The module of a VAE.

    Args:
        module: this one.
        dtype: what it computes in.
    """

    def __init__(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        super().__init__(module)
        self._dtype = dtype

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    def memory_required(self, size: torch.Size) -> float:
        """Return 0: beside what a call takes, the weights are little, and it needs each of them however they come.

        Where memory runs out with them there, it most likely does without. Then the host goes on in tiles.
        """
        return 0

    def shown_by(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Arguments | None:
        """Return a corner of an image, as the call: all of a large one takes seconds."""
        data = args[0] if args else None
        if not isinstance(data, torch.Tensor) or data.ndim < _IMAGE_AXES:
            return None
        height, width = (max(1, side // (_PART * _CORNER)) * _CORNER for side in data.shape[-2:])
        corner = data[..., :height, :width]
        return (corner, *args[1:]), kwargs


_IMAGE_AXES = 4
_PART, _CORNER = 4, 64  # a fourth of each side, in multiples that each VAE takes of pixels


def _to_serve(vae: Any, module: torch.nn.Module) -> tuple[Any, torch.nn.Module]:
    """Return the patcher and the module of a VAE that are served: its own, where that can be.

    Where it cannot be served from Dynamic VRAM, the host's loaders load it anew in a form whose weights stay in place
    while it is loaded, and which is moved as a whole. A VAE from elsewhere stays dynamic.
    """
    patcher = resident_clone(vae.patcher, "VAE") if needs_resident_form(vae.patcher) else None
    if patcher is None:
        return vae.patcher, module
    # Loaded for Dynamic VRAM its weights have the file's dtype, and layers cast them; whole, they need the VAE's.
    # A form that is shared has it already, and nothing happens to it.
    return patcher, patcher.model.to(vae.vae_dtype)


class _Runs:
    """Over a VAE class: each of its calls by a node is one run of the dispatcher, however many tiles it has."""

    first_stage_model: Any

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        with self._run("decode"):
            return super().decode(*args, **kwargs)  # type: ignore[misc]

    def decode_tiled(self, *args: Any, **kwargs: Any) -> Any:
        with self._run("decode"):
            return super().decode_tiled(*args, **kwargs)  # type: ignore[misc]

    def encode(self, *args: Any, **kwargs: Any) -> Any:
        with self._run("encode"):
            return super().encode(*args, **kwargs)  # type: ignore[misc]

    def encode_tiled(self, *args: Any, **kwargs: Any) -> Any:
        with self._run("encode"):
            return super().encode_tiled(*args, **kwargs)  # type: ignore[misc]

    @contextlib.contextmanager
    def _run(self, method: str) -> Iterator[None]:
        module, dispatcher = self.first_stage_model, find_vae_dispatcher(self)
        if dispatcher is None:
            metrics().fell_back(message("a node behind OneDiff VAE Speedup has given the VAE another module"))
        elif serves(module, method):
            before = _calls(dispatcher)
            dispatcher.begin_run()
            yield
            if _calls(dispatcher) > before:
                dispatcher.end_run(
                    module_behind(module), message("decoded") if method == "decode" else message("encoded")
                )
            else:
                dispatcher.metrics.fell_back(
                    message(
                        "this VAE does not call the method {method} of its module, which is what a graph can serve",
                        method=method,
                    )
                )
            return
        yield


def _calls(dispatcher: Dispatcher) -> int:
    counted = dispatcher.metrics.snapshot()
    return int(counted["served"] + sum(counted["fallbacks"].values()))


def _sizes_of(buckets: BucketSet, ratio: int) -> Callable[[Signature], bool]:
    """Return a test of signatures: True if the call is for images of a size in ``buckets``.

    Args:
        ratio: pixels of an image's side for one latent pixel."""

    def wanted(signature: Signature) -> bool:
        index = batch_tensor(signature.tensors)
        shape = signature.tensors[index].shape if index is not None else ()
        if len(shape) < 4:
            return False
        factor = ratio if signature.function.endswith(".decode") else 1
        return buckets.holds(shape[-1] * factor, shape[-2] * factor, shape[0])

    return wanted


def _other_latents(vae: Any, manifest: Manifest) -> Message | None:
    """Return why a decoder's graph is for other latents; decoders of many families have weights of the same names."""
    decodes = any(line.startswith("function ") and line.endswith(".decode") for line in manifest.signature)
    channels = manifest.shapes["axes"][0][1] if decodes else None
    if not isinstance(channels, int) or channels == vae.latent_channels:
        return None
    return message(
        "architecture: compiled for {target} with latents of {theirs} channels, and this VAE's have {ours}",
        target=manifest.target,
        theirs=channels,
        ours=vae.latent_channels,
    )


def _served_modules(vae: Any) -> Sequence[torch.nn.Module]:
    """Return the module whose calls are served, and its parts, whose calls are for a video's pieces."""
    return [part for module in module_at("first_stage_model")(vae) for part in (module, *module.children())]


ADAPTER = Adapter(
    node=message("OneDiff VAE Speedup"),
    accelerate=accelerate_vae,
    find_dispatcher=find_vae_dispatcher,
    modules=_served_modules,
    dtype=lambda vae: vae.vae_dtype,
    other_architecture=_other_latents,
    preparing=preparing,
)
