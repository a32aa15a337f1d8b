"""Classes beyond plain Python, torch and numpy: which travel, which are rebuilt, and that none of their code runs."""

from __future__ import annotations

import argparse
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
from collections import OrderedDict, defaultdict, deque, namedtuple
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ft_core.checkpointing import OwnState, decode, encode, register_state_type, state_types, tensor_paths
from ft_core.checkpointing.tensor_bytes import byte_view
from ft_core.checkpointing.tree import snapshot
from ft_core.errors import ConfigError, EncodingError, HealError

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    a: int
    b: str = "b"


class Checked(NamedTuple("Checked", [("n", int)])):
    __slots__ = ()

    def __new__(cls, n: int) -> Checked:
        if n == 13:
            raise AssertionError("code of the class ran")
        return super().__new__(cls, n)


class Mode(enum.Enum):
    TRAIN = "train"
    EVAL = object()


class Level(enum.IntEnum):
    LOW = 1


class Bits(enum.Flag):
    A = 1
    B = 2


@dataclass
class Meta:
    step: int
    weights: torch.Tensor
    history: list[Any] = field(default_factory=list)
    late: int = field(init=False)

    def __post_init__(self) -> None:
        if self.step == 13:
            raise AssertionError("code of the class ran")


@dataclass(frozen=True, slots=True)
class Key:
    name: str
    n: int


@dataclass
class Labelled(dict[str, int]):
    label: str = ""


class Opaque:
    def __init__(self, n: int) -> None:
        self.n = n

    def __eq__(self, other: object) -> bool:
        return type(other) is Opaque and other.n == self.n

    def __hash__(self) -> int:
        return self.n


def travel(state: Any, known: Any = None) -> Any:
    """What a receiver ends up with; `known`: a state of its own, default an equal one."""
    encoded = encode(state)
    tensors = []
    for leaf, tensor in zip(encoded.leaves, encoded.tensors, strict=True):
        fresh = torch.empty(leaf.shape, dtype=leaf.dtype)
        byte_view(fresh)[:] = byte_view(tensor)
        tensors.append(fresh)
    own = OwnState.of(state if known is None else known)
    return decode(encoded.skeleton_bytes(), tensors, own.classes)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_types, "_by_class", dict(state_types._by_class))
    monkeypatch.setattr(state_types, "_by_name", dict(state_types._by_name))


UTC = datetime.timezone.utc
VALUES = [
    Point(1, [2, Point(3, 4)]),
    Typed(1),
    Mode.TRAIN,
    Mode.EVAL,
    Level.LOW,
    Bits.A,
    Bits.A | Bits.B,
    Bits(0),
    Key("k", 1),
    {Key("k", 1): 1, Mode.EVAL: 2, Point(1, 2): 3, 5: 6, (7, "x"): 8},
    {Mode.TRAIN, Key("k", 1)},
    deque([Point(1, 2)], maxlen=3),
    defaultdict(deque, {"a": deque([1])}),
    OrderedDict(a=Level.LOW),
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("c"),
    pathlib.PureWindowsPath("c:\\d"),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6),  # noqa: DTZ001 - naive ones travel, too
    datetime.datetime(2026, 1, 2, tzinfo=UTC),
    datetime.datetime(2026, 1, 2, fold=1, tzinfo=datetime.timezone(datetime.timedelta(hours=2), "X")),
    datetime.date(2026, 1, 2),
    datetime.time(1, 2, 3, tzinfo=UTC),
    datetime.timedelta(days=-1, microseconds=5),
    UTC,
    decimal.Decimal("1.10"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=7),
    argparse.Namespace(lr=0.1, layers=[1, 2]),
    types.SimpleNamespace(a=1),
    torch.strided,
    torch.channels_last,
    np.random.default_rng(3).bit_generator.state,
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{str(v)[:20]}")
def test_every_type_comes_back_as_itself(value: Any) -> None:
    back = travel({"x": value})["x"]
    assert type(back) is type(value)
    assert back == value


def test_datetimes_keep_their_zone_and_fold() -> None:
    value = datetime.datetime(2026, 1, 2, fold=1, tzinfo=UTC)
    back = travel([value])[0]
    assert back.tzinfo is UTC
    assert back.fold == 1


def test_a_generator_goes_on_where_it_was() -> None:
    generator = torch.Generator().manual_seed(5)
    torch.rand(3, generator=generator)
    back = travel({"g": generator})["g"]
    assert torch.equal(torch.rand(4, generator=back), torch.rand(4, generator=generator))


def test_a_dataclass_comes_back_with_what_is_set_and_none_of_its_code_runs() -> None:
    meta = Meta(12, torch.arange(3.0), [Point(1, 2)])
    meta.step = 13
    back = travel({"m": meta})["m"]
    assert type(back) is Meta
    assert (back.step, back.history) == (13, [Point(1, 2)])
    assert torch.equal(back.weights, meta.weights)
    assert not hasattr(back, "late")
    odd = tuple.__new__(Checked, [13])
    assert travel([odd]) == [odd]


def test_tensors_in_them_are_found_where_the_encoder_finds_them() -> None:
    state = {"m": Meta(1, torch.ones(2)), "p": [Point(torch.ones(1), {"z": torch.ones(3)})]}
    assert list(tensor_paths(state)) == [leaf.path for leaf in encode(state).leaves]
    assert list(tensor_paths(state)) == ["state['m'].weights", "state['p'][0].x", "state['p'][0].y['z']"]


def hides() -> Any:
    point = type("Sub", (Point,), {})(1, 2)
    point.extra = 3
    return point


