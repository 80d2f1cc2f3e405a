"""Trees of values to the layout of safetensors and back; whatever the bytes are, reading them is safe."""

from __future__ import annotations

import array
import json
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshots import arrays, layout
from holdfast.snapshots.layout import LayoutError
from tests.promises import promise
from tests.support import ImportedLater

torch: Any = ImportedLater("torch")


def slot_of(tree: Any, **more: Any) -> bytearray:
    arranged = layout.arrange(tree, arrays.array_of, **more)
    memory = bytearray(arranged.size)
    memory[: len(arranged.header)] = arranged.header
    for offset, each in arranged.arrays:
        data = each.data() if callable(each.data) else each.data
        assert len(data) == each.size
        memory[offset : offset + each.size] = data
    return memory


def tree_of(memory: bytearray, is_copied: bool = True) -> Any:
    return layout.parse(memoryview(memory), lambda array, source: arrays.leaf_of(array, source, is_copied))


TEXTS = st.text() | st.text(st.sampled_from("a\ud83d\ude00\udcff"))
KEYS = st.none() | st.booleans() | st.integers() | TEXTS | st.binary(max_size=9) | st.tuples(st.integers(), TEXTS)
LEAVES = KEYS | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False) | st.binary(max_size=3000)
TREES = st.recursive(
    LEAVES, lambda more: st.lists(more) | st.lists(more).map(tuple) | st.dictionaries(KEYS, more), max_leaves=20
)


@given(TREES)
@promise("snapshots.trees-survive: Trees of dicts, lists, tuples, numbers, texts, bytes and arrays survive unchanged.")
def test_trees_survive(tree: Any) -> None:
    found = tree_of(slot_of({"x": tree}))["x"]
    assert found == tree
    assert repr(found) == repr(tree)  # 1, 1.0 and True are equal, and so are 0.0 and -0.0.


NUMPY = [
    np.arange(12, dtype=np.float32).reshape(3, 4),
    np.arange(24).reshape(4, 6)[:, ::2],
    np.array(3.5),
    np.zeros((0, 3), np.int8),
    np.array([1 + 2j]),
    np.array(["2026-01-01"], "M8[D]"),
    np.array(["a", "bcd"]),
    np.arange(3, dtype=">i4"),
    np.array([True, False]),
    np.float32(2.5),
    np.uint16(7),
    np.array([1, 2], ml_dtypes.bfloat16),
    np.array([1, 2], ml_dtypes.float8_e4m3fnuz),
    np.array([[1], [2]], ml_dtypes.int4),
    np.array([b"ab"], "V2"),
]


@pytest.mark.parametrize("value", NUMPY, ids=lambda value: f"{value.dtype}{value.shape}")
@pytest.mark.parametrize("is_copied", [True, False])
def test_arrays_of_numpy_survive(value: Any, is_copied: bool) -> None:
    found = tree_of(slot_of({"a": value}), is_copied)["a"]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    np.testing.assert_array_equal(found, value)


TORCH = (
    "arange(6.0).reshape(2, 3)", "arange(6, dtype=torch.bfloat16)", "arange(4.0).to(torch.float8_e4m3fn)",
    "zeros(0, 2)", "tensor(3)", "arange(12).reshape(3, 4).t()", "tensor([1 + 2j]).conj()",
    "nn.Parameter(torch.ones(3))",
)  # fmt: skip


@pytest.mark.parametrize("made", TORCH)
@pytest.mark.parametrize("is_copied", [True, False])
def test_tensors_survive(made: str, is_copied: bool) -> None:
    value = eval(f"torch.{made}")
    found = tree_of(slot_of({"a": [value]}), is_copied)["a"][0]
    assert type(found) is torch.Tensor
    assert (found.dtype, found.shape) == (value.dtype, value.shape)
    before = value.detach().resolve_conj().contiguous()
    assert torch.equal(found.reshape(-1).view(torch.uint8), before.reshape(-1).view(torch.uint8))


def test_buffers_become_memoryviews() -> None:
    values = {"a": array.array("i", [1, 2]), "b": bytearray(b"xy"), "c": memoryview(b"abcdef").cast("B", [2, 3])[::-1]}
    found = tree_of(slot_of(values))
    assert [type(each) for each in found.values()] == [memoryview] * 3
    assert [each.tolist() for each in found.values()] == [[1, 2], [120, 121], [[100, 101, 102], [97, 98, 99]]]


