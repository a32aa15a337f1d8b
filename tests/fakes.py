"""Stand-ins that several tests share; each does what the real thing promises and records what it was asked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.events import schema

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


class FakeEvents:
    """A log whose events are kept; each is checked against the schema."""

    def __init__(self) -> None:
        self.on = True
        self.all: list[dict[str, Any]] = []

    def emit(self, kind: str, /, **fields: Any) -> None:
        event = {"t": 0.0, "kind": kind, **{k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}}
        assert schema.check(event) == ""
        self.all.append(event)

    def close(self) -> None:
        self.on = False

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Those of these kinds, in order."""
        return [event for event in self.all if event["kind"] in kinds]

    @property
    def kinds(self) -> list[str]:
        """What happened, without what comes once a second."""
        return [event["kind"] for event in self.all if event["kind"] != "counters"]
