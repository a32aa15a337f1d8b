"""Whatever is sent arrives as it was, and nothing else arrives."""

from __future__ import annotations

import contextlib
import math
import zlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.errors import ConfigError, JobFinishedError, ProtocolError, RefusedError
from ft_core.protocol.lighthouse.events import Hello, Left, Progress
from ft_core.protocol.pushes import Acked, Answer, Busy, Change, Lost, Order, Over, Push, Reason, Refusal
from ft_core.protocol.types import VOID, Ask, Member, Outcome, Quorum, Verdict, Version
from ft_core.rpc import codec
from ft_core.rpc.codec import pb, pushes
from ft_core.rpc.codec.pushes import PACKED_FROM
from ft_core.rpc.codec.state import pb_quorum
from ft_core.settings import MAX_REPLICAS, MAX_STEP, PROTOCOL_VERSION

INT64 = st.integers(0, 2**63 - 1)
NAMES = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
ADDRESSES = st.lists(TEXTS, max_size=4).map(tuple)
STEPS = st.integers(0, MAX_STEP)
VERSIONS = st.just(VOID) | st.builds(Version, STEPS, INT64)
U64 = st.integers(0, 2**64 - 1)
MILLIS = st.integers(0, 10**9).map(lambda ms: ms / 1000)
FLAGS = {
    name: st.booleans() for name in ("init_sync", "allow_heal", "shrink_only", "heals_before_forward", "heals_late")
}
ASKS = st.builds(
    Ask, NAMES, INT64, VERSIONS, U64, INT64, st.booleans(), TEXTS, min_replicas=st.integers(1, MAX_REPLICAS),
    group_world_size=st.integers(1, 4096), heal_addresses=ADDRESSES, store_address=TEXTS, address=TEXTS, signature=U64,
    commit_failures=st.integers(0, 99), data=TEXTS, position=INT64, **FLAGS,
)  # fmt: skip
MEMBERS = st.builds(
    Member, NAMES, VERSIONS, U64, st.integers(1, 4096), ADDRESSES, TEXTS, TEXTS, previous_quorum_id=INT64,
    commit_failures=st.integers(0, 99), data=TEXTS, position=INT64, **FLAGS,
)  # fmt: skip
QUORUMS = st.builds(
    Quorum, INT64, st.lists(MEMBERS, min_size=1, max_size=4, unique_by=lambda m: m.replica_id).map(tuple), INT64
)
HELLOS = st.builds(
    Hello, NAMES, NAMES, st.just(0), INT64, version=VERSIONS, stable=VERSIONS, highest_id=INT64, quorum_id=INT64,
    members=st.lists(NAMES, max_size=4).map(tuple), signature=U64, signature_lines=ADDRESSES,
    expected=st.integers(0, MAX_REPLICAS), min_replicas=st.integers(1, MAX_REPLICAS),
    group_world_size=st.integers(1, 4096), join_s=MILLIS, liveness_s=MILLIS,
    orphan_s=MILLIS | st.just(math.inf), heal_addresses=ADDRESSES,
)  # fmt: skip
VERDICTS = st.builds(
    Verdict, INT64, st.integers(0, 2**40), st.sampled_from(Outcome), TEXTS, U64, st.integers(0, MAX_REPLICAS),
    st.sets(st.integers(0, 255), max_size=4).map(lambda places: tuple(sorted(places))), st.booleans(),
    st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
HEALED = st.tuples(U64, U64).map(lambda both: (min(both), max(both)))
PROGRESSES = st.builds(Progress, st.just("me"), st.just(7), STEPS, NAMES, VERSIONS, MILLIS, ADDRESSES, HEALED)
LEFTS = st.builds(Left, st.just("me"), st.just(7), TEXTS, st.booleans(), VERSIONS, st.booleans())
PUSHES = (
    st.builds(Answer, INT64, QUORUMS)
    | st.builds(Reason, TEXTS)
    | st.builds(Change, INT64, TEXTS)
    | st.builds(Lost, INT64, ADDRESSES, VERSIONS)
    | st.builds(Busy, INT64, NAMES, MILLIS)
    | st.builds(Over, INT64)
    | st.builds(Order, st.booleans(), TEXTS)
    | st.builds(Acked, st.integers(0, 10**9).map(float), MILLIS, MILLIS)
)
FAST = settings(max_examples=60, deadline=None)


@FAST
@given(HELLOS, NAMES)
def test_hello_arrives(hello: Hello, room: str) -> None:
    opening = codec.decode_lease_request(codec.encode_hello(hello, room, "1.2"))
    assert opening == codec.Opening(replace(hello, release="1.2"), room)


@FAST
@given(ASKS)
def test_ask_arrives(ask: Ask) -> None:
    assert codec.decode_lease_request(codec.encode_lease(ask), ask.replica_id) == ask
    assert codec.decode_group_request(codec.encode_rank(codec.RankAsk(ask, "x"))) == codec.RankAsk(ask, "x")


@FAST
@given(PROGRESSES, LEFTS, st.integers(0, 10**9).map(float))
def test_progress_and_goodbye_arrive(progress: Progress, left: Left, clock_s: float) -> None:
    renewal = codec.Renewal(clock_s, progress)
    assert codec.decode_lease_request(codec.encode_lease(renewal), "me", 7) == renewal
    assert codec.decode_lease_request(codec.encode_lease(left), "me", 7) == left


@FAST
@given(VERDICTS)
def test_verdict_arrives(verdict: Verdict) -> None:
    assert codec.decode_group_request(codec.encode_rank(verdict)) == verdict
    assert codec.decode_push(codec.encode_push(verdict)) == verdict


@FAST
@given(PUSHES)
def test_a_push_arrives(push: Push) -> None:
    assert codec.decode_push(codec.encode_push(push)) == push


@FAST
@given(QUORUMS, INT64)
def test_a_shared_quorum_answers_each_member(quorum: Quorum, seq: int) -> None:
    assert codec.decode_push(codec.answer(seq, codec.encode_quorum(quorum))) == Answer(seq, quorum)
    assert codec.decode_quorum_info(codec.encode_quorum_info(quorum)) == quorum


def of_many(members: int) -> Quorum:
    """A quorum whose members are as alike as those of a job."""
    state = Version(10**6, 1 << 62)
    return Quorum(
        1 << 62,
        tuple(
            Member(
                f"trainer-{number:04d}:{number * 2654435761 % 2**32:08x}", state, 7, previous_quorum_id=1 << 61,
                heal_addresses=(f"http://10.0.{number // 250}.{number % 250}:34567",),
                store_address=f"10.0.{number // 250}.{number % 250}:12345",
            )
            for number in range(members)
        ),
    )  # fmt: skip


@pytest.mark.parametrize("members", [PACKED_FROM - 1, PACKED_FROM, MAX_REPLICAS])
def test_a_quorum_of_many_is_packed_and_says_its_id(members: int) -> None:
    quorum = of_many(members)
    shared = codec.encode_quorum(quorum)
    assert codec.decode_push(codec.answer(3, shared)) == Answer(3, quorum)
    assert codec.decode_push(codec.encode_push(Answer(3, quorum))) == Answer(3, quorum)
    plain = len(pb.Push(quorum=pb_quorum(quorum)).SerializeToString())
    if members < PACKED_FROM:
        assert len(shared) == plain
    else:
        assert pb.Push.FromString(shared).packed.quorum_id == quorum.quorum_id
        assert len(shared) < plain / 2
    if members == MAX_REPLICAS:
        assert len(shared) < plain / 4


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (b"no zlib", "cannot be unpacked"),
        (zlib.compress(bytes(10**6))[:-9], "cut off"),
        (zlib.compress(b"\xff" * 9), "not a QuorumInfo"),
    ],
)
def test_a_packed_quorum_that_is_none_is_refused(info: bytes, words: str) -> None:
    push = pb.Push(seq=1, packed=pb.PackedQuorum(quorum_id=7, info=info)).SerializeToString()
    with pytest.raises(ProtocolError, match=words):
        codec.decode_push(push)


