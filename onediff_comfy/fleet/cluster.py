"""The fleet on Ray: one gateway, which Ray restarts, and workers, which Ray Serve places, replaces and scales.

Prompts do not go through Ray. Its HTTP proxy takes 5 ms for a request where the gateway's own server takes 0.2 ms, and
ComfyUI's clients make several for each prompt; so the gateway talks to the workers' ComfyUI directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from .fleet_options import FleetOptions
from .worker import Worker, WorkerError

if TYPE_CHECKING:
    from .gateway.api import Gateway

log = logging.getLogger(__name__)

NAME = "onediff-fleet"
"""The Ray namespace, and the Serve application."""
_GATEWAY = "gateway"

_PROMPTS_OF_A_WORKER = 2  # running and waiting; of more, another worker takes some
_ASK_S = 5.0
_TRIES = 3
_PATIENCE_S = 30.0
_DRAIN_S = 600.0
_SILENT_S = 180.0
_HEAD = "node:__internal_head__"  # a resource that Ray gives to the head node alone


class GatewayActor:
    """The gateway's process."""

    async def __init__(self, options: Mapping[str, Any]) -> None:  # type: ignore[misc] # Ray awaits it
        from aiohttp import web

        logging.basicConfig(level=logging.INFO)
        self._options = FleetOptions.of(options)
        self._gateway, app = await self._take_over()
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, self._options.host, self._options.port).start()

    async def _take_over(self) -> tuple[Gateway, Any]:
        """Return the gateway and its server, once the journal can be read: what is in it, it answers for."""
        from .gateway.api import Gateway
        from .gateway.journal import Journal

        about = {"pid": os.getpid(), "journal": self._options.journal_url, "replicas": self._options.replicas}
        while True:
            gateway = Gateway(Journal(self._options.journal_url), about)
            try:
                return gateway, await gateway.application()
            except gateway.ledger.journal.errors as error:
                log.error("the journal at %s cannot be read: %s", self._options.journal_url, error)
                await gateway.stop()
                await asyncio.sleep(_ASK_S)

    async def register(self, facts: Mapping[str, Any]) -> int:
        """Take a worker's word that it is there. Return how many prompts are unfinished."""
        self._gateway.carrier.register(facts)
        return len(self._gateway.ledger.open)

    async def ready(self) -> int:
        """Return the process id, once the server listens."""
        return os.getpid()


class Replica:
    """One worker as Ray Serve runs it. Made when it is ready for prompts."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import ray

        logging.basicConfig(level=logging.INFO)
        self._ray = ray
        given = FleetOptions.of(options)
        alone = given.host.startswith("127.")
        node = ray.util.get_node_ip_address()
        self._worker = Worker(given, "127.0.0.1" if alone else node)
        gpus = ",".join(map(str, ray.get_gpu_ids()))
        name = f"{node}-{self._worker.place.number}"
        self._facts = {"name": name, "run": self._worker.run, "node": node, "gpu": gpus, "url": self._worker.url}
        self._state, self._detail, self._open = "starting", "", 0
        self._begun, self._ended = threading.Event(), threading.Event()
        self._failure: Exception | None = None
        self._answered = time.monotonic()
        # ComfyUI is ended with the thread that starts it, so that thread stays.
        threading.Thread(target=self._live, daemon=True).start()
        threading.Thread(target=self._beat, daemon=True).start()
        self._begun.wait()
        if self._failure is not None:
            self._ended.set()
            raise self._failure

    def _live(self) -> None:
        try:
            self._worker.start()
            self._state = "warming up"
            problems = self._worker.warm_up(self._say)
            self._state, self._detail = "ready", "; ".join(problems)
        except Exception as error:  # Serve says it, and tries again
            self._failure = error
        self._begun.set()
        self._ended.wait()

    def _say(self, workflow: str) -> None:
        self._detail = workflow

    def _beat(self) -> None:
        """Tell the gateway that the worker is there, for as long as it is."""
        from .gateway.link import HEARTBEAT_S

        while not self._ended.is_set():
            if self._state == "starting" or self._worker.unfinished() is not None:
                self._answered = time.monotonic()
                self._tell()
            self._ended.wait(HEARTBEAT_S)

    def _tell(self) -> None:
        facts = {**self._facts, "pid": self._worker.pid, "state": self._state, "detail": self._detail}
        with contextlib.suppress(self._ray.exceptions.RayError, ValueError):  # it is being restarted
            gateway = self._ray.get_actor(_GATEWAY, namespace=NAME)
            self._open = self._ray.get(gateway.register.remote(facts), timeout=_ASK_S)

    def check_health(self) -> None:
        """Make sure that ComfyUI runs and answers; called by Serve, which replaces a replica for which this fails."""
        self._worker.check()
        silent = time.monotonic() - self._answered
        if silent > _SILENT_S:
            raise WorkerError(f"ComfyUI has not answered for {silent:.0f} s")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what ``replicas_wanted`` is told; called by Serve."""
        return {"open": float(self._open)}

    def __del__(self) -> None:
        """Finish what has begun, then end; called by Serve when a replica has to go."""
        if getattr(self, "_state", "gone") == "gone" or self._ended.is_set():
            return
        self._state = "draining"
        self._tell()
        deadline = time.monotonic() + _DRAIN_S
        while self._worker.unfinished() and time.monotonic() < deadline:
            time.sleep(1)
        self._state = "gone"
        self._tell()
        self._ended.set()
        self._worker.stop()


