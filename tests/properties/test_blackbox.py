"""The black box can be read whatever happened while it was written."""

from __future__ import annotations

import json
import os

from hypothesis import given
from hypothesis import strategies as st

from holdfast.process.spawner.bootstrap import ERROR, MAGIC, VALUE, write_record
from holdfast.process.workers.worker import read_blackbox, read_of
from tests.promises import promise, proves

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)
errors = st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=10), max_size=3)
values = st.binary(max_size=60) | st.just(MAGIC + VALUE + bytes(8)) | st.just(MAGIC)
parts = st.lists(
    st.one_of(
        texts.map(lambda text: ("text", text)),
        values.map(lambda value: ("value", value)),
        errors.map(lambda error: ("error", error)),
    ),
    max_size=6,
)


def written(content: list[tuple[str, object]]) -> bytes:
    fd = os.memfd_create("box")
    try:
        for kind, what in content:
            if isinstance(what, bytes):
                write_record(fd, VALUE, what)
            elif kind == "error":
                write_record(fd, ERROR, json.dumps(what).encode())
            else:
                os.write(fd, str(what).encode())
        return os.pread(fd, os.fstat(fd).st_size, 0)
    finally:
        os.close(fd)


def last(content: list[tuple[str, object]], kind: str) -> object:
    return next((what for each, what in reversed(content) if each == kind), None)


@given(parts)
def test_what_is_written_is_read(content: list[tuple[str, object]]) -> None:
    text = "".join(str(what) for kind, what in content if kind == "text")
    box = read_blackbox(written(content))
    assert (box.value, box.error, box.text) == (last(content, "value"), last(content, "error"), text)


@promise("failures.truncated-evidence-loses: Truncated evidence loses only the truncated record. Junk does no harm.")
@given(parts, values, st.data())
def test_a_cut_loses_the_record_that_is_cut_and_no_other(
    content: list[tuple[str, object]], value: bytes, data: st.DataObject
) -> None:
    whole = written(content)
    record = written([("value", value)])
    cut = data.draw(st.integers(1, len(record) - 1))
    box = read_blackbox(whole + record[:cut])
    assert (box.value, box.error) == (last(content, "value"), last(content, "error"))
    assert box.text == read_blackbox(whole).text


@given(parts, st.integers(0, 300))
def test_a_cut_anywhere_is_survived(content: list[tuple[str, object]], size: int) -> None:
    box = read_blackbox(written(content)[:size])
    assert box.value is None or ("value", box.value) in content
    assert box.error is None or ("error", box.error) in content


@proves("failures.truncated-evidence-loses")
@given(st.lists(st.binary(max_size=20) | st.sampled_from([MAGIC, MAGIC + VALUE, MAGIC + ERROR, b"\0", bytes(8)])))
def test_junk_is_survived(junk: list[bytes]) -> None:
    data = b"".join(junk)
    box = read_blackbox(data)
    assert isinstance(box.text, str)
    assert box.value is None or box.value in data


@given(st.binary(max_size=40), texts)
def test_error_that_is_no_error_does_not_count(payload: bytes, text: str) -> None:
    try:
        is_error = isinstance(json.loads(payload), dict)
    except ValueError:
        is_error = False
    box = read_blackbox(MAGIC + ERROR + len(payload).to_bytes(8, "big") + payload + text.encode())
    assert (box.error is not None) == is_error
    assert box.text == text


@proves("failures.black-box-program-last")
@given(parts)
def test_of_a_program_all_is_read_but_values(content: list[tuple[str, object]]) -> None:
    fd = os.memfd_create("box")
    os.write(fd, written(content))
    own = [each for each in content if each[0] != "value"]
    box = read_of(fd, is_function=False)
    os.close(fd)
    assert (box.value, box.error) == (None, last(own, "error"))
    assert box.text == read_blackbox(written(content)).text


def test_nesting_that_is_too_deep_does_not_count() -> None:
    payload = b"[" * 200_000
    assert read_blackbox(MAGIC + ERROR + len(payload).to_bytes(8, "big") + payload).error is None