def test_a_packed_quorum_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pushes, "MAX_PUSH_BYTES", 10**6)
    push = pb.Push(seq=1, packed=pb.PackedQuorum(quorum_id=7, info=zlib.compress(bytes(10**7)))).SerializeToString()
    with pytest.raises(ProtocolError, match="larger than 1000000 bytes"):
        codec.decode_push(push)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error_or_nothing(data: bytes) -> None:
    for decode in (
        codec.decode_lease_request,
        codec.decode_group_request,
        codec.decode_push,
    ):
        with contextlib.suppress(ProtocolError):
            decode(data)


@pytest.mark.parametrize("error", [RefusedError("r"), JobFinishedError("f"), ProtocolError("p"), ConfigError("c")])
def test_a_refusal_arrives_as_the_error_it_is(error: Exception) -> None:
    push = codec.decode_push(codec.encode_push(Refusal(error)))
    assert isinstance(push, Refusal)
    assert type(push.error) is type(error)
    assert str(push.error) == str(error)


@pytest.mark.parametrize(
    ("theirs", "upgrade"), [(PROTOCOL_VERSION - 1, "the trainer"), (PROTOCOL_VERSION + 1, "the lighthouse")]
)
def test_a_differing_version_names_both_and_what_to_upgrade(theirs: int, upgrade: str) -> None:
    message = pb.LeaseRequest(hello=pb.Hello(protocol_version=theirs, release="9.9", replica_id="a"))
    with pytest.raises(ProtocolError) as caught:
        codec.decode_lease_request(message.SerializeToString())
    text = str(caught.value)
    assert f"version {theirs}" in text
    assert f"version {PROTOCOL_VERSION}" in text
    assert text.endswith(f"upgrade ft-training on {upgrade}")


