"""The layout of a slot: that of safetensors, so that a slot written to a file opens with that library. Pure.

    8 bytes       the length of the header, little-endian
    header        JSON: name -> dtype, shape, data_offsets; padded with blanks, so that the arrays are aligned
    arrays        their bytes without holes, those with the largest alignment first

`__metadata__` of the header has the tree in which the arrays are leaves, as JSON text under `holdfast`. There, null,
booleans, texts and ordinary numbers stand for themselves. Everything else is a list with a word of one letter first:

    l t           a list, a tuple                d    a dict: key, value, key, value...
    i f c b s     an integer, a float, a complex number, bytes or a text with surrogates, which JSON does not have
    a             an array: its name, its kind (what it is to become when it is loaded), and, if safetensors has no such
                  dtype, so that the array is stored as bytes, its own dtype and shape

The kinds of arrays, and what holds their bytes, belong to `arrays`. What is read may be anything, and is checked.
"""

from __future__ import annotations

import json
import math
import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from holdfast import escape
from holdfast.errors import HoldfastError
from holdfast.frozen import frozen

# The dtypes of safetensors that we write, and their sizes.
SIZES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
MOST_HEADER_BYTES = 100_000_000  # As the library has it.

_LENGTH = struct.Struct("<Q")
_METADATA, _TREE, _CHECKSUMS = "__metadata__", "holdfast", "holdfast.crc32"
_ALIGNMENT = 64
_MOST_DEPTH = 200
_LARGEST_PLAIN_INT = 1 << 53
_LARGEST_PLAIN_BYTES = 1024


class LayoutError(HoldfastError, ValueError):
    """A value that cannot be kept, or bytes that are no snapshot."""


