"""``onediff-comfy store``: the object store that a fleet of machines shares, and the keys of its builders."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .folders import cache_folder, config_folder, store_role, store_url
from .settings import FLEET_PACKAGES
from .terminal import counted, number, say, say_json, whole_number

_LONGEST_KEY_FILE = 1 << 20

if TYPE_CHECKING:
    from .store.remote.tiered_store import TieredStore
    from .store.signing.key_ring import KeyRing


def add_commands(store: argparse.ArgumentParser) -> None:
    """Declare the commands, and which function each is done by."""
    commands = store.add_subparsers(required=True)

    def command(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.set_defaults(command=_explained(function))
        return added

    def of_a_store(name: str, function: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        added = command(name, function, text)
        added.add_argument("--url", default=store_url(), help="the store; ONEDIFF_STORE_URL if not given")
        return added

    keygen = command("keygen", _keygen, "make this builder's private key, and print the public one for other machines")
    keygen.add_argument("--label", default="", help="what people call it; the machine's name if not given")
    keygen.add_argument("--rotate", action="store_true", help="make another in place of the one that there is")
    trust = command("trust", _trust, "believe a builder's public key on this machine")
    trust.add_argument("key", help="the line that keygen printed, or a file with it")
    trust.add_argument("--label", default="", help="what people call it")
    revoke = command("revoke", _revoke, "never believe a key again, and remove what it signed from this machine")
    revoke.add_argument("key", help="its name: 16 hexadecimal digits")
    of_a_store("probe", _probe, "try what the tier needs of a store; exit status 1 if it cannot do something")
    push = of_a_store("push", _push, "publish graphs that this builder compiled")
    push.add_argument("graph", nargs="*", help="keys, or their beginnings; every graph if none is given")
    pull = of_a_store("pull", _pull, "fetch the graphs for this Python's torch; exit status 1 if one is refused")
    pull.add_argument("--architecture", action="append", help="of a GPU, such as sm_90; may be given several times")
    pull.add_argument("--all", action="store_true", help="for every torch and machine")
    prune = of_a_store("prune", _prune, "remove graphs from the store, for every machine")
    prune.add_argument("--days", type=number, help="remove what was published longer ago")
    prune.add_argument("--limit-mb", type=whole_number, help="megabytes that may remain; the oldest go first")
    prune.add_argument("--unbelieved", action="store_true", help="remove what no key signed that is believed here")
    of_a_store("status", _status, "what is in the store, and whose signatures count here")


def _explained(function: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that fails in a line where the store, a key or a package is not as it should be."""

    def run(options: argparse.Namespace) -> int:
        try:
            from .store.remote import tiered_store  # noqa: F401  # all that the tier needs
            from .store.remote.objects import Unreachable
        except ImportError as error:
            raise OSError(f"{error.name or error} is not installed; run {FLEET_PACKAGES}") from error
        try:
            return function(options)
        except Unreachable as error:
            raise OSError(f"the store does not answer: {error}") from error
        except (ValueError, FileExistsError) as error:
            raise OSError(str(error)) from error

    return run


def _keygen(options: argparse.Namespace) -> int:
    from .store.signing.key_ring import default_label

    keys = _keys()
    signer = keys.make(options.label or default_label(), options.rotate)
    if options.json:
        say_json({"key": signer.key_id, "public": signer.public, "private_file": str(keys.private_file)})
    else:
        say(f"made key {signer.key_id} in {keys.private_file}; builders need a copy of that file, and nobody else")
        say("every machine of the fleet has to believe it:")
        say(f"  onediff-comfy store trust {signer.public}")
    return 0


def _trust(options: argparse.Namespace) -> int:
    key_id = _keys().trust(_public_key(options.key), options.label)
    if options.json:
        say_json({"key": key_id})
    else:
        say(f"key {key_id} is believed: what it signed is code that runs on this machine")
    return 0


def _public_key(given: str) -> str:
    """Return the line that a person gave, or the one in the file that they named."""
    from .files import read_regular

    if not os.path.exists(given):
        return given
    try:
        return read_regular(Path(given), _LONGEST_KEY_FILE).decode("utf-8-sig", "replace")
    except OSError as error:
        raise OSError(f"{given} holds no public key: {error.strerror or error}") from error


def _revoke(options: argparse.Namespace) -> int:
    from .store.remote.upkeep import signed_by
    from .store.store import local_store
    from .store.trust import Trust

    _keys().revoke(options.key)
    store, trust = local_store(), Trust(config_folder())
    removed = [
        key
        for key in signed_by(store.folder, trust, options.key)
        if store.remove(key, lambda graph: trust.fetched_from(graph) == options.key)
    ]
    if options.json:
        say_json({"key": options.key, "removed": removed})
    else:
        say(f"key {options.key} is revoked here, and {counted(len(removed), 'graph')} that it signed removed")
        say("a running ComfyUI keeps what it has in memory until it ends; revoke it on every machine, and then let a")
        say("machine that does not believe it any more run: onediff-comfy store prune --unbelieved")
    return 0


