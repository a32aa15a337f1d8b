"""`room.Room` as a state machine under random events, and as transcripts of what happens in known situations."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from ft_core.protocol.lighthouse import replica_table
from ft_core.protocol.lighthouse.events import (
    Announce,
    Asked,
    ChangePending,
    Effect,
    Ended,
    Event,
    Explain,
    Hello,
    Incomplete,
    LeaseEnded,
    Left,
    MemberLost,
    Note,
    Paused,
    Progress,
    Propose,
    Refuse,
    Reopen,
    Superseded,
    Tick,
    Turbulence,
)
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.view import Life
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import VOID, Ask, Version
from ft_core.settings import MAX_REPLICAS, LighthouseSettings
from tests.protocol.oracle import may_form

if TYPE_CHECKING:
    from ft_core.protocol.lighthouse.rules import Rules

ORPHAN, LIVENESS, GRACE, JOIN = 60.0, 4.0, 0.1, 10.0
RECORDS = 200


class Script:
    """A room, a clock, and the log of what the shell would have done: set-up, command, expected log."""

    def __init__(
        self, *, boot_window_s: float = 0.0, at: float = 1000.0, rules: Rules | None = None, **hello: Any
    ) -> None:
        self.now = at
        self.ids = QuorumIds(500, 77, deque(range(1, 100)))
        settings_ = LighthouseSettings(boot_window_s=boot_window_s, grace_s=GRACE)
        self.room = Room("job", settings_, self.ids, boot_at=at, rules=rules)
        self.hello_fields = hello
        self.generation: dict[str, int] = {}
        self.seq: dict[str, int] = {}
        self.quorum: dict[str, int] = {}
        self.members: dict[str, tuple[str, ...]] = {}

    def do(self, event: Event) -> list[str]:
        """Handle an event; the effects as lines."""
        effects = self.room.handle(event, self.now)
        self.room.validate()
        for effect in effects:
            if isinstance(effect, Announce):
                for name, seq in effect.to:
                    if self.seq.get(name) == seq:
                        self.quorum[name], self.members[name] = effect.quorum.quorum_id, effect.quorum.ids
        return [line(e) for e in effects]

    def later(self, seconds: float) -> list[str]:
        """Let time pass, waking the room whenever it wants."""
        end, out = self.now + seconds, []
        while self.room.next_at is not None and self.room.next_at <= end:
            self.now = max(self.now, self.room.next_at)
            out += self.do(Tick())
        self.now = end
        return out

    def hello(self, name: str, **more: Any) -> list[str]:
        """A lease is opened, presenting the quorum it is in."""
        self.generation[name] = self.generation.get(name, 0) + 1
        fields: dict[str, Any] = {
            "quorum_id": self.quorum.get(name, 0), "members": self.members.get(name, ()), "join_s": JOIN,
            "liveness_s": LIVENESS, "orphan_s": ORPHAN,
        }  # fmt: skip
        fields.update(self.hello_fields)
        fields.update(more)
        return self.do(
            Hello(name, name.partition(":")[0], self.generation[name], fields.pop("incarnation", 1), **fields)
        )

    def ask(self, name: str, step: int = 0, *, failed: bool = False, again: bool = False, **more: Any) -> list[str]:
        """A new ask; `again`: the last one once more."""
        self.seq[name] = self.seq.get(name, 0) + (not again)
        version = more.pop("version", Version(step, self.quorum.get(name, 0) if step else 0))
        ask = Ask(name, self.seq[name], version, quorum_id=self.quorum.get(name, 0), failed=failed, **more)
        return self.do(Asked(ask, self.generation[name]))

    def progress(self, name: str, stable: int, *, phase: str = "open", paused_s: float = 0.0) -> list[str]:
        """A report on the lease."""
        version = Version(stable, self.quorum.get(name, 0)) if stable else VOID
        return self.do(Progress(name, self.generation[name], stable, phase, version, paused_s))

    def ends(self, name: str, silence_s: float = 0.2) -> list[str]:
        """The lease stream ends."""
        return self.do(LeaseEnded(name, self.generation[name], silence_s))

    def train(self, *names: str, step: int = 0) -> None:
        """Everybody is in one quorum."""
        for name in names:
            self.hello(name)
        for name in names:
            self.ask(name, step)
        self.later(0.2)
        assert self.room.current is not None
        assert self.room.current.members == names


def line(effect: Effect) -> str:
    """An effect as the log line it amounts to."""
    match effect:
        case Announce(quorum, to):
            return f"quorum {', '.join(quorum.ids)} -> {', '.join(f'{n}#{s}' for n, s in to)}"
        case Explain(to, reason):
            return f"tell {', '.join(to)}: {reason}"
        case ChangePending(to, _, reason):
            return f"change -> {', '.join(to)}: {reason}"
        case MemberLost(to, _, lost):
            return f"lost {', '.join(lost)} -> {', '.join(to)}"
        case Superseded(to, _):
            return f"superseded -> {to}"
        case Propose(proposal):
            return f"propose {', '.join(proposal.members)}"
        case Paused(to, _, who, for_s):
            return f"{who} busy for {for_s:g} s -> {', '.join(to)}"
        case Refuse(to, reason, finished, lost):
            return f"refuse {to}{' (finished)' if finished else ' (lost)' if lost else ''}: {reason}"
        case Note(text):
            return f"# {text}"


# ---------------------------------------------------------------- transcripts


def test_a_newcomer_joins_at_the_next_boundary() -> None:
    script = Script()
    script.train("a", "b")
    assert script.hello("c") == []
    assert script.ask("c") == [
        "tell c: waiting for the running groups to reach their next step boundary",
        "change -> a, b: c wants to join",
    ]
    assert script.ask("a", 7) == ["tell a, c: waiting for 1 of 3 groups: b (alive)"]
    assert script.ask("b", 7) == ["quorum a, b, c -> a#2, b#2, c#1", "# quorum of 3 at step 7: a, b, c; joined: c"]


def test_a_closed_connection_is_told_after_the_grace_and_a_loss_at_once_when_a_peer_accuses_it() -> None:
    script = Script()
    script.train("a", "b", "c")
    script.progress("c", 3, phase="launched")
    assert script.ends("c") == [], "one line per loss, when it is one"
    assert script.later(GRACE) == ["lost c -> a, b"]
    assert script.later(LIVENESS - GRACE) == ["# c is lost: its connection closed (last seen at step 3, launched)"]
    script = Script()
    script.train("a", "b", "c")
    script.progress("c", 2, phase="step")
    script.ends("c")
    told = script.ask("a", 3, failed=True)
    assert told[0] == "lost a -> b"  # its data plane broke: whoever waits for it need not
    assert told[1] == "# c is lost: its connection closed (last seen at step 2)"
    assert script.ask("b", 3, failed=True)[:1] == ["quorum a, b -> a#2, b#2"]


@pytest.mark.parametrize("failed", [False, True])
def test_who_asked_again_before_it_was_answered_is_not_waited_for_in_the_quorum_of_that_answer(failed: bool) -> None:
    """The others may be building its process groups, where nobody else would tell them."""
    script = Script()
    script.train("a", "b", "c")
    before = script.quorum["a"]
    for name in "abc":
        script.ask(name, 3)
    assert script.quorum["a"] > before
    script.quorum["a"] = before  # its second ask, from another step, was on its way when the first one was answered
    assert script.ask("a", 3, failed=failed)[0] == "lost a -> b, c"
    assert script.ask("b", 3, failed=True)[0] == "tell a, b: waiting for 1 of 3 groups: c (alive)", "they are told once"
    assert script.ask("c", 3, failed=True)[0] == "quorum a, b, c -> a#3, b#3, c#3"


def test_a_frozen_member_is_lost_but_never_certainly_gone() -> None:
    script = Script()
    script.train("a", "b")
    assert script.ends("b", silence_s=LIVENESS) == ["# b went silent (frozen or cut off)", "lost b -> a"]
    assert script.ask("a", 3, failed=True)[0] == "quorum a -> a#2"
    assert script.hello("b") == ["superseded -> b"]


def test_a_frozen_quorum_of_one_is_waited_for_until_orphan_s() -> None:
    script = Script()
    script.train("a")
    script.ends("a", silence_s=LIVENESS)
    script.hello("b")
    assert "its place is free in 60 s" in script.ask("b")[0]
    assert script.later(ORPHAN - 1) == []
    assert script.later(2)[0] == "quorum b -> b#1"


def test_pause_is_told_to_the_peers_once() -> None:
    script = Script()
    script.train("a", "b")
    assert script.progress("a", 3, phase="saving", paused_s=30.0) == ["a busy for 30 s -> b"]
    assert script.progress("a", 3, phase="saving", paused_s=29.0) == []
    assert script.progress("a", 3) == ["a busy for 0 s -> b"]


def test_a_longer_pause_within_a_pause_is_news() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("a", 3, phase="saving", paused_s=10.0)
    assert script.progress("a", 3, phase="validation", paused_s=3600.0) == ["a busy for 3600 s -> b"]
    assert script.progress("a", 3, phase="saving", paused_s=9.0) == ["a busy for 9 s -> b"]


def test_a_pause_that_is_open_when_a_quorum_forms_is_known_in_it() -> None:
    script = Script()
    script.train("a", "b", "c")
    script.ask("a", 3, failed=True)
    assert script.progress("a", 3, phase="validation", paused_s=300.0) == ["a busy for 300 s -> b, c"]
    script.ask("b", 3, failed=True)
    script.now += 1
    assert script.ask("c", 3, failed=True)[:2] == ["quorum a, b, c -> a#2, b#2, c#2", "a busy for 299 s -> b, c"]
    assert script.progress("a", 3, phase="validation", paused_s=299.0) == []
    assert script.progress("a", 3) == ["a busy for 0 s -> b, c"]


def test_a_member_whose_lease_opens_anew_is_told_of_pauses_and_tells_its_own() -> None:
    script = Script()
    script.train("a", "b", "c")
    script.ends("b", silence_s=LIVENESS)
    script.progress("a", 3, phase="saving", paused_s=30.0)
    assert "a busy for 30 s -> b" in script.hello("b", paused_s=20.0)
    script.ends("b")
    out = script.hello("b", paused_s=20.0)
    assert out == ["a busy for 30 s -> b", "b busy for 20 s -> a, c"]
    script.ends("b")
    script.progress("a", 3)
    assert script.hello("b") == ["a busy for 0 s -> b", "b busy for 0 s -> a, c"], "both are over"


def test_a_pause_is_known_to_a_restarted_lighthouse() -> None:
    script = Script()
    script.train("a", "b", "c")
    again = Script(at=script.now + 1)
    again.quorum, again.members = script.quorum, script.members
    for name in ("a", "b"):
        again.hello(name)
    assert "c busy for 40 s -> a, b" in again.hello("c", paused_s=40.0)
    again.ask("a", 3)
    again.ask("b", 3)
    assert again.later(JOIN + 29.0) == [], "it is waited for"


def test_who_was_paused_has_its_time_to_arrive_when_it_is_back() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("b", 3, phase="validation", paused_s=3600.0)
    script.ask("a", 3, failed=True)
    script.later(5 * JOIN)
    assert script.progress("b", 3) == [
        "b busy for 0 s -> a",
        "tell a: waiting for 1 of 2 groups: b (alive, last seen in open)",
    ]
    script.later(JOIN - 0.1)
    assert script.ask("b", 3)[0] == "quorum a, b -> a#2, b#2"


def test_those_who_wait_are_told_for_how_long_a_pause_may_last() -> None:
    script = Script()
    script.train("a", "b")

    def told(effects: list[Effect]) -> list[float]:
        return [round(effect.paused_s, 3) for effect in effects if isinstance(effect, Explain)]

    def progress(paused_s: float) -> list[Effect]:
        return script.room.handle(Progress("b", 1, 3, "validation", VOID, paused_s), script.now)

    ask = Ask("a", 2, Version(3, script.quorum["a"]), quorum_id=script.quorum["a"], failed=True)
    assert told(script.room.handle(Asked(ask, 1), script.now)) == [0.0]
    assert told(progress(60.0)) == [60.0]
    script.now += 3
    assert told(progress(57.0)) == []
    assert told(progress(90.0)) == [90.0]
    assert told(progress(0.0)) == [0.0]


def test_a_newcomer_is_told_of_the_pause_that_keeps_the_running_quorum_busy() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("b", 3, phase="validation", paused_s=60.0)
    script.hello("c")
    ask = Ask("c", 1)
    explained = [e for e in script.room.handle(Asked(ask, 1), script.now) if isinstance(e, Explain)]
    assert [e.paused_s for e in explained] == [60.0]


def test_a_group_that_lacks_a_rank_is_not_waited_for_until_it_asks_with_all() -> None:
    script = Script()
    script.train("a", "b", "c")
    missing = Incomplete("b", 1, script.quorum["b"], "group rank 1 of b is gone or frozen")
    assert script.do(missing) == ["# group rank 1 of b is gone or frozen", "lost b -> a, c"]
    assert script.do(missing) == ["# group rank 1 of b is gone or frozen"], "the others are told once"
    script.ask("a", 3)
    out = script.ask("c", 3)
    assert "quorum a, c -> a#2, c#2" in out
    assert script.room.records["b"].stalled == "b cannot take part: group rank 1 of b is gone or frozen"
    assert script.ask("b", 3)[-1] == "change -> a, c: b wants to join"
    assert script.room.records["b"].incomplete == script.room.records["b"].stalled == ""


def test_an_ask_of_a_group_that_lost_a_rank_since_is_not_taken() -> None:
    script = Script()
    script.train("a", "b")
    script.ask("b", 3, failed=True)
    script.do(Incomplete("b", 1, script.quorum["b"], "group rank 1 of b is gone or frozen"))
    out = script.ask("a", 3)
    assert "quorum a -> a#2" in out
    assert not [line for line in out if "wants to join" in line]
    assert script.ask("b", 3, failed=True, again=True)[-1] == "change -> a: b wants to join"


def test_a_report_of_an_older_stream_is_not_taken() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("b")
    assert script.do(Incomplete("b", 1, script.quorum["b"], "never mind")) == []
    assert script.room.current is not None
    assert not script.room.current.ended


def test_a_member_that_does_not_come_is_stalled_until_it_asks() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("b", 3, phase="launched")
    script.ask("a", 3, failed=True)
    assert script.later(JOIN - 0.1) == []
    assert script.later(0.2) == [
        "# b is alive but did not arrive within 10 s (alive, last seen in launched)",
        "quorum a -> a#2", "# quorum of 1 at step 3: a; without: b", "superseded -> b",
    ]  # fmt: skip
    record = script.room.records["b"]
    assert record.stalled == "b is alive but did not arrive within 10 s (alive, last seen in launched)"
    script.ends("b")
    script.hello("b")
    assert record.stalled, "a blip of its connection is no sign of life of its training thread"
    script.ask("b", 3)
    assert record.stalled == ""


def test_it_is_stalled_too_when_the_others_are_too_few_without_it() -> None:
    script = Script()
    script.train("a", "b")
    script.ask("a", 3, failed=True, min_replicas=2)
    assert script.later(2 * JOIN) == [
        "# b is alive but did not arrive within 10 s (alive)",
        "tell a: 1 of the 2 groups that min_replicas asks for are here (a)",
    ]
    assert script.progress("b", 3) == [], "said once"
    assert script.room.records["b"].stalled
    script.do(Ended("b"))
    script.do(Ended("b"))  # its name and its id are the same here
    assert script.room.records["b"].stalled == ""


def test_it_is_stalled_too_when_it_holds_what_the_others_wait_for() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("b", 4)
    assert "b holds step 4, newer" in script.ask("a", 3, failed=True)[-1]
    assert script.later(2 * JOIN) == ["# b is alive but did not arrive within 10 s (alive, last seen in open)"]


def test_who_is_not_stalled() -> None:
    script = Script()
    script.train("a", "b", "c")
    assert script.later(10 * JOIN) == [], "nobody asks: nobody is waited for"
    script.progress("b", 3, phase="saving", paused_s=30.0)
    script.ends("c", silence_s=LIVENESS)
    script.ask("a", 3, failed=True)
    script.later(29.0)
    assert [r.stalled for r in script.room.records.values()] == ["", "", ""]
    script.later(JOIN + 2.0)
    assert script.room.records["b"].stalled
    script.progress("b", 3, phase="saving", paused_s=30.0)
    assert script.room.records["b"].stalled == "", "it is busy, and says so"


def test_a_supervisors_word_may_be_faster_than_the_end_of_the_lease() -> None:
    script = Script()
    script.train("a:1", "b:1")
    assert script.do(Ended("a")) == []
    assert script.ends("a:1") == ["# a:1 ended, says its supervisor", "lost a:1 -> b:1"]
    script = Script()
    script.train("a:1", "b:1")
    script.do(Ended("a"))
    script.later(5 * GRACE + 0.01)
    assert script.ends("a:1") == [], "too long ago: it was about another process"
    assert script.later(GRACE) == ["lost a:1 -> b:1"]


def test_a_supervisors_word_is_about_processes_that_were_known_when_it_came() -> None:
    script = Script()
    script.train("a:1", "b:1")
    script.ends("a:1")
    assert script.do(Ended("a"))[0] == "# a:1 ended, says its supervisor"
    script.hello("a:2")
    assert script.ends("a:2") == [], "the word was not about this one"
    script = Script()
    script.train("a:1", "b:1")
    script.do(Ended("a"))
    script.hello("a:1")  # its lease only broke: it lives
    assert script.ends("a:1") == []


def test_a_word_that_comes_after_the_next_process_does_not_touch_it() -> None:
    script = Script()
    script.train("a:1", "b:1")
    script.ends("a:1")
    script.hello("a:2")
    assert script.do(Ended("a"))[0] == "# a:1 ended, says its supervisor"
    assert script.ends("a:2") == []


def test_who_leaves_while_it_waits_is_not_lost_to_those_who_are_about_to_ask() -> None:
    """The fence has told them to ask; but if the answer crossed the goodbye, they wait for it in the new quorum."""
    script = Script()
    script.train("a", "b")
    script.ask("b", 3)
    left = Left("b", script.generation["b"], "drained", False, VOID, agreed=False)
    assert script.do(left) == ["# b left: drained"]
    script = Script()
    script.train("a", "b")
    script.ask("b", 3)
    script.ask("a", 3)
    assert script.do(left) == ["# b left: drained", "lost b -> a"]


# ---------------------------------------------------------------- a closed connection is not a death


def test_nothing_forms_beside_a_quorum_whose_connection_closed() -> None:
    """A proxy in front of the lighthouse restarts: two lineages trained side by side, and one was erased."""
    script = Script()
    script.train("a")
    script.progress("a", 40)
    script.ends("a")
    script.hello("b")
    assert script.ask("b")[0] == "tell b: the connection of a closed; waiting for it to return"
    out = script.later(ORPHAN - 1)
    assert not [text for text in out if text.startswith("quorum")]
    assert "change -> a: b wants to join" in script.hello("a")
    assert script.ask("a", 60)[0] == "quorum a, b -> a#2, b#1"


def test_all_members_behind_one_balancer_are_waited_for() -> None:
    script = Script(boot_window_s=0.5)
    script.later(1.0)
    script.train("a", "b", "c")
    for name in "abc":
        script.progress(name, 5)
    for name in "abc":
        script.ends(name)
    script.do(Turbulence())
    script.hello("new")
    script.ask("new")
    out = script.later(2 * LIVENESS)
    assert not [text for text in out if text.startswith("quorum")]
    assert [text for text in script.hello("a") if text.startswith("lost")] == [], "the others are about to return, too"
    script.later(0.3)
    assert script.hello("b") == ["change -> a, b: new wants to join"]
    assert script.hello("c") == ["change -> a, b, c: new wants to join"]


def test_who_does_not_return_with_the_others_is_lost_after_all() -> None:
    script = Script(boot_window_s=0.5)
    script.later(1.0)
    script.train("a", "b", "c")
    for name in "abc":
        script.ends(name)
    script.later(2 * LIVENESS)
    script.hello("a")
    script.hello("b")
    assert script.later(0.4) == []
    assert script.later(0.2) == ["lost c -> a, b"]


def test_one_member_whose_connection_breaks_again_and_again_does_not_hide_a_loss() -> None:
    script = Script(boot_window_s=0.5)
    script.later(1.0)
    script.train("a", "b", "c")
    told: list[str] = []
    script.ends("c")
    for _ in range(20):
        script.ends("b")
        told += script.later(0.05)
        told += script.hello("b")
        told += script.later(0.35)
    assert "lost c -> a, b" in told or "lost c -> a" in told


def test_a_stable_step_is_remembered_although_its_holder_was_accused() -> None:
    """The accuser dies as well: a newcomer must not make the same steps again beside a member that lives."""
    script = Script()
    script.train("a", "b")
    script.progress("b", 7)
    script.ends("b")
    assert script.ask("a", 7, failed=True)[1] == "quorum a -> a#2"
    script.do(Ended("a"))
    script.hello("c")
    assert "b holds step 7, newer than the step 0 of those who ask (connection closed, not back" in script.ask("c")[-1]
    assert not [text for text in script.later(ORPHAN - 1) if text.startswith("quorum")]
    assert "this job has committed 7 steps, and everybody who held them is gone" in script.later(2.0)[0]


def test_a_job_that_dies_in_its_first_step_does_not_wait_for_its_own_dead() -> None:
    script = Script()
    script.train("a", "b")
    script.progress("a", 0, phase="compiling")
    script.ends("a")
    script.ends("b")
    script.hello("c")
    assert "closed; waiting for it to return" in script.ask("c")[0]
    assert "quorum c -> c#1" in script.later(LIVENESS)
    script = Script()
    script.train("a", "b")
    script.progress("a", 1, phase="compiling")  # it has committed: what it does out of reach may be worth something
    script.ends("a")
    script.ends("b")
    script.hello("c")
    script.ask("c")
    assert not [text for text in script.later(ORPHAN - 1) if text.startswith("quorum")]


def test_a_process_that_was_in_no_quorum_is_gone_after_the_grace() -> None:
    script = Script()
    script.train("a")
    script.hello("b")
    script.ask("b")
    script.ends("b")
    assert script.later(GRACE) == ["# b is gone (last seen at step 0)"]


def test_who_survives_alone_among_closed_connections_goes_on_after_the_grace() -> None:
    """Two of three are back after 20 ms: links failed, not processes. What they committed meanwhile was undone."""
    script = Script()
    script.train("a", "b", "c")
    script.ends("b")
    script.ends("c")
    assert not [text for text in script.ask("a", 3, failed=True) if text.startswith("quorum")]
    script.later(0.02)
    script.hello("b")
    script.hello("c")
    script.ask("b", 4, failed=True)
    assert script.ask("c", 4, failed=True)[0] == "quorum a, b, c -> a#2, b#2, c#2"
    script.ends("b")
    script.ends("c")
    script.ask("a", 5, failed=True)
    assert "quorum a -> a#3" in script.later(GRACE)


def test_members_that_asked_are_waited_for_a_liveness_timeout_when_their_connection_closes() -> None:
    """Nobody accused them: the boundary was agreed, and their asks are on their way."""
    script = Script()
    script.train("a", "b", "c")
    script.hello("d")
    script.ask("d")
    script.ask("a", 3)
    script.ends("b")
    script.ends("c")
    assert not [text for text in script.later(LIVENESS - 0.1) if text.startswith("quorum")]
    assert "quorum a, d -> a#2, d#1" in script.later(0.2)


def test_a_member_that_never_returned_after_a_restart_of_the_lighthouse_is_told_within_the_liveness_timeout() -> None:
    """Nobody told the survivors: they stood still in a collective with it for their whole `timeout`."""
    old = Script()
    old.train("a", "b", "c")
    new = Script(boot_window_s=0.5, at=1100.0)
    new.quorum, new.members, new.seq = old.quorum, old.members, old.seq
    new.hello("a")
    new.hello("b")
    assert new.later(LIVENESS) == []
    assert new.later(0.6) == ["# c has not returned since the lighthouse started", "lost c -> a, b"]
    new.ask("a", 3, failed=True)
    assert new.ask("b", 3, failed=True)[0] == "quorum a, b -> a#2, b#2"


# ---------------------------------------------------------------- who cannot reach whom


def test_of_two_that_cannot_reach_each_other_one_is_left_out_until_it_can() -> None:
    """Both reached the lighthouse, so every quorum held both, and nobody committed anything."""
    script = Script()
    script.train("a", "b", "c")
    out = script.ask("a", 3, failed=True, unreachable=("c",), reached=("b",))
    assert "# a and c cannot reach each other, reports a" in out
    assert not [text for text in script.ask("c", 3, failed=True, unreachable=("a",)) if text.startswith("quorum")]
    out = script.ask("b", 3, failed=True)
    assert out[0] == "quorum a, b -> a#2, b#2"
    assert out[-1] == (
        "tell c: c and a cannot reach each other (network): 2 of 3 groups that reach each other go on without it "
        "until they can"
    )
    script.progress("a", 4)
    assert script.later(LIVENESS) == [], "the two that train are not asked again and again"
    assert "change -> a, b: c wants to join" in script.ask("c", 3, failed=True, reached=("a", "b"))
    script.ask("a", 5)
    assert script.ask("b", 5)[0] == "quorum a, b, c -> a#3, b#3, c#3"


def test_a_newcomer_that_cannot_reach_a_member_waits_alone() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("c")
    script.ask("c")
    script.ask("a", 3)
    script.ask("b", 3)
    assert script.members["c"] == ("a", "b", "c")
    script.ask("c", failed=True, unreachable=("b",))
    script.ask("b", 3, failed=True, unreachable=("c",))
    assert script.ask("a", 3, failed=True)[0] == "quorum a, b -> a#3, b#3"
    assert script.later(LIVENESS) == []


def test_what_an_ask_says_of_absent_members_is_not_about_the_network() -> None:
    script = Script()
    script.train("a", "b", "c")
    script.ends("c")
    script.ask("a", 3, failed=True, unreachable=("c",))
    script.ask("b", 3, failed=True, unreachable=("c",))
    script.hello("c")
    assert "change -> a, b: c wants to join" in script.ask("c", 3, failed=True)


def test_the_state_that_an_ask_knows_to_be_stable_is_not_made_again() -> None:
    """It had not been reported when its holder was left out, because the others were more."""
    script = Script()
    script.train("a", "b", "c")
    script.ask("a", 5, failed=True, unreachable=("b", "c"), stable=Version(4, 1))
    script.ask("b", 3, failed=True, unreachable=("a",))
    assert script.ask("c", 3, failed=True, unreachable=("a",))[0] == "quorum a -> a#2"


# ---------------------------------------------------------------- defects found by the simulation, one test each


def test_change_pending_is_pushed_again_to_a_member_whose_lease_broke_under_it() -> None:
    """Found as I7: the push was lost with the stream, and the newcomer waited for ever."""
    script = Script()
    script.train("a")
    script.ends("a")
    script.hello("b")
    assert "the connection of a closed; waiting for it to return" in script.ask("b")[0]
    assert "change -> a: b wants to join" in script.hello("a")
    script.ends("a")
    assert "change -> a: b wants to join" in script.hello("a")


def test_a_loss_is_told_again_to_a_member_whose_lease_broke_under_it() -> None:
    script = Script()
    script.train("a", "b")
    script.ends("a")
    script.ends("b", silence_s=LIVENESS)
    assert "lost b -> a" in script.hello("a")


def test_an_agreed_leave_is_never_pushed_as_a_loss() -> None:
    script = Script()
    script.train("a", "b")
    left = Left("b", script.generation["b"], "drained", False, Version(3, 1), agreed=True)
    assert script.do(left) == ["# b left: drained"]
    script.ends("a")
    assert script.hello("a") == []
    script.do(Left("b", script.generation["b"], "again", False, VOID, agreed=False))
    assert script.progress("b", 9) == []
    assert script.ask("a", 3)[0] == "quorum a -> a#2"


def test_a_frozen_replica_does_not_become_certainly_gone_by_turbulence() -> None:
    """A frozen quorum of one would go on committing beside its successor."""
    script = Script(boot_window_s=0.5, at=1000.0)
    script.later(1.0)
    script.train("a")
    script.ends("a", silence_s=LIVENESS)
    script.do(Turbulence())
    script.hello("b")
    script.ask("b")
    assert not [text for text in script.later(5.0) if text.startswith("quorum")]


def test_turbulence_suspends_the_grace() -> None:
    script = Script(boot_window_s=0.5)
    script.later(1.0)
    script.train("a", "b")
    script.ends("a")
    script.do(Turbulence())
    script.ends("b")
    assert script.later(0.45) == []
    script.hello("a")
    assert script.later(LIVENESS + 1) == ["lost b -> a", "# b is lost: its connection closed (last seen at step 0)"]


def test_members_have_the_whole_join_time_however_long_a_newcomer_has_waited() -> None:
    """Steps longer than join_s: each join would have thrown out all members but the first to ask."""
    script = Script()
    script.train("a", "b")
    script.hello("c")
    script.ask("c")
    script.later(JOIN * 2)
    assert script.ask("a", 1) == ["tell a, c: waiting for 1 of 3 groups: b (alive)"]
    assert script.ask("b", 1)[0] == "quorum a, b, c -> a#2, b#2, c#1"


def test_an_answer_is_repeated_only_while_its_quorum_is_in_force() -> None:
    """Found as I3: who missed the whole life of its quorum of one entered it beside its successor, freshly leased."""
    script = Script()
    script.train("a")
    assert script.ask("a", 0, again=True) == ["quorum a -> a#1"]
    script.ends("a", silence_s=LIVENESS)
    script.hello("b")
    script.ask("b")
    assert script.later(ORPHAN + 1)[0] == "quorum b -> b#1"
    script.hello("a", quorum_id=0, members=())
    out = script.ask("a", 0, again=True)
    assert not [text for text in out if text.startswith("quorum")]
    assert "change -> b: a wants to join" in out


def test_an_answer_that_lay_in_a_buffer_while_its_quorum_passed_is_taken_back() -> None:
    """Found as I3: thawed, it took the answer from the dead stream; its new hello still presented the quorum before."""
    script = Script()
    script.train("a", "b")
    before = script.quorum["a"]
    script.ends("b", silence_s=LIVENESS)
    assert script.ask("a", 3, failed=True)[0] == "quorum a -> a#2"
    script.ends("a", silence_s=LIVENESS)
    script.hello("c")
    script.ask("c", version=Version(5, 1))
    assert script.later(ORPHAN + 1)[0] == "quorum c -> c#1"
    taken = script.quorum["a"]
    effects = script.room.handle(
        Hello("a", "a", 9, 1, quorum_id=before, members=("a", "b"), orphan_s=ORPHAN), script.now
    )
    assert [e.quorum_id for e in effects if isinstance(e, Superseded)] == [before, taken]


def test_a_member_believed_gone_that_returns_is_asked_to_make_room() -> None:
    """Found as I7: its quorum counted as ended, so nobody told it that another group waited for its newer state."""
    script = Script()
    script.train("a")
    script.ends("a")
    script.later(GRACE + 0.1)
    script.hello("a")
    script.progress("a", 5)
    script.hello("b")
    assert "change -> a: b wants to join" in script.ask("b")


def test_a_late_word_about_a_name_does_not_end_its_next_incarnation() -> None:
    script = Script()
    script.train("a:1")
    script.ends("a:1")
    script.hello("a:2")
    script.ask("a:2")
    assert script.do(Ended("a"))[0] == "# a:1 ended, says its supervisor"
    assert script.room.records["a:2"].life is Life.UP
    assert script.room.current is not None
    assert script.room.current.members == ("a:2",)
    assert "# a:2 ended, says its supervisor" in script.do(Ended("a:2"))


def test_the_late_closing_of_a_lease_does_not_touch_the_next_incarnation() -> None:
    """Its process is dead and replaced, but the kernel closes its connections late; its supervisor has told."""
    script = Script()
    script.train("a:1", "b:1")
    script.do(Ended("a"))
    script.later(2 * GRACE)
    script.hello("a:2")
    assert "a:2 waits to see whether a:1, an earlier process of the same name" in script.ask("a:2")[0]
    assert script.ends("a:1")[:2] == ["# a:1 ended, says its supervisor", "lost a:1 -> b:1"]
    script.ask("b:1", 3, failed=True)
    assert script.members["a:2"] == ("a:2", "b:1")
    assert script.room.records["a:2"].life is Life.UP


@pytest.mark.parametrize("closed_after_s", [10 * GRACE, 1.4 * LIVENESS])
def test_a_lease_that_closes_long_after_the_word_does_not_touch_the_next_incarnation(closed_after_s: float) -> None:
    """The word is forgotten by then; the newcomer waits, and takes the place when the connection has closed."""
    script = Script()
    script.train("a:1", "b:1")
    script.do(Ended("a"))
    script.hello("a:2")
    script.ask("a:2")
    script.later(closed_after_s)
    script.ends("a:1")
    assert script.later(GRACE) == ["lost a:1 -> b:1"]
    script.ask("b:1", 3, failed=True)
    assert script.members["a:2"] == ("a:2", "b:1")
    assert script.ends("a:1") == [], "once is enough"
    assert script.room.records["a:2"].life is Life.UP


def test_a_new_process_under_an_old_id_does_not_get_the_old_answer() -> None:
    script = Script()
    script.train("a")
    script.ends("a")
    script.seq.clear()
    script.quorum.clear()
    assert script.hello("a", incarnation=2, quorum_id=0, members=()) == [
        "refuse a: an earlier process called 'a' lost its connection and may still be training: give the new one its "
        "own replica_id, or report the end of the old one"
    ]
    script.do(Ended("a"))
    script.hello("a", incarnation=2, quorum_id=0, members=())
    first = script.quorum.get("a", 0)
    assert script.ask("a")[0] == "quorum a -> a#1"
    assert script.quorum["a"] > first
    script.ends("a", silence_s=LIVENESS)
    assert script.hello("a", incarnation=3, quorum_id=0, members=()) == [
        "refuse a: an earlier process called 'a' went silent and may still be training: give the new one its own "
        "replica_id, or report the end of the old one"
    ]


def test_two_live_processes_with_one_id_are_refused() -> None:
    script = Script()
    script.hello("a")
    assert script.hello("a", incarnation=2) == [
        "refuse a: two live processes call themselves 'a': give every replica group its own replica_id (FT_REPLICA_ID)"
    ]


def test_a_hello_overtaken_by_a_newer_stream_changes_nothing() -> None:
    script = Script()
    script.hello("a")
    script.generation["a"] = 7
    script.hello("a")
    script.generation["a"] = 2
    script.hello("a")
    assert script.room.records["a"].generation == 8
    script.ends("a")
    assert script.room.records["a"].life is Life.UP, "only the newest stream's end counts (R15)"


def test_a_held_back_candidate_wakes_the_room_when_it_is_admitted() -> None:
    script = Script()
    for number in range(4):
        name = f"a:{number}"
        script.hello(name)
        script.ends(name)
        script.later(1.0)
    script.hello("a:9")
    (held,) = script.ask("a:9")
    assert held == (
        "tell a:9: a:9 is held back for 2 s: earlier processes of that name crashed repeatedly before their first "
        "commit"
    )
    script.now += 0.9
    assert script.hello("b:1") == [], "the same words while it waits"
    script.ends("b:1")
    assert "quorum a:9 -> a:9#1" in script.later(10.0)


def test_a_newcomer_whose_name_is_taken_is_told_once_what_it_waits_for() -> None:
    script = Script()
    script.hello("a:1")
    script.hello("a:2", incarnation=2)
    words = "a:2 waits to see whether a:1, an earlier process of the same name, is still alive"
    assert script.ask("a:2") == [f"tell a:2: {words}"]
    script.now += LIVENESS
    assert script.do(Tick()) == [], "the same words while it waits"
    assert "quorum a:2 -> a:2#1" in script.ends("a:1")


def test_a_stranger_that_only_wants_to_shrink_is_told_so() -> None:
    script = Script()
    script.train("a")
    script.hello("b")
    assert script.ask("b", shrink_only=True)[0] == ("tell b: b is not in the running quorum, which shall only shrink")


def test_a_finished_room_stays_closed_until_it_is_reopened() -> None:
    script = Script()
    script.train("a", "b")
    script.do(Left("a", 1, "out of data", True, Version(90, 1), agreed=True))
    assert script.ask("b", 90)[0] == "quorum b -> b#2"
    assert script.hello("a:2")[0].startswith("refuse a:2 (finished): training in room 'job' finished at step 90")
    script.hello("c", quorum_id=script.quorum["b"], members=("b",))
    assert script.ask("c", 89)[0].startswith("refuse c (finished)"), (
        "it would train over the finished job's checkpoints"
    )
    script.do(Reopen())
    assert script.hello("a:2") == []


def test_who_waits_for_a_quorum_when_the_room_finishes_is_told() -> None:
    """Nobody trained is left to form one: it would have waited for its whole quorum timeout."""
    script = Script()
    script.train("a")
    script.hello("b")
    script.ask("b", 3)
    assert script.do(Left("a", 1, "out of data", True, Version(90, 1), agreed=True))[1].startswith(
        "refuse b (finished): training in room 'job' finished at step 90"
    )


def test_a_restarted_lighthouse_adopts_the_highest_quorum_and_stays_above_it() -> None:
    old = Script()
    old.train("a", "b")
    new = Script(boot_window_s=0.5, at=1100.0)
    new.ids.boot = 3
    new.quorum, new.members, new.seq = old.quorum, old.members, old.seq
    assert new.hello("a") == ["# adopted the running quorum of a, b from a"]
    assert new.ask("a", 9)[0] == "tell a: the lighthouse has just started; b may still reconnect"
    new.hello("b")
    assert new.ask("b", 9)[0] == "quorum a, b -> a#2, b#2"
    assert new.room.current is not None
    assert new.room.current.quorum_id > max(old.ids.next(), old.quorum["a"] >> 1)
    assert new.room.current.quorum_id >> 32 == 501


OTHER_SIZE = (
    "refuse b: the replica group b has 2 ranks, but a has 4: all groups of a job need the same number of ranks "
    "(world_size; ftrun --nproc-per-replica). Start b with 4 ranks; for a job of another size, end all groups of this "
    "one first, or use another lighthouse or room"
)


def test_a_group_of_another_size_is_refused_before_it_trains() -> None:
    script = Script(expected=2)
    script.hello("a", group_world_size=4)
    assert script.hello("b", group_world_size=2) == [], "nobody has asked yet"
    script.ask("a", group_world_size=4)
    assert OTHER_SIZE in script.ask("b", group_world_size=2)
    assert script.ask("b", group_world_size=4)[0] == "quorum a, b -> a#1, b#2"


def test_a_newcomer_of_another_size_is_refused_at_its_hello() -> None:
    script = Script()
    script.hello("a", group_world_size=4)
    assert script.ask("a", group_world_size=4) == ["quorum a -> a#1", "# quorum of 1 at step 0: a"]
    assert OTHER_SIZE in script.hello("b", group_world_size=2)
    script.do(Left("a", script.generation["a"], "finished", False, VOID, True))
    assert script.hello("c", group_world_size=2) == [], "everybody of that size is gone"


def test_a_running_group_is_not_refused_because_of_a_newcomer() -> None:
    """A lighthouse that has just started hears the newcomer first."""
    script = Script(boot_window_s=5.0)
    script.hello("b", group_world_size=2)
    script.ask("b", group_world_size=2)
    out = script.hello("a", group_world_size=4, quorum_id=9 << 32, members=("a",))
    assert OTHER_SIZE in out
    assert not [text for text in out if text.startswith("refuse a")]
    assert script.room.records["b"].ask is None


def test_another_model_is_refused_with_the_first_differing_parameter() -> None:
    script = Script()
    script.hello("a", signature=1, signature_lines=("w float32 3x4", "b float32 4"))
    assert script.hello("b", signature=2, signature_lines=("w float32 3x5", "b float32 4")) == [
        "refuse b: b has another model than a: parameter 0 is 'w float32 3x5' here and 'w float32 3x4' there; "
        "start every replica group with the same model and the same DistributedDataParallel settings"
    ]
    assert "2 parameters here" not in script.hello("c", signature=3, signature_lines=("w float32 3x4",))[0]


def test_the_room_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replica_table.MAX_RECORDS >= 2 * MAX_REPLICAS, "as many again may have died in the last minutes"
    monkeypatch.setattr(replica_table, "MAX_RECORDS", RECORDS)
    script = Script()
    for number in range(RECORDS):
        script.hello(f"n{number}", stable=Version(4, 7))
        script.ends(f"n{number}", silence_s=LIVENESS)  # what it reported is needed until it is certainly gone
    assert script.hello("one more")[0].startswith("refuse one more: room 'job' is full")
    script.do(Left("n5", 1, "drained", False, VOID, agreed=True))
    assert script.hello("one more") == []
    assert len(script.room.records) == RECORDS


def test_replicas_frozen_for_good_are_forgotten() -> None:
    script = Script()
    script.train("a")
    for number in range(5):
        script.hello(f"n{number}")
        script.ends(f"n{number}", silence_s=LIVENESS)
    script.later(200.0)
    script.progress("a", 3)
    script.do(Tick())
    assert set(script.room.records) == {"a"}


def test_ids_grow_past_the_counter_and_above_whatever_is_presented() -> None:
    ids = QuorumIds(7, 1, deque([2, 3]))
    before = ids.next()
    ids.counter = 0xFFFF
    after = ids.next()
    assert after > before
    assert after >> 32 == 8
    ids.observe(after)
    assert ids.boot == 8, "our own id is not foreign"
    ids.observe((90 << 32) | 5)
    assert ids.next() >> 32 == 91
    ids.observe(3)
    assert ids.next() >> 32 == 91


def test_repr_is_a_summary() -> None:
    script = Script()
    script.train("a", "b")
    script.hello("c")
    script.ask("c")
    assert repr(script.room) == "Room('job', quorum=0x1f4004d0001 of 2, replicas=3, asking=1)"


# ---------------------------------------------------------------- random events


NAMES = ("a", "b", "c", "d")


class RoomMachine(RuleBasedStateMachine):
    """Any sequence of events. The room must do what the oracle says, when it says it would, and keep its invariants."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(boot_window_s=0.5)
        self.ids: list[int] = []
        self.lists: dict[int, tuple[str, ...]] = {}

    def step(self, event: Event) -> None:
        before = {n: (r.ask, r.life, r.answered) for n, r in self.script.room.records.items()}
        effects = self.script.room.handle(event, self.script.now)
        self.script.room.validate()
        for effect in effects:
            if isinstance(effect, Announce):
                self.announced(effect, before, event)

    def announced(self, effect: Announce, before: dict[str, Any], event: Event) -> None:
        quorum = effect.quorum
        if quorum.quorum_id not in self.lists:
            assert all(quorum.quorum_id > old for old in self.ids)
            self.ids.append(quorum.quorum_id)
            for name, seq in effect.to:
                ask, life, _ = before.get(name, (None, Life.UP, None))
                if isinstance(event, Asked) and event.ask.replica_id == name:
                    ask, life = event.ask, Life.UP
                assert ask is not None, f"{name} did not ask"
                assert ask.seq == seq
                assert life is Life.UP
        assert self.lists.setdefault(quorum.quorum_id, quorum.ids) == quorum.ids
        for name, _ in effect.to:
            self.script.quorum[name], self.script.members[name] = quorum.quorum_id, quorum.ids

    @rule(seconds=st.sampled_from([0.01, 0.09, 0.5, 3.0, 11.0, 70.0]))
    def time_passes(self, seconds: float) -> None:
        end = self.script.now + seconds
        while self.script.room.next_at is not None and self.script.room.next_at <= end:
            wake = self.script.room.next_at
            self.script.now = self.script.now + (wake - self.script.now) / 2
            formed = len(self.ids)
            self.step(Tick())
            assert len(self.ids) == formed, "the room formed a quorum before the instant it named"
            self.script.now = max(self.script.now, wake)
            self.step(Tick())
        self.script.now = end

    @rule(name=st.sampled_from(NAMES), present=st.booleans())
    def hello(self, name: str, present: bool) -> None:
        script = self.script
        script.generation[name] = script.generation.get(name, 0) + 1
        quorum = script.quorum.get(name, 0) if present else 0
        members = script.members.get(name, ()) if present else ()
        self.step(
            Hello(
                name,
                name,
                script.generation[name],
                1,
                quorum_id=quorum,
                members=members,
                join_s=JOIN,
                liveness_s=LIVENESS,
                orphan_s=ORPHAN,
            )
        )

    @rule(
        name=st.sampled_from(NAMES), step=st.integers(-1, 3), failed=st.booleans(), again=st.booleans(),
        may_begin=st.booleans(),
    )  # fmt: skip
    def asks(self, name: str, step: int, failed: bool, again: bool, may_begin: bool) -> None:
        script = self.script
        if name not in script.generation:
            return
        script.seq[name] = max(1, script.seq.get(name, 0) + (not again))
        version = VOID if step < 0 else Version(step, min(script.quorum.get(name, 0), step and 1 << 60))
        left = script.quorum.get(name, 0)
        ask = Ask(name, script.seq[name], version, quorum_id=left, failed=failed, from_scratch=may_begin)
        self.step(Asked(ask, script.generation[name]))

    @rule(name=st.sampled_from(NAMES), old=st.booleans(), silence=st.sampled_from([0.1, LIVENESS]))
    def lease_ends(self, name: str, old: bool, silence: float) -> None:
        self.step(LeaseEnded(name, self.script.generation.get(name, 0) - old, silence))

    @rule(name=st.sampled_from(NAMES), stable=st.integers(0, 3), paused=st.sampled_from([0.0, 0.0, 5.0]))
    def progress(self, name: str, stable: int, paused: float) -> None:
        version = Version(stable, 1) if stable else VOID
        self.step(Progress(name, self.script.generation.get(name, 0), stable, "open", version, paused))

    @rule(name=st.sampled_from(NAMES), agreed=st.booleans())
    def leaves(self, name: str, agreed: bool) -> None:
        self.step(Left(name, self.script.generation.get(name, 0), "drained", False, VOID, agreed))

    @rule(name=st.sampled_from(NAMES))
    def word(self, name: str) -> None:
        self.step(Ended(name))

    @rule()
    def turbulence(self) -> None:
        self.step(Turbulence())

    @invariant()
    def nothing_that_may_form_is_left_unformed(self) -> None:
        room = self.script.room
        view = room._view(self.script.now)
        asks = [seen.ask for seen in view.seen.values() if seen.ask is not None]
        lost = room._claims.furthest > 0 and all(ask.version.step <= 0 and not ask.from_scratch for ask in asks)
        if room.next_at is None or room.next_at > self.script.now:
            assert may_form(view) is None or lost  # R21

    @invariant()
    def the_next_instant_lies_ahead(self) -> None:
        assert self.script.room.next_at is None or self.script.room.next_at > 0

    @invariant()
    def bounded_and_consistent(self) -> None:
        room = self.script.room
        assert len(room.records) <= len(NAMES) + 1
        for record in room.records.values():
            assert record.ask is None or record.life is Life.UP


