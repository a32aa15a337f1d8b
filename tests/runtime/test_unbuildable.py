"""A member whose process group fails whenever it is configured does not stop the others, nor forms anew without end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ft_core import ProcessGroupGloo
from ft_core.errors import CollectiveError, ConfigError, LighthouseError, NotAvailableError, PeerError, ThisMachineError
from ft_core.protocol.lighthouse.build_backoff import FREE, FREE_UNSURE
from ft_core.runtime.unbuilt import is_own
from tests.runtime.harness import Replica

if TYPE_CHECKING:
    from tests.runtime.harness import Cluster

STEPS = 30


class Broken(ProcessGroupGloo):
    """A group of the user's own, with a mistake in it."""

    def __init__(self, error: Exception) -> None:
        super().__init__(hostname="127.0.0.1")
        self.error, self.tries = error, 0

    def configure(self, *_: Any, **__: Any) -> None:
        self.tries += 1
        raise self.error


@pytest.mark.parametrize(
    ("error", "free"),
    [(NameError("name 'comunicator' is not defined"), FREE), (RuntimeError("no usable device"), FREE_UNSURE)],
    ids=["of its own", "perhaps of others"],
)
def test_the_others_train_on(cluster: Cluster, error: Exception, free: int) -> None:
    group = Broken(error)
    bad = Replica(1, pg=lambda: group, catch=LighthouseError, max_iterations=1)
    others = [Replica(0, steps=STEPS), Replica(2, steps=STEPS)]
    cluster.expected = 3
    cluster.start(others[0], bad, others[1])
    for other in others:
        other.join()
    bad.manager.shutdown()
    bad.join()
    assert [other.error for other in others] == [None, None]
    assert [other.commits[-1].step for other in others] == [STEPS, STEPS]
    assert free < group.tries <= free + 3, "it is held back for 1 s, 2 s and so on"
    assert any("could not build its process group" in line for line in cluster.lighthouse.log)


@pytest.mark.parametrize(
    ("error", "own"),
    [
        (NameError("x"), True), (KeyError("x"), True), (ImportError("x"), True), (NotImplementedError("x"), True),
        (ConfigError("x"), True), (ThisMachineError("x"), True), (NotAvailableError("x"), True),
        (RuntimeError("x"), False), (ConnectionResetError("x"), False), (TimeoutError("x"), False),
        (CollectiveError("x"), False), (PeerError("x"), False),
    ],
    ids=repr,
)  # fmt: skip
def test_what_a_peer_or_the_network_may_have_done_is_not_ones_own_doing(error: Exception, own: bool) -> None:
    assert is_own(error) is own
