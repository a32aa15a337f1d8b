"""Out of which quorums the next one may grow, where two lighthouses share a job (R22): `succession`, room by room."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.protocol.lighthouse.events import Ended, PartnerIs, PartnerTold, Propose, Recorded
from ft_core.protocol.lighthouse.pair import accepts
from ft_core.protocol.lighthouse.partner import Partner, Proposal, Told, most_of
from ft_core.protocol.lighthouse.room import Room
from ft_core.protocol.lighthouse.rules import Rules
from ft_core.protocol.quorum_ids import QuorumIds
from ft_core.protocol.types import Basis, Version
from ft_core.settings import LighthouseSettings
from tests.protocol.test_room import ORPHAN, Script

OTHER = "host1:29510"


class Half(Script):
    """The room of one lighthouse of a pair."""

    def __init__(self, *told: Told, boot: int = 500, rules: Rules | None = None, **hello: Any) -> None:
        super().__init__(**hello)
        self.ids = QuorumIds(boot, 77, deque(range(1, 100)))
        settings = LighthouseSettings(boot_window_s=0.0, grace_s=0.1)
        self.room = Room("job", settings, self.ids, boot_at=self.now, rules=rules, told=told)

    def other(self, *, stands_by: bool, informed: bool = True, since: float | None = None) -> None:
        """What is known of the other lighthouse."""
        at = self.now if since is None else since
        self.do(PartnerIs(Partner(OTHER, stands_by, informed, at, self.now)))

    def proposes(self) -> Proposal | None:
        """What the room would like to have recorded now."""
        effects = self.room.settle(self.now)
        return next((effect.proposal for effect in effects if isinstance(effect, Propose)), None)

    def records(self, lines: list[str], *, accepted: bool = True) -> list[str]:
        """The other lighthouse answers the proposal that is open."""
        assert any(line.startswith("propose ") for line in lines), lines
        proposed = self.room._succession._proposed
        assert proposed is not None
        return self.do(Recorded(proposed.proposal.quorum_id, accepted))

    def trains(self, *names: str, told: bool = True) -> None:
        """A first quorum of these, which the other lighthouse records; a fence of it completes."""
        self.other(stands_by=told)
        for name in names:
            self.hello(name, expected=len(names))
        lines = [line for name in names for line in self.ask(name)] + self.later(0.2)
        if told and self.room.current is None:
            self.records(lines)
        assert self.room.current is not None
        assert self.room.current.members == names

    def comes(self, basis: Basis, *names: str, **hello: Any) -> list[str]:
        """They open leases here, and present a quorum that this room did not announce to them."""
        lines: list[str] = []
        for name in names:
            self.quorum[name], self.members[name] = basis.quorum_id, basis.members
            lines += self.hello(name, **hello)
        return lines

    def dies(self, name: str) -> list[str]:
        """Its connection closes, and a peer has accused it."""
        return self.ends(name)

    def asks_again(self, name: str, **more: Any) -> list[str]:
        """It asks after its last quorum; `fenced`: a step was committed in that."""
        fenced = more.get("fenced", True)
        version = Version(5, self.quorum.get(name, 0) if fenced else 3)
        return self.ask(name, failed=True, version=version, **{"cast": True, "fenced": True, **more})


def left_alone() -> Half:
    """a, b and c have trained, known to the lighthouse that stands by; a and b have died."""
    half = Half()
    half.trains("a", "b", "c")
    for name in "abc":
        half.progress(name, 1)
    half.dies("a"), half.dies("b")
    return half


def two_go_on(boot: int = 500) -> Half:
    """a, b and c have trained; c has died, and a and b go on in a quorum of this lighthouse, after `boot`, alone."""
    half = Half()
    half.trains("a", "b", "c")
    half.other(stands_by=False)
    half.dies("c")
    half.ids.observe(boot << 32)
    half.asks_again("a"), half.asks_again("b")
    half.later(9)
    assert half.room.current is not None
    assert half.room.current.members == ("a", "b")
    return half


def with_another_beside() -> Half:
    """The same, and meanwhile the other lighthouse has formed a quorum of b, who came here before it entered it, and c.

    Its id is the lower one.
    """
    half = two_go_on(boot=900)
    first, apart = half.room.told.bases[0], Basis(600 << 32 | 1, ("b", "c"))
    half.do(PartnerTold(Told("job", apart.quorum_id, apart.members, bases=(first, apart))))
    return half


def test_without_a_partner_nothing_is_held_up() -> None:
    alone = Script()
    alone.train("a", "b", "c")
    alone.ends("b"), alone.ends("c")
    assert any(line.startswith("quorum a ->") for line in alone.ask("a", 3, failed=True, fenced=True) + alone.later(9))


def test_the_first_quorum_is_recorded_by_both() -> None:
    half = Half()
    half.other(stands_by=True)
    half.hello("a"), half.hello("b")
    lines = half.ask("a") + half.ask("b") + half.later(0.2)
    assert "propose a, b" in lines
    assert half.room.current is None
    assert any(line.startswith("quorum a, b ->") for line in half.records(lines))


def test_the_first_quorum_is_formed_alone_only_of_the_whole_job() -> None:
    half = Half()
    half.other(stands_by=False, informed=False)
    half.hello("a", expected=2)
    half.ask("a")
    half.later(15)
    assert half.room.current is None
    assert OTHER in half.room.waits.reason
    half.hello("b", expected=2)
    assert any(line.startswith("quorum a, b ->") for line in half.ask("b") + half.later(0.2))


def test_more_than_half_go_on_alone() -> None:
    half = Half()
    half.trains("a", "b", "c")
    half.other(stands_by=False)
    half.dies("c")
    half.asks_again("a")
    assert any(line.startswith("quorum a, b ->") for line in half.asks_again("b") + half.later(9))


def test_less_than_half_go_on_without_the_rule() -> None:
    half = Half(rules=Rules(r22_grows=False))
    half.trains("a", "b", "c", told=False)
    half.dies("a"), half.dies("b")
    assert any(line.startswith("quorum c ->") for line in half.asks_again("c") + half.later(30))


def test_less_than_half_wait_for_the_other_lighthouse_in_words() -> None:
    half = Half()
    half.trains("a", "b", "c")
    half.other(stands_by=False)
    half.dies("a"), half.dies("b")
    half.asks_again("c")
    half.later(2 * ORPHAN)
    assert half.room.current is not None
    assert half.room.current.members == ("a", "b", "c")
    assert OTHER in half.room.waits.reason
    assert "a, b may train on under it" in half.room.waits.reason
    assert "--peer" in half.room.waits.reason


def test_less_than_half_go_on_once_the_other_lighthouse_has_recorded_it() -> None:
    half = left_alone()
    lines = half.asks_again("c") + half.later(9)
    assert "propose c" in lines
    assert any(line.startswith("quorum c ->") for line in half.records(lines))


def test_of_two_halves_the_one_with_the_first_member_goes_on_alone() -> None:
    for survivor, goes_on in (("a", True), ("b", False)):
        half = Half()
        half.trains("a", "b")
        half.other(stands_by=False)
        half.dies("b" if survivor == "a" else "a")
        lines = half.asks_again(survivor) + half.later(9)
        assert any(line.startswith(f"quorum {survivor} ->") for line in lines) is goes_on


def test_what_a_refused_proposal_was_for_is_not_announced_and_asked_again_later() -> None:
    half = left_alone()
    lines = half.records(half.asks_again("c") + half.later(9), accepted=False)
    assert not any(line.startswith("quorum") for line in lines)
    lines = half.later(1.0)
    assert "propose c" in lines, "it is asked again"
    assert lines.count("propose c") == 1, "and not all the time"


def test_a_record_for_other_asks_is_worth_nothing() -> None:
    half = left_alone()
    lines = half.asks_again("c") + half.later(9)
    proposed = half.room._succession._proposed
    assert proposed is not None
    half.hello("d")
    again = half.ask("d") + half.later(0.2)  # it joins: that is another quorum
    assert not any(line.startswith("quorum") for line in half.do(Recorded(proposed.proposal.quorum_id, True)))
    assert "propose c, d" in lines + again


def test_a_lighthouse_that_was_started_again_needs_all_of_the_last_quorum() -> None:
    """Before its start it may have formed a quorum of one of them together with the other lighthouse."""
    last = Basis(500 << 32 | 3, ("a", "b", "c"))
    for who, goes_on, rules in (("ab", False, None), ("abc", True, None), ("ab", True, Rules(r22_informed=False))):
        half = Half(boot=900, rules=rules)
        half.other(stands_by=False, informed=False)
        half.comes(last, *who, version=Version(5, last.quorum_id), fenced=True)
        lines = [line for name in who for line in half.asks_again(name)] + half.later(60)
        assert any(line.startswith("quorum") for line in lines) is goes_on, (who, half.room.waits.reason)
    half = Half(boot=900)  # the same two, once the other one has told what it knows
    half.other(stands_by=False, informed=True)
    half.comes(last, *"ab", version=Version(5, last.quorum_id), fenced=True)
    lines = half.asks_again("a") + half.asks_again("b") + half.later(60)
    assert any(line.startswith("quorum a, b ->") for line in lines)


def test_what_both_may_have_forgotten_is_not_contradicted() -> None:
    """Both know one quorum of three, and one of them was started since: it may have formed one of the other two."""
    for rules in (None, Rules(r22_remembers=False)):
        half = Half(rules=rules)
        half.trains("a", "b", "c")
        half.later(3)
        half.dies("a"), half.dies("b")
        half.later(9)
        half.other(stands_by=True)  # another life of the other lighthouse
        lines = half.asks_again("c") + half.later(ORPHAN / 2)
        assert any(line.startswith("propose") for line in lines) is (rules is not None), "the rule is not needed"
        if rules is None:
            assert "was last heard of" in half.room.waits.reason
            assert "propose c" in half.later(ORPHAN), "nothing that may have been forgotten trains on by now"


def test_attempts_that_may_have_been_entered_count() -> None:
    """A newer quorum of five was entered by two of three at least, who gave their ballots: two are no longer enough."""
    basis = Basis(500 << 32 | 3, ("a", "b", "c"))
    five = Basis(500 << 32 | 4, ("a", "b", "c", "d", "e"))
    for cast, goes_on in ((True, False), (False, True)):
        half = Half(boot=900)
        half.other(stands_by=False)
        half.comes(five, *"bc", version=Version(5, basis.quorum_id), cast=cast, after=(basis,))
        lines = half.asks_again("b", cast=cast, fenced=False) + half.asks_again("c", cast=cast, fenced=False)
        lines += half.later(30)
        assert any(line.startswith("quorum b, c ->") for line in lines) is goes_on, half.room.waits.reason


def test_members_bring_along_what_their_quorum_grew_out_of() -> None:
    half = two_go_on()
    last = half.room.last_quorum
    assert last is not None
    assert last.ids == ("a", "b")
    assert [basis.members for basis in last.after] == [("a", "b", "c")]


def test_a_quorum_of_the_other_lighthouse_stands_beside_until_one_of_it_asks() -> None:
    """The two were cut off from each other: what the other one formed may go on, though its id is the lower one."""
    half = with_another_beside()
    lines = half.asks_again("a", fenced=False) + half.later(ORPHAN / 2)
    assert not any(line.startswith("quorum") for line in lines), "b and c may train by themselves"
    lines = half.asks_again("b", fenced=False) + half.later(9)
    assert any(line.startswith("quorum a, b ->") for line in lines)


def test_an_open_ask_that_visits_this_lighthouse_ends_nothing_that_the_other_one_may_answer() -> None:
    """c has asked the other one, which has formed {c, d} with our record; the answer may reach c yet, who goes back."""
    first, last = Basis(400 << 32 | 1, tuple("abcde")), Basis(400 << 32 | 2, ("c", "d"))
    half = Half(Told("job", last.quorum_id, last.members, bases=(first, last)))
    half.other(stands_by=False)
    half.comes(first, *"abce", fenced=True)
    half.asks_again("c")
    half.ends("c")
    lines = [line for name in "abe" for line in half.asks_again(name)] + half.later(ORPHAN / 2)
    assert not any(line.startswith("quorum") for line in lines), "it may train with d, under the other lighthouse"
    half.do(PartnerTold(Told("job", last.quorum_id, last.members, bases=(first, last))))
    half.other(stands_by=True, since=0.0)
    lines = half.later(ORPHAN / 4)
    assert not any(line.startswith(("quorum", "propose")) for line in lines), "nor is it over when they meet again"


class Opened(Half):
    """a and b have opened their leases before their first ballot in {a, b}, which grew out of a larger quorum."""

    def __init__(self, *before: str) -> None:
        super().__init__(boot=900)
        self.before, last = Basis(400 << 32 | 1, before), Basis(400 << 32 | 2, ("a", "b"))
        self.other(stands_by=False)
        self.comes(last, *last.members, cast=False, after=(self.before,))


def test_a_ballot_that_was_given_after_the_lease_was_opened_counts() -> None:
    """The ask brings it: that attempt may have been entered by all."""
    half = Opened("a", "b", "c")
    half.comes(half.before, "c", fenced=True)
    half.dies("a")
    lines = half.asks_again("b", fenced=False) + half.asks_again("c") + half.later(30)
    assert not any(line.startswith("quorum") for line in lines), "a may have gone on alone: it is the first of two"


def test_a_fence_that_completed_after_the_lease_was_opened_counts() -> None:
    """The ask brings it: all had entered that quorum, so the one before it does not count any more."""
    half = Opened("a", "b", "c")
    half.dies("b")
    old = Version(5, half.before.quorum_id)  # the attempt was vetoed
    lines = half.ask("a", failed=True, version=old, fenced=True) + half.later(30)
    assert any(line.startswith("quorum a ->") for line in lines), half.room.waits.reason


def test_a_quorum_that_all_its_members_leave_after_a_ballot_was_entered_by_all() -> None:
    half = Opened(*"abcde")
    lines = [line for name in "ab" for line in half.asks_again(name, fenced=False)] + half.later(30)
    assert any(line.startswith("quorum a, b ->") for line in lines), half.room.waits.reason


def test_an_open_proposal_is_part_of_what_the_other_lighthouse_is_told() -> None:
    """Else the next report would have it forget what it has just recorded."""
    half = left_alone()
    assert "propose c" in half.asks_again("c") + half.later(9)
    assert half.room.told.bases[-1].members == ("c",)


def test_nothing_is_proposed_beside_a_quorum_of_the_other_lighthouse() -> None:
    half = with_another_beside()
    half.other(stands_by=True, since=0.0)
    half.dies("b")
    lines = half.asks_again("a", fenced=False) + half.later(ORPHAN / 4)
    assert not any(line.startswith(("quorum", "propose")) for line in lines), "b and c may train by themselves"


def test_the_state_is_not_called_lost_while_the_other_lighthouse_may_know_its_holders() -> None:
    told = Told("job", 400 << 32 | 1, ("x", "y"), bases=(Basis(400 << 32 | 1, ("x", "y")),), furthest=7)
    half = Half(told)
    half.other(stands_by=False)
    half.hello("a")
    lines = half.ask("a") + half.later(2 * ORPHAN)
    assert not any(line.startswith("refuse") for line in lines)
    assert OTHER in half.room.waits.reason


@pytest.mark.parametrize("rule", [True, False])
def test_the_state_is_not_called_lost_by_a_lighthouse_that_was_frozen_and_has_not_noticed_the_silence(
    rule: bool,
) -> None:
    told = Told("job", 400 << 32 | 1, ("x", "y"), bases=(Basis(400 << 32 | 1, ("x", "y")),), furthest=7)
    half = Half(told, rules=Rules(r22_silent=rule))
    together = Partner(OTHER, stands_by=True, informed=True, met_at=half.now, silent_at=half.now + 5.0)
    half.do(PartnerIs(together))
    half.hello("a")
    lines = half.ask("a") + half.later(2 * ORPHAN)
    assert any(line.startswith("refuse a (lost)") for line in lines) is not rule
    lines += half.do(PartnerIs(replace(together, silent_at=half.now + 5.0)))
    assert any(line.startswith("refuse a (lost)") for line in lines)


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("rule", [True, False])
def test_who_may_have_had_a_lease_at_the_other_lighthouse_is_waited_for_once_they_have_met(
    rule: bool, seen: bool
) -> None:
    """x went silent here longer than orphan_s ago, or was never here, and holds what it has trained with y there."""
    last = Basis(900 << 32 | 1, ("x", "y"))
    half = Half(rules=Rules(r22_met=rule))
    half.trains(*("w", "x")[: 1 + seen])
    for name in half.room.told.members:
        half.ends(name, silence_s=10.0)
    half.do(Ended("w"))
    half.hello("a")
    half.ask("a")
    half.other(stands_by=False)
    half.later(2 * ORPHAN)
    told = Told("job", last.quorum_id, last.members, ended=True, bases=(last,), furthest=7, entered=last.quorum_id)
    half.do(PartnerTold(told))
    lines = half.do(PartnerIs(Partner(OTHER, stands_by=True, informed=True, met_at=half.now)))
    assert ("x may hold step 7, those who ask hold none" in half.room.waits.reason) is rule
    lines += half.later(ORPHAN - 1)
    assert any(line.startswith("refuse a (lost)") for line in lines) is not rule
    assert not any(line.startswith("propose") for line in lines)
    assert not rule or any(line.startswith("refuse a (lost)") for line in half.later(2)), "nobody has come"


@pytest.mark.parametrize("rule", [True, False])
def test_who_left_one_lighthouse_untrained_may_train_under_the_other(rule: bool) -> None:
    """The quorum of a and c, which the other lighthouse has formed, is not over because c has left this one."""
    half = Half(rules=Rules(r22_gone=rule))
    half.trains("a", "b")
    half.progress("b", 1)
    half.other(stands_by=False)
    half.hello("c")
    half.ends("c")
    half.dies("a")
    half.asks_again("b")
    half.later(2)
    last = Basis(900 << 32 | 1, ("a", "c"))
    half.do(PartnerTold(Told("job", last.quorum_id, last.members, bases=(last,), furthest=9, entered=last.quorum_id)))
    half.other(stands_by=True, since=0.0)
    assert ("propose b" in half.later(ORPHAN - 1)) is not rule
    assert "propose b" in half.later(2), "nobody trains out of reach for longer than orphan_s"


def test_a_record_that_was_perhaps_never_announced_frees_nobody() -> None:
    """The proposer may be dead, or live and form alone what has most of the last one: nobody can tell which."""
    proposer = left_alone()
    assert "propose c" in proposer.asks_again("c") + proposer.later(9)
    told = proposer.room.told
    proposer.other(stands_by=False)  # before the answer
    proposer.ends("c")
    lines = [line for name in "ab" for line in proposer.hello(name) + proposer.asks_again(name)]
    assert any(line.startswith("quorum a, b ->") for line in lines + proposer.later(9))
    standby = Half(told, boot=900)  # which has recorded it, and to which c comes with the same ask
    standby.other(stands_by=False)
    standby.comes(Basis(proposer.quorum["c"], ("a", "b", "c")), "c", fenced=True)
    lines = standby.asks_again("c") + standby.later(2 * ORPHAN)
    assert not any(line.startswith("quorum") for line in lines)
    assert "a, b may train on under it" in standby.room.waits.reason
    assert "start this lighthouse again without --peer" in standby.room.waits.reason


@pytest.mark.parametrize("met", ["before", "after"])
def test_that_both_lighthouses_have_forgotten_a_quorum_is_said_once(met: str) -> None:
    """They were started again before they met: before somebody of the job comes, or afterwards."""
    half = Half(boot=900)
    together, apart = Partner(OTHER, True, True, half.now, half.now), Partner(OTHER)
    lines = half.do(PartnerIs(together if met == "before" else apart))
    lines += half.comes(Basis(500 << 32 | 3, ("a", "b")), *"ab", fenced=True)
    assert any("remembers the quorum" in line for line in lines) is (met == "before"), "the other one may know it"
    lines += half.do(PartnerIs(together)) + half.do(PartnerIs(together))
    assert sum("remembers the quorum of a, b: each that knew it was started again" in line for line in lines) == 1


def test_the_last_quorum_of_a_lighthouse_that_ended_is_not_called_forgotten() -> None:
    """It had told this one all but that; its members bring it along before it is started again."""
    half = Half(boot=900)
    lines = half.do(PartnerIs(Partner(OTHER, False, True)))
    lines += half.comes(Basis(500 << 32 | 3, ("a", "b")), "a", fenced=True)
    lines += half.do(PartnerIs(Partner(OTHER, True, True, half.now, half.now)))
    assert not any("remembers the quorum" in line for line in lines)


def test_a_quorum_that_the_other_lighthouse_knows_is_not_called_forgotten() -> None:
    basis = Basis(500 << 32 | 3, ("a", "b"))
    half = Half(boot=900)
    half.other(stands_by=False, informed=False)
    lines = half.comes(basis, "a", fenced=True)
    lines += half.do(PartnerTold(Told("job", basis.quorum_id, basis.members, bases=(basis,), entered=basis.quorum_id)))
    lines += half.do(PartnerIs(Partner(OTHER, True, True, half.now, half.now)))
    assert not any("remembers the quorum" in line for line in lines)


# ---------------------------------------------------------------- what is told, and what may go on elsewhere


def test_an_attempt_that_the_other_lighthouse_tells_of_does_not_count_as_entered() -> None:
    """That one was started since, and knows {a, b} only, from a; b left that without a ballot, and is with c there."""
    half = Half()
    half.trains("a", "b", "c")
    for name in "abc":
        half.progress(name, 1)
    half.other(stands_by=False)
    attempt = Basis(600 << 32 | 1, ("a", "b"))
    half.do(PartnerTold(Told("job", attempt.quorum_id, attempt.members, ended=True, bases=(attempt,))))
    half.dies("b"), half.dies("c")
    lines = half.asks_again("a") + half.later(30)
    assert not any(line.startswith("quorum") for line in lines), "b and c are more than half of the last one"


def test_a_newer_attempt_of_the_same_members_takes_no_older_ones_place() -> None:
    """Else it takes that with it when it turns out that nobody has entered it."""
    first, second = Basis(400 << 32 | 1, ("a", "b", "c")), Basis(400 << 32 | 2, ("a", "d"))
    third = Basis(400 << 32 | 3, ("a", "b", "c"))
    half = Half(Told("job", third.quorum_id, third.members, bases=(first, second, third)))
    half.other(stands_by=False)
    half.comes(third, "c", cast=False)
    half.asks_again("c", cast=False, fenced=False)
    half.dies("c")
    half.comes(second, *"ad", after=(first,))
    lines = half.asks_again("a", fenced=False) + half.asks_again("d", fenced=False, cast=False) + half.later(30)
    assert not any(line.startswith("quorum") for line in lines), "b and c are more than half of the first one"


def test_an_older_attempt_of_the_same_members_takes_no_newer_ones_place() -> None:
    first, second = Basis(400 << 32 | 1, ("a", "b", "c")), Basis(400 << 32 | 2, ("a", "d"))
    third = Basis(400 << 32 | 3, ("a", "b", "c"))
    half = Half(Told("job", third.quorum_id, third.members, ended=True, bases=(third,)))
    half.other(stands_by=False)
    half.comes(second, *"ad", after=(first,))
    lines = half.asks_again("a") + half.asks_again("d") + half.later(30)
    assert not any(line.startswith("quorum") for line in lines), "b and c are more than half of the third one"


def test_where_none_is_known_to_be_entered_all_attempts_are_to_be_heard_of() -> None:
    """The other lighthouse, in its former life, may have formed one of more than half of the second alone."""
    first, second = Basis(400 << 32 | 1, ("a", "d")), Basis(400 << 32 | 2, ("b", "c"))
    half = Half(Told("job", second.quorum_id, second.members, ended=True, bases=(first, second)))
    half.other(stands_by=True)
    half.comes(first, *"ad")
    lines = half.asks_again("a", fenced=False) + half.later(ORPHAN / 2)
    assert not any(line.startswith(("propose", "quorum")) for line in lines)
    assert "propose a" in half.later(ORPHAN)


@pytest.mark.parametrize("tells", [True, False])
def test_what_an_open_ask_that_visits_leaves_is_not_over_where_the_other_one_has_forgotten_it(tells: bool) -> None:
    """As above; then the other lighthouse, which has answered c, is started again: nobody else knows of {c, d}."""
    first, last = Basis(400 << 32 | 1, tuple("abcde")), Basis(400 << 32 | 2, ("c", "d"))
    half = Half(Told("job", last.quorum_id, last.members, bases=(first, last), entered=first.quorum_id))
    half.other(stands_by=False)
    for name in "cabe":
        half.comes(first, name, fenced=True)
        half.asks_again(name)
        if name == "c":
            half.ends(name)
    assert half.room.told.elsewhere == (last,), "so the other lighthouse does not take it for over"
    half.other(stands_by=True)
    if tells:
        half.do(PartnerTold(Told("job", last.quorum_id, last.members, bases=(first, last), entered=first.quorum_id)))
    lines = [line for name in "abe" for line in half.progress(name, 5)] + half.later(ORPHAN / 2)
    assert not any(line.startswith(("quorum", "propose")) for line in lines), "c and d may train"
    assert "propose a, b, e" in half.later(ORPHAN)
    proposed = half.room._succession._proposed
    assert proposed is not None
    assert proposed.proposal.presumed, "that it is over is not certain"
    assert last.quorum_id in proposed.proposal.over, "else the other lighthouse, if it knows of it, never records this"


def test_a_quorum_that_others_have_taken_the_place_of_may_go_on() -> None:
    """Two present the last one, and so overrule what was told; c and d are in that, out of reach."""
    first, last = Basis(400 << 32 | 1, tuple("abcde")), Basis(400 << 32 | 2, ("c", "d"))
    told = Told("job", last.quorum_id, last.members, bases=(first, last), entered=first.quorum_id)
    half = Half(told)
    half.other(stands_by=False)
    half.comes(first, *"abe", fenced=True)
    assert half.room.current is not None
    assert half.room.current.quorum_id == first.quorum_id
    for name in "abe":
        half.asks_again(name)
    half.later(9)
    half.do(PartnerTold(told))
    half.other(stands_by=True, since=0.0)
    assert not any(line.startswith(("quorum", "propose")) for line in half.later(ORPHAN / 2)), "c and d may train"


def test_a_quorum_that_its_member_left_for_a_newer_one_is_over() -> None:
    """The other lighthouse had not told of the newer one when it ended."""
    before, last = Basis(400 << 32 | 1, ("a", "b")), Basis(400 << 32 | 2, ("a", "c"))
    half = Half(Told("job", before.quorum_id, before.members, bases=(before,), entered=before.quorum_id))
    half.other(stands_by=False)
    half.comes(last, "a", after=(before,))
    assert half.room.current is not None
    assert half.room.current.members == last.members
    assert not half.room.told.elsewhere


def test_what_may_go_on_elsewhere_is_told_and_known_after_a_takeover() -> None:
    first, last = Basis(400 << 32 | 1, ("a", "b", "c")), Basis(400 << 32 | 2, ("c", "d"))
    half = Half(
        Told("job", first.quorum_id, first.members, True, (first, last), entered=400 << 32 | 1, elsewhere=(last,))
    )
    half.other(stands_by=True, since=0.0)
    half.comes(first, *"ab", fenced=True)
    lines = half.asks_again("a") + half.asks_again("b") + half.later(ORPHAN / 2)
    assert not any(line.startswith(("quorum", "propose")) for line in lines)
    assert "c, d may train on" in half.room.waits.reason


def test_a_presumption_is_not_told_as_an_end() -> None:
    half = Half()
    half.trains("a", "b")
    half.dies("a"), half.dies("b")
    half.later(9)
    assert half.room.presumed_over
    assert not half.room.told.ended


# ---------------------------------------------------------------- standing by


def proposal(**more: Any) -> Proposal:
    return replace(
        Proposal("job", 9, ("c",), (Basis(5, ("a", "b", "c")), Basis(9, ("c",))), (5,), orphan_s=60.0), **more
    )


def test_only_what_contradicts_nothing_known_is_recorded() -> None:
    five = Told("job", 5, ("a", "b", "c"), bases=(Basis(5, ("a", "b", "c")),))
    newer = Told("job", 7, ("a", "b"), bases=(Basis(5, ("a", "b", "c")), Basis(7, ("a", "b"))))
    assert accepts(proposal(), (), 0.0, 1.0)
    assert accepts(proposal(), (five,), 0.0, 1.0)
    assert not accepts(proposal(), (five, newer), 0.0, 1.0)
    elsewhere = Basis(6, ("a", "b"))
    assert not accepts(proposal(), (replace(five, elsewhere=(elsewhere,)),), 0.0, 1.0)
    assert accepts(proposal(over=(5, 6)), (replace(five, elsewhere=(elsewhere,)),), 0.0, 1.0)
    assert accepts(proposal(over=(5, 7)), (five, newer), 0.0, 1.0)


def test_a_presumption_is_recorded_only_after_orphan_s_without_leases() -> None:
    five = Told("job", 5, ("a", "b", "c"), bases=(Basis(5, ("a", "b", "c")),))
    assert not accepts(proposal(presumed=True), (five,), 100.0, 159.0)
    assert accepts(proposal(presumed=True), (five,), 100.0, 160.0)


@given(st.integers(1, 8))
def test_two_majorities_have_a_member_in_common(size: int) -> None:
    members = tuple("abcdefgh"[:size])
    basis = Basis(1, members)
    grown = [set(c) for n in range(size + 1) for c in combinations(members, n) if most_of(basis, c)]
    assert grown
    assert all(one & other for one in grown for other in grown)


@pytest.mark.parametrize("stands_by", [True, False])
def test_many_attempts_are_formed_together_only(stands_by: bool) -> None:
    """More of them than travel with a quorum would be forgotten by its members."""
    bases = tuple(Basis(400 << 32 | n, ("a", "b", f"x{n}")) for n in range(1, 8))
    half = Half(Told("job", bases[-1].quorum_id, bases[-1].members, bases=bases))
    half.other(stands_by=stands_by, since=0.0)
    half.comes(bases[-1], *"ab", after=bases[:-1])
    lines = half.asks_again("a", fenced=False) + half.asks_again("b", fenced=False) + half.later(30)
    assert not any(line.startswith("quorum") for line in lines)
    assert any(line.startswith("propose") for line in lines) is stands_by
