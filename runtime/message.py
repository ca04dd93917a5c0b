"""`@message`: what stages say to each other. A frozen, slotted dataclass without `__eq__`, made in less time.

A decoding step makes seven messages of up to 19 fields, and a frozen dataclass pays for each field with a call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, FrozenInstanceError, dataclass, field, fields
from typing import Any, Never, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Use it as `@dataclass(frozen=True, slots=True, eq=False)`: fields, defaults, `replace`, `match` and copies work.

    NOTE: the attributes are set while the object is still of the plain class below, which refuses nothing. Dataclasses
    as bases, fields by name only and `__post_init__` are not supported.
    """
    if any(hasattr(base, "__dataclass_fields__") for base in cls.__bases__):
        raise TypeError(f"message {cls.__name__}: a dataclass as its base is not supported; repeat the fields")
    plain = dataclass(slots=True, eq=False)(cls)

    def reduce(self: Any) -> tuple[type, tuple[Any, ...]]:
        return type(self), tuple(getattr(self, spec.name) for spec in fields(self))

    members = {"__new__": _maker(plain), "__init__": object.__init__, "__setattr__": _refuse, "__delattr__": _refuse}
    names = {name: getattr(cls, name) for name in ("__doc__", "__module__", "__qualname__")}
    signature = {"__signature__": inspect.signature(plain)}
    made: type[T] = type(
        cls.__name__, (plain,), {"__slots__": (), "__reduce__": reduce, **members, **names, **signature}
    )
    return made


def _maker(plain: type) -> Callable[..., Any]:
    """The `__new__` of a message: fills a `plain` object, and makes it one of the class it is called for. Written out
    field by field, as dataclasses write their `__init__`: to pass arguments on takes longer than to use them."""
    specs: tuple[Field[Any], ...] = fields(plain)
    known: dict[str, Any] = {"_new": object.__new__, "_plain": plain, "_MISSING": MISSING}
    parameters, lines = ["_cls"], ["_made = _new(_plain)"]
    for spec in specs:
        name = value = spec.name
        parameter = name
        if spec.default is not MISSING:
            known[f"_default_{name}"], parameter = spec.default, f"{name}=_default_{name}"
        elif spec.default_factory is not MISSING:
            known[f"_make_{name}"], parameter = spec.default_factory, f"{name}=_MISSING"
            value = f"_make_{name}() if {name} is _MISSING else {name}"
        parameters.append(parameter)
        lines.append(f"_made.{name} = {value}")
    lines += ["_made.__class__ = _cls", "return _made"]
    exec(f"def __new__({', '.join(parameters)}):\n  " + "\n  ".join(lines), known)
    made: Callable[..., Any] = known["__new__"]
    made.__qualname__ = plain.__qualname__
    return made


def _refuse(self: object, name: str, value: object = None) -> Never:
    raise FrozenInstanceError(f"{type(self).__name__}.{name}: a message is made once, use dataclasses.replace")