TestRoomMachine = RoomMachine.TestCase
TestRoomMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
pytestmark = pytest.mark.timeout(120)


def test_two_live_processes_of_one_name_are_told_apart_from_a_restart() -> None:
    """A second process called 'a' waits until the first is known to live (refused) or to be gone (admitted)."""
    for first_dies in (False, True):
        room = m_room()
        room.handle(hello_of("a:1"), 10.0)
        room.handle(hello_of("a:2"), 10.1)
        if first_dies:
            room.handle(LeaseEnded("a:1", 1, 0.1), 10.2)
        assert room.next_at is not None
        refused = [e for at in (10.4, 11.7) for e in room.handle(Tick(), at) if isinstance(e, Refuse)]
        if first_dies:
            assert not refused
        else:
            assert [e.to for e in refused] == ["a:2"]
            assert "a:1 and a:2 are both alive and both called 'a'" in refused[0].reason
            assert "FT_REPLICA_ID" in refused[0].reason


@pytest.mark.parametrize("successor_first", [True, False])
def test_of_two_live_processes_of_one_name_the_one_in_the_running_quorum_stays(successor_first: bool) -> None:
    """The lighthouse was started again; a:1, which was frozen and replaced meanwhile, holds what was trained."""
    script, running = Script(boot_window_s=1.0), ("a:1", "b:1")
    script.quorum["a:1"], script.members["a:1"] = 400 << 32 | 1, running
    trained = Version(9, 400 << 32 | 1)

    def comes(name: str) -> list[str]:
        incarnation = int(name[-1])
        if name == "a:1":
            return script.hello(name, incarnation=incarnation, version=trained, stable=trained)
        return script.hello(name, incarnation=incarnation) + script.ask(name)

    for name in ("a:2", "a:1") if successor_first else ("a:1", "a:2"):
        comes(name)
    lines = script.later(2 * LIVENESS)
    assert [text for text in lines if text.startswith("refuse")] == [
        "refuse a:2: a:1 and a:2 are both alive and both called 'a': give every replica group its own FT_REPLICA_ID "
        "(replica_id)"
    ]


def m_room() -> Room:
    return Room("default", LighthouseSettings(boot_window_s=0.0), QuorumIds(boot=1, noise=2), boot_at=0.0)


def hello_of(replica_id: str) -> Hello:
    return Hello(
        replica_id, replica_id.split(":")[0], generation=1, incarnation=hash(replica_id) & 0xFFFF, liveness_s=1.0
    )
