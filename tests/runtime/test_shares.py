"""A step that commits without a planned participant's share: samples come again, weights are known, whole steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from ft_core.errors import HealError, RefusedError, UsageError
from tests.data.counters import EPOCHS, Counter
from tests.data.test_manager import finish
from tests.runtime.harness import Cluster, Replica, both, crash
from tests.runtime.interleavings import once_held, until_broken

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ft_core.data import ElasticDataLoader

LENGTH = 240


def fails_to_heal(replica: Replica, times: int = 1) -> None:
    """Its next heals end in a HealError after the quorum was formed, as when all donors are too slow."""
    healing = replica.manager._runtime.shell.transfer
    receive, left = healing.receive, [times]

    def failing(*args: Any) -> Any:
        if not left[0]:
            return receive(*args)
        left[0] -= 1
        raise HealError("injected: no donor could be received from")

    healing.receive = failing  # type: ignore[assignment, method-assign]


def loses_its_ring(replica: Replica) -> None:
    """Once the others have committed the step: it falls behind."""
    others = [r for r in replica.cluster.replicas if r is not replica and hasattr(r, "manager")]
    replica.cluster.lighthouse.wait_for(lambda: any(r.manager.current_step() > replica.step for r in others))
    replica.manager._runtime.shell.fail(OSError("injected: a connection broke"))


class Exact(Counter):
    """Counts what was committed: a planned share that is missing changes what a sample's gradient is divided by."""

    def __init__(self, index: int, **options: Any) -> None:
        super().__init__(index, length=LENGTH, **options)

    def wrap(self) -> None:
        super().wrap()
        self.model.loss = self.mean  # type: ignore[method-assign]
        self.inner.register_step_pre_hook(self.multiply)

    def mean(self, wrapped: nn.Module, loader: ElasticDataLoader, batch: Tensor) -> Tensor:
        loss: Tensor = wrapped(batch + loader.epoch * self.length)
        return loss

    def multiply(self, *_: Any) -> None:
        gradient = self.model.counts.grad
        assert gradient is not None
        gradient.mul_(self.manager.last_commit_weight)


class Behind(Exact):
    """Falls behind at a step and cannot be healed in the next quorum, in which it was planned to contribute."""

    def __init__(self, index: int, times: int = 1, **options: Any) -> None:
        super().__init__(index, **options)
        self.actions[5, "backward"] = both(lambda r: fails_to_heal(r, times), loses_its_ring)
        self.heals_failed = times


@pytest.mark.parametrize("loader", [{}, {"global_batch_size": 10}])
@pytest.mark.parametrize("times", [1, 2])
def test_a_failed_heal_in_a_synchronous_quorum_loses_no_sample(
    cluster: Cluster, loader: dict[str, Any], times: int
) -> None:
    """Its share of the step that the others commit comes again."""
    options: dict[str, Any] = {"use_async_quorum": False, "loader": loader}
    bad = Behind(2, times, **options)
    others = [Exact(index, **options) for index in range(2)]
    returned: list[int] = []

    def look(point: str) -> None:
        returned.append(len(others[0].loader.sampler.cursor.returned))
        Replica.at(others[0], point)

    others[0].at = look  # type: ignore[method-assign]
    cluster.run(*others, bad)
    assert len(finish(cluster)) == 3
    assert any(returned), "nobody's share was missing: the test proves nothing"


def test_the_sum_of_weights_is_the_same_on_all_members(cluster: Cluster) -> None:
    """Also on those that were healed: a newcomer, and one that missed a commit."""
    weights: dict[int, set[int]] = {}

    def note(replica: Counter) -> None:
        if replica.optimizer.committed:
            weights.setdefault(replica.manager.current_step(), set()).add(replica.manager.last_commit_weight)

    class Noting(Exact):
        def vote(self) -> None:
            super().vote()
            note(self)

    late = Noting(3)
    replicas = [Noting(index) for index in range(3)]
    replicas[0].actions[3, "boundary"] = cluster.joins(late)
    replicas[1].actions[6, "backward"] = loses_its_ring
    replicas[2].actions[9, "backward"] = crash
    cluster.run(*replicas)
    assert len(finish(cluster)) == 3
    assert len(weights) > 10
    assert {step: seen for step, seen in weights.items() if len(seen) > 1} == {}
    assert sum(max(seen) for seen in weights.values()) == EPOCHS * LENGTH


def test_nothing_was_committed_yet(cluster: Cluster) -> None:
    seen: list[int] = []
    cluster.run(Replica(0, at={(0, "boundary"): lambda r: seen.append(r.manager.last_commit_weight)}))
    assert seen == [0]
    assert cluster.replicas[0].manager.last_commit_weight == 1


class Whole(Behind):
    def wrap(self) -> None:
        super().wrap()
        self.manager.require_all_contributions()


def test_whole_steps_only(cluster: Cluster) -> None:
    options: dict[str, Any] = {"use_async_quorum": False}
    """One that cannot be healed in the next quorum costs all one attempt."""
    bad = Whole(2, 2, **options)
    others = [Whole(index, **options) for index in range(2)]
    for other in others:
        other.actions = {(6, "boundary"): until_broken}
    bad.actions[5, "backward"] = once_held(others, 6, bad.actions[5, "backward"])
    cluster.run(*others, bad)
    assert len(finish(cluster)) == 3
    assert [other.vetoes for other in others] == [[6], [6]]
    assert max(sum(replica.samples) for replica in others) == EPOCHS * LENGTH
    with pytest.raises(UsageError, match="before"):
        bad.manager.require_all_contributions()


def test_whole_steps_are_for_all_groups_or_for_none(cluster: Cluster) -> None:
    late = Whole(2)
    late.actions.clear()
    a = Counter(0, length=LENGTH)
    a.actions[3, "boundary"] = lambda r: r.cluster.start(late)
    cluster.run(a, Counter(1, length=LENGTH))
    assert isinstance(late.error, RefusedError)
    assert "runs with require_all_contributions=True, and" in str(late.error)
    assert str(late.error).endswith(
        "with require_all_contributions=False: give all replica groups the same require_all_contributions"
    )
