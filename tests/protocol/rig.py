"""Several real `Step`s in lockstep: the smallest cluster, without a lighthouse or a clock that moves by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ft_core.protocol.rank.heal_plan import Plan  # noqa: TC001 - tests read better without a type-checking block
from ft_core.protocol.rank.phases import Heal, MustAsk
from ft_core.protocol.rank.rank import Step
from ft_core.protocol.rank.settings import StepSettings
from ft_core.protocol.types import Ask, Member, Outcome, Quorum, Verdict, Version

if TYPE_CHECKING:
    from collections.abc import Sequence

TEMPLATE = Ask("", 0)


def member(name: str, step: int = 0, epoch: int = 0, lineage: int = 1, **more: Any) -> Member:
    """A member holding (step, epoch)."""
    return Member(name, Version(step, epoch), lineage, **more)


def new_step(name: str, *, lineage: int = 1, now: float = 0.0, **more: Any) -> Step:
    """One rank that has just started."""
    return Step(StepSettings(name, **more), lineage=lineage, now=now)


class Rig:
    """Members that ask, enter, launch and judge together."""

    def __init__(self, names: str = "abc", **more: Any) -> None:
        self.steps = {name: new_step(name, lineage=number + 1, **more) for number, name in enumerate(names)}
        self.next_id = 1
        self.now = 0.0

    def __getitem__(self, name: str) -> Step:
        return self.steps[name]

    def form(self, names: str = "", *, heal: bool = True, **template: Any) -> dict[str, Plan]:
        """All of `names` ask and enter one quorum; configured; first heals are applied if `heal`."""
        members = []
        for name in names or "".join(self.steps):
            step = self.steps[name]
            why = step.boundary()
            assert isinstance(why, MustAsk)
            ask = step.ask(Ask("", 0, **template), why)
            members.append(Member.of(ask))
        self.next_id += 1
        quorum = Quorum(self.next_id << 32 | 7, tuple(sorted(members, key=lambda m: m.replica_id)))
        plans = {m.replica_id: self.steps[m.replica_id].enter(quorum) for m in quorum.members}
        for name, plan in plans.items():
            assert self.steps[name].configured(quorum.quorum_id)
            if heal and plan.heals:
                self.receive(name, apply=plan.heals_first)
        return plans

    def receive(self, name: str, *, apply: bool = False) -> None:
        """The planned state arrives."""
        step = self.steps[name]
        assert step.plan is not None
        assert step.healed(step.plan.quorum_id)
        if apply:
            step.heal_applied(None, 0, 0)

    def fence(self, names: str = "", *, tamper: Sequence[float] | None = None) -> dict[str, Verdict]:
        """Everybody launches and judges the same sum."""
        who = [self.steps[n] for n in names or "".join(self.steps)]
        slots = []
        for step in who:
            assert step.launching(self.now)
            slots.append(step.slots(self.now))
        sums = [sum(column) for column in zip(*slots, strict=True)]
        return {step.settings.replica_id: step.judge(tamper or sums, self.now) for step in who}

    def attempt(self, names: str = "") -> dict[str, bool]:
        """One whole attempt; what should_commit returns to each."""
        out = {}
        for name, verdict in self.fence(names).items():
            step = self.steps[name]
            if verdict.outcome is not Outcome.BROKEN and step.heal is Heal.READY:
                step.heal_applied(None, 0, 0)
            out[name] = step.settle(verdict)
        return out
