"""The list of keys: what several processes change at once, and keys that are none."""

from __future__ import annotations

import base64
import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from machines import CALL, KEY, StoreFleet, graph, start_forkserver

from onediff_comfy.store.remote.lease import DONE, HELD
from onediff_comfy.store.signing.key_ring import KeyRing, Signer, key_id_of

ROUNDS = 10
OTHER = "6" * 64


def publics(number: int) -> list[str]:
    return [Signer(Ed25519PrivateKey.generate()).public for _ in range(number)]


def believed(ring: KeyRing) -> set[str]:
    return {key.key_id for key in ring.known() if not key.revoked}


def _trust(folder: Path, public: str, together: Barrier) -> None:
    together.wait()
    KeyRing(folder).trust(public, "")


def _revoke(folder: Path, public: str, together: Barrier) -> None:
    together.wait()
    KeyRing(folder).revoke(key_id_of(public))


def _make(folder: Path, label: str, together: Barrier) -> None:
    together.wait()
    try:
        KeyRing(folder).make(label)
    except FileExistsError:
        return


def at_once(folder: Path, work: Sequence[tuple[Callable[[Path, str, Barrier], None], str]]) -> None:
    start_forkserver()
    context = multiprocessing.get_context("forkserver")
    together = context.Barrier(len(work))
    processes = [context.Process(target=function, args=(folder, given, together)) for function, given in work]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0


def test_what_is_trusted_and_revoked_at_once_stays_so(tmp_path: Path) -> None:
    bad, *good = publics(4)
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        ring = KeyRing(folder)
        ring.trust(bad, "")
        at_once(folder, [(_revoke, bad), *((_trust, public) for public in good)])
        assert ring.is_revoked(key_id_of(bad))
        assert believed(ring) == {key_id_of(public) for public in good}


def test_of_several_that_make_the_key_at_once_one_does(tmp_path: Path) -> None:
    for number in range(ROUNDS):
        ring = KeyRing(tmp_path / str(number))
        at_once(tmp_path / str(number), [(_make, "one"), (_make, "another")])
        signer = ring.signer()
        assert signer is not None and believed(ring) == {signer.key_id}


P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P
I = pow(2, (P - 1) // 4, P)  # noqa: E741  # as it is called everywhere


def of_order_eight() -> list[int]:
    """The y of the points whose double has order 4, which is y = 0: there x² = -y², and so d·y⁴ + 2y² - 1 = 0."""
    root = square_root(1 + D)
    squares = [(-1 + sign * root) * pow(D, -1, P) % P for sign in (1, -1)]
    found = []
    for square in squares:
        y = square_root(square)
        if y is not None:
            found += [y, P - y]
    return found


def square_root(value: int | None) -> int | None:
    if value is None:
        return None
    root = pow(value % P, (P + 3) // 8, P)
    return next((each for each in (root, root * I % P) if (each * each - value) % P == 0), None)


LOW_ORDER = [0, 1, P - 1, P, P + 1, *of_order_eight()]


@pytest.mark.parametrize("sign", [0, 1])
@pytest.mark.parametrize("y", LOW_ORDER)
def test_a_key_by_which_what_nobody_signed_counts_as_signed_is_refused(tmp_path: Path, y: int, sign: int) -> None:
    raw = (y | sign << 255).to_bytes(32, "little")
    with pytest.raises(ValueError, match="by which anything counts as signed"):
        KeyRing(tmp_path).trust("onediff-ed25519:" + base64.b64encode(raw).decode(), "")
    assert KeyRing(tmp_path).known() == []


def test_such_keys_are_those_that_verify_anything() -> None:
    """The list is of the right points: each of these takes one of some dozen messages as signed by nobody."""
    assert len(LOW_ORDER) == 7
    nobodys = (1).to_bytes(32, "little") + bytes(32)
    for y in (0, 1, P - 1, *of_order_eight()):
        key = Ed25519PublicKey.from_public_bytes(y.to_bytes(32, "little"))
        assert any(takes(key, nobodys, number.to_bytes(2, "little")) for number in range(200))


def takes(key: Ed25519PublicKey, signature: bytes, message: bytes) -> bool:
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def test_a_builder_that_runs_goes_on_with_the_key_that_there_is_now(folder_fleet: StoreFleet) -> None:
    machine = folder_fleet.machine()
    running = machine.store()  # as since before the change
    held = running.tier.turn(OTHER)
    new = machine.keys.make("the next", rotate=True)
    machine.keys.revoke(folder_fleet.signer.key_id)
    with running.compiling(KEY):
        seen = machine.tier().leases.look(KEY)
        assert seen is not None and seen.state == HELD
        running.save(graph())
    statement = machine.tier().statement(KEY)
    assert statement is not None and statement.key == new.key_id
    assert [key for key, _ in machine.tier().calls(CALL)] == [KEY]
    assert held is not None
    held.release(published=True)
    seen = machine.tier().leases.look(OTHER)
    assert seen is not None and seen.state == DONE, "a lease that was taken before is signed anew"


def test_a_builder_whose_key_is_revoked_leases_and_publishes_nothing_and_says_so_once(
    folder_fleet: StoreFleet, caplog: pytest.LogCaptureFixture
) -> None:
    machine = folder_fleet.machine()
    running = machine.store()
    machine.keys.revoke(folder_fleet.signer.key_id)
    for key in (KEY, OTHER):
        with running.compiling(key):
            running.save(graph(key))
        assert running.find(key) is not None, "it serves here"
    assert running.tier.objects.listed("v1/") == []
    counted = running.tier.counters.snapshot()
    assert (counted["alone"], counted["published"], counted["unpublished"]) == (2, 0, 0)
    assert caplog.text.count(f"key {folder_fleet.signer.key_id} is revoked; make another") == 1
    with pytest.raises(PermissionError, match="is revoked"):
        running.tier.publish(graph())
