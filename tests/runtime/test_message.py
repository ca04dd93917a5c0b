"""What `@message` promises."""

import copy
import inspect
import pickle
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, field, fields, replace

import pytest

from millrace.runtime.message import message


@message
class Told:
    """A message."""

    step: int
    rows: Sequence[int]
    is_last: bool = False
    notes: dict[str, int] = field(default_factory=dict)


def test_it_is_made_by_place_or_by_name_and_defaults_are_its_own() -> None:
    told = Told(1, [2], notes={"a": 3})
    assert (told.step, told.rows, told.is_last, told.notes) == (1, [2], False, {"a": 3})
    assert Told(step=1, rows=()).notes is not Told(1, ()).notes
    with pytest.raises(TypeError, match="rows"):
        Told(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="colour"):
        Told(1, (), colour="red")  # type: ignore[call-arg]


def test_it_cannot_be_changed_and_takes_no_more_attributes() -> None:
    told = Told(1, ())
    for name in ("step", "colour"):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(told, name, 2)
        with pytest.raises(FrozenInstanceError, match=name):
            delattr(told, name)
    assert not hasattr(told, "__dict__") and told.step == 1


def test_it_is_a_dataclass_to_replace_match_repr_copy_and_pickle() -> None:
    told = Told(1, (2, 3))
    later = replace(told, step=2)
    assert type(later) is Told and (later.step, later.rows) == (2, (2, 3))
    match later:
        case Told(step=2, rows=(2, 3)):
            pass
        case _:
            pytest.fail("the pattern does not match")
    assert repr(told) == "Told(step=1, rows=(2, 3), is_last=False, notes={})"
    assert [spec.name for spec in fields(told)] == ["step", "rows", "is_last", "notes"]  # type: ignore[arg-type]
    for twin in (copy.copy(told), copy.deepcopy(told), pickle.loads(pickle.dumps(told))):
        assert type(twin) is Told and repr(twin) == repr(told)


def test_equal_contents_are_two_messages() -> None:
    one, other = Told(1, ()), Told(1, ())
    assert one != other and one == one and len({one, other}) == 2


def test_it_says_what_it_is_and_what_it_takes() -> None:
    assert (Told.__name__, Told.__doc__, Told.__module__) == ("Told", "A message.", __name__)
    assert list(inspect.signature(Told).parameters) == ["step", "rows", "is_last", "notes"]


def test_a_dataclass_as_its_base_is_refused() -> None:
    @dataclass
    class Base:
        step: int

    with pytest.raises(TypeError, match="message Derived: a dataclass as its base"):

        @message
        class Derived(Base):
            rows: int


def test_a_message_as_its_base_is_refused() -> None:
    with pytest.raises(TypeError, match="Derived: a message as its base"):

        class Derived(Told):
            pass


def test_what_would_not_be_called_when_one_is_made_is_refused() -> None:
    with pytest.raises(TypeError, match="message Checked: __post_init__ is not supported"):

        @message
        class Checked:
            step: int

            def __post_init__(self) -> None:
                raise ValueError(self.step)
