"""Models in Dynamic VRAM that cannot be served from there, and a form of each whose weights stay while it is loaded.

In Dynamic VRAM, the host's default on NVIDIA, layers fetch their weights one by one while they run, which no graph
can take. Where the host has nothing that pins them (see ``pinned_module``), and for runs that are split over GPUs, a
resident form is served. The host makes one for those who ask, by running the model's loader once more: the whole file
is read, and there is another model in memory. So a model gets one resident form here, which all its accelerated clones
share as ordinary clones of the host share a model, and which outlives the last of them for a while.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import weakref
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from ..adapters.attach import release_on_detach
from ..process.prompts import between_prompts
from .pinned_module import can_pin

log = logging.getLogger(__name__)

# The host drops a node's old output when a prompt starts. The new one is made when the nodes before it have run.
_KEPT_SECONDS = 300.0
_RETRY_SECONDS = 1.0
_ON_OTHER_GPUS = "multigpu"  # by this name the host keeps them on a patcher


def is_dynamic(patcher: Any) -> bool:
    """Whether layers fetch their weights one by one while they run."""
    return hasattr(patcher, "is_dynamic") and bool(patcher.is_dynamic())


def needs_resident_form(patcher: Any) -> bool:
    """Return True for a model in Dynamic VRAM that cannot be served from there.

    So it is where the host has nothing that pins weights, and where a run of a MODEL is split over GPUs.
    """
    return is_dynamic(patcher) and (not can_pin() or bool(_on_other_gpus(patcher)))


class SplitRun(NamedTuple):
    """What runs in the place of a MODEL.

    Attributes:
        patcher: a clone of the MODEL's; or its own, where the run is not split over GPUs.
        others: how many models on other GPUs are beside it.
    """

    patcher: Any
    others: int


def resident_over_gpus(patcher: Any) -> SplitRun:
    """Have all models of a run resident that ComfyUI's MultiGPU CFG Split has split over GPUs: a thread calls each.

    The host makes those on other GPUs from the loader, or takes what another workflow has loaded there, and so in
    Dynamic VRAM.

    Args:
        patcher: an accelerated MODEL whose run is about to begin.
    """
    others = _on_other_gpus(patcher)
    if needs_resident_form(patcher):
        patcher = resident_clone(patcher, "MODEL") or patcher
    if not is_dynamic(patcher) and any(map(_fetches_weights, others)):  # beside one that is they have to be, too
        patcher.set_additional_models(_ON_OTHER_GPUS, [_resident_beside(patcher, other) for other in others])
    return SplitRun(patcher, len(others))


def _on_other_gpus(patcher: Any) -> list[Any]:
    """Return the models on other GPUs that a split over them keeps beside a MODEL."""
    return list(patcher.get_additional_models_with_key(_ON_OTHER_GPUS))


def _resident_beside(patcher: Any, other: Any) -> Any:
    """Return a resident clone of a model on another GPU, which the host finds for the next split of ``patcher``."""
    resident = resident_clone(other, "MODEL") if _fetches_weights(other) else other
    if resident is None:
        return other
    _join_clones(resident, patcher)
    return resident


def _join_clones(patcher: Any, another: Any) -> None:
    """Have the host take two patchers for clones of one model, which MultiGPU CFG Split looks for on other GPUs."""
    if hasattr(another, "clone_base_uuid"):  # since the host has that node
        patcher.clone_base_uuid = another.clone_base_uuid


def _fetches_weights(patcher: Any) -> bool:
    """As ``is_dynamic``; also of a model in Dynamic VRAM that was given to a patcher of another class."""
    return is_dynamic(patcher) or any("_v" in vars(layer) for layer in patcher.model.modules())


def resident_clone(patcher: Any, kind: str) -> Any | None:
    """A clone of a patcher in Dynamic VRAM that shares the resident form of its model.

    Args:
        patcher: a ModelPatcher of the host's; it and its model stay as they are.
        kind: the host's name for what it belongs to: MODEL, VAE, CLIP.

    Returns:
        The clone; or None where the loader gives no resident form, after a warning. Such a model stays dynamic,
        and its calls run eager with that reason.
    """
    form = _forms().setdefault(patcher.model, _ResidentForm())
    base = form.base()
    try:
        if base is None:
            base = _loaded(patcher, kind)
        clone = patcher.clone(disable_dynamic=True, model_override=base.get_clone_model_override())
    except Exception as error:  # whatever a loader raises: of another extension, or its file is gone
        log.warning("OneDiff: this %s's loader gives no resident form (%s); it stays in Dynamic VRAM", kind, error)
        return None
    # The host manages memory through the parent once a clone is gone. The dynamic patcher could not: it has
    # another model. And whoever clones the clone holds the base by this.
    clone.parent = base
    # Not a clone of the dynamic patcher to the host: that would take it for its own on another GPU, and the server's
    # thread for prompts ends where it expects a model in Dynamic VRAM.
    _join_clones(clone, base)
    clone.hook_backup = base.hook_backup  # original weights too, which the host's clone() leaves with the dynamic model
    weakref.finalize(clone, _ResidentForm.outlive, weakref.ref(form)).atexit = False
    form.found_by(base)
    return clone


def _loaded(patcher: Any, kind: str) -> Any:
    """What the loader of ``patcher`` gives when asked for no Dynamic VRAM: the base of all clones.

    The host's ``clone`` would do the same and drop this patcher. But it is what knows the originals of patched
    weights, and what the host has in its list if the loader has put the model on the device already.

    Raises:
        LookupError: nobody has said how to load this model again.
        Exception: the loader's.
    """
    if patcher.cached_patcher_init is None:
        raise LookupError("it has not told ComfyUI how to load the model again")
    began = time.perf_counter()
    load, arguments, *place = patcher.cached_patcher_init
    base = load(*arguments, disable_dynamic=True)
    if place:  # of several things that it loads
        base = base[place[0]]
    if is_dynamic(base):  # the host's loaders of VAEs take no notice of what they are asked for
        base = base.clone(disable_dynamic=True, model_override=base.get_clone_model_override())
        base.parent = None
    base.load_device, base.offload_device = patcher.load_device, patcher.offload_device  # a node may have chosen others
    release_on_detach(base)
    seconds = time.perf_counter() - began
    log.info("OneDiff: loaded a %s (%s) in its resident form in %.1f s", kind, type(base.model).__name__, seconds)
    return base


class _ResidentForm:
    """The resident form of one dynamic model: how it is found, and what keeps it when no clone does.

    The form's base is a patcher without patches and parent, and holds nothing of the dynamic one. The clones hold it,
    as their ``parent``, and so does this object until a while has passed since a clone died. It dies with the dynamic
    model, and with it what it keeps.
    """

    def __init__(self) -> None:
        self._base: weakref.ref[Any] | None = None
        self._kept: Any = None
        self._until = 0.0  # of time.monotonic
        self._timer: threading.Timer | None = None

    def base(self) -> Any | None:
        """The base of all clones, as long as anything holds it."""
        return None if self._base is None else self._base()

    def found_by(self, base: Any) -> None:
        """``base`` is what ``base()`` gives from now on, until the last of its clones has been gone for a while."""
        self._base, self._kept = weakref.ref(base), base

    @staticmethod
    def outlive(reference: weakref.ref[_ResidentForm]) -> None:
        """A clone is dying: its base is kept for a while from now on.

        It may die in a garbage collection, on any thread in the middle of anything. So nothing here takes a lock, and a
        timer that runs is left to find that its time is not up.
        """
        form = reference()
        if form is not None:
            form._until = time.monotonic() + _KEPT_SECONDS
            form._kept = form.base() or form._kept  # of a clone in a cycle, only this object has it by now
            if form._timer is None:
                form._look_again_in(_KEPT_SECONDS)

    def _look_again_in(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._let_go, [weakref.ref(self)])
        self._timer.daemon = True
        self._timer.start()

    @staticmethod
    def _let_go(reference: weakref.ref[_ResidentForm]) -> None:
        form = reference()
        if form is None:
            return
        # When a model goes the host takes it out of its list of loaded models, on the thread where that happens. A
        # prompt may be walking through that list.
        with between_prompts() as between:
            left = form._until - time.monotonic()  # another clone may have died since
            if left > 0:
                form._look_again_in(left)
            elif between:
                form._kept = form._timer = None
            else:
                form._look_again_in(_RETRY_SECONDS)


@functools.cache
def _forms() -> WeakKeyDictionary[torch.nn.Module, _ResidentForm]:
    """The resident forms in this process, by the dynamic model."""
    return WeakKeyDictionary()