@frozen
class Array:
    """`own_dtype` is set if safetensors has no such dtype: then `shape` is the array's own, and bytes are stored.
    `data` is a buffer of bytes, or a function that returns one when it is needed."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    data: Any = None
    own_dtype: str = ""
    checksum: int | None = None


@frozen
class Layout:
    header: bytes
    arrays: tuple[tuple[int, Array], ...]
    size: int


# Writing.


def arrange(tree: Any, array_of: Callable[[Any], Array | None], checksum: Callable[[Any], int] | None = None) -> Layout:
    """Where everything goes. `array_of` makes an array of a leaf, or None if the leaf is none."""
    found: dict[str, Array] = {}
    text = json.dumps(_Encoder(array_of, found).encode(tree, ()), separators=(",", ":"))
    metadata = {_TREE: text}
    if checksum is not None:
        sums = {name: checksum(array.data() if callable(array.data) else array.data) for name, array in found.items()}
        metadata[_CHECKSUMS] = json.dumps(sums, separators=(",", ":"))
    entries: dict[str, Any] = {_METADATA: metadata}
    places: list[tuple[int, Array]] = []
    end = 0
    for name, array in sorted(found.items(), key=lambda item: -_alignment(item[1])):
        shape = [array.size] if array.own_dtype else [*array.shape]
        entries[name] = {"dtype": array.dtype, "shape": shape, "data_offsets": [end, end + array.size]}
        places.append((end, array))
        end += array.size
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-(len(header) + _LENGTH.size) % _ALIGNMENT)
    if len(header) > MOST_HEADER_BYTES:
        raise LayoutError(f"all that is no array needs {len(header)} bytes, and {MOST_HEADER_BYTES} is the limit")
    header = _LENGTH.pack(len(header)) + header
    return Layout(header, tuple((len(header) + at, array) for at, array in places), len(header) + end)


def _alignment(array: Array) -> int:
    """The largest power of two that divides the size of an element, also of one that is stored as bytes."""
    size = array.size // math.prod(array.shape) if array.own_dtype and array.size else SIZES[array.dtype]
    return size & -size


class _Encoder:
    def __init__(self, array_of: Callable[[Any], Array | None], found: dict[str, Array]) -> None:
        self._array_of, self._found = array_of, found

    def encode(self, value: Any, path: tuple[Any, ...]) -> Any:
        if len(path) > _MOST_DEPTH:
            raise LayoutError(f"{_name(path[:5])}...: nested more than {_MOST_DEPTH} times")
        if value is None or type(value) is bool:
            return value
        if type(value) is str:
            return value if _is_plain(value) else ["s", value.encode("utf-8", "surrogatepass").hex()]
        if type(value) in (int, float, complex):
            return _number(value)
        if type(value) is bytes and len(value) <= _LARGEST_PLAIN_BYTES:
            return ["b", value.hex()]
        if type(value) is list or (isinstance(value, tuple) and not hasattr(value, "_fields")):
            word = "l" if type(value) is list else "t"
            return [word, *(self.encode(each, (*path, at)) for at, each in enumerate(value))]
        if type(value) in (dict, OrderedDict):
            return ["d", *(part for key, each in value.items() for part in self._pair(key, each, path))]
        try:
            array = self._array_of(value)
        except Exception as error:  # Whatever its framework raises.
            raise LayoutError(f"{_name(path)}: {error}") from None
        if array is None:
            raise LayoutError(f"{_name(path)}: a {type(value).__module__}.{type(value).__qualname__} cannot be kept")
        name = self._free_name(_name(path))
        self._found[name] = array
        return ["a", name, array.kind, *([array.own_dtype, [*array.shape]] if array.own_dtype else [])]

    def _pair(self, key: Any, value: Any, path: tuple[Any, ...]) -> tuple[Any, Any]:
        if not _is_key(key):
            raise LayoutError(f"{_name(path)}: a key that is a {type(key).__qualname__} cannot be kept")
        return self.encode(key, path), self.encode(value, (*path, key))

    def _free_name(self, name: str) -> str:
        free, number = name, 1
        while free in self._found or free == _METADATA:
            number += 1
            free = f"{name}#{number}"
        return free


def _is_plain(text: str) -> bool:
    try:
        return text.isascii() or bool(text.encode())
    except UnicodeEncodeError:
        return False


def _is_key(key: Any) -> bool:
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, str, int, float) or (type(key) is bytes and len(key) <= 1024)


def _number(value: complex) -> Any:
    if isinstance(value, complex):
        return ["c", value.real.hex(), value.imag.hex()]
    if isinstance(value, float):
        return value if math.isfinite(value) else ["f", repr(value)]
    return value if abs(value) < _LARGEST_PLAIN_INT else ["i", hex(value)]


def _name(path: tuple[Any, ...]) -> str:
    """`model.weight`: keys and positions, as text that can be encoded."""
    return escape.encodable(".".join(str(part) for part in path)) or "the value"


# Reading.


def parse(view: memoryview, make: Callable[[Array, memoryview], Any]) -> Any:
    """The tree that the bytes hold, from the first to the last, with what `make` makes of each array and its bytes.
    Raises LayoutError for anything else."""
    if len(view) < _LENGTH.size:
        raise LayoutError(f"{len(view)} bytes are no snapshot")
    (length,) = _LENGTH.unpack_from(view)
    start = _LENGTH.size + length
    if length > MOST_HEADER_BYTES or start > len(view):
        raise LayoutError(f"the header has {length} bytes, and there are only {len(view)}")
    entries, metadata, size = entries_in(bytes(view[_LENGTH.size : start]))
    if start + size != len(view):
        raise LayoutError(f"the arrays have {size} bytes, and there are {len(view) - start}")
    if _TREE not in metadata:
        raise LayoutError("this is no snapshot: its header has no tree")
    sums = _loaded(metadata.get(_CHECKSUMS, "{}"))
    if not isinstance(sums, dict):
        raise LayoutError("the checksums are no table")

    def array(name: str, kind: str, own_dtype: Any = "", own_shape: Any = None) -> Any:
        dtype, shape, begin, end = entries[name]
        if not isinstance(own_dtype, str):
            raise LayoutError(f"{name}: its dtype is no text")
        shape = _shape(own_shape) if own_dtype else shape
        return make(Array(kind, dtype, shape, end - begin, None, own_dtype, sums.get(name)), view[start:][begin:end])

    try:
        return _decoded(_loaded(metadata[_TREE]), array)
    except LayoutError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise LayoutError(f"the tree cannot be read: {type(error).__name__}: {error}") from None


def _decoded(coded: Any, array: Callable[..., Any]) -> Any:
    if not isinstance(coded, list):
        return coded
    match coded:
        case ["l" | "t" as word, *parts]:
            values = [_decoded(part, array) for part in parts]
            return values if word == "l" else tuple(values)
        case ["d", *parts]:
            values = [_decoded(part, array) for part in parts]
            return dict(zip(values[::2], values[1::2], strict=True))
        case ["i", text]:
            return int(text, 16)
        case ["f", "nan" | "inf" | "-inf" as text]:
            return float(text)
        case ["c", real, imag]:
            return complex(float.fromhex(real), float.fromhex(imag))
        case ["b", text]:
            return bytes.fromhex(text)
        case ["s", text]:
            return bytes.fromhex(text).decode("utf-8", "surrogatepass")
        case ["a", str(name), str(kind), *own]:
            return array(name, kind, *own)
    raise LayoutError(f"the tree has a part that is not known: {str(coded)[:40]}")


def entries_in(header: bytes) -> tuple[dict[str, tuple[str, tuple[int, ...], int, int]], dict[str, str], int]:
    """The arrays, with offsets from the end of the header, the metadata, and how many bytes all arrays have."""
    entries = _loaded(header)
    if not isinstance(entries, dict):
        raise LayoutError("the header is no table")
    metadata = entries.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise LayoutError("__metadata__ is no table of texts")
    stored = {name: _entry(name, entry) for name, entry in entries.items()}
    end = 0
    for name, (_, _, begin, stop) in sorted(stored.items(), key=lambda item: item[1][2:]):
        if begin != end:
            raise LayoutError(f"{name}: its bytes begin at {begin}, not where the ones before end ({end})")
        end = stop
    return stored, metadata, end


def _entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(dims), "data_offsets": [int(begin), int(end)]} if dtype in SIZES:
            shape = _shape(dims)
            if 0 <= begin <= end and end - begin == math.prod(shape) * SIZES[dtype]:
                return dtype, shape, begin, end
    raise LayoutError(f"{name}: its entry in the header makes no sense")


def _shape(dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, list) or len(dims) > 64 or not all(type(d) is int and 0 <= d < 1 << 63 for d in dims):
        raise LayoutError("a shape makes no sense")
    return tuple(dims)


def _loaded(text: str | bytes) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise LayoutError(f"the header cannot be read: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise LayoutError("the header has a name twice")
    return table
