"""Agreement among the ranks of a group: keyed, idempotent, all or nothing."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from ft_core.protocol.group import events as ev
from ft_core.protocol.group.group import Group
from ft_core.protocol.group.merge import Mismatch, merge_asks, merge_votes
from ft_core.protocol.group.settings import GroupSettings
from ft_core.protocol.group.votes import MAX_OPEN_VOTES, Votes
from ft_core.protocol.pushes import Order
from ft_core.protocol.types import VOID, Ask, Outcome, Verdict, Version

COMMIT, VETO, BROKEN = (Verdict(9, 2, o, o.value) for o in Outcome)


def ask(step: int = 4, lineage: int = 1, **more: object) -> Ask:
    return Ask("a", 3, Version(step, 7 if step > 0 else 0), lineage, **more)  # type: ignore[arg-type]


def test_a_group_is_where_its_ranks_are_and_one_without_data_says_nothing_of_it() -> None:
    merged = merge_asks({0: ask(position=7), 1: ask(position=0)}, 2)
    assert isinstance(merged, Ask)
    assert merged.position == 7


def test_a_group_has_entered_a_quorum_with_all_its_ranks_or_not_at_all() -> None:
    """Else one group's word that a quorum was entered by all could meet another's that it never was (R22)."""
    for cast, fenced in itertools.product([True, False], repeat=2):
        merged = merge_asks({0: ask(cast=True, fenced=True), 1: ask(cast=cast, fenced=fenced)}, 2)
        assert isinstance(merged, Ask)
        assert (merged.cast, merged.fenced) == (cast, fenced)


def test_every_combination_of_three_votes() -> None:
    for votes in itertools.product([COMMIT, VETO, BROKEN, None], repeat=3):
        cast = {rank: vote for rank, vote in enumerate(votes) if vote}
        result = merge_votes(cast, 3)
        if BROKEN in votes:
            assert result == BROKEN
        elif None in votes:
            assert result is None
        else:
            assert result is not None
            assert result.outcome is (Outcome.VETO if VETO in votes else Outcome.COMMIT)


flags = st.builds(
    Verdict, st.just(9), st.just(2), st.sampled_from([Outcome.COMMIT, Outcome.VETO]), change=st.booleans(),
    healed=st.booleans(), exhausted=st.booleans(), stop=st.booleans(), behind=st.booleans(),
    drain=st.booleans(),
)  # fmt: skip


@given(st.lists(flags, min_size=1, max_size=4), st.data())
def test_the_answer_does_not_depend_on_order_or_repetition(votes: list[Verdict], data: st.DataObject) -> None:
    order = data.draw(st.permutations([*range(len(votes)), *range(len(votes))]))
    open_votes = Votes(len(votes))
    answers = [open_votes.cast(rank, votes[rank]) for rank in order]
    final = answers[-1]
    assert final is not None
    assert open_votes.result(9, 2) == final
    decided = [a for a in answers if a is not None]
    assert all(a == final for a in decided)
    assert final.change == any(v.change for v in votes)
    assert final.stop == any(v.stop for v in votes)
    assert final.drain == any(v.drain for v in votes)
    assert final.healed == all(v.healed for v in votes)
    assert final.behind == any(v.behind for v in votes)


def test_the_first_vote_of_a_rank_stands() -> None:
    votes = Votes(2)
    assert votes.cast(0, COMMIT) is None
    assert votes.cast(0, VETO) is None
    assert votes.cast(1, COMMIT) == COMMIT
    assert votes.cast(0, BROKEN) == COMMIT


def test_keys_do_not_mix_and_are_bounded() -> None:
    votes = Votes(2)
    for attempt in range(3 * MAX_OPEN_VOTES):
        votes.cast(0, Verdict(9, attempt, Outcome.COMMIT))
    assert repr(votes).count(": 1") == MAX_OPEN_VOTES
    assert votes.result(9, 0) is None
    assert votes.cast(1, Verdict(9, 3 * MAX_OPEN_VOTES - 1, Outcome.COMMIT)) is not None
    assert repr(Votes(2)) == "Votes(of 2: none open)"


def test_a_group_asks_once_all_have_asked() -> None:
    first, second = ask(heal_addresses=("h:1",)), ask(heal_addresses=("h:2",), failed=True, reason="a bucket failed")
    assert merge_asks({0: first}, 2) is None
    merged = merge_asks({1: second, 0: first}, 2)
    assert isinstance(merged, Ask)
    assert (merged.failed, merged.reason, merged.heal_addresses) == (True, "a bucket failed", ("h:1", "h:2"))
    assert (merged.version, merged.lineage) == (first.version, 1)


def test_ranks_with_different_states_make_the_group_void() -> None:
    for other in (ask(5), ask(4, lineage=2), ask(0)):
        merged = merge_asks({0: ask(4), 1: other}, 2)
        assert isinstance(merged, Ask)
        assert merged.version == VOID


def test_an_untrained_group_half_healed_does_not_pass_for_a_healed_one() -> None:
    """Found as I4: rank 0 had received the common initial state, rank 1 had not; rank 0 spoke for both."""
    healed = merge_asks({0: ask(0, lineage=5), 1: ask(0, lineage=5)}, 2)
    half = merge_asks({0: ask(0, lineage=5), 1: ask(0, lineage=8)}, 2)
    assert isinstance(healed, Ask)
    assert isinstance(half, Ask)
    assert (healed.version, half.version) == (Version(0, 0), Version(0, 0))
    assert healed.lineage == 5
    assert half.lineage != 5
    assert half == merge_asks({0: ask(0, lineage=5), 1: ask(0, lineage=8)}, 2)


def test_a_setting_that_differs_between_ranks_is_named() -> None:
    merged = merge_asks({0: ask(min_replicas=1), 1: ask(min_replicas=2)}, 2)
    assert merged == Mismatch("the ranks of a differ in min_replicas: [1, 2]; pass the same on all ranks")


def test_groups_meet_only_if_they_are_alike_on_every_rank() -> None:
    """Ranks may hold different models (the stages of a pipeline); those of one number meet in a ring."""

    def group(*models: int) -> Ask:
        asks = {r: ask(signature=m, signature_lines=(f"w float32 [{m}]",)) for r, m in enumerate(models)}
        merged = merge_asks({r: replace(one, group_world_size=len(models)) for r, one in asks.items()}, len(models))
        assert isinstance(merged, Ask)
        return merged

    assert group(1, 1).signature == 1
    assert group(1, 2).signature == group(1, 2).signature
    assert len({group(1, 1).signature, group(1, 2).signature, group(1, 3).signature, group(2, 1).signature}) == 4
    assert group(1, 2).signature_lines == ("w float32 [1]", "on group rank 1: w float32 [2]")


def told_to_end(*events: tuple[float, ev.Event]) -> list[float]:
    """When a group of three with a liveness timeout of 1 s tells its ranks to end."""
    group = Group(GroupSettings("a", 3, liveness_s=1.0, grace_s=0.1, connect_s=10.0))
    found: list[float] = []
    for rank in range(3):
        group.handle(ev.RankJoined(rank, incarnation=rank + 1), 0.0)
    waiting = list(events)
    while waiting or group.next_at is not None:
        due = group.next_at
        if waiting and (due is None or waiting[0][0] <= due):
            now, event = waiting.pop(0)
        else:
            assert due is not None
            now, event = due, ev.Tick()
        effects = group.handle(event, now)
        group.validate()
        found += [now for effect in effects if isinstance(effect, ev.TellAll) and kills(effect)]
    return found


def kills(effect: ev.TellAll) -> bool:
    return isinstance(effect.push, Order) and effect.push.kill


FROZEN = ev.RankGone(2, silence_s=10.0)


def test_a_group_ends_whose_ranks_wait_inside_it_for_one_that_is_gone() -> None:
    assert told_to_end((5.0, FROZEN)) == [6.0]
    assert told_to_end((5.0, ev.RankGone(2, silence_s=0.0))) == [6.1]
    assert told_to_end((5.0, FROZEN), (5.5, ev.RankAsked(0, ask(), None))) == [6.0], "rank 1 still waits"


def test_a_group_waits_for_a_rank_that_nobody_waits_for_inside_it() -> None:
    asked = tuple((5.5, ev.RankAsked(rank, ask(), None)) for rank in (0, 1))
    assert told_to_end((5.0, FROZEN), *asked) == []
    assert told_to_end((5.0, FROZEN), (5.9, ev.RankJoined(2, incarnation=3))) == [], "it is back"
    assert told_to_end((5.0, ev.RankLeft(2)), (5.0, FROZEN)) == [], "it has said goodbye"


def weighed(own: int | None, ring: int) -> Verdict:
    return Verdict(7, 0, Outcome.COMMIT, weight=ring, own_weight=own)


def test_ranks_that_must_weigh_alike_do_or_nobody_commits() -> None:
    alike = merge_votes({0: weighed(3, 4), 1: weighed(3, 4)}, 2)
    assert alike == Verdict(7, 0, Outcome.COMMIT, weight=4)
    mine = merge_votes({0: weighed(3, 4), 1: weighed(1, 4)}, 2)
    assert mine is not None
    assert (mine.outcome, mine.own_weights) == (Outcome.VETO, (3, 1)), "also where it cancels out in the rings"
    others = merge_votes({0: weighed(3, 4), 1: weighed(3, 5)}, 2)
    assert others is not None
    assert (others.outcome, others.own_weights) == (Outcome.VETO, ()), "that is another group's mistake"
    free = merge_votes({0: weighed(None, 4), 1: weighed(None, 5)}, 2)
    assert free is not None
    assert free.outcome is Outcome.COMMIT, "whole models are averaged over all ranks of all groups"
