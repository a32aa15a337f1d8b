"""Lists of addresses, and the rule by which a client goes through them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ft_core.addresses import Addresses, Turn, hosts_of
from ft_core.errors import ConfigError

FIRST_S, MOST_S = 0.02, 0.15


def ended(turn: Turn, *, steady: bool = False, stay: bool = False) -> Turn:
    return turn.ended(steady=steady, first_s=FIRST_S, most_s=MOST_S, stay=stay)


@pytest.mark.parametrize(
    ("text", "hosts", "ports"),
    [
        ("a:1", ("a",), {1}),
        ("http://a:1/", ("a",), {1}),
        ("a:1,b:2", ("a", "b"), {1, 2}),
        ("https://a:1, http://b:1", ("a", "b"), {1}),
        ("[::1]:1,[fe80::2]:3", ("::1", "fe80::2"), {1, 3}),
        ("a:1,a:2", ("a", "a"), {1, 2}),
    ],
)
def test_one_address_or_two(text: str, hosts: tuple[str, ...], ports: set[int]) -> None:
    found = Addresses.parse(text, "FT_LIGHTHOUSE")
    assert found.hosts == hosts_of(text, "FT_LIGHTHOUSE") == hosts
    assert found.ports == ports
    assert str(found) == text.replace(", ", ",")


def test_nothing_has_no_hosts() -> None:
    assert hosts_of("", "FT_LIGHTHOUSE") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a:1,b:1,c:1", "names 3 lighthouses, and a job has at most 2"),
        ("a:1,a:1", "names one lighthouse twice"),
        ("a:1,http://A:1/", "names one lighthouse twice"),
        ("a:1,", "an address is missing before or after a comma"),
        (",a:1", "an address is missing before or after a comma"),
        (",", "an address is missing before or after a comma"),
        ("a:1,b", "='b': expected host:port"),
        ("a:1,::1:2", "brackets"),
        ("a:1,b:0", "port 0 is not between"),
        ("a:1 b:1", "expected host:port"),
        ("", "expected host:port"),
    ],
)
@pytest.mark.parametrize("setting", ["FT_LIGHTHOUSE", "--lighthouse"])
def test_what_cannot_work_is_named_with_its_setting(text: str, says: str, setting: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Addresses.parse(text, setting)
    assert str(caught.value).startswith(f"{setting}='")
    assert says in str(caught.value)


def test_what_is_no_text_is_named_too() -> None:
    number: Any = 29510
    with pytest.raises(ConfigError, match="lighthouse=29510 must be a string such as 'trainer0:29510'"):
        Addresses.parse(number, "lighthouse")


def test_messages_say_which_of_two_is_meant() -> None:
    one, two = Addresses.parse("a:1", "addr"), Addresses.parse("a:1,b:2", "addr")
    assert one.named("a:1") == "addr='a:1'"
    assert two.named("b:2") == "addr='a:1,b:2' (b:2)"
    assert one.each({"a:1": "refused"}) == "refused"
    assert two.each({"b:2": "standby", "a:1": "refused"}) == "a:1: refused; b:2: standby"
    assert two.each({"b:2": "standby"}) == "b:2: standby"


def test_with_one_address_the_first_retry_after_a_steady_stream_is_at_once_and_pauses_double() -> None:
    turn, pauses = ended(Turn(1), steady=True), []
    assert (turn.index, turn.pause_s) == (0, 0.0)
    for _ in range(6):
        turn = ended(turn)
        pauses.append(turn.pause_s)
    assert pauses == [0.02, 0.04, 0.08, 0.15, 0.15, 0.15]


def test_both_are_tried_at_once_and_then_a_pause_follows_each_round() -> None:
    turn, seen = ended(Turn(2), steady=True), []
    for _ in range(7):
        seen.append((turn.index, turn.pause_s))
        turn = ended(turn)
    assert seen == [(1, 0.0), (0, 0.0), (1, 0.02), (0, 0.0), (1, 0.04), (0, 0.0), (1, 0.08)]


def test_a_stream_that_was_open_for_long_makes_everything_before_forgotten() -> None:
    turn = Turn(2)
    for _ in range(5):
        turn = ended(turn)
    assert ended(turn, steady=True) == Turn(2, (turn.index + 1) % 2)


def test_who_ended_what_was_asked_of_it_is_gone_to_again() -> None:
    assert ended(Turn(2, 1), steady=True, stay=True) == Turn(2, 1)
    assert ended(Turn(2, 1), stay=True).index == 1


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 2))
def test_a_pause_is_bounded_and_every_address_has_its_turn(ends: list[bool], count: int) -> None:
    turn, since_pause = Turn(count), 1
    for steady in ends:
        after = ended(turn, steady=steady)
        assert after.index == (turn.index + 1) % count
        assert 0 <= after.pause_s <= MOST_S
        since_pause = 1 if steady or after.pause_s else since_pause + 1
        assert since_pause <= count, "no more than one round without a pause"
        turn = after
