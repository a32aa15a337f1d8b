"""`Membership`: what a sampler needs of a Manager, with the membership and the verdicts in the test's hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from ft_core.data import DataListener


class Membership:
    """One rank of replica group number `place` among `groups` participants."""

    def __init__(self, groups: int = 1, place: int | None = 0) -> None:
        self.groups, self.place = groups, place
        self.quorums = 0
        self.weight = 0
        self.listeners: list[DataListener] = []
        self.state: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.on_quorum: Callable[[], None] = lambda: None

    @property
    def hooks(self) -> Any:
        return self

    def attach_data(self, listener: DataListener) -> None:
        self.listeners.append(listener)

    def register_state_dict_fn(
        self, key: str, load_state_dict: Callable[[Any], None], state_dict: Callable[[], Any]
    ) -> None:
        self.state[key] = (load_state_dict, state_dict)

    def start_quorum(self) -> None:
        self.quorums += 1
        self.weight = 0
        self.on_quorum()

    def num_participants(self) -> int:
        return self.groups

    def participating_rank(self) -> int | None:
        return self.place

    def weigh(self, weight: int) -> None:
        self.weight += weight

    def vote(self, commit: bool = True) -> None:
        for listener in self.listeners:
            if commit:
                listener.committed(None)
            else:
                listener.vetoed()