def test_a_loaded_copy_shares_nothing_with_the_slot() -> None:
    memory = slot_of({"t": torch.ones(4), "n": np.ones(4), "b": bytearray(4), "z": b"z" * 2000})
    found = tree_of(memory)
    memory[:] = bytes(len(memory))
    assert (found["t"].tolist(), found["n"].tolist(), found["b"].tolist()) == ([1] * 4, [1] * 4, [0] * 4)
    assert found["z"] == b"z" * 2000


@promise("snapshots.opens-with-safetensors: A slot that is written to a file opens with the library safetensors.")
def test_a_slot_opens_with_the_library(tmp_path: Path) -> None:
    import safetensors.numpy
    import safetensors.torch

    tree = {
        "model": OrderedDict(
            weight=torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), odd=torch.ones(3, dtype=torch.bool)
        ),
        "optimizer": {"state": {0: {"exp_avg": torch.arange(5.0, dtype=torch.float64)}}, "lr": 0.1},
        "numpy": [np.arange(3, dtype=np.uint8), b"x" * 5000],
        "__metadata__": torch.ones(1),
    }
    path = tmp_path / "slot.safetensors"
    path.write_bytes(slot_of(tree))
    found = safetensors.torch.load_file(path)
    assert found.keys() == {
        "model.weight", "model.odd", "optimizer.state.0.exp_avg", "numpy.0", "numpy.1", "__metadata__#2"
    }  # fmt: skip
    assert torch.equal(found["model.weight"], tree["model"]["weight"])  # type: ignore[call-overload]
    assert torch.equal(found["optimizer.state.0.exp_avg"], torch.arange(5.0, dtype=torch.float64))
    path.write_bytes(slot_of({"a": {"b": np.arange(3)}, ("t", 1): np.ones((2, 2), np.float16), "a.b": np.zeros(1)}))
    opened = safetensors.numpy.load_file(path)
    assert {name: each.tolist() for name, each in opened.items()} == {
        "a.b": [0, 1, 2], "('t', 1)": [[1, 1], [1, 1]], "a.b#2": [0]
    }  # fmt: skip


def test_arrays_are_aligned() -> None:
    tree: dict[str, Any] = {
        "a": np.zeros(3, np.uint8),
        "b": np.zeros(5, np.float64),
        "c": np.zeros(3, np.int16),
        "d": np.zeros(1, "f4"),
        "e": np.zeros(3, np.complex64),
        "f": np.zeros((0, 2), np.complex128),
        "g": np.zeros(3, "U5"),
    }
    arranged = layout.arrange(tree, arrays.array_of)
    assert len(arranged.header) % 64 == 0
    found = tree_of(slot_of(tree), is_copied=False)
    places = {name: found[name].__array_interface__["data"][0] for name in "abcdeg"}
    assert [(places[name] - places["b"]) % tree[name].dtype.alignment for name in places] == [0] * 6


class Odd:
    pass


class Elsewhere:
    def __array__(self, *args: Any, **more: Any) -> Any:
        raise RuntimeError("spans devices of other processes")


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"layers": [1, Odd()]}}, "model.layers.1: a tests.unit.test_snapshot_layout.Odd cannot be kept"),
        ({"model": {Odd(): 1}}, "model: a key that is a Odd cannot be kept"),
        ({"a": np.array([Odd()])}, "a: an array of object cannot be kept"),
        (lambda: {"a": torch.ones(2).to_sparse()}, "a: a tensor that is sparse"),
        ({"a": [Elsewhere()]}, "a.0: spans devices of other processes"),
        ({"a": {1, 2}}, "a: a builtins.set cannot be kept"),
        (lambda: {"a": torch.finfo(torch.float32)}, "a: a torch.finfo cannot be kept"),
    ],
)
def test_values_that_cannot_be_kept_are_named(tree: Any, words: str) -> None:
    with pytest.raises(LayoutError, match="^" + words.replace(".", r"\.")):
        slot_of(tree() if callable(tree) else tree)


