"""Safe encoding of nested state: a JSON skeleton plus a flat list of tensor leaves.

`encode` walks a state dict once and splits it. Everything that is not bulk data becomes the *skeleton*, a tree of plain
JSON values in which a container or special value is an array that starts with a tag (`["d", key, value, ...]`); every
tensor (and large bytes, and numpy arrays) becomes a *leaf* that the skeleton refers to by number. `decode` is the
inverse. There is no pickle on either side: a received skeleton can only ever build the closed set of types below, so
nothing that arrives from the network can run code.

Invariants
- `decode(skeleton(encode(x)), leaves) == x` for every type in the table; every other type is refused by `encode`
  with an `EncodingError` that names its key path. Never a silent approximation (one exception, wanted: an
  `nn.Parameter` arrives as a plain tensor).
- A class is named, never sent: `state_types` decides which instances can travel, and which of them are rebuilt.
- Leaf order is the traversal order, so equal structures give equal leaf lists on every donor. That is why a tensor may
  not sit in a set or be a dict key: neither has an order that all donors share.
- Two places that hold the same memory, shape and strides share one leaf (tied weights); other overlaps are sent twice.
- `Encoded.tensors` are contiguous CPU tensors, or (`on_devices`) lie where a device copies them later. Where `owned` is
  False they alias the live state, with a TensorImpl of their own: the trainer's `p.data = other` does not free them.

Threads: pure functions on the caller's thread; nothing is kept.
"""

from __future__ import annotations

import base64
import enum
import json
import re
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch

from ft_core.checkpointing import devices, state_types
from ft_core.checkpointing.sharded_state import LocalShard, Sharding
from ft_core.checkpointing.tensor_bytes import byte_view
from ft_core.checkpointing.tree import MAX_DEPTH, ROOT, is_plain_tensor
from ft_core.errors import EncodingError, HealError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

INLINE_BYTES_MAX: Final = 1024
"""Longer `bytes` values become leaves: the skeleton would have them in base64."""

DTYPES: Final[dict[str, torch.dtype]] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not str(value).startswith(("torch.q", "torch.bits"))
}
"""The dtypes a leaf may have, by the name used on the wire."""

CLASSES_MAX: Final = 1024
"""Most classes of the user's in one state."""
_NO_CLASSES: Final[dict[str, type]] = {}
_PLAIN: Final = (str, float, bool, type(None))
_INT_LIMIT: Final = 1 << 63
_NUMPY_DTYPE: Final = re.compile(r"[<>|=][biufcSUmM]\d{1,6}(\[\w{1,8}\])?")
REGISTER: Final = "or register its class: ft_core.checkpointing.register_state_type"


@dataclass(frozen=True, slots=True)
class Leaf:
    """One piece of bulk data: where it first occurs in the state, and what it is."""

    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the leaf's data in bytes."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count

    @property
    def dtype_name(self) -> str:
        """The dtype's name on the wire, `float32`."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def identity(self) -> str:
        """Equal for leaves that can take each other's bytes."""
        return f"{self.path}|{self.dtype_name}|{self.shape}"


@dataclass(slots=True)
class Encoded:
    """What `encode` made of a state. `tensors[i]` holds the data of `leaves[i]`."""

    skeleton: Any
    leaves: list[Leaf] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    owned: list[bool] = field(default_factory=list)
    """Whether `tensors[i]` is a copy made by the encoder (True) or aliases the caller's memory (False)."""
    classes: dict[str, tuple[type, str]] = field(default_factory=dict)
    """The user's classes in the state by the name they travel under, each with the key path where it first occurs."""

    def skeleton_bytes(self) -> bytes:
        """The skeleton as it travels."""
        return json.dumps(self.skeleton, separators=(",", ":")).encode("ascii")


def encode(state: object, *, dry: bool = False, on_devices: bool = False) -> Encoded:
    """Split `state` into skeleton and leaves.

    Copies only what cannot be served from where it lies (device memory, non-contiguous tensors, numpy arrays, bytes).
    `on_devices`: what `devices` can copy later stays where it is. `dry`: copies nothing; the result has no `tensors`.
    Raises `EncodingError` naming the key path of the first value that cannot be carried.
    """
    encoder = _Encoder(dry, on_devices)
    encoder.result.skeleton = encoder.node(state, ROOT, 0)
    return encoder.result


def decode(skeleton: bytes | str, tensors: Sequence[torch.Tensor], known: Mapping[str, type] = _NO_CLASSES) -> Any:
    """Rebuild the state from a received skeleton; `HealError` if it is not one.

    `known`: classes that may be rebuilt besides the registered ones, by name.
    """
    try:
        return decode_tree(json.loads(skeleton), tensors, known)
    except (ValueError, RecursionError) as e:
        raise HealError(f"received state skeleton is not valid: {e!r}") from e


