"""`@message`: the decorator of messages between stages.

A frozen, slotted dataclass without `__eq__`, faster to make.

A decoding step makes seven messages. A frozen dataclass pays a call for each field: 8.5 us for ten fields on a 2.5 GHz
Xeon with Python 3.11.
"""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass, field, fields
from functools import partial
from typing import Annotated, Any, Never, TypeVar, dataclass_transform

T = TypeVar("T")

# A field's type: a point in time on the monotonic clock of this machine, in seconds. Where it crosses a link to another
# machine, it arrives on that one's clock.
Moment = Annotated[float, "Moment"]


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def message(cls: type[T]) -> type[T]:
    """Use it like `@dataclass(frozen=True, slots=True, eq=False)`.

    Defaults, `replace`, `match` and copies work.

    NOTE: `__init__` sets the attributes while the object is of the class `unfinished` below, which is not frozen; then
    its class is changed. So dataclasses as bases, subclasses and `__post_init__` are not supported.
    """
    if hasattr(cls, "__post_init__"):
        raise TypeError(f"message {cls.__name__}: __post_init__ is not supported; check fields where it is made")
    if any(hasattr(base, "__dataclass_fields__") for base in cls.__bases__):
        raise TypeError(f"message {cls.__name__}: a dataclass as its base is not supported; repeat the fields")

    def finish(self: Any) -> None:
        self.__class__ = made

    def reduce(self: Any) -> tuple[type, tuple[Any, ...]]:
        return made, tuple(getattr(self, spec.name) for spec in fields(self))

    cls.__post_init__ = finish  # type: ignore[attr-defined]
    made = dataclass(slots=True, eq=False)(cls)
    plain = {name: getattr(object, name) for name in ("__new__", "__setattr__", "__delattr__")}
    unfinished = type(cls.__name__, (made,), {"__slots__": (), **plain})
    members = {
        "__signature__": inspect.signature(made),
        "__new__": partial(object.__new__, unfinished),  # faster than a function, which packs and unpacks arguments
        "__setattr__": _refuse,
        "__delattr__": _refuse,
        "__reduce__": reduce,
        "__init_subclass__": classmethod(_refuse_subclass),
    }
    for name, member in members.items():
        setattr(made, name, member)
    return made


def _refuse(self: object, name: str, value: object = None) -> Never:
    raise FrozenInstanceError(f"{type(self).__name__}.{name}: a message is made once, use dataclasses.replace")


def _refuse_subclass(cls: type) -> Never:
    raise TypeError(f"{cls.__name__}: a message as its base is not supported; repeat the fields")
