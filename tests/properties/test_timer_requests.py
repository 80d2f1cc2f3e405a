"""Timer requests on the pipe: whole, cut anywhere, behind junk."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from holdfast.timer.client import FileTimerRequest, decode, encode, split_lines

requests = st.builds(
    FileTimerRequest,
    worker_pid=st.integers(-(2**31) + 1, 2**31 - 1),
    scope_id=st.text(max_size=100),
    expiration_time=st.floats(allow_nan=False),
    signal=st.integers(-5, 64),
)


@given(st.lists(requests, max_size=8), st.data())
def test_however_the_stream_is_cut_the_same_requests_come_out(
    sent: list[FileTimerRequest], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    received, rest = [], b""
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        lines, rest = split_lines(rest + stream[begin:end])
        received += map(decode, lines)
    assert received == sent


@given(st.binary(max_size=200))
def test_no_line_does_more_harm_than_a_value_error(line: bytes) -> None:
    with suppress(ValueError):
        decode(line)