ASK = Ask("a:1", 1)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"replica_id": ""}, "replica_id"),
        ({"replica_id": "x" * 257}, "replica_id"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": MAX_REPLICAS + 1}, "min_replicas"),
        ({"heal_addresses": ("x",) * 5000}, "heal_addresses"),
        ({"data": "x" * 20_000}, "data"),
        ({"seq": -1}, "Ask"),
        ({"store_address": "\udcff"}, "Ask"),
        ({"signature": 2**64}, "Ask"),
        ({"version": Version(-5, 0)}, "version"),
        ({"version": Version(MAX_STEP + 1, 0)}, "version.step"),
    ],
)
def test_a_broken_bound_is_the_senders_mistake(change: dict[str, Any], names: str) -> None:
    with pytest.raises((ConfigError, ProtocolError), match=names):
        # A version below VOID can be written down but not read: protobuf has no bounds of its own.
        codec.decode_lease_request(codec.encode_lease(replace(ASK, **change)), "a:1")


def test_what_arrives_is_bounded_too() -> None:
    for message, names in (
        (pb.LeaseRequest(ask=pb.Ask(replica_id="a", min_replicas=0, group_world_size=1)), "min_replicas"),
        (pb.LeaseRequest(ask=pb.Ask(replica_id="b", min_replicas=1, group_world_size=1)), "lease of"),
        (pb.LeaseRequest(), "empty"),
        (pb.LeaseRequest(progress=pb.Progress(phase="x" * 300)), "phase"),
    ):
        with pytest.raises(ProtocolError, match=names):
            codec.decode_lease_request(message.SerializeToString(), "a")
    with pytest.raises(ProtocolError, match="outcome"):
        codec.decode_group_request(pb.GroupRequest(vote=pb.Verdict(quorum_id=1)).SerializeToString())
    twice = pb.QuorumInfo(quorum_id=1)
    for _ in range(2):
        twice.members.add(replica_id="a", group_world_size=1)
    with pytest.raises(ProtocolError, match="twice"):
        codec.decode_push(pb.Push(quorum=twice).SerializeToString())


def test_a_push_of_a_later_release_is_passed_over() -> None:
    assert codec.decode_push(b"") is None


def test_long_reasons_are_cut_and_long_layouts_left_out() -> None:
    push = codec.decode_push(codec.encode_push(Reason("x" * 10_000)))
    assert isinstance(push, Reason)
    assert len(push.text) == codec.MAX_TEXT
    lines = tuple(f"layer{n}.weight float32 [1024, 1024]" for n in range(100_000))
    opening = codec.decode_lease_request(codec.encode_hello(Hello("a", "a", 0, 1, signature_lines=lines), "r", ""))
    assert isinstance(opening, codec.Opening)
    kept = opening.hello.signature_lines
    assert 1000 < len(kept) <= codec.MAX_SIGNATURE_LINES
    assert kept == lines[: len(kept)]


def test_a_quorum_of_the_largest_asks_that_are_taken_can_be_sent() -> None:
    """What one group sends is bounded, so that nothing is consumed which cannot be told to everybody."""
    text = "\N{GRINNING FACE}"
    many = tuple(text * (codec.MAX_ADDRESSES_BYTES // 4 // 100) for _ in range(100))
    ask = Ask(
        text * codec.MAX_NAME, 1, Version(MAX_STEP, 2**63 - 1), 2**64 - 1, quorum_id=2**63 - 1, heal_addresses=many,
        store_address=text * codec.MAX_ADDRESS, address=text * codec.MAX_ADDRESS, data=text * codec.MAX_DATA,
    )  # fmt: skip
    taken = codec.decode_lease_request(codec.encode_lease(ask), ask.replica_id)
    assert isinstance(taken, Ask)
    quorum = Quorum(2**63 - 1, (Member.of(taken),), 2**62)
    assert MAX_REPLICAS * len(codec.encode_quorum(quorum)) < codec.MAX_PUSH_BYTES
    with pytest.raises(ConfigError, match=r"Ask.heal_addresses has 1\d+ bytes in all; at most 163840 are allowed"):
        codec.encode_lease(replace(ask, heal_addresses=(*many, text * 99)))
