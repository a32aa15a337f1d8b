"""What the quorum worker does may raise what nobody expected: the script gets the error, it never waits for ever."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

from ft_core.checkpointing import HTTPTransport
from ft_core.process_group import ProcessGroupGloo
from ft_core.runtime import peer_links
from tests.runtime.harness import Cluster, Replica

if TYPE_CHECKING:
    import pytest


def test_receiving_raises_in_the_script_and_the_others_train_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, left = HTTPTransport.fetch, ["DefaultCPUAllocator: can't allocate memory"]

    def first_fails(self: HTTPTransport[Any], *args: Any, **options: Any) -> Any:
        if left:
            raise RuntimeError(left.pop())
        return fetch(self, *args, **options)

    monkeypatch.setattr(HTTPTransport, "fetch", first_fails)
    replicas = [Replica(0, catch=RuntimeError), Replica(1, catch=RuntimeError)]  # at step 0 one heals from the other
    cluster.run(*replicas)
    assert [str(error) for replica in replicas for error in replica.caught] == [
        "DefaultCPUAllocator: can't allocate memory"
    ]


def test_a_look_at_the_network_that_fails_says_nothing_about_peers(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure, left = ProcessGroupGloo.configure, ["connect: timed out"]

    def first_fails(self: ProcessGroupGloo, *args: Any, **options: Any) -> None:
        if left:
            raise RuntimeError(left.pop())
        configure(self, *args, **options)

    def no_sockets(*_: object) -> None:
        raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")

    monkeypatch.setattr(ProcessGroupGloo, "configure", first_fails)
    monkeypatch.setattr(peer_links, "_shake_hands", no_sockets)
    cluster.run(Replica(0), Replica(1))
    assert not left
