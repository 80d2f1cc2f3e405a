"""Frames between transfer processes: what one end makes the other reads, and junk is an error of one kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshots import frames
from holdfast.snapshots.frames import FrameError, Pace, Part

NUMBERS = st.integers(0, (1 << 63) - 1)
PARTS = st.builds(
    lambda term, round, step, size, rank, is_replicated, length: Part(
        (term, round, step, max(size, rank + 1), is_replicated), rank, length
    ),
    NUMBERS, NUMBERS, NUMBERS, st.integers(1, 1 << 31), st.integers(0, 1 << 31), st.booleans(), st.integers(0, 1 << 48),
)  # fmt: skip


@given(PARTS, st.sampled_from([frames.GET, frames.PUT]))
def test_a_request_is_read_as_it_was_written(part: Part, kind: bytes) -> None:
    assert frames.part_in(frames.request(kind, part)) == part


@given(st.binary(max_size=80))
def test_junk_is_refused_in_one_way(junk: bytes) -> None:
    for read in (frames.part_in, frames.size_in, frames.checksum_in):
        try:
            read(junk)
        except FrameError:
            pass
    if len(junk) >= frames.HEADER.size:
        try:
            length, _ = frames.length_in(junk[: frames.HEADER.size])
            assert 1 <= length <= frames.FRAME_BYTES
        except FrameError:
            pass


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=5), st.data())
def test_no_frame_is_changed_repeated_or_left_out_unseen(bodies: list[bytes], data: st.DataObject) -> None:
    out, _ = frames.seals_of(b"k" * 32, b"c" * 32, b"s" * 32)
    seals = [out.header(body[:1], body[1:])[4 : frames.HEADER.size] for body in bodies]
    seen = data.draw(st.lists(st.sampled_from(range(len(bodies))), min_size=1, max_size=6))
    flipped = data.draw(st.integers(-1, len(seen) - 1))
    into, _ = frames.seals_of(b"k" * 32, b"c" * 32, b"s" * 32)
    for at, index in enumerate(seen):
        body = bytes([bodies[index][0] ^ 1]) + bodies[index][1:] if at == flipped else bodies[index]
        if index == at and at != flipped:
            into.check(seals[index], body)
        elif (seals[index], body) != (seals[at] if at < len(seals) else None, bodies[at] if at < len(bodies) else None):
            with pytest.raises(FrameError):
                into.check(seals[index], body)
            return


def test_keys_differ_by_direction_nonces_and_run() -> None:
    made = [
        seal.next(b"x")
        for key, client, server in ((b"k", b"c", b"s"), (b"j", b"c", b"s"), (b"k", b"d", b"s"), (b"k", b"c", b"t"))
        for seal in frames.seals_of(key * 32, client * 32, server * 32)
    ]
    assert len(set(made)) == 8


@given(st.integers(1, 1 << 30), st.lists(st.integers(1, 1 << 20), min_size=1, max_size=30))
def test_the_pace_is_kept(bytes_per_s: int, sizes: list[int]) -> None:
    pace, now = Pace(bytes_per_s), 100.0
    for size in sizes:
        now += pace.delay_s(size, now)
    assert now - 100.0 >= sum(sizes[:-1]) / bytes_per_s - 0.126
    assert Pace(0).delay_s(1 << 30, now) == 0