def decode_tree(tree: Any, tensors: Sequence[torch.Tensor], known: Mapping[str, type] = _NO_CLASSES) -> Any:
    """`decode` for a skeleton that is already parsed."""
    try:
        return _Decoder(tensors, known).value(tree, 0)
    except HealError:
        raise
    except Exception as e:
        # Whatever a malformed tree makes the constructors below raise, the finding is the same.
        raise HealError(f"received state skeleton is not valid: {e!r}") from e


class _Encoder:
    """One walk. `shared` maps the identity of a tensor's memory to its leaf."""

    def __init__(self, dry: bool, on_devices: bool) -> None:
        self.dry, self.on_devices = dry, on_devices
        self.result = Encoded(None)
        self.shared: dict[tuple[Any, ...], int] = {}
        self.unordered = 0  # > 0 inside a set or a dict key, where tensors are refused

    def refuse(self, path: str, value: object, why: str) -> NoReturn:
        kind = type(value)
        name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
        raise EncodingError(f"{path}: type {name} {why}")

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is int:
            return value if -_INT_LIMIT <= value < _INT_LIMIT else ["i", hex(value)]
        if depth > MAX_DEPTH:
            self.refuse(path[:200], value, f"is nested deeper than {MAX_DEPTH} levels, or the state contains itself")
        if isinstance(value, torch.Tensor):
            return ["T", self.tensor(value, path)]
        if kind is LocalShard:
            return ["DT", self.tensor(value.tensor, path), *value.sharding.encoded()]
        entry = state_types.registered(kind)
        if entry is not None and entry.encode is not None:
            return self.registered(entry, entry.encode, value, path, depth)
        if isinstance(value, enum.Enum):
            return ["E", self.class_name(kind, path), state_types.enum_value(value)]
        if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
            return self.container(value, path, depth)
        if state_types.is_open_dataclass(kind):
            self.check_hidden(value, path)
            fields = dict(state_types.fields_of(value))
            node = ["dc", self.class_name(kind, path)]
            for name, item in fields.items():
                node += [name, self.node(item, f"{path}.{name}", depth + 1)]
            return node
        return self.special(value, path)

    def class_name(self, kind: type, path: str) -> str:
        name = state_types.class_name(kind)
        if name not in self.result.classes and len(self.result.classes) >= CLASSES_MAX:
            raise EncodingError(f"{path}: the state holds instances of more than {CLASSES_MAX} classes")
        self.result.classes.setdefault(name, (kind, path))
        return name

    def check_hidden(self, value: object, path: str) -> None:
        hidden = state_types.hidden_attributes(value)
        if hidden:
            names = ", ".join(hidden)[:200]
            self.refuse(path, value, f"has attributes that are not fields: {names}; remove them, {REGISTER}")

    def registered(
        self, entry: state_types.StateType, take_apart: Callable[[Any], Any], value: object, path: str, depth: int
    ) -> list[Any]:
        try:
            parts = take_apart(value)
        except Exception as e:
            name = type(value).__qualname__
            raise EncodingError(f"{path}: the encode function registered for {name} raised {e!r}") from e
        return ["R", entry.name, self.node(parts, path, depth + 1)]

    def container(self, value: Any, path: str, depth: int) -> list[Any]:
        kind = type(value)
        if kind is dict:
            return self.pairs(["d"], value, path, depth)
        if kind is list:
            return self.items(["l"], value, path, depth)
        if kind is tuple:
            return self.items(["t"], value, path, depth)
        if kind is OrderedDict:
            # nn.Module.state_dict() hangs its version table on the dict; load_state_dict reads it back.
            meta = getattr(value, "_metadata", None)
            return self.pairs(["o", self.node(meta, f"{path}._metadata", depth + 1)], value, path, depth)
        if kind is torch.Size:
            return ["S", *value]
        if kind is Counter:
            return self.pairs(["c"], value, path, depth)
        if kind is defaultdict:
            name = next((n for n, f in state_types.FACTORIES.items() if f is value.default_factory), None)
            if name is None:
                known = ", ".join(state_types.FACTORIES)
                self.refuse(path, value, f"has default_factory {value.default_factory!r}; only {known}")
            return self.pairs(["dd", name], value, path, depth)
        if kind is deque:
            return self.items(["dq", value.maxlen], value, path, depth)
        if kind in (set, frozenset):
            self.unordered += 1
            node = self.items(["s" if kind is set else "f"], value, path, depth)
            self.unordered -= 1
            return node
        if state_types.is_named_tuple(kind):
            self.check_hidden(value, path)
            node = ["nt", self.class_name(kind, path)]
            return node + [self.node(item, f"{path}.{n}", depth + 1) for n, item in state_types.fields_of(value)]
        why = f"is a container subclass that cannot be sent; convert it to its base type, {REGISTER}"
        return self.refuse(path, value, why)

    def items(self, node: list[Any], values: Iterable[Any], path: str, depth: int) -> list[Any]:
        for index, item in enumerate(values):
            kind = type(item)
            # Paths cost more than the values themselves in long lists of numbers (RNG states): build them when needed.
            node.append(item if kind in _PLAIN else self.node(item, f"{path}[{index}]", depth + 1))
        return node

    def pairs(self, node: list[Any], values: dict[Any, Any], path: str, depth: int) -> list[Any]:
        for key, item in values.items():
            if type(key) is str:
                node.append(key)
            else:
                self.unordered += 1
                node.append(self.node(key, f"{path} key {key!r}"[:300], depth + 1))
                self.unordered -= 1
            node.append(item if type(item) in _PLAIN else self.node(item, f"{path}[{key!r}]", depth + 1))
        return node

    def special(self, value: Any, path: str) -> list[Any]:
        kind = type(value)
        if kind in (bytes, bytearray):
            tag = "b" if kind is bytes else "ba"
            if len(value) <= INLINE_BYTES_MAX:
                return [tag, base64.b64encode(value).decode("ascii")]
            return [tag, self.raw_leaf(bytearray() if self.dry else bytearray(value), path, len(value))]
        if kind is complex:
            return ["z", value.real, value.imag]
        if kind is torch.dtype:
            name = str(value).removeprefix("torch.")
            if name not in DTYPES:
                self.refuse(path, value, f"{value} cannot be sent")
            return ["D", name]
        if kind is torch.device:
            return ["V", str(value)]
        if kind is range:
            return ["r", value.start, value.stop, value.step]
        if kind is slice:
            return ["sl", *(self.node(part, path, 0) for part in (value.start, value.stop, value.step))]
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
            return self.numpy(numpy, value, path)
        return self.refuse(path, value, f"cannot be sent; keep it out of the state, {REGISTER}")

    def numpy(self, numpy: Any, value: Any, path: str) -> list[Any]:
        if isinstance(value, numpy.ndarray) and type(value) is not numpy.ndarray:
            self.refuse(path, value, "is a numpy array subclass; convert it with numpy.array()")
        if not _NUMPY_DTYPE.fullmatch(value.dtype.str):
            self.refuse(path, value, f"with dtype {value.dtype} cannot be sent")
        if isinstance(value, numpy.generic):
            return ["n", value.dtype.str, base64.b64encode(value.tobytes()).decode("ascii")]
        # Always a copy: nothing tells when numpy state (an RNG's) changes.
        data = bytearray() if self.dry else bytearray(value.tobytes())
        return ["N", value.dtype.str, list(value.shape), self.raw_leaf(data, path, value.nbytes)]

    def raw_leaf(self, data: bytearray, path: str, size: int) -> int:
        if self.unordered:
            raise EncodingError(f"{path}: bulk data in a set or as a dict key has no order that all donors share")
        if self.dry:
            return self.leaf(Leaf(path, torch.uint8, (size,)))
        tensor = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return self.add(tensor, path, owned=True)

    def tensor(self, value: torch.Tensor, path: str) -> int:
        if self.unordered:
            self.refuse(path, value, "is in a set or a dict key, which have no order that all donors share; use a list")
        self.check(value, path)
        plain = value.detach()
        flags = (plain.is_conj(), plain.is_neg())
        key = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride(), flags)
        known = self.shared.get(key) if plain.numel() else None
        if known is not None:
            return known
        if self.dry:
            index = self.leaf(Leaf(path, plain.dtype, tuple(plain.shape)))
        else:
            held = plain.resolve_conj().resolve_neg()
            held = (held if self.on_devices and devices.device_of(plain) is not None else held.cpu()).contiguous()
            index = self.add(held, path, owned=held.data_ptr() != plain.data_ptr())
        self.shared[key] = index
        return index

    def check(self, value: torch.Tensor, path: str) -> None:
        if type(value).__name__ == "DTensor":
            self.refuse(path, value, "cannot be sent yet; send its local shard, value.to_local()")
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            self.refuse(path, value, "is a tensor subclass, which may carry more than its bytes; send a plain tensor")
        if not is_plain_tensor(value):
            what = "meta" if value.is_meta else "quantized" if value.is_quantized else str(value.layout)
            self.refuse(path, value, f"({what}) cannot be sent; only dense tensors with data can")
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            self.refuse(path, value, f"with dtype {value.dtype} cannot be sent")

    def add(self, tensor: torch.Tensor, path: str, *, owned: bool) -> int:
        self.result.tensors.append(tensor)
        self.result.owned.append(owned)
        return self.leaf(Leaf(path, tensor.dtype, tuple(tensor.shape)))

    def leaf(self, leaf: Leaf) -> int:
        self.result.leaves.append(leaf)
        return len(self.result.leaves) - 1


