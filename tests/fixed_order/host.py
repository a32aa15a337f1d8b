"""`Host`: a Manager in the test's hand, for one replica with a sampler and a FixedOrderDataParallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ft_core.data import ElasticDataLoader
from ft_core.fixed_order import FixedOrderDataParallel
from tests.data.membership import Membership
from tests.fixed_order.reference import Points
from tests.reduction.fakes import FakeAttempt, FakeHost

if TYPE_CHECKING:
    from torch import nn

    from ft_core.manager import Manager


class Host(Membership, FakeHost):
    """What is asked of a Manager, with attempts that record their launches."""

    def __init__(self, groups: int = 1, place: int | None = 0, ranks: int = 1) -> None:
        Membership.__init__(self, groups, place)
        FakeHost.__init__(self)
        self._runtime = SimpleNamespace(config=SimpleNamespace(world_size=ranks))
        self.whole_steps = False
        self.attempts: list[FakeAttempt] = []
        self.faults: dict[str, Any] = {}
        """Of the attempts that are opened from now on."""
        self.on_quorum = self._open

    def _open(self) -> None:
        self.attempts.append(self.start(**self.faults))

    def require_all_contributions(self) -> None:
        self.whole_steps = True

    @property
    def manager(self) -> Manager:
        return cast("Manager", self)

    def end(self, commit: bool = True) -> None:
        """The vote."""
        for reducer in self.reducers:
            reducer.flush()
            if commit:
                reducer.committed()
            else:
                reducer.vetoed()
        self.vote(commit)


def loader_on(host: Host, **options: Any) -> ElasticDataLoader:
    settings: dict[str, Any] = {
        "batch_size": 2, "global_batch_size": 8, "fixed_micro_batches": True, "shuffle": True,
    } | options  # fmt: skip
    return ElasticDataLoader(Points(40), manager=host, **settings)


def wrap(module: nn.Module, host: Host | None = None, **options: Any) -> tuple[Any, Host, ElasticDataLoader]:
    """The wrapper (Any: tests reach deep into modules), its Manager and its loader."""
    host = host or Host()
    loader = loader_on(host, **options)
    return FixedOrderDataParallel(host.manager, module, loader), host, loader
