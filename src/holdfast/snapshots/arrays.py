"""Arrays of any framework as bytes, and back. No framework is imported to save; to load, the one that the array is of.

The kind of an array says what it becomes: `numpy` (arrays of JAX, too), `numpy-scalar`, `torch`, `bytes`, or `view`, a
memoryview, for everything else that has a buffer. If its framework is not installed it becomes a memoryview.
"""

from __future__ import annotations

import ctypes
import math
import sys
from typing import Any

from holdfast.snapshots.layout import Array, LayoutError

# Of numpy and torch, which call most things alike; JAX has numpy's with more of its own.
_DTYPES = {
    "bool": "BOOL",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    **{f"{'u' * (word == 'U')}int{bits}": f"{word}{bits}" for word in "IU" for bits in (8, 16, 32, 64)},
    **{f"float{bits}": f"F{bits}" for bits in (16, 32, 64)},
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}
_FORMAT_OF = {
    "BOOL": "?", "I8": "b", "U8": "B", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q",
    "F16": "e", "F32": "f", "F64": "d", "BF16": "H", "F8_E4M3": "B", "F8_E5M2": "B",
}  # fmt: skip
_PIECE_BYTES = 16 << 20
_LONG_BITS = 8 * ctypes.sizeof(ctypes.c_long)
_FORMATS = {word: dtype for dtype, word in reversed([*_FORMAT_OF.items()])}
_FORMATS |= {"c": "U8", "l": f"I{_LONG_BITS}", "L": f"U{_LONG_BITS}"}


def array_of(leaf: Any) -> Array | None:
    """None if the leaf is no array."""
    torch: Any = sys.modules.get("torch")
    numpy: Any = sys.modules.get("numpy")
    if torch is not None and isinstance(leaf, getattr(torch, "Tensor", ())):
        return _of_torch(torch, leaf)
    if type(leaf) is bytes:
        return Array("bytes", "U8", (len(leaf),), len(leaf), leaf)
    if numpy is not None and (hasattr(leaf, "__array__") or hasattr(leaf, "__array_interface__")):
        return _of_numpy(numpy, leaf)
    return _of_buffer(leaf)


def _of_torch(torch: Any, leaf: Any) -> Array:
    if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        hint = ": holdfast.snapshots.torch.state_of takes its local part" if hasattr(leaf, "to_local") else ""
        raise LayoutError(f"a tensor of the type {type(leaf).__qualname__} cannot be kept{hint}")
    if leaf.layout != torch.strided or leaf.is_quantized or leaf.device.type == "meta":
        raise LayoutError(f"a tensor that is sparse, quantized or without data cannot be kept ({leaf.layout})")
    name = str(leaf.dtype).removeprefix("torch.")
    size = leaf.numel() * leaf.element_size()

    def data() -> memoryview:
        """On the host, without holes."""
        tensor = leaf.detach().resolve_conj().resolve_neg().cpu().contiguous()
        return _at(tensor.data_ptr(), size, tensor)

    return _known("torch", _DTYPES.get(name), tuple(leaf.shape), size, data, name)


def _of_numpy(numpy: Any, leaf: Any) -> Array:
    if isinstance(leaf, numpy.ndarray) and type(leaf) not in (numpy.ndarray, numpy.memmap):
        raise LayoutError(f"an array of the type {type(leaf).__qualname__} cannot be kept")
    array = numpy.asarray(leaf, order="C")
    if array.dtype.hasobject or array.dtype.names:
        raise LayoutError(f"an array of {array.dtype} cannot be kept")
    kind = "numpy-scalar" if isinstance(leaf, numpy.generic) else "numpy"
    dtype = _DTYPES.get(array.dtype.name) if array.dtype.isnative else None
    data = memoryview(array.reshape(-1).view("u1"))
    is_of_others = array.dtype.isbuiltin == 2  # Such as the small numbers of ml_dtypes, whose `str` says little.
    return _known(kind, dtype, array.shape, array.nbytes, data, array.dtype.name if is_of_others else array.dtype.str)


def _of_buffer(leaf: Any) -> Array | None:
    try:
        view = memoryview(leaf)
    except TypeError:
        return None
    dtype = _FORMATS.get(view.format.lstrip("@=<"))
    if dtype is None:
        raise LayoutError(f"a buffer of the format {view.format!r} cannot be kept")
    shape = view.shape or ()
    data = view.cast("B") if view.c_contiguous and 0 not in shape else memoryview(view.tobytes())
    return Array("view", dtype, shape, view.nbytes, data)


def _known(kind: str, dtype: str | None, shape: tuple[int, ...], size: int, data: Any, own: str) -> Array:
    return Array(kind, dtype or "U8", shape, size, data, "" if dtype else own)


def _at(address: int, size: int, owner: Any) -> memoryview:
    """The bytes at an address, which `owner` keeps alive."""
    block = (ctypes.c_char * size).from_address(address) if size else (ctypes.c_char * 0)()
    block.owner = owner  # type: ignore[attr-defined]
    return memoryview(block).cast("B") if size else memoryview(b"")


def copy(target: memoryview, source: memoryview) -> None:
    """In pieces: between two of them other threads of Python get their turn."""
    for begin in range(0, len(source), _PIECE_BYTES):
        target[begin : begin + _PIECE_BYTES] = source[begin : begin + _PIECE_BYTES]


def leaf_of(array: Array, source: memoryview, is_copied: bool) -> Any:
    """The value that the array becomes. If it is not copied it lies in `source`."""
    if array.checksum is not None:
        import zlib

        if zlib.crc32(source) != array.checksum:
            raise LayoutError(f"the checksum of an array of {array.size} bytes is wrong")
    if array.kind == "bytes":
        return bytes(source)
    if is_copied:
        own = memoryview(bytearray(array.size))
        copy(own, source)
        source = own
    try:
        if array.kind == "torch":
            return _to_torch(array, source)
        if array.kind in ("numpy", "numpy-scalar"):
            return _to_numpy(array, source)
    except ImportError:
        pass
    word: Any = "B" if array.own_dtype else _FORMAT_OF[array.dtype]
    is_shaped = array.size and array.shape and not array.own_dtype
    return source.cast(word, array.shape) if is_shaped else source.cast(word)


def _to_torch(array: Array, source: memoryview) -> Any:
    torch: Any = __import__("torch")
    dtype = getattr(torch, array.own_dtype or _NAMES[array.dtype], None)
    if not isinstance(dtype, torch.dtype) or math.prod(array.shape) * dtype.itemsize != array.size:
        raise LayoutError(f"this is no tensor: {array.own_dtype or array.dtype} {array.shape}, {array.size} bytes")
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    return torch.frombuffer(source, dtype=dtype).view(array.shape)


def _to_numpy(array: Array, source: memoryview) -> Any:
    numpy: Any = __import__("numpy")
    try:
        name = array.own_dtype or _NAMES[array.dtype]
        if name.isidentifier() and not hasattr(numpy, name):
            __import__("ml_dtypes")  # It makes the names of the small numbers known.
        dtype = numpy.dtype(name)
        if dtype.hasobject:
            raise TypeError("objects")
        flat = numpy.frombuffer(source, dtype) if array.size else numpy.empty(0, dtype)
        made = flat.reshape(array.shape)
    except (TypeError, ValueError, MemoryError) as error:
        raise LayoutError(f"this is no array: {array.own_dtype or array.dtype} {array.shape}: {error}") from None
    return made[()] if array.kind == "numpy-scalar" else made
