"""Data classes of our own: what the standard ones do, as far as it is needed, without their imports."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest

from holdfast.frozen import changed, dataclass, field, frozen
from tests.promises import promise, proves


@frozen
class Point:
    """A place."""

    x: int
    y: int = 7
    name: str = ""


@frozen
class Twin:
    x: int
    y: int = 7
    name: str = ""


@frozen
class Empty:
    pass


@pytest.mark.parametrize(
    ("values", "named", "expected"),
    [
        ((1,), {}, (1, 7, "")),
        ((1, 2), {}, (1, 2, "")),
        ((1, 2, "p"), {}, (1, 2, "p")),
        ((), {"x": 1}, (1, 7, "")),
        ((1,), {"name": "p"}, (1, 7, "p")),
        ((), {"name": "p", "y": 2, "x": 1}, (1, 2, "p")),
    ],
)
def test_values_by_position_by_name_and_by_default(
    values: tuple[Any, ...], named: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    point = Point(*values, **named)
    assert (point.x, point.y, point.name) == expected


@pytest.mark.parametrize(
    ("values", "named", "text"),
    [
        ((), {}, "Point needs a value for x"),
        ((), {"y": 1}, "Point needs a value for x"),
        ((1, 2, "p", 4), {}, "Point takes 3 values, not 4"),
        ((1,), {"z": 1}, "Point has no field 'z', or was given it twice"),
        ((1,), {"x": 1}, "Point has no field 'x', or was given it twice"),
    ],
)
def test_wrong_values(values: tuple[Any, ...], named: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as caught:
        Point(*values, **named)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("one", "other", "are_equal"),
    [
        (Point(1), Point(1, 7), True),
        (Point(1), Point(2), False),
        (Point(1), Point(1, name="p"), False),
        (Point(1), Twin(1), False),
        (Point(1), (1, 7, ""), False),
        (Empty(), Empty(), True),
        (Empty(), Point(1), False),
    ],
)
def test_equal_are_those_of_a_kind_with_equal_values(one: Any, other: Any, are_equal: bool) -> None:
    assert (one == other) is are_equal
    assert (one != other) is not are_equal
    assert (len({one, other}) == 1) is are_equal
    if are_equal:
        assert hash(one) == hash(other)


def test_it_cannot_be_changed() -> None:
    point = Point(1)
    for change in (lambda: setattr(point, "x", 2), lambda: setattr(point, "new", 2), lambda: delattr(point, "x")):
        with pytest.raises(AttributeError, match=r"^Point is a record and cannot be changed \((x|new)\)$"):
            change()
    assert point == Point(1)
    assert not hasattr(point, "__dict__")


def test_match_by_position_and_by_name() -> None:
    match Point(1, 2, "p"):
        case Twin():
            pytest.fail("of another kind")
        case Point(1, y, name="p"):
            assert y == 2
        case _:
            pytest.fail("not matched")


@pytest.mark.parametrize("value", [Point(1, 2, "p"), Point(1), Empty()], ids=repr)
def test_pickle_and_copy(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert (type(again), again) == (type(value), value)
    assert copy.copy(value) == copy.deepcopy(value) == value


@dataclass
class Open:
    """A configuration."""

    size: int
    names: dict[str, int] = field(default_factory=dict)
    limit: float = 0.5
    made: str = field(init=False)
    count: int = field(default=3, init=False)

    def __post_init__(self) -> None:
        self.made = f"made of {self.size}"


@dataclass(slots=True, eq=False)
class Slotted:
    size: int
    items: list[int] = field(default_factory=list)


@dataclasses.dataclass
class Wider(Open):
    extra: str = "more"


def test_a_data_class_that_can_be_changed() -> None:
    one, other = Open(1), Open(1)
    assert one == other
    assert one.names is not other.names
    assert repr(one) == "Open(size=1, names={}, limit=0.5, made='made of 1', count=3)"
    one.size, one.anything = 2, "goes"  # type: ignore[attr-defined]
    assert one != other
    assert Open.limit == 0.5
    assert not hasattr(Open, "names")
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    with pytest.raises(TypeError, match="has no field 'count', or was given it twice"):
        Open(1, count=4)  # type: ignore[call-arg]
    assert copy.deepcopy(one).__dict__ == one.__dict__
    assert pickle.loads(pickle.dumps(one)).__dict__ == one.__dict__


def test_slots_and_identity() -> None:
    one = Slotted(1)
    assert one != Slotted(1)
    assert len({one, Slotted(1)}) == 2
    assert not hasattr(one, "__dict__")
    assert Slotted(2).items is not one.items
    one.items = [3]
    assert copy.copy(one).items == [3]


@promise("""project.configurations-results-users: The configurations and results that users know are data classes:
    `dataclasses.replace`, `fields` and `asdict` work, and `inspect.signature` shows the fields.""")
@pytest.mark.parametrize("record", [Open(1, limit=2.0), Slotted(1), Point(1, name="p"), Empty()], ids=repr)
def test_the_standard_library_takes_it_for_a_data_class(record: Any) -> None:
    assert bool(dataclasses.is_dataclass(record))
    names = [each.name for each in dataclasses.fields(record)]
    assert dataclasses.asdict(record) == {name: getattr(record, name) for name in names}
    again = dataclasses.replace(record)
    assert type(again) is type(record)
    assert dataclasses.asdict(again) == dataclasses.asdict(record)
    assert list(inspect.signature(type(record)).parameters) == list(record.__match_args__)


@proves("project.configurations-results-users")
def test_the_standard_library_replaces_and_extends() -> None:
    assert dataclasses.replace(Open(1), limit=1.5) == changed(Open(1), limit=1.5) == Open(1, limit=1.5)
    wider = Wider(1, extra="x")
    assert (wider.size, wider.names, wider.made, wider.extra) == (1, {}, "made of 1", "x")
    assert (
        str(inspect.signature(Open))
        == "(size: 'int', names: 'dict[str, int]' = <factory>, limit: 'float' = 0.5) -> None"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        Point(1).x = 2  # type: ignore[misc]


def test_nothing_slow_is_imported_to_make_one() -> None:
    code = (
        "import sys; from holdfast.frozen import dataclass, field\n"
        "@dataclass(slots=True)\nclass A:\n  x: list = field(default_factory=list)\n"
        "A(); print({'dataclasses', 'inspect'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
