"""Timer requests on the pipe: whole, cut anywhere, behind junk."""

from __future__ import annotations

import tempfile
from contextlib import closing

from hypothesis import given
from hypothesis import strategies as st

from holdfast.timer.client import FileTimerRequest, TimerRequest, encode
from holdfast.timer.server import RequestPipe

requests = st.builds(
    FileTimerRequest,
    worker_pid=st.integers(-(2**31) + 1, 2**31 - 1),
    scope_id=st.text(max_size=100),
    expiration_time=st.floats(allow_nan=False, allow_infinity=False),
    signal=st.integers(-5, 64),
)


def received(*pieces: bytes) -> list[TimerRequest]:
    found = []
    with tempfile.TemporaryDirectory() as directory, closing(RequestPipe(f"{directory}/pipe")) as pipe:
        for piece in pieces:
            with open(pipe.path, "wb", buffering=0) as file:
                file.write(piece)
            found += pipe.get(1, 0.0)
    return found


@given(st.lists(requests, max_size=8), st.data())
def test_however_the_stream_is_cut_the_same_requests_come_out(
    sent: list[FileTimerRequest], data: st.DataObject
) -> None:
    stream = b"".join(map(encode, sent))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    pieces = (stream[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True))
    assert received(*pieces) == sent


@given(st.binary(max_size=200), requests)
def test_no_line_of_junk_costs_the_request_after_it(line: bytes, request: FileTimerRequest) -> None:
    assert received(line, b"\n" + encode(request))[-1:] == [request]
