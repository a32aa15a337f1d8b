"""The encoding: everything comes back as itself, or is refused by key path."""

import json
import math
import pickle
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ft_core.checkpointing import Encoded, decode, encode, tensor_paths
from ft_core.checkpointing.state_encoding import DTYPES
from ft_core.checkpointing.tensor_bytes import byte_view
from ft_core.checkpointing.tree import MAX_DEPTH
from ft_core.errors import EncodingError, HealError


def travel(state: Any) -> Any:
    """What a receiver with fresh memory ends up with."""
    encoded = encode(state)
    tensors = []
    for leaf, tensor in zip(encoded.leaves, encoded.tensors, strict=True):
        fresh = torch.empty(leaf.shape, dtype=leaf.dtype)
        byte_view(fresh)[:] = byte_view(tensor)
        tensors.append(fresh)
    return decode(encoded.skeleton_bytes(), tensors)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bytes(byte_view(a)) == bytes(byte_view(b))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(x, y) for x, y in zip(a.values(), b.values(), strict=True))
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and math.isnan(a):
        return math.isnan(b)
    return bool(a == b)


VALUES = [
    None,
    True,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**200,
    -(2**5000),
    0.1,
    -0.0,
    math.inf,
    math.nan,
    1 + 2j,
    "",
    "text \u00e9 \ud800",
    b"",
    b"\x00\xff",
    b"long" * 1000,
    bytearray(b"abc"),
    bytearray(5000),
    [],
    (),
    {},
    set(),
    [1, [2, (3, {"a": 4})]],
    {1: "int key", (1, "t"): 2, None: 3, b"k": 4, False: 5, 2.5: 6},
    {1, "a", (2, 3), frozenset({4})},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({30: 1, 80: 2}),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {"a": 1}),
    deque([1, 2], maxlen=5),
    torch.Size([2, 3]),
    torch.float32,
    torch.device("cpu"),
    torch.device("cuda", 1),
    range(1, 10, 2),
    slice(1, None, 2),
    np.arange(6, dtype=">i4").reshape(2, 3),
    np.zeros((0, 3)),
    np.array(["ab", "c"]),
    np.array(3.5),
    np.datetime64("2024-01-01", "ns"),
    np.float64(0.1),
    np.bool_(True),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda v: f"{type(v).__name__}-{str(v)[:12]!r}")
def test_every_type_comes_back_as_itself(value: Any) -> None:
    state = {"x": value, "nested": [(value,)]}
    assert same(travel(state), state)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    dtype = DTYPES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of half-supported dtypes; we only move their bytes
        tensor = torch.empty(shape, dtype=dtype)
    view = byte_view(tensor)
    view[:] = bytes(i % 2 for i in range(len(view)))
    assert same(travel({"t": tensor}), {"t": tensor})


def test_tensors_that_do_not_lie_flat() -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1).expand(5),
        "conj": torch.tensor([1 + 2j]).conj(),
        "neg": torch.tensor([1 + 2j]).conj().imag,
        "grad": torch.ones(3, requires_grad=True),
    }
    back = travel(state)
    for key, tensor in state.items():
        assert torch.equal(back[key], tensor.detach()), key
        assert back[key].is_contiguous()


def test_a_parameter_arrives_as_a_tensor() -> None:
    back = travel({"p": torch.nn.Parameter(torch.ones(2))})
    assert type(back["p"]) is torch.Tensor
    assert not back["p"].requires_grad


def test_tied_tensors_are_one_leaf_and_stay_tied() -> None:
    weight = torch.randn(4, 4)
    encoded = encode({"a": weight, "b": weight, "c": weight.view(4, 4), "part": weight[:2], "t": weight.t()})
    assert [leaf.path for leaf in encoded.leaves] == ["state['a']", "state['part']", "state['t']"]
    back = travel({"a": weight, "b": weight})
    assert back["a"] is back["b"]


def test_live_tensors_are_not_copied_and_survive_p_data_assignment() -> None:
    parameter = torch.nn.Parameter(torch.ones(1000))
    encoded = encode([parameter, parameter.detach()[::2]])
    assert encoded.tensors[0].data_ptr() == parameter.data_ptr()
    assert encoded.owned == [False, True]
    parameter.data = torch.zeros(1000)
    assert encoded.tensors[0].sum() == 1000


def test_module_and_optimizer_state_round_trip() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    state: Any = {"m": model.state_dict(), "o": optimizer.state_dict(), "s": scheduler.state_dict()}
    state["rng"] = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    back = travel(state)
    assert same(back, state)
    assert back["m"]._metadata == state["m"]._metadata
    model.load_state_dict(back["m"])
    optimizer.load_state_dict(back["o"])
    scheduler.load_state_dict(back["s"])