def _probe(options: argparse.Namespace) -> int:
    from .store.remote.objects import open_store
    from .store.remote.upkeep import probe

    found = []
    for each in probe(open_store(_url(options))):
        found.append(each)
        if not options.json:
            say(f"{'ok' if each.ok else 'FAILS':6} {each.name}: {each.text}")
    if options.json:
        say_json([{"name": each.name, "ok": each.ok, "text": each.text} for each in found])
    bad = [each for each in found if not each.ok]
    if bad and not options.json:
        say("a fleet on this store may compile a graph more than once; use one that can do all of this")
    return 1 if bad else 0


def _push(options: argparse.Namespace) -> int:
    from .store.remote.upkeep import push

    store = _store(options, "builder")
    entries = store.entries()
    if options.graph:
        if "" in options.graph:
            raise LookupError("a graph's key is empty here; see graphs list")
        entries = [entry for entry in entries if entry.path.stem.startswith(tuple(options.graph))]
        if not entries:
            raise LookupError(f"no graph has a key that begins with {' or '.join(options.graph)}; see graphs list")
    done = push(store, entries)
    if options.json:
        say_json(done)
    else:
        say(
            f"published {counted(len(done['published']), 'graph')}; {len(done['there'])} were there, "
            f"{len(done['left'])} are not this machine's or cannot be read"
        )
    return 0


def _pull(options: argparse.Namespace) -> int:
    from .store.remote.upkeep import pull, this_machine

    wanted = {} if options.all else dict(this_machine())
    if options.architecture:
        wanted["architecture"] = options.architecture
    done = pull(_store(options, store_role()), wanted)
    if options.json:
        say_json(done | {"wanted": {fact: list(values) for fact, values in wanted.items()}})
    else:
        say(
            f"fetched {counted(len(done['fetched']), 'graph')}; {len(done['here'])} were here, "
            f"{len(done['other'])} are for other machines, {len(done['refused'])} were refused"
        )
        if done["refused"]:
            say("the log says why, and store status whose signatures count here")
    return 1 if done["refused"] else 0


def _prune(options: argparse.Namespace) -> int:
    from .store.remote.upkeep import prune

    if options.days is None and options.limit_mb is None and not options.unbelieved:
        raise ValueError("give --days, --limit-mb or --unbelieved: what is to go")
    limit = None if options.limit_mb is None else options.limit_mb << 20
    removed = prune(_store(options, "worker").tier, options.days, limit, options.unbelieved)
    if options.json:
        say_json(removed)
    else:
        say(f"removed {counted(len(removed), 'graph')}; a machine that needs one again compiles it again")
    return 0


def _status(options: argparse.Namespace) -> int:
    from .store.remote.upkeep import status

    store = _store(options, "worker")
    keys, signer = _keys(), _keys().signer()
    known = [
        {"key": each.key_id, "label": each.label, "since": each.since, "revoked": each.revoked} for each in keys.known()
    ]
    found = status(store.tier) | {
        "role": store_role(),
        "own_key": signer.key_id if signer else None,
        "keys": known,
        "kept_aside": len(list(store.tier.refusals.folder.glob("*.json"))),
    }
    if options.json:
        say_json(found)
        return 0
    say(f"{found['url']}: {counted(found['graphs'], 'graph')}, {found['mb']} MB; this machine is a {found['role']}")
    for kind in found["kinds"]:
        say(f"  {kind['graphs']:5}  {kind['architecture']:8} {kind['torch']:14} {kind['target']}")
    for each in known:
        state = "REVOKED" if each["revoked"] else "believed"
        own = ", this builder's" if each["key"] == found["own_key"] else ""
        say(f"key {each['key']} {state} since {each['since']}{own}  {each['label']}")
    if not any(not each["revoked"] for each in known):
        say("no key is believed here, so no graph of the store is used; see store trust")
    if found["kept_aside"]:
        say(f"{counted(found['kept_aside'], 'object')} refused lately, kept aside in {store.tier.refusals.folder}")
    return 0


def _url(options: argparse.Namespace) -> str:
    if not options.url:
        raise ValueError("give --url, or set ONEDIFF_STORE_URL: s3://bucket/prefix, gs://…, az://… or file:///folder")
    return str(options.url)


def _keys() -> KeyRing:
    from .store.signing.key_ring import KeyRing

    return KeyRing(config_folder())


def _store(options: argparse.Namespace, role: str) -> TieredStore:
    from .store.remote.tiered_store import TieredStore, open_tier
    from .store.trust import Trust

    tier = open_tier(_url(options), role, cache_folder(), config_folder())
    return TieredStore(cache_folder(), Trust(config_folder()), tier)
