"""Classes that a state may hold beyond plain Python, torch and numpy: how they are named, taken apart and rebuilt.

Three kinds need no function of the user's: named tuples, dataclasses and enums are data by construction. They are taken
apart field by field and rebuilt without running any code of theirs (no `__init__`, `__new__` or `__post_init__`). Every
other class needs a pair of functions: `register_state_type(cls, encode, decode)`.

A class travels by name (`module:qualname`) and is never imported for it: a receiver rebuilds only classes that occur in
its own state, and those that were registered in its process. So what arrives chooses among classes which this process
has named itself.

Threads: registration is a single dict assignment, any thread; everything else is a pure function.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from ft_core.errors import ConfigError, HealError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

T = TypeVar("T")

REGISTERED_MAX: Final = 1024
"""Most classes in the registry."""
FACTORIES: Final[dict[str, Any]] = {
    "None": None,
    **{kind.__name__: kind for kind in (list, dict, set, int, float, str, bool, tuple, frozenset, bytes, bytearray)},
    **{kind.__name__: kind for kind in (deque, Counter, OrderedDict)},
}
"""What a defaultdict may make, by name."""
_HIDING: Final = (dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, BaseException)
"""Bases that hold content of their own, which the fields of a dataclass would not show."""


@dataclass(frozen=True, slots=True)
class StateType:
    """A registered class. Without functions it is only known by name: a named tuple, dataclass or enum."""

    name: str
    cls: type
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


_by_class: dict[type, StateType] = {}
_by_name: dict[str, StateType] = {}


def class_name(cls: type) -> str:
    """The name a class travels under."""
    return f"{cls.__module__}:{cls.__qualname__}"


def register_state_type(
    cls: type[T], encode: Callable[[T], Any] | None = None, decode: Callable[[Any], T] | None = None
) -> None:
    """Let `cls` travel with the state of a replica that heals. Call it in the script of every replica.

    Named tuples, dataclasses and enums need this only where a replica that starts afresh has none of them in its state
    yet, and then no functions. Every other class needs both.

    Args:
        cls: the class itself; subclasses have to be registered on their own.
        encode: returns what makes up an instance, of types that can be sent (tensors, too). It must not change the
            instance, and may run on any thread.
        decode: makes an instance of what `encode` returned; trusted with whatever a peer sends. Any thread.

    Raises:
        ConfigError: `cls` is not a class, its kind needs functions, or one of the two functions is missing.
    """
    if not isinstance(cls, type):
        raise ConfigError(f"register_state_type needs a class, got {cls!r}")
    if (encode is None) != (decode is None):
        raise ConfigError(f"register_state_type({cls.__qualname__}): pass both encode and decode, or neither")
    if encode is None and not (is_named_tuple(cls) or issubclass(cls, enum.Enum) or is_open_dataclass(cls)):
        raise ConfigError(
            f"register_state_type({cls.__qualname__}): only a named tuple, a dataclass without a base that holds "
            "content of its own, or an enum goes without encode and decode"
        )
    if cls not in _by_class and len(_by_class) >= REGISTERED_MAX:
        raise ConfigError(f"register_state_type({cls.__qualname__}): {REGISTERED_MAX} classes are registered already")
    _add(StateType(class_name(cls), cls, encode, decode))


def _add(entry: StateType) -> None:
    _by_class[entry.cls] = _by_name[entry.name] = entry


def registered(cls: type) -> StateType | None:
    """The entry of exactly this class."""
    return _by_class.get(cls)


def resolve(name: Any, known: Mapping[str, type]) -> type:
    """The class a peer means by `name`; `HealError` if neither the registry nor `known` has it."""
    entry = _by_name.get(name) if isinstance(name, str) else None
    found = entry.cls if entry is not None else known.get(name)
    if found is None:
        raise HealError(f"received state holds the class {str(name)[:200]}, which is not known here")
    return found


def knows(name: str, known: Mapping[str, type]) -> bool:
    """Whether `resolve` would find it."""
    return name in _by_name or name in known


def decode_registered(name: Any, value: Any) -> Any:
    """Make an instance of what its registered `encode` returned."""
    entry = _by_name.get(name)
    if entry is None or entry.decode is None:
        raise HealError(f"received state holds the type {str(name)[:200]}, which is not registered here")
    return entry.decode(value)


# -- the three kinds that are data by construction


def is_named_tuple(cls: type) -> bool:
    """Whether `cls` was made by `namedtuple` or `NamedTuple`."""
    return issubclass(cls, tuple) and isinstance(getattr(cls, "_fields", None), tuple)


def is_open_dataclass(cls: type) -> bool:
    """Whether `cls` is a dataclass whose fields are all it has."""
    return dataclasses.is_dataclass(cls) and not issubclass(cls, (*_HIDING, enum.Enum, torch.Tensor, torch.nn.Module))


def hidden_attributes(value: Any) -> list[str]:
    """What an instance of a named tuple or dataclass holds beyond its fields, so that it cannot be rebuilt of them."""
    fields = {f.name for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    slots = [s for base in type(value).__mro__ for s in _slots(base) if s not in ("__dict__", "__weakref__")]
    held = [*getattr(value, "__dict__", {}), *(s for s in slots if hasattr(value, s))]
    return sorted(set(held) - fields)


def _slots(cls: type) -> tuple[str, ...]:
    slots = cls.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each field of a named tuple or dataclass that is set."""
    if isinstance(value, tuple):
        yield from zip(type(value)._fields, value, strict=True)  # type: ignore[attr-defined]
        return
    for field in dataclasses.fields(value):
        if hasattr(value, field.name):
            yield field.name, getattr(value, field.name)