def test_a_tree_that_contains_itself_is_an_error() -> None:
    tree: dict[str, Any] = {}
    tree["tree"] = tree
    with pytest.raises(LayoutError, match=r"tree\.tree\.tree\.tree\.tree\.\.\.: nested more than 200 times"):
        slot_of(tree)


def test_a_wrong_checksum_is_an_error() -> None:
    import zlib

    memory = slot_of({"a": np.arange(10)}, checksum=zlib.crc32)
    assert tree_of(memory)["a"].tolist() == [*range(10)]
    memory[-1] ^= 1
    with pytest.raises(LayoutError, match="the checksum of an array of 80 bytes is wrong"):
        tree_of(memory)


def with_header(header: Any, data: bytes = b"", length: int | None = None) -> bytearray:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text) if length is None else length) + text + data)


def entry(begin: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end], **more}


JUNK = {
    "nothing": bytearray(),
    "short": bytearray(7),
    "length beyond": with_header({}, length=1 << 62),
    "truncated header": with_header(b'{"a": {"dty', length=40),
    "no table": with_header([]),
    "not utf-8": with_header(b'{"\xff": 1}'),
    "deep": with_header(b"[" * 100_000),
    "duplicate": with_header(b'{"a":%s,"a":%s}' % ((json.dumps(entry(0, 2)).encode(),) * 2), b"xy"),
    "metadata": with_header({"__metadata__": {"holdfast": 1}}),
    "unknown dtype": with_header({"a": entry(0, 2, dtype="F128")}, b"xy"),
    "negative shape": with_header({"a": entry(0, 2, shape=[-1, -2])}, b"xy"),
    "shape of texts": with_header({"a": entry(0, 2, shape=["2"])}, b"xy"),
    "huge shape": with_header({"a": entry(0, 2, shape=[1 << 62, 1 << 62])}, b"xy"),
    "negative offsets": with_header({"a": entry(-2, 0)}, b"xy"),
    "offsets beyond": with_header({"a": entry(0, 20)}, b"xy"),
    "overlap": with_header({"a": entry(0, 2), "b": entry(1, 3)}, b"xyz"),
    "hole": with_header({"a": entry(0, 1), "b": entry(2, 3)}, b"xyz"),
    "more than the arrays": with_header({"a": entry(0, 1)}, b"xyz"),
    "no tree": with_header({"a": entry(0, 2)}, b"xy"),
}  # fmt: skip

TREES_OF_JUNK = [
    "", "[", '["a"]', '["a","b","numpy"]', '["a","a","numpy",7,[2]]', '["a","a","numpy","O",[2]]', '["q"]',
    '["i","zz"]', '["s","ff"]',
    '["a","a","numpy","<U9999999999",[1]]', '["a","a","torch","nn",[2]]', '["a","a","torch","float64",[2]]', '["d",1]',
    '["d",["l"],1]', '["b",7]', '["c",1,2]', '["f","x"]', '["a",["l"],"numpy"]', '["a","a","numpy","<f8",[-1]]', "[]",
    '["l",' * 5000,
]  # fmt: skip
JUNK |= {
    f"tree {text[:40]}": with_header({"__metadata__": {"holdfast": text}, "a": entry(0, 2)}, b"xy")
    for text in TREES_OF_JUNK
}


@pytest.mark.parametrize("memory", JUNK.values(), ids=JUNK)
@promise("snapshots.junk-is-an-error: Bytes that are no snapshot give a clear error, whatever they are.")
def test_junk_is_a_clear_error(memory: bytearray) -> None:
    with pytest.raises(LayoutError):
        tree_of(memory)


@given(st.data())
def test_changed_bytes_give_a_value_or_a_clear_error(data: st.DataObject) -> None:
    memory = slot_of({"a": np.arange(3), "b": [1, "x", torch.ones(2)]})
    for _ in range(data.draw(st.integers(1, 4))):
        memory[data.draw(st.integers(0, len(memory) - 1))] = data.draw(st.integers(0, 255))
    try:
        tree_of(memory[: data.draw(st.integers(0, len(memory)))] if data.draw(st.booleans()) else memory)
    except LayoutError:
        pass