class Foo:
    pass


class MyTensor(torch.Tensor):
    pass


class MyDict(dict[str, int]):
    pass


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"optim": {"hook": Foo()}}, ["state['optim']['hook']", "Foo"]),
        ({"f": [1, len]}, ["state['f'][1]", "builtin_function_or_method"]),
        ({"s": torch.eye(2).to_sparse()}, ["state['s']", "sparse"]),
        ({"m": torch.empty(2, device="meta")}, ["state['m']", "meta"]),
        ({"t": torch.ones(2).as_subclass(MyTensor)}, ["state['t']", "MyTensor", "subclass"]),
        ({"c": MyDict(a=1)}, ["state['c']", "MyDict", "register_state_type"]),
        ({"set": {"a": [1, {torch.ones(1)}]}}, ["state['set']['a'][1]", "Tensor", "order"]),
        ({"d": {(1, torch.ones(1)): 2}}, ["state['d'] key", "Tensor"]),
        ({"d": defaultdict(lambda: 1)}, ["state['d']", "default_factory"]),
        ({"n": np.array([object()])}, ["state['n']", "ndarray", "object"]),
        ({"n": np.zeros(2, dtype="i4,f4")}, ["state['n']", "dtype"]),
        ({Foo: 1}, ["state key", "type"]),
    ],
    ids=lambda v: str(v)[:30],
)
def test_what_cannot_be_sent_is_refused_by_key_path(state: Any, words: list[str]) -> None:
    with pytest.raises(EncodingError) as e:
        encode(state)
    for word in words:
        assert word in str(e.value)


def test_dtensor_is_refused_by_name() -> None:
    DTensor = type("DTensor", (torch.Tensor,), {})
    with pytest.raises(EncodingError, match=r"state\['w'\].*DTensor.*to_local"):
        encode({"w": torch.ones(2).as_subclass(DTensor)})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = [state]
    with pytest.raises(EncodingError, match=f"deeper than {MAX_DEPTH}"):
        encode(state)


class Bomb:
    fired = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "fired", True))


@pytest.mark.parametrize(
    "skeleton",
    [
        pickle.dumps(Bomb()),
        b"",
        b"{}",
        b'{"a": 1}',
        b'["?", 1]',
        b"[]",
        b'["T", 0]',
        b'["T", -1]',
        b'["T", true]',
        b'["d", 1]',
        b'["d", ["l"], 1]',
        b'["dd", "eval"]',
        b'["D", "float99"]',
        b'["V", "nowhere:x"]',
        b'["N", "|O8", [1], ["T", 0]]',
        b'["n", "object", "AAAA"]',
        b'["b", "%%%"]',
        b'["i", "zz"]',
        b'["S", "a"]',
        b'["l", {"__reduce__": 1}]',
        b"[" * 100_000,
        json.dumps(["l"] + [0] * 10).encode() + b"x",
    ],
    ids=lambda s: repr(s[:25]),
)
def test_a_malicious_skeleton_is_refused_and_runs_nothing(skeleton: bytes) -> None:
    with pytest.raises(HealError, match="skeleton"):
        decode(skeleton, [])
    assert not Bomb.fired


def test_deep_skeleton_is_refused() -> None:
    with pytest.raises(HealError, match="nested"):
        decode(b'["l",' * 200 + b"1" + b"]" * 200, [])


def test_tensor_paths_match_the_encoder() -> None:
    state = {"a": [torch.ones(1), (torch.ones(2), {"b": torch.ones(3)})], "n": 1, 7: torch.ones(4), "bad": Foo()}
    found = tensor_paths(state)
    del state["bad"]
    encoded: Encoded = encode(state)
    assert list(found) == [leaf.path for leaf in encoded.leaves]
    assert found["state[7]"] is state[7]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.sampled_from([torch.float32, torch.int8, torch.device("cpu")])
)
keys = st.text(max_size=5) | st.integers() | st.tuples(st.integers(), st.text(max_size=3)) | st.booleans()
tensors = st.builds(
    lambda dtype, shape: torch.arange(math.prod(shape)).reshape(shape).to(dtype),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
)
states = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4).map(OrderedDict)
        | st.sets(keys, max_size=4)
        | st.lists(inner, max_size=3).map(deque)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(states)
def test_any_nesting_round_trips(state: Any) -> None:
    assert same(travel(state), state)
