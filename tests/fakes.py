"""Stand-ins that several tests share; each does what the real thing promises and records what it was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


class FakeManager:
    """A Manager whose votes are given beforehand; True once they run out. `calls` is what happened, in order."""

    def __init__(self, votes: Iterable[bool] = ()) -> None:
        self.votes = list(votes)
        self.calls: list[str] = []
        self.torn: list[BaseException] = []
        self.last_commit_weight = 0

    def start_quorum(self) -> None:
        self.calls.append("start_quorum")

    def should_commit(self) -> bool:
        self.calls.append("should_commit")
        return self.votes.pop(0) if self.votes else True

    @property
    def hooks(self) -> FakeManager:
        return self

    def report_torn_state(self, error: BaseException) -> None:
        self.calls.append("report_torn_state")
        self.torn.append(error)