def build_named_tuple(cls: type, values: list[Any]) -> Any:
    """A named tuple of these fields, without running its `__new__`."""
    if not is_named_tuple(cls) or len(values) != len(cls._fields):  # type: ignore[attr-defined]
        raise HealError(f"received state holds {class_name(cls)} with {len(values)} fields, which it has not here")
    return tuple.__new__(cls, values)


def build_dataclass(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass of these fields, without running its `__init__`; frozen ones, too."""
    if not is_open_dataclass(cls):
        raise HealError(f"received state holds {class_name(cls)} as a dataclass, which it is not here")
    unknown = sorted(set(values) - {field.name for field in dataclasses.fields(cls)})
    if unknown:
        raise HealError(f"received state holds {class_name(cls)} with fields it does not have here: {unknown}")
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def enum_value(value: enum.Enum) -> str | int:
    """The name of a member; of flags that are combined, their bits."""
    cls = type(value)
    named: str | None = value.name  # combined flags have none, or one that is no member's, depending on Python
    return named if named in cls.__members__ and named is not None else int(value.value)


def build_enum(cls: type, value: Any) -> Any:
    """The member `enum_value` described."""
    if not issubclass(cls, enum.Enum):
        raise HealError(f"received state holds {class_name(cls)} as an enum, which it is not here")
    if isinstance(value, str):
        if value not in cls.__members__:
            raise HealError(f"received state holds {class_name(cls)}.{value[:100]}, which does not exist here")
        return cls.__members__[value]
    if not issubclass(cls, enum.Flag) or type(value) is not int:
        raise HealError(f"received state holds {class_name(cls)} with the value {str(value)[:100]}")
    return cls(value)


# -- what the standard library and torch have, under names that do not depend on the Python version


def _generator(parts: Any) -> torch.Generator:
    device, state = parts
    made = torch.Generator(device)
    made.set_state(state)
    return made


def _datetime(parts: Any) -> datetime.datetime:
    text, fold, zone = parts
    return datetime.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _time(parts: Any) -> datetime.time:
    text, fold, zone = parts
    return datetime.time.fromisoformat(text).replace(tzinfo=zone, fold=fold)


def _zone(parts: Any) -> datetime.timezone:
    offset, name = parts
    zero = offset == datetime.timedelta(0) and name == "UTC"
    return datetime.timezone.utc if zero else datetime.timezone(offset, name)


_LAYOUTS: Final = {
    str(value): value for value in vars(torch).values() if isinstance(value, (torch.layout, torch.memory_format))
}
_BUILTIN: Final[tuple[tuple[type, Callable[[Any], Any], Callable[[Any], Any]], ...]] = (
    (pathlib.PurePosixPath, str, pathlib.PurePosixPath),
    (pathlib.PureWindowsPath, str, pathlib.PureWindowsPath),
    (pathlib.PosixPath, str, pathlib.Path),
    (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    (datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), lambda p: datetime.timedelta(*p)),
    (datetime.timezone, lambda v: (v.utcoffset(None), v.tzname(None)), _zone),
    (datetime.datetime, lambda v: (v.replace(tzinfo=None).isoformat(), v.fold, v.tzinfo), _datetime),
    (datetime.time, lambda v: (v.replace(tzinfo=None).isoformat(), v.fold, v.tzinfo), _time),
    (decimal.Decimal, str, decimal.Decimal),
    (fractions.Fraction, lambda v: (v.numerator, v.denominator), lambda p: fractions.Fraction(*p)),
    (uuid.UUID, lambda v: v.int, lambda n: uuid.UUID(int=n)),
    (argparse.Namespace, lambda v: dict(vars(v)), lambda d: argparse.Namespace(**d)),
    (types.SimpleNamespace, lambda v: dict(vars(v)), lambda d: types.SimpleNamespace(**d)),
    (torch.Generator, lambda v: (v.device, v.get_state()), _generator),
    (torch.layout, str, _LAYOUTS.__getitem__),
    (torch.memory_format, str, _LAYOUTS.__getitem__),
)
for _cls, _encode, _decode in _BUILTIN:
    _add(StateType(f"{_cls.__module__.split('.')[0]}.{_cls.__name__}", _cls, _encode, _decode))