def replicas_wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Return how many workers the unfinished prompts need; Serve's autoscaling policy.

    Args:
        context: Ray Serve's ``AutoscalingContext``. Each replica reports the same number, that of the whole fleet.
    """
    told = (context.aggregated_metrics or {}).get("open") or {}
    unfinished = max(told.values(), default=0.0)
    wanted = math.ceil(unfinished / _PROMPTS_OF_A_WORKER)
    most, least = context.capacity_adjusted_max_replicas, context.capacity_adjusted_min_replicas
    return max(least, min(most, wanted)), dict(context.policy_state or {})


def deployment_options(options: FleetOptions) -> dict[str, Any]:
    """Return how Serve is to run the workers."""
    scaled: dict[str, Any] = {"num_replicas": options.replicas}
    if options.most > options.replicas:
        policy = {"policy_function": f"{__name__}:{replicas_wanted.__name__}"}
        scaled = {"min_replicas": options.replicas, "max_replicas": options.most, "policy": policy}
        scaled |= {"metrics_interval_s": 2.0, "look_back_period_s": 10.0}
        scaled |= {"upscale_delay_s": 10.0, "downscale_delay_s": 300.0}
        scaled = {"autoscaling_config": scaled}
    resources = {"num_cpus": 1} if options.cpu else {"num_cpus": 0, "num_gpus": 1}
    return {
        **scaled,
        "name": "worker",
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_timeout_s": _DRAIN_S + 30.0,
        "ray_actor_options": resources,
    }


def application(args: Mapping[str, Any]) -> Any:
    """Return the Serve application, having started the gateway; what a Serve config's ``import_path`` names.

    Args:
        args: of ``FleetOptions``, by name.
    """
    from ray import serve

    options = FleetOptions.of(args)
    gateway(options, log.info)
    return serve.deployment(**deployment_options(options))(Replica).bind(options.to_dict())


def gateway(options: FleetOptions, say: Callable[[str], None]) -> Any:
    """Return the gateway's actor, which is started if it is not there. Ray restarts it where it was, on the head node.

    Args:
        say: told when it takes long.

    Raises:
        ray.exceptions.RayActorError: it could not start.
    """
    import ray

    # Detached: it outlives whoever starts it. All its methods are coroutines.
    placed = {"num_cpus": 0, "resources": {_HEAD: 0.001}, "max_restarts": -1, "max_task_retries": 0}
    named = {"name": _GATEWAY, "namespace": NAME, "lifetime": "detached", "get_if_exists": True}
    actor = ray.remote(GatewayActor).options(**placed, **named, max_concurrency=1000).remote(options.to_dict())
    ready = actor.ready.remote()
    while not ray.wait([ready], timeout=_PATIENCE_S)[0]:
        say(f"the gateway is not ready; it waits as long as its journal, {options.journal_url}, cannot be read")
    ray.get(ready)
    return actor


def run(options: FleetOptions, address: str | None, say: Callable[[str], None]) -> None:
    """Start a fleet and return when its workers are ready.

    Args:
        address: of a Ray cluster that runs already; without one Ray is started on this machine, and ends with this
            process.
    """
    import ray
    from ray import serve

    given: dict[str, Any] = {"address": address} if address else {"num_cpus": max(os.cpu_count() or 1, options.most)}
    for tries_left in reversed(range(_TRIES)):
        try:
            ray.init(namespace=NAME, include_dashboard=False, logging_level="ERROR", log_to_driver=False, **given)
            break
        except Exception:  # a plain one: Ray gives its processes 30 s, too few on a machine whose cores are busy
            ray.shutdown()
            if not tries_left:
                raise
            say("Ray did not start; once more")
    gateway(options, say)
    say(f"gateway: http://{options.host}:{options.port}   page: /fleet   metrics: /metrics")
    say(f"journal: {options.journal_url}")
    serve.start(proxy_location="Disabled")
    serve.run(application(options.to_dict()), name=NAME, route_prefix=None)


def environment_for_ray(package: str, around: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables in which Ray's processes find this package.

    Args:
        package: the folder that the package is in.
    """
    path = os.pathsep.join(filter(None, (package, around.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "RAY_USAGE_STATS_ENABLED": around.get("RAY_USAGE_STATS_ENABLED", "0")}
