"""What a fleet is made of: the same from the command line and from a cluster's YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..folders import cache_folder

GATEWAY_PORT = 8188
"""ComfyUI's own, so that clients need no change."""


@dataclass(frozen=True)
class FleetOptions:
    """A fleet.

    Attributes:
        comfyui: ComfyUI's folder, on every machine.
        python: the interpreter that has ComfyUI's requirements.
        base: whose ``models`` and ``custom_nodes`` the workers use; ``comfyui`` unless given.
        folder: on each machine by itself: what the workers write.
        shared: on all machines the same: ``input`` and ``user``; ``folder/shared`` unless given.
        journal: the URL of a folder or object store; ``folder/journal`` unless given.
        store: the URL of the artifacts' remote store, or nothing.
        store_role: what the workers may do there.
        warm_up: a folder of workflows that each worker runs before it takes prompts, or nothing.
        replicas: how many workers there are at least.
        max_replicas: how many at most.
        cpu: whether they run on the CPU.
        comfyui_args: more for ComfyUI's command line.
        host: the address that the gateway listens on.
        port: its port.
        environment: more environment variables for the workers.
    """

    comfyui: str
    python: str
    base: str = ""
    folder: str = field(default_factory=lambda: str(cache_folder() / "fleet"))
    shared: str = ""
    journal: str = ""
    store: str = ""
    store_role: str = ""
    warm_up: str = ""
    replicas: int = 1
    max_replicas: int = 0
    cpu: bool = False
    comfyui_args: str = ""
    host: str = "127.0.0.1"
    port: int = GATEWAY_PORT
    environment: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(given: Mapping[str, Any]) -> FleetOptions:
        """Return the options in a YAML file's ``args``.

        Raises:
            ValueError: says what is missing or unknown.
        """
        unknown = given.keys() - FleetOptions.__dataclass_fields__.keys()
        if unknown:
            raise ValueError(f"a fleet has no option {', '.join(sorted(unknown))}")
        missing = {"comfyui", "python"} - given.keys()
        if missing:
            raise ValueError(f"a fleet needs {' and '.join(sorted(missing))}")
        return FleetOptions(**given)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``of`` reads."""
        return asdict(self)

    @property
    def journal_url(self) -> str:
        """Return where prompts and results are written."""
        return self.journal or (Path(self.folder).resolve() / "journal").as_uri()

    @property
    def most(self) -> int:
        """Return how many workers there may be."""
        return max(self.replicas, self.max_replicas)
