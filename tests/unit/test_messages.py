"""What crosses the wire: every kind survives the journey, and nothing else is let in."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.rendezvous import bounds, messages
from holdfast.rendezvous.messages import MAX_MESSAGE_BYTES, Frames, Malformed, encode
from holdfast.rendezvous.outcome import End, Failure, Outcome
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.vocabulary import Admit, Settings, Stage
from holdfast.rendezvous.world import NodeFacts, Place
from holdfast.rendezvous.world import Run as Alike

EVERYTHING = messages.Handshake | messages.ToCoordinator | messages.Answer

FACTS = NodeFacts("node-a", 3, "10.0.0.1", 4711, "trainer", 8, 2)
POLICY = RestartPolicy(3, 600.0, 1.0, 30.0, frozenset({13}), frozenset({"SyntaxError"}), frozenset({143}))
SETTINGS = Settings(2, 4, 600.0, 5.0, 1.0, 5.0, 2.0, 10.0, Admit.ON_RESTART, POLICY)
PLACE = Place(7, 1, 3, (Alike("trainer", 8, 2), Alike("reader", 1, 1)), "10.0.0.1", 4711, 2)
FAILURE = Failure("node-a", 5, -9, "RuntimeError", "rank 5 died of SIGKILL", True)
NONCE = bytes(range(32))

EXAMPLES: list[Any] = [
    messages.Challenge(1, NONCE, True),
    messages.Hello(1, "run/1", NONCE, b"proof"),
    messages.Welcome(b"proof"),
    messages.Denied("no"),
    messages.StoreRequest(b"client", 9, "compare_set", ("key",), (b"\x00\xff", b""), -4, 2.5, b"made"),
    messages.StoreAnswer(9, (b"\x00\xff",), 2**63 - 1, "timeout", b"made"),
    messages.Join(FACTS, SETTINGS, 6, "node-a/2"),
    messages.Return(FACTS, SETTINGS, PLACE, Stage.FINISHED),
    messages.Heartbeat(12),
    messages.Failed(7, FAILURE),
    messages.Succeeded(7),
    messages.Leaving(),
    messages.Left(),
    messages.Close("by the user"),
    messages.HeartbeatAnswer(12),
    messages.Sealed("node-a/3", PLACE),
    messages.Stop(7, "node-b leaves"),
    messages.Stop(7, "rank 2 hung", is_hang=True),
    messages.Refused("rank 2 is taken"),
    messages.Expelled("it was not heard of"),
    messages.Ended(Outcome(End.FAILED, "no restarts are left", FAILURE)),
    messages.Progress(6, 8, 10, 540.5),
    messages.Notice("standing by"),
]


def received(data: bytes, kinds: object = EVERYTHING) -> list[object]:
    frames = Frames(kinds)
    frames.feed(data)
    found = []
    while (message := frames.next()) is not None:
        found.append(message)
    return found


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def raw(kind: str, **fields: object) -> bytes:
    return frame(msgspec.msgpack.encode({"type": kind, **fields}))


def refused(data: bytes, kinds: object = EVERYTHING) -> str:
    with pytest.raises(Malformed) as caught:
        received(data, kinds)
    return str(caught.value)


# Honest messages.


def test_there_is_an_example_of_every_kind() -> None:
    assert {type(each) for each in EXAMPLES} == set(get_args(EVERYTHING))


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda each: type(each).__name__)
def test_a_message_arrives_as_it_was_sent(message: Any) -> None:
    assert received(encode(message)) == [message]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda each: type(each).__name__)
def test_a_message_that_comes_in_pieces_is_put_together(message: Any) -> None:
    frames = Frames(EVERYTHING)
    *pieces, last = (bytes([each]) for each in encode(message))
    for piece in pieces:
        frames.feed(piece)
        assert frames.next() is None
    frames.feed(last)
    assert frames.next() == message
    assert frames.next() is None


def test_messages_that_come_together_are_taken_apart() -> None:
    assert received(b"".join(map(encode, EXAMPLES))) == EXAMPLES


def test_other_kinds_are_expected_after_the_handshake() -> None:
    frames = Frames(messages.Handshake)
    frames.feed(encode(messages.Welcome()) + encode(messages.Stop(1, "x")))
    assert frames.next() == messages.Welcome()
    frames.expect(messages.Answer)
    assert frames.next() == messages.Stop(1, "x")


def test_fields_that_a_newer_peer_adds_do_no_harm() -> None:
    assert received(raw("Heartbeat", number=3, mood="fine")) == [messages.Heartbeat(3)]


NAMES = st.text(min_size=1, max_size=20)
TIMES = st.floats(0, bounds.MAX_SECONDS)
COUNTS = st.integers(0, 2**53)


@st.composite
def some_facts(draw: st.DrawFn) -> NodeFacts:
    rank = draw(st.none() | st.integers(-5, 5000))
    port, workers = draw(st.integers(0, 65535)), draw(st.integers(1, 1000))
    return NodeFacts(draw(NAMES), draw(COUNTS), draw(NAMES), port, draw(NAMES), workers, rank)


@st.composite
def some_settings(draw: st.DrawFn) -> Settings:
    low = draw(st.integers(1, 5000))
    times = [draw(TIMES) for _ in range(6)]
    codes, words = st.frozensets(st.integers(-64, 255), max_size=4), st.frozensets(NAMES, max_size=4)
    policy = RestartPolicy(
        draw(COUNTS),
        draw(st.none() | TIMES),
        draw(TIMES),
        draw(TIMES),
        draw(codes),
        draw(words),
        draw(codes),
        draw(words),
    )
    return Settings(low, low + draw(st.integers(0, 5000)), *times, draw(st.sampled_from(Admit)), policy)


@st.composite
def some_place(draw: st.DrawFn) -> Place:
    runs = draw(st.lists(st.builds(Alike, NAMES, st.integers(1, 64), st.integers(1, 100)), min_size=1, max_size=5))
    count = sum(run.count for run in runs)
    rank, port = draw(st.integers(0, count - 1)), draw(st.integers(0, 65535))
    return Place(draw(st.integers(1, 2**53)), rank, count, tuple(runs), draw(NAMES), port, draw(COUNTS))


SOME_FAILURE = st.builds(Failure, NAMES, st.integers(-1, 9999), st.integers(-64, 255), NAMES, st.text(), st.booleans())
SOME_MESSAGE = st.one_of(
    st.builds(messages.Join, some_facts(), some_settings(), COUNTS, NAMES),
    st.builds(messages.Return, some_facts(), some_settings(), some_place(), st.sampled_from(Stage)),
    st.builds(messages.Failed, st.integers(0, 2**53), SOME_FAILURE),
    st.builds(messages.Sealed, NAMES, some_place()),
    st.builds(messages.Ended, st.builds(Outcome, st.sampled_from(End), st.text(), st.none() | SOME_FAILURE)),
    st.builds(
        messages.StoreRequest,
        st.binary(max_size=32),
        COUNTS,
        NAMES,
        st.lists(st.text()).map(tuple),
        st.lists(st.binary()).map(tuple),
        st.integers(-(2**63), 2**63 - 1),
        TIMES,
        st.binary(max_size=32),
    ),
    st.builds(messages.Hello, st.just(1), st.text(), st.binary(min_size=32, max_size=32), st.binary()),
    st.builds(messages.Stop, COUNTS, st.text()),
)


@given(st.lists(SOME_MESSAGE, max_size=5), st.randoms(use_true_random=False))
def test_any_messages_survive_any_cut(sent: list[Any], random: Any) -> None:
    frames = Frames(EVERYTHING)
    data = b"".join(map(encode, sent))
    found: list[object] = []
    while data:
        size = random.randint(1, max(1, len(data)))
        frames.feed(data[:size])
        data = data[size:]
        while (message := frames.next()) is not None:
            found.append(message)
    assert found == sent


# Everything else.


@given(st.binary(max_size=300))
def test_junk_is_refused_or_awaited_and_nothing_else(data: bytes) -> None:
    try:
        received(data)
        received(frame(data))
    except Malformed:
        pass


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_with_changed_bytes_is_refused_or_is_another_message(message: Any, data: st.DataObject) -> None:
    changed = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(4, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        for found in received(bytes(changed)):
            assert isinstance(found, get_args(EVERYTHING))
    except Malformed:
        pass


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda each: type(each).__name__)
def test_a_message_that_is_cut_short_is_refused(message: Any) -> None:
    body = encode(message)[4:]
    for end in range(len(body)):
        assert "not a message" in refused(frame(body[:end]))


def test_a_message_with_more_behind_it_is_refused() -> None:
    assert "trailing" in refused(frame(encode(messages.Left())[4:] + b"\x00"))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        b"\xc0",
        b"\x90",
        b"\x80",
        b"\x81\xa4type\x01",
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa9Heartbeat\xa6number" + b"\xc7\x10\x05",
        b"\x83\xa4type\xa9Heartbeat\xa6number\x01\xa1x" + b"\x91" * 100_000,
        b"\x82\xa4type\xa5Close\xa6reason\xa2\xff\xff",
        b"\x82\xa4type\xa5Close\xa6reason\xdb\xff\xff\xff\xff",
        b"\x84\xa4type\xacStoreRequest\xa6sender\xc4\x00\xa6number\x01\xa4keys\xdd\xff\xff\xff\xff",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_bodies_that_are_no_messages(body: bytes) -> None:
    assert "not a message" in refused(frame(body))


@pytest.mark.parametrize(
    ("kind", "fields", "words"),
    [
        ("Nonsense", {}, "Invalid value 'Nonsense'"),
        ("Heartbeat", {}, "missing required field `number`"),
        ("Heartbeat", {"number": "1"}, "Expected `int`, got `str`"),
        ("Heartbeat", {"number": 1.0}, "Expected `int`, got `float`"),
        ("Heartbeat", {"number": True}, "Expected `int`, got `bool`"),
        ("Heartbeat", {"number": None}, "Expected `int`, got `None`"),
        ("Close", {"reason": b"x"}, "Expected `str`, got `bytes`"),
        ("Failed", {"round": 1, "failure": []}, "Expected `object`, got `array`"),
        ("Join", {"facts": {"node_id": 1}, "settings": {}}, "Expected `str`, got `int` - at `$.facts.node_id`"),
        ("Join", {"facts": {"node_id": "a"}, "settings": {"admit": "never"}}, "Invalid enum value 'never'"),
        ("StoreRequest", {"sender": b"", "number": 1, "operation": "get", "keys": "k"}, "Expected `array`, got `str`"),
    ],
)
def test_wrong_types(kind: str, fields: dict[str, object], words: str) -> None:
    assert words in refused(raw(kind, **fields))


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        (messages.Handshake, messages.Join(FACTS, SETTINGS)),
        (messages.ToCoordinator, messages.Hello(1, "run", NONCE)),
        (messages.ToCoordinator, messages.Stop(1, "x")),
        (messages.Answer, messages.Close("x")),
    ],
)
def test_a_kind_at_the_wrong_time_is_refused(kinds: object, message: Any) -> None:
    assert "Invalid value" in refused(encode(message), kinds)


def wrong_settings(**changes: Any) -> messages.Join:
    return messages.Join(FACTS, replace(SETTINGS, **changes))


def wrong_facts(**changes: Any) -> messages.Join:
    return messages.Join(replace(FACTS, **changes), SETTINGS)


def wrong_place(**changes: Any) -> messages.Return:
    return messages.Return(FACTS, SETTINGS, replace(PLACE, **changes), Stage.RUNNING)


NAN, INF = float("nan"), float("inf")
SENSELESS: list[tuple[Any, str]] = [
    (wrong_settings(min_nodes=0), "0 to 4 nodes"),
    (wrong_settings(min_nodes=5), "5 to 4 nodes"),
    (wrong_settings(max_nodes=10**9), "2 to 1000000000 nodes"),
    *((wrong_settings(lease_s=value), "lease_s is") for value in (NAN, INF, -1.0, 1e300)),
    (wrong_settings(close_linger_s=NAN), "close_linger_s is nan"),
    (wrong_settings(policy=RestartPolicy(-1)), "max_restarts is -1"),
    (wrong_settings(policy=RestartPolicy(1, window_s=NAN)), "nan"),
    (wrong_settings(policy=RestartPolicy(1, backoff_s=-INF)), "-inf"),
    (wrong_facts(node_id=""), "without a name"),
    (wrong_facts(node_id="x" * 1025), "more than 1024 characters"),
    (wrong_facts(role="x" * 1025), "more than 1024 characters"),
    (wrong_facts(incarnation=-1), "incarnation -1"),
    (wrong_facts(port=65536), "port 65536"),
    (wrong_facts(local_world_size=0), "0 workers"),
    (wrong_facts(local_world_size=2**40), "workers"),
    (messages.Join(FACTS, SETTINGS, -1), "last round -1"),
    (messages.Join(FACTS, SETTINGS, 0, "x" * 3000), "last round 0"),
    (wrong_place(round=0), "round 0"),
    (wrong_place(rank=3), "rank 3 of 3 nodes"),
    (wrong_place(rank=-1), "rank -1 of 3 nodes"),
    (wrong_place(node_count=10**9), "nodes"),
    (wrong_place(runs=()), "another number of members"),
    (wrong_place(runs=(Alike("a", 1, 2**60),)), "another number of members"),
    (wrong_place(runs=(Alike("a", 1, 4), Alike("a", 1, -1))), "impossible members"),
    (wrong_place(restarts_used=-1), "-1 restarts"),
    (wrong_place(master_port=-1), "master port -1"),
    (messages.Sealed("a/0", replace(PLACE, node_count=4)), "another number of members"),
    (messages.Failed(1, Failure(text="x" * 20_000)), "20000 characters"),
    (messages.Failed(1, Failure(node="x" * 2000)), "more than 1024"),
    (messages.Failed(1, Failure(exitcode=2**60)), "exit code"),
    (messages.Close("x" * 20_000), "20000 characters"),
    (messages.Ended(Outcome(End.FAILED, "x" * 20_000)), "20000 characters"),
    (messages.StoreRequest(b"", 1, "get", ("k",), timeout_s=NAN), "timeout_s is nan"),
    (messages.StoreRequest(b"", 1, "get", ("k",), timeout_s=INF), "timeout_s is inf"),
    (messages.StoreRequest(b"", 1, "get", ("k",), timeout_s=-1.0), "timeout_s is -1"),
    (messages.StoreRequest(b"x" * 33, 1, "get", ("k",)), "33 bytes"),
    (messages.StoreRequest(b"", 1, "get", ("k",), generation=b"x" * 33), "generation 33"),
    (messages.Hello(1, "run", b"short"), "a nonce of 5 bytes"),
    (messages.Challenge(1, b"", True), "a nonce of 0 bytes"),
]


@pytest.mark.parametrize(("message", "words"), SENSELESS)
def test_values_that_make_no_sense(message: Any, words: str) -> None:
    said = refused(encode(message))
    assert said.startswith(f"{type(message).__name__} makes no sense: ")
    assert words in said


def test_the_nonces_of_another_version_are_its_own_business() -> None:
    hello = messages.Hello(99, "run", b"short")
    assert received(encode(hello)) == [hello]


def test_a_failure_can_be_cut_to_what_may_be_sent() -> None:
    long = Failure("n" * 5000, 1, 1, "e" * 5000, "x" * 10**6)
    cut = bounds.clipped(long)
    assert received(encode(messages.Failed(1, cut))) == [messages.Failed(1, cut)]
    assert cut.text.endswith("x ...")
    assert bounds.clipped(FAILURE) == FAILURE


# Sizes.


def test_a_long_message_is_refused_by_its_length_alone() -> None:
    assert "longer than the 1048576" in refused(struct.pack("!I", MAX_MESSAGE_BYTES + 1))


def test_the_largest_message_passes_and_one_byte_more_is_not_sent() -> None:
    def request(size: int) -> messages.StoreRequest:
        return messages.StoreRequest(b"", 1, "set", ("k",), (bytes(size),))

    room = MAX_MESSAGE_BYTES - len(encode(request(MAX_MESSAGE_BYTES // 2))) + 4 + MAX_MESSAGE_BYTES // 2
    largest = request(room)
    assert len(encode(largest)) == 4 + MAX_MESSAGE_BYTES
    assert received(encode(largest)) == [largest]
    with pytest.raises(ValueError, match="StoreRequest has 1048577 bytes, at most 1048576 can be sent"):
        encode(request(room + 1))


def test_strangers_may_send_less() -> None:
    frames = Frames(messages.Handshake, messages.MAX_HANDSHAKE_BYTES)
    frames.feed(struct.pack("!I", messages.MAX_HANDSHAKE_BYTES + 1))
    with pytest.raises(Malformed, match="longer than the 16384"):
        frames.next()


def test_the_longest_run_id_fits_into_a_handshake() -> None:
    hello = messages.Hello(1, "\U0001f600" * 1024, NONCE, bytes(32))
    frames = Frames(messages.Handshake, messages.MAX_HANDSHAKE_BYTES)
    frames.feed(encode(hello))
    assert frames.next() == hello


# Proofs.


def test_a_proof_is_for_one_token_side_run_and_pair_of_nonces() -> None:
    args = (b"token", b"agent", "run", b"challenge", b"nonce")
    others = [
        (b"Token", *args[1:]),
        (args[0], b"coordinator", *args[2:]),
        (*args[:2], "other", *args[3:]),
        (*args[:3], b"another", args[4]),
        (*args[:4], b"another"),
        # The same bytes, cut elsewhere.
        (*args[:2], "runc", b"hallenge", args[4]),
    ]
    proof = messages.prove(*args)
    assert messages.is_proof(messages.prove(*args), proof)
    assert not any(messages.is_proof(messages.prove(*other), proof) for other in others)
    assert not messages.is_proof(b"", proof)
