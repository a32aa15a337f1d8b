"""`Port`: a Manager in the test's hand, for one replica with a sampler and a FixedOrderDataParallel."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from ft_core.data import ElasticDataLoader
from ft_core.fixed_order import FixedOrderDataParallel
from tests.data.ports import Membership
from tests.fixed_order.reference import Points
from tests.reduction.fakes import FakeAttempt, FakePort

if TYPE_CHECKING:
    from torch import nn

    from ft_core.manager import Manager


class Port(Membership, FakePort):
    """What is asked of a Manager, with attempts that record their launches."""

    def __init__(self, groups: int = 1, place: int | None = 0, ranks: int = 1) -> None:
        Membership.__init__(self, groups, place)
        FakePort.__init__(self)
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
        for carrier in self.carriers:
            carrier.flush()
            if commit:
                carrier.committed()
            else:
                carrier.vetoed()
        self.vote(commit)


def loader_on(port: Port, **options: Any) -> ElasticDataLoader:
    settings: dict[str, Any] = {
        "batch_size": 2, "global_batch_size": 8, "fixed_micro_batches": True, "shuffle": True,
    } | options  # fmt: skip
    return ElasticDataLoader(Points(40), manager=port, **settings)


def wrap(module: nn.Module, port: Port | None = None, **options: Any) -> tuple[Any, Port, ElasticDataLoader]:
    """The wrapper (Any: tests reach deep into modules), its Manager and its loader."""
    port = port or Port()
    loader = loader_on(port, **options)
    return FixedOrderDataParallel(port.manager, module, loader), port, loader
