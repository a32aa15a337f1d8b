"""`quorum_rule.decide` against the oracle in every small world, and the sentences it gives to users."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.protocol.lighthouse.quorum_rule import decide
from ft_core.protocol.lighthouse.view import Current, Formed, Life, NotReady, Seen, View
from ft_core.protocol.types import VOID, Ask, Version
from tests.protocol.oracle import may_form

NOW, ORPHAN, JOIN = 100.0, 50.0, 10.0
V0, V1, V2 = Version(0, 0), Version(4, 7), Version(5, 7)


def seen(name: str, kind: str, asked_at: float) -> Seen | None:
    """One replica in one of the situations a small world is made of."""
    match kind:
        case "absent":
            return None
        case "up":
            return Seen(name, Life.UP, 0.0, stable=V1)
        case "asks new":
            return Seen(name, Life.UP, 0.0, ask=Ask(name, 1), asked_at=asked_at)
        case "asks old":
            return Seen(name, Life.UP, 0.0, stable=V1, ask=Ask(name, 1, version=V2), asked_at=asked_at)
        case "asks void":
            return Seen(name, Life.UP, 0.0, stable=V1, ask=Ask(name, 1, version=VOID), asked_at=asked_at)
        case "closed":
            return Seen(name, Life.CLOSED, NOW - 0.05, stable=V1)
        case "lost":
            return Seen(name, Life.LOST, NOW - 20, stable=V1)
        case "frozen":
            return Seen(name, Life.MISSED, NOW - 20, stable=V1)
        case "orphan":
            return Seen(name, Life.MISSED, NOW - ORPHAN, stable=V1)
        case "unknown":
            return Seen(name, Life.UNKNOWN, NOW - 20)
        case _:
            return Seen(name, Life.GONE, NOW - 1, stable=V2)


KINDS = ("absent", "up", "asks new", "asks old", "asks void", "closed", "lost", "frozen", "orphan", "unknown", "gone")
CURRENTS = (
    None,
    Current(9, ("a", "b"), ended=False),
    Current(9, ("a", "b"), ended=True, ended_at=NOW - 1),
    Current(9, ("a", "b"), ended=True, ended_at=NOW - JOIN - 1),
)


@pytest.mark.parametrize("current", CURRENTS)
@pytest.mark.parametrize("asked_at", [NOW - 1, NOW - JOIN - 1])
def test_agrees_with_the_oracle_in_every_world_of_three(current: Current | None, asked_at: float) -> None:
    formed = 0
    for kinds in itertools.product(KINDS, repeat=3):
        world = {n: s for n, k in zip("abc", kinds, strict=True) if (s := seen(n, k, asked_at))}
        for needed, expected, boot in ((1, 0, 0.0), (2, 0, 0.0), (1, 3, 0.0), (1, 3, NOW + 1)):
            view = View(
                NOW, world, current, min_replicas=needed, expected=expected, join_s=JOIN, orphan_s=ORPHAN,
                boot_until=boot, restart_until=NOW + 5 if boot else 0.0, trained=needed == 1,
            )  # fmt: skip
            outcome, truth = decide(view), may_form(view)
            mine = tuple(a.replica_id for a in outcome.asks) if isinstance(outcome, Formed) else None
            assert mine == truth, f"{kinds} {current} {needed=} {expected=} {boot=}: {outcome}"
            formed += mine is not None
    assert formed > 50


times = st.sampled_from([0.0, 40.0, 49.9, 50.0, 60.0, 90.0, 99.0, 99.95, 100.0])
versions = st.sampled_from([VOID, V0, V1, V2])


@st.composite
def views(draw: st.DrawFn) -> View:
    names = "abcd"[: draw(st.integers(1, 4))]
    world = {}
    for name in names:
        life = draw(st.sampled_from(Life))
        ask = None
        if life is Life.UP and draw(st.booleans()):
            ask = Ask(
                name, 1, version=draw(versions), min_replicas=draw(st.integers(1, 3)),
                shrink_only=draw(st.integers(0, 9)) == 0,
            )  # fmt: skip
        world[name] = Seen(
            name, life, draw(times), draw(versions), ask, draw(times), draw(st.sampled_from([0.0, 105.0])), "forward",
            draw(st.sampled_from([0.0, 0.0, 0.0, 101.0])),
        )  # fmt: skip
    members = draw(st.sampled_from([None, ("a",), ("a", "b"), ("b", "c", "x")]))
    current = Current(9, members, draw(st.booleans()), draw(times)) if members else None
    return View(
        NOW, world, current, draw(st.integers(1, 3)), draw(st.integers(0, 4)), 0.1, JOIN, ORPHAN,
        draw(st.sampled_from([0.0, 100.5])), draw(st.sampled_from([0.0, 130.0])), trained=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=600, deadline=None)
@given(views())
def test_agrees_with_the_oracle_in_random_worlds(view: View) -> None:
    outcome, truth = decide(view), may_form(view)
    mine = tuple(a.replica_id for a in outcome.asks) if isinstance(outcome, Formed) else None
    assert mine == truth, outcome
    if isinstance(outcome, NotReady):
        assert outcome.reason
        assert outcome.at is None or outcome.at > view.now, "an instant that has passed would spin the lighthouse"


def up(name: str, **more: object) -> Seen:
    return Seen(name, Life.UP, 0.0, **more)  # type: ignore[arg-type]


def asks(name: str, version: Version = V0, asked_at: float = 99.0) -> Seen:
    return up(name, ask=Ask(name, 1, version=version), asked_at=asked_at)


ENDED = Current(9, ("a", "b", "c"), ended=True, ended_at=99.0)
SENTENCES: list[tuple[View, str]] = [
    (View(NOW, {}, None), "nobody asks for a quorum"),
    (
        View(NOW, {"a": asks("a"), "b": asks("b"), "c": up("c", phase="backward")}, ENDED),
        "waiting for 1 of 3 groups: c (alive, last seen in backward)",
    ),
    (
        View(NOW, {"a": asks("a"), "b": asks("b"), "c": up("c", phase="saving", paused_until=142.0)}, ENDED),
        "waiting for 1 of 3 groups: c (paused, last seen in saving, for at most 42 s more)",
    ),
    (
        View(NOW, {"a": asks("a"), "c": Seen("c", Life.CLOSED, 99.99)}, ENDED),
        "waiting for 1 of 2 groups: c (connection closed)",
    ),
    (
        View(NOW, {"d": asks("d"), "a": up("a")}, Current(9, ("a",), ended=False)),
        "waiting for the running groups to reach their next step boundary",
    ),
    (
        View(NOW, {"d": asks("d"), "a": Seen("a", Life.CLOSED, 99.9)}, Current(9, ("a",), ended=False)),
        "the connection of a closed; waiting for it to return",
    ),
    (
        View(NOW, {"d": asks("d"), "a": Seen("a", Life.MISSED, 60.0)}, Current(9, ("a",), ended=False), orphan_s=50.0),
        "the quorum of a may still be training out of reach; its place is free in 10 s (orphan_s), or as soon as one "
        "of them returns or its supervisor reports its end",
    ),
    (
        View(NOW, {"d": asks("d"), "a": Seen("a", Life.MISSED, 60.0, stable=V1, phase="open")}, ENDED),
        "a holds step 4, newer than the step 0 of those who ask (silent: frozen or cut off, last seen in open); it is "
        "waited for until it returns, its supervisor reports its end, or it has been away for 900 s (orphan_s)",
    ),
    (
        View(NOW, {"a": asks("a")}, None, min_replicas=2),
        "1 of the 2 groups that min_replicas asks for are here (a)",
    ),
    (
        View(NOW, {"a": asks("a")}, None, expected=3),
        "1 of 3 groups are here (a); waiting for the others",
    ),
    (
        View(NOW, {"a": asks("a", asked_at=0.0)}, None, expected=3, restart_until=500.0, trained=True),
        "waiting for 2 of 3 groups: those that are here are all untrained, the others may hold trained state, as one "
        "has shown (until 900 s after the lighthouse's start)",
    ),
    (
        View(NOW, {"a": asks("a")}, None, boot_until=100.4),
        "the lighthouse has just started and waits for running groups to reconnect",
    ),
    (
        View(NOW, {"a": asks("a"), "b": Seen("b", Life.UNKNOWN, 99.9)}, ENDED, boot_until=100.4),
        "the lighthouse has just started; b may still reconnect",
    ),
    (
        View(NOW, {"a": asks("a", VOID)}, None),
        "no group holds a usable state: a were interrupted while receiving theirs",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("view", "sentence"), SENTENCES)
def test_reasons_are_sentences(view: View, sentence: str) -> None:
    outcome = decide(view)
    assert isinstance(outcome, NotReady)
    assert outcome.reason == sentence


def test_left_out_members_are_named_with_the_reason() -> None:
    view = View(NOW, {"a": asks("a", asked_at=80.0), "b": up("b", phase="forward")}, Current(9, ("a", "b"), True, 80.0))
    outcome = decide(view)
    assert isinstance(outcome, Formed)
    assert outcome.left_out == {"b": "b is alive but did not arrive within 10 s (alive, last seen in forward)"}


def test_versions_order_and_read_well() -> None:
    assert VOID < V0 < V1 < V2 < Version(5, 8)
    assert (str(VOID), str(V1)) == ("void", "step 4")