class _Decoder:
    """Builds values from a skeleton; every tag it does not know is an error."""

    def __init__(self, tensors: Sequence[torch.Tensor], known: Mapping[str, type]) -> None:
        self.tensors = tensors
        self.known = known

    def leaf(self, index: Any) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self.tensors):
            raise HealError(f"received state skeleton refers to leaf {index!r} of {len(self.tensors)}")
        return self.tensors[index]

    def raw(self, ref: Any) -> bytearray:
        if isinstance(ref, str):
            return bytearray(base64.b64decode(ref, validate=True))
        return bytearray(byte_view(self.leaf(ref)))

    def items(self, nodes: Iterable[Any], depth: int) -> list[Any]:
        return [node if type(node) in _PLAIN else self.value(node, depth + 1) for node in nodes]

    def pairs(self, nodes: list[Any], depth: int) -> list[tuple[Any, Any]]:
        values = self.items(nodes, depth)
        return list(zip(values[::2], values[1::2], strict=True))

    def value(self, node: Any, depth: int) -> Any:
        if type(node) is not list:
            if type(node) is dict:
                raise HealError("received state skeleton holds a JSON object")
            return node
        if depth > MAX_DEPTH + 2:
            raise HealError(f"received state skeleton is nested deeper than {MAX_DEPTH} levels")
        tag, rest = node[0], node[1:]
        if tag == "d":
            return dict(self.pairs(rest, depth))
        if tag == "l":
            return self.items(rest, depth)
        if tag == "t":
            return tuple(self.items(rest, depth))
        if tag == "T":
            return self.leaf(*rest)
        if tag == "o":
            ordered: OrderedDict[Any, Any] = OrderedDict(self.pairs(rest[1:], depth))
            meta = self.value(rest[0], depth + 1)
            if meta is not None:
                ordered._metadata = meta  # type: ignore[attr-defined]
            return ordered
        return self.rare(tag, rest, depth)

    def rare(self, tag: Any, rest: list[Any], depth: int) -> Any:
        if tag == "S":
            return torch.Size(rest)
        if tag == "c":
            return Counter(dict(self.pairs(rest, depth)))
        if tag == "dd":
            return defaultdict(state_types.FACTORIES[rest[0]], self.pairs(rest[1:], depth))
        if tag == "dq":
            return deque(self.items(rest[1:], depth), maxlen=rest[0])
        if tag == "s":
            return set(self.items(rest, depth))
        if tag == "f":
            return frozenset(self.items(rest, depth))
        if tag == "nt":
            return state_types.build_named_tuple(state_types.resolve(rest[0], self.known), self.items(rest[1:], depth))
        if tag == "dc":
            return state_types.build_dataclass(
                state_types.resolve(rest[0], self.known), dict(self.pairs(rest[1:], depth))
            )
        if tag == "R":
            return state_types.decode_registered(rest[0], self.value(rest[1], depth + 1))
        return self.scalar(tag, rest)

    def scalar(self, tag: Any, rest: list[Any]) -> Any:
        if tag == "i":
            return int(rest[0], 16)
        if tag == "b":
            return bytes(self.raw(rest[0]))
        if tag == "ba":
            return self.raw(rest[0])
        if tag == "z":
            return complex(*rest)
        if tag == "D":
            return DTYPES[rest[0]]
        if tag == "V":
            return torch.device(rest[0])
        if tag == "r":
            return range(*rest)
        if tag == "sl":
            return slice(*self.items(rest, 0))
        if tag in ("n", "N"):
            return self.numpy(tag, rest)
        if tag == "DT":
            return LocalShard(self.leaf(rest[0]), Sharding.decoded(*rest[1:]))
        if tag == "E":
            return state_types.build_enum(state_types.resolve(rest[0], self.known), rest[1])
        raise HealError(f"received state skeleton holds an unknown tag {str(tag)[:40]!r}")

    def numpy(self, tag: str, rest: list[Any]) -> Any:
        if not _NUMPY_DTYPE.fullmatch(rest[0]):
            raise HealError(f"received state skeleton holds a numpy dtype that is not allowed: {rest[0]!r}")
        try:
            import numpy
        except ImportError as e:
            raise HealError("received state holds numpy values, but numpy is not installed here") from e
        if tag == "n":
            return numpy.ndarray((), rest[0], self.raw(rest[1]))[()]
        return numpy.ndarray(rest[1], rest[0], self.raw(rest[2]))