def more() -> Any:
    meta = Meta(1, torch.ones(1))
    meta.unexpected = 5  # type: ignore[attr-defined]
    return meta


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (Opaque(1), ["Opaque", "register_state_type"]),
        (hides(), ["Sub", "extra"]),
        (more(), ["Meta", "unexpected"]),
        (Labelled(label="x"), ["Labelled", "register_state_type"]),
        (datetime.datetime(2026, 1, 1, tzinfo=type("Zone", (datetime.tzinfo,), {})()), ["Zone"]),
        (type("Weird", (int,), {})(3), ["Weird"]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_rebuilt_is_refused_by_key_path(value: Any, words: list[str]) -> None:
    for dry in (False, True):
        with pytest.raises(EncodingError) as e:
            encode({"a": [value]}, dry=dry)
        for word in ["state['a'][0]", *words]:
            assert word in str(e.value)


@pytest.mark.parametrize("value", [Point(1, 2), Mode.TRAIN, Key("a", 1)], ids=repr)
def test_a_class_is_rebuilt_only_where_it_is_known(value: Any, registry: None) -> None:
    with pytest.raises(HealError, match=rf"{type(value).__name__}.* not known here"):
        travel([value], known=[])
    assert travel([value], known={"elsewhere": value}) == [value]
    register_state_type(type(value))
    assert travel([value], known=[]) == [value]


def test_a_registered_class_travels_with_its_tensors(registry: None) -> None:
    register_state_type(Opaque, lambda v: {"n": v.n, "t": torch.ones(v.n)}, lambda d: Opaque(int(d["t"].sum())))
    assert travel({"o": Opaque(5)}, known=[]) == {"o": Opaque(5)}
    assert snapshot([Opaque(5)], ()) == [Opaque(5)]
    with pytest.raises(HealError, match="not registered"):
        decode(b'["R", "os:system", "true"]', [])


def test_an_encode_function_that_fails_is_named_with_the_key_path(registry: None) -> None:
    register_state_type(Opaque, lambda v: v.missing, lambda d: Opaque(d))  # type: ignore[attr-defined]
    with pytest.raises(EncodingError, match=r"state\['o'\].*Opaque.*AttributeError"):
        encode({"o": Opaque(5)})
    kept = Opaque(5)
    assert snapshot(kept, ()) is kept


@pytest.mark.parametrize("arguments", [(Opaque,), (Opaque, lambda v: v), (Labelled,), (5,), (dict,)], ids=str)
def test_a_registration_that_cannot_work_is_refused(arguments: Any, registry: None) -> None:
    with pytest.raises(ConfigError, match="register_state_type"):
        register_state_type(*arguments)


HERE = __name__


@pytest.mark.parametrize(
    "skeleton",
    [
        f'["nt","{HERE}:Point",1]',
        f'["nt","{HERE}:Meta",1,2]',
        f'["dc","{HERE}:Point","x",1]',
        f'["dc","{HERE}:Meta","nonsense",1]',
        f'["dc","{HERE}:Meta",1,1]',
        f'["E","{HERE}:Mode","NONE"]',
        f'["E","{HERE}:Mode",5]',
        f'["E","{HERE}:Point","x"]',
        f'["nt",["{HERE}:Point"],1,2]',
        '["E","enum:Enum","x"]',
        '["dc","subprocess:Popen","args","true"]',
        '["R","pathlib.PosixPath",5]',
        '["R","argparse.Namespace",["l"]]',
        f'["R","{HERE}:Point",["t",1,2]]',
    ],
)
def test_a_class_that_is_misused_is_refused(skeleton: str) -> None:
    known = OwnState.of([Point(1, 2), Meta(1, torch.ones(1)), Mode.TRAIN]).classes
    with pytest.raises(HealError):
        decode(skeleton, [], known)


def test_a_snapshot_is_not_reached_by_later_changes() -> None:
    volatile = torch.zeros(3)
    other = torch.zeros(3)
    state: OrderedDict[str, Any] = OrderedDict(
        a=[1, {"b": volatile, "tied": volatile}], m=Meta(1, volatile, [1]), d=deque([volatile], 2), o=other,
        n=np.zeros(2), g=torch.Generator().manual_seed(1), p=Point(volatile, {1}), s={1}, dd=defaultdict(list, x=[1]),
    )  # fmt: skip
    state._metadata = {"version": 1}  # type: ignore[attr-defined]
    before = encode(snapshot(state, {volatile.untyped_storage().data_ptr()}))
    taken: Any = snapshot(state, {volatile.untyped_storage().data_ptr()})
    volatile += 1
    state["a"].append(2)
    state["m"].history.append(2)
    state["d"].append(3)
    state["n"][0] = 7
    torch.rand(1, generator=state["g"])
    state["s"].add(2)
    state["dd"]["x"].append(2)
    after = encode(taken)
    assert after.skeleton == before.skeleton
    assert all(torch.equal(a, b) for a, b in zip(after.tensors, before.tensors, strict=True))
    assert taken["a"][1]["b"] is taken["a"][1]["tied"] is taken["m"].weights
    assert taken["o"] is other
    assert taken._metadata == {"version": 1}
    assert (taken["d"].maxlen, taken["dd"].default_factory) == (2, list)


def test_a_dry_run_sees_what_a_real_one_sees_and_copies_nothing() -> None:
    state = {"m": Meta(1, torch.ones(2, 2).t()), "b": b"x" * 5000, "n": np.zeros((3, 4)), "p": Point(1, torch.ones(9))}
    real, dry = encode(state), encode(state, dry=True)
    assert dry.leaves == real.leaves
    assert dry.skeleton == real.skeleton
    assert dry.tensors == []
