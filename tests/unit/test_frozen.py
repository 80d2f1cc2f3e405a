"""Records: what a frozen dataclass with slots does, as far as the machines need it."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from holdfast.frozen import frozen


@frozen
class Point:
    """A place."""

    x: int
    y: int = 7
    name: str = ""

    @property
    def total(self) -> int:
        return self.x + self.y


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


def test_a_hash_of_what_has_none() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Point([]))  # type: ignore[arg-type]


def test_repr() -> None:
    assert repr(Point(1, name="p")) == "Point(x=1, y=7, name='p')"
    assert repr(Empty()) == "Empty()"


def test_match_by_position_and_by_name() -> None:
    match Point(1, 2, "p"):
        case Twin():
            pytest.fail("of another kind")
        case Point(1, y, name="p"):
            assert y == 2
        case _:
            pytest.fail("not matched")


def test_what_the_class_has_besides_its_fields_stays() -> None:
    assert Point(1).total == 8
    assert Point.__doc__ == "A place."
    assert (Point.__name__, Point.__module__) == ("Point", __name__)


@pytest.mark.parametrize("value", [Point(1, 2, "p"), Point(1), Empty()], ids=repr)
def test_pickle_and_copy(value: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(value, protocol))
        assert (type(again), again) == (type(value), value)
    assert copy.copy(value) == copy.deepcopy(value) == value
