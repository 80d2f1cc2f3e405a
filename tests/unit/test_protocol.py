"""What crosses the wire: every kind survives the journey, and nothing else is let in."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.failures.records import Evidence, Failure, Folded
from holdfast.rendezvous.membership import frames, keys, model, protocol
from holdfast.rendezvous.membership.frames import (
    DOWNWARD,
    HANDSHAKE,
    MAX_HANDSHAKE_BYTES,
    MAX_MESSAGE_BYTES,
    UPWARD,
    Frames,
    Malformed,
    encode,
)
from holdfast.rendezvous.membership.model import Admit, End, Memory, NodeFacts, Outcome, Settings, Stage, Stop, World
from holdfast.rendezvous.membership.protocol import MAJOR, Join, Return
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.membership.round import Round
from holdfast.telemetry.stragglers import LINES, STEPS, Straggler
from tests.promises import promise, proves

FACTS = NodeFacts("node-a", 3, "10.0.0.1", 4711, "trainer", 8, 2, 12.5, "0123456789abcdef")
POLICY = RestartPolicy(3, 600.0, 1.0, 30.0, frozenset({13}), frozenset({"SyntaxError"}), frozenset({143}))
SETTINGS = Settings(2, 4, 600.0, 5.0, 1.0, 5.0, 2.0, 10.0, Admit.ON_RESTART, POLICY, leader_lease_s=4.0)
MEMBERS = [
    replace(FACTS, node_id=name, role=role) for name, role in zip("abc", ("trainer", "trainer", "reader"), strict=True)
]
PLACE = World.of(4, 7, MEMBERS, 2).place_of("b/3")
FOLDED = Folded((6, 7, 9), "exit code", "exited with code 3")
SLOW = (Straggler(5, 0.5, 2.0, STEPS, 4), Straggler(7, 0.0, 1.0, LINES, 2))
EVIDENCE = Evidence("RuntimeError: x", "Traceback", left=("/core.7",), stragglers=SLOW, others=(FOLDED,))
FAILURE = Failure("node-a", 5, -9, "RuntimeError", "rank 5 died of SIGKILL", True, EVIDENCE, "signal", "died", 1, 7, 3)
NONCE = bytes(range(32))
SNAPSHOT = model.SnapshotId(4, 6, 120, 24, is_replicated=True)
HELD = model.Held(SNAPSHOT, ((0, 8), (20, 4)))
CHOSEN = model.Chosen(SNAPSHOT, (model.Source((8, 4), "10.0.0.2", 7),), needs_reshard=True)

FROM_STRANGERS: list[Any] = [
    protocol.Challenge(MAJOR, NONCE, True, 1),
    protocol.Hello(MAJOR, "run/1", NONCE, 1, True, "10.0.0.1:29400"),
    protocol.Proved(),
    protocol.Introduction("node-a", b"secret", 5),
    protocol.Welcome(5, 7, 2),
    protocol.Denied("no", is_passing=True),
]
FROM_NODES: list[Any] = [
    protocol.StoreRequest(b"client", 9, "compare_set", ("key",), (b"\x00\xff", b""), -4, 2.5),
    Join(FACTS, SETTINGS, PLACE, 8, True, FAILURE, Stop(7, "why", True, True)),
    Join(FACTS, SETTINGS),
    Join(replace(FACTS, snapshot_port=7), SETTINGS, held=(HELD, HELD)),
    Return(FACTS, SETTINGS, PLACE, Stage.FINISHED),
    protocol.Heartbeat(12),
    protocol.Failed(7, FAILURE),
    protocol.Succeeded(7),
    protocol.SnapshotReport(7, model.SavedSteps(130, 120, 110, 100, (4, 6, 90))),
    protocol.Leaving(),
    protocol.Left(),
    protocol.Close("by the user"),
    protocol.GiveNotice(model.NoticeRequest(120.0, "SIGUSR1", True)),
    protocol.Query(3, b'{"command": "status"}', "node-b"),
    protocol.Answer(4, b'{"result": {}}'),
]
FROM_COORDINATORS: list[Any] = [
    protocol.StoreAnswer(9, (b"\x00\xff",), 2**63 - 1, "timeout"),
    protocol.HeartbeatAnswer(12),
    protocol.Query(4, b"{}"),
    protocol.Answer(3, b'{"error": "busy"}'),
    model.Sealed("node-a/3", PLACE),
    model.Sealed("node-a/3", replace(PLACE, chosen=CHOSEN, copy_to=(("10.0.0.2", 7),), agrees_on_steps=True)),
    model.StandBy(7, "round 7 runs with 3 nodes, this node stands by"),
    Stop(7, "node-b leaves"),
    model.KeepFrom(7, 120),
    model.Agreed(7, 120, to_disk=True),
    model.Complete(7, (4, 6, 120)),
    Stop(7, "rank 2 hung", is_failure=True, is_hang=True),
    model.Refused("rank 2 is taken"),
    model.Expelled("it was silent for 5 s"),
    model.Ended(Outcome(End.FAILED, "no restarts are left", FAILURE)),
    model.Progress(6, 8, 10, 540.5),
    model.Notice("standing by"),
    model.GoingAway(120.0, 110.0, False, ("node-a",), 1, "SIGUSR1"),
    model.Resigned(),
]
DECODERS = {HANDSHAKE: FROM_STRANGERS, UPWARD: FROM_NODES, DOWNWARD: FROM_COORDINATORS}
EXAMPLES = [(decoder, message) for decoder, messages in DECODERS.items() for message in messages]
each_example = pytest.mark.parametrize(
    ("decoder", "message"), EXAMPLES, ids=[type(message).__name__ for _, message in EXAMPLES]
)


def reader(decoder: Any) -> Frames:
    found = Frames()
    found.expect(decoder)
    return found


def received(data: bytes, decoder: Any) -> list[object]:
    stream = reader(decoder)
    stream.feed(data)
    found = []
    while (message := stream.next()) is not None:
        found.append(message)
    return found


def frame(body: bytes) -> bytes:
    return struct.pack("!I", len(body)) + body


def raw(kind: str, **fields: object) -> bytes:
    return frame(msgspec.msgpack.encode({"type": kind, **fields}))


def refused(data: bytes, decoder: Any = UPWARD) -> str:
    with pytest.raises(Malformed) as caught:
        received(data, decoder)
    return str(caught.value)


def test_there_is_an_example_of_every_kind() -> None:
    kinds = {*get_args(protocol.Handshake), *get_args(protocol.ToCoordinator), *get_args(protocol.FromCoordinator)}
    assert {type(message) for _, message in EXAMPLES} == {*kinds, protocol.StoreAnswer}


@each_example
def test_a_message_that_comes_in_pieces_is_put_together(decoder: Any, message: Any) -> None:
    stream = reader(decoder)
    *pieces, last = (bytes([each]) for each in encode(message))
    for piece in pieces:
        stream.feed(piece)
        assert stream.next() is None
    stream.feed(last)
    assert stream.next() == message
    assert stream.next() is None


def test_other_kinds_are_expected_after_the_handshake() -> None:
    stream = Frames()
    stream.feed(encode(protocol.Welcome()) + encode(Stop(1, "x")))
    assert stream.next() == protocol.Welcome()
    stream.expect(DOWNWARD)
    assert stream.next() == Stop(1, "x")


def test_fields_that_a_newer_peer_adds_do_no_harm() -> None:
    assert received(raw("Heartbeat", number=3, mood="fine"), UPWARD) == [protocol.Heartbeat(3)]
    assert received(raw("Notice", text="x", mood="fine"), DOWNWARD) == [model.Notice("x")]
    hello = raw("Hello", version=MAJOR, minor=9, run_id="r", nonce=NONCE, compress="zstd")
    assert received(hello, HANDSHAKE) == [protocol.Hello(MAJOR, "r", NONCE, minor=9)]


@pytest.mark.parametrize("version", [1, 2, 99])
def test_what_another_major_version_sends_can_be_told_from_junk(version: int) -> None:
    """So that it can be refused by name: its nonces and what else it says are its own business."""
    for message in (protocol.Hello(version, "run", b"short"), protocol.Challenge(version, b"", True)):
        assert received(encode(message), HANDSHAKE) == [message]
    assert received(raw("Hello", version=version, run_id="r", nonce=b"", mood=7), HANDSHAKE)


@given(st.sampled_from([*DECODERS]), st.data(), st.randoms(use_true_random=False))
def test_any_messages_survive_any_cut(decoder: Any, drawn: st.DataObject, random: Any) -> None:
    messages = drawn.draw(st.lists(st.sampled_from(DECODERS[decoder]), max_size=3))
    stream, data = reader(decoder), b"".join(map(encode, messages))
    found: list[object] = []
    while data:
        size = random.randint(1, max(1, len(data)))
        stream.feed(data[:size])
        data = data[size:]
        while (message := stream.next()) is not None:
            found.append(message)
    assert found == messages


@promise("""coordinator.peer-sends-known-message: A peer sends a known message with valid values, or loses its
    connection. Lengths are checked before anything is stored.""")
@given(st.sampled_from(list(DECODERS)), st.binary(max_size=300))
def test_junk_is_refused_or_awaited_and_nothing_else(decoder: Any, data: bytes) -> None:
    try:
        received(data, decoder)
        received(frame(data), decoder)
    except Malformed:
        pass


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_message_with_changed_bytes_is_refused_or_is_another_message(example: Any, data: st.DataObject) -> None:
    decoder, message = example
    changed = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(4, len(changed) - 1))] = data.draw(st.integers(0, 255))
    try:
        for found in received(bytes(changed), decoder):
            assert type(found) in {type(each) for each in DECODERS[decoder]}
    except Malformed:
        pass


@each_example
def test_a_message_that_is_cut_short_is_refused(decoder: Any, message: Any) -> None:
    body = encode(message)[4:]
    for end in range(len(body)):
        assert "not a message" in refused(frame(body[:end]), decoder)


def test_a_message_with_more_behind_it_is_refused() -> None:
    assert "trailing" in refused(frame(encode(protocol.Left())[4:] + b"\x00"))


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
    ("decoder", "message"),
    [
        (HANDSHAKE, Join(FACTS, SETTINGS)),
        (UPWARD, protocol.Hello(MAJOR, "run", NONCE)),
        (UPWARD, Stop(1, "x")),
        (DOWNWARD, protocol.Close("x")),
    ],
)
def test_a_kind_at_the_wrong_time_is_refused(decoder: Any, message: Any) -> None:
    assert "Invalid value" in refused(encode(message), decoder)


def unlimited_in(hint: Any, where: str, seen: set[Any]) -> Iterator[str]:
    """The parts of a type on the wire whose size or value is not bounded."""
    limits = [each for each in getattr(hint, "__metadata__", ()) if isinstance(each, msgspec.Meta)]
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    is_bounded = any(each.max_length is not None or each.le is not None or each.lt is not None for each in limits)
    if hint in (int, float, str, bytes) or get_origin(hint) in (tuple, frozenset):
        is_pair = get_origin(hint) is tuple and ... not in get_args(hint)
        if not is_bounded and not is_pair:
            yield where
    for each in get_args(hint):
        yield from unlimited_in(each, where, seen)
    if hint not in seen and hasattr(hint, "__match_args__") and not issubclass(hint, Enum):
        seen.add(hint)
        for name, own in get_type_hints(hint, include_extras=True).items():
            yield from unlimited_in(own, f"{hint.__name__}.{name}", seen)


def test_whatever_a_peer_sends_has_a_limit() -> None:
    kinds = [*get_args(protocol.Handshake), *get_args(protocol.ToCoordinator), *get_args(protocol.FromCoordinator)]
    found = {each for kind in (*kinds, Memory) for each in unlimited_in(kind, kind.__name__, set())}
    assert found == UNLIMITED


# Numbers that are compared and nothing else; texts and keys that the length of a message bounds, and whose number is.
UNLIMITED = {
    "Challenge.version", "Challenge.minor", "Hello.version", "Hello.minor", "Hello.run_id",
    "StoreRequest.keys", "StoreRequest.values", "StoreRequest.amount", "Memory.members",
}  # fmt: skip
NAN, INF = float("nan"), float("inf")
TOO_LONG = "x" * 20_000
JOIN, BACK, FAILED = Join(FACTS, SETTINGS), Return(FACTS, SETTINGS, PLACE, Stage.RUNNING), protocol.Failed(1, FAILURE)
# One of each kind of limit, and what spans several fields: where it is in which message, the value, and the words.
SENSELESS: list[tuple[Any, str, Any, str]] = [
    (JOIN, "settings.min_nodes", 0, "$.settings.min_nodes"),
    (JOIN, "settings.min_nodes", 5, "Join makes no sense: a run of 5 to 4 nodes"),
    *((JOIN, "settings.lease_s", value, "$.settings.lease_s") for value in (NAN, INF, -1.0, 0.0, 1e300)),
    (JOIN, "settings.heartbeat_s", 3.0, "a lease of 5 s with a heartbeat every 3 s"),
    (JOIN, "settings.policy.window_s", NAN, "$.settings.policy.window_s"),
    (JOIN, "settings.policy.fatal_exit_codes", frozenset(range(2000)), "$.settings.policy.fatal_exit_codes"),
    (JOIN, "facts.node_id", "", "length >= 1 - at `$.facts.node_id`"),
    (JOIN, "facts.node_id", "x" * 257, "length <= 256 - at `$.facts.node_id`"),
    (JOIN, "facts.incarnation", -1, "$.facts.incarnation"),
    (JOIN, "facts.port", 65536, "$.facts.port"),
    (JOIN, "held", (HELD,) * 65, "$.held"),
    (JOIN, "settings.snapshot_copies", 9, "$.settings.snapshot_copies"),
    (protocol.SnapshotReport(7, model.SavedSteps()), "steps.kept", -1, "$.steps.kept"),
    (model.Sealed("a/0", PLACE), "place.copy_to", (("b", 1),) * 9, "place.copy_to"),
    (JOIN, "held", (model.Held(SNAPSHOT, ()),), "$.held[0].ranks"),
    (JOIN, "held", (model.Held(SNAPSHOT, ((0, 1),) * 65),), "$.held[0].ranks"),
    (JOIN, "held", (model.Held(SNAPSHOT, ((20, 5),)),), "ranks up to 24 of a snapshot of 24 workers"),
    (model.Sealed("a/0", PLACE), "place.chosen", replace(CHOSEN, sources=CHOSEN.sources * 1025), "chosen.sources"),
    (JOIN, "place", replace(PLACE, rank=3), "Join makes no sense: rank 3 of 3 nodes"),
    (BACK, "place.node_count", 6, "a place among 6 nodes in a run of at most 4"),
    (BACK, "place.rank", 3, "Return makes no sense: rank 3 of 3 nodes"),
    (BACK, "place.round", 0, "$.place.round"),
    (BACK, "place.shapes", (("a", 0),), "$.place.shapes[0][1]"),
    (BACK, "place.pattern", bytes(600_000), "$.place.pattern"),
    (FAILED, "failure.text", TOO_LONG, "$.failure.text"),
    (FAILED, "failure.exitcode", 2**60, "$.failure.exitcode"),
    (FAILED, "failure.evidence.left", ("x" * 1025,), "$.failure.evidence.left[0]"),
    (FAILED, "failure.evidence.others", (FOLDED,) * 17, "$.failure.evidence.others"),
    (FAILED, "failure.evidence.stragglers", (replace(SLOW[0], unit="\x1b"),), "$.failure.evidence.stragglers[0].unit"),
    (protocol.StoreRequest(b"", 1, "get", ("k",)), "timeout_s", INF, "$.timeout_s"),
    (protocol.StoreRequest(b"", 1, "wait", ()), "keys", ("",) * (protocol.MAX_STORE_KEYS + 1), "$.keys"),
    (model.Sealed("a/0", PLACE), "place.node_count", 4, "Sealed makes no sense: a world of 4 nodes describes another"),
    (model.Sealed("a/0", PLACE), "place.pattern", b"junk", "Sealed makes no sense: a world whose pattern"),
    (model.Ended(Outcome(End.FAILED, "")), "outcome.reason", TOO_LONG, "$.outcome.reason"),
    (protocol.Hello(MAJOR, "run", NONCE), "nonce", b"short", "Hello makes no sense: a nonce of 5 bytes"),
    (protocol.Challenge(MAJOR, NONCE, True), "nonce", b"", "Challenge makes no sense: a nonce of 0 bytes"),
]


def with_value(record: Any, path: str, value: Any) -> Any:
    name, _, rest = path.partition(".")
    value = with_value(getattr(record, name), rest, value) if rest else value
    change = msgspec.structs.replace if isinstance(record, msgspec.Struct) else replace
    return change(record, **{name: value})


@proves("coordinator.peer-sends-known-message")
@pytest.mark.parametrize(("message", "path", "value", "words"), SENSELESS)
def test_values_that_make_no_sense(message: Any, path: str, value: Any, words: str) -> None:
    [decoder] = [each for each, kinds in DECODERS.items() if type(message) in map(type, kinds)]
    assert words in refused(encode(with_value(message, path, value)), decoder)


@proves("nodes.end-failed-run-shows")
@pytest.mark.parametrize("filler", ["x", "\0", "\U0001f600", "\ud800"])
def test_a_failure_can_be_cut_to_what_may_be_sent(filler: str) -> None:
    """Not all of what a worker leaves is text that can be sent: JSON and paths may have halves of characters."""
    huge = filler * 10**6
    also = (Folded(tuple(range(2000)), huge, huge),) * 20
    texts = dict.fromkeys(("message", "stack", "stderr_tail", "memory", "note", "hang", "refusal", "error_file"), huge)
    evidence = Evidence(**texts, traceback=f"begin {huge} end", left=(huge,) * 20, stragglers=SLOW * 10, others=also)
    cut = protocol.clipped(Failure(huge, 1, 1, huge, huge, evidence=evidence, words=huge))
    assert received(encode(protocol.Failed(1, cut)), UPWARD) == [protocol.Failed(1, cut)]
    assert cut.text.endswith(" ...")
    assert cut.evidence.traceback.startswith("begin ")
    assert cut.evidence.traceback.endswith(" end")
    assert "\n... (cut) ...\n" in cut.evidence.traceback
    assert cut.evidence.others[0].ranks == tuple(range(1024))
    assert protocol.clipped(FAILURE) == FAILURE


@proves("nodes.end-failed-run-shows")
@pytest.mark.parametrize(
    "other",
    [
        Evidence("\U0001f600" * 16_384, "\U0001f600" * 16_384),
        Evidence(others=(Folded((2**32 - 1,) * 1024, "", ""),) * 16),
    ],
    ids=["texts", "ranks"],
)
def test_the_longest_outcome_fits_into_a_message(other: Evidence) -> None:
    """Whatever the nodes have sent."""
    huge = "\U0001f600" * 10**5
    texts = dict.fromkeys(("message", "traceback", "stack", "stderr_tail", "memory", "note", "hang", "refusal"), huge)
    also = (Folded((2**32 - 1,) * 1024, huge, huge),) * 16
    evidence = Evidence(**texts, error_file=huge, logs=huge, left=(huge,) * 16, stragglers=SLOW * 8, others=also)
    cause = protocol.clipped(Failure(huge, 1, 1, huge, huge, evidence=evidence, kind=huge, words=huge))
    kept = Round(World.of(1, 1, MEMBERS))
    for number, failure in enumerate([cause, *[replace(cause, evidence=other)] * 8]):
        kept.report(str(number), failure)
    others, ended = kept.failures_besides(cause), (model.RoundEnd(1, "\U0001f600" * 300),) * 8
    assert (len(others), sum(each.evidence == other for each in others)) == (7, (1 << 16) // other.size_chars())
    sent = encode(model.Ended(Outcome(End.FAILED, "\U0001f600" * protocol.MAX_TEXT, cause, others, ended)))
    assert len(received(sent, DOWNWARD)) == 1


def test_a_text_for_nodes_is_cut_to_what_may_be_sent() -> None:
    """It is made of what other nodes say."""
    assert "$.text" in refused(raw("Notice", text=TOO_LONG), DOWNWARD)
    [notice] = received(encode(model.Notice(TOO_LONG)), DOWNWARD)
    assert isinstance(notice, model.Notice)
    assert notice.text == "x" * (protocol.MAX_TEXT - 4) + " ..."


def test_memory_is_read_back_as_it_was_written() -> None:
    memory = Memory(5, 4, 7, ("a/0", "b/1"), 3, (1.5, 0.0), SETTINGS, Outcome(End.FAILED, "why", FAILURE), True)
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(memory), type=Memory) == memory
        with pytest.raises(msgspec.ValidationError):
            codec.decode(codec.encode(replace(memory, last_round=-1)), type=Memory)


@proves("coordinator.peer-sends-known-message")
def test_a_long_message_is_refused_by_its_length_alone() -> None:
    assert "longer than the 1048576" in refused(struct.pack("!I", MAX_MESSAGE_BYTES + 1))


def test_the_largest_message_passes_and_one_byte_more_is_not_sent() -> None:
    def request(size: int) -> protocol.StoreRequest:
        return protocol.StoreRequest(b"", 1, "set", ("k",), (bytes(size),))

    room = MAX_MESSAGE_BYTES - len(encode(request(MAX_MESSAGE_BYTES // 2))) + 4 + MAX_MESSAGE_BYTES // 2
    largest = request(room)
    assert len(encode(largest)) == 4 + MAX_MESSAGE_BYTES
    assert received(encode(largest), UPWARD) == [largest]
    with pytest.raises(ValueError, match="StoreRequest has 1048577 bytes, at most 1048576 can be sent"):
        encode(request(room + 1))


@proves("coordinator.peer-sends-known-message")
def test_strangers_may_send_less() -> None:
    stream = Frames(MAX_HANDSHAKE_BYTES)
    stream.feed(struct.pack("!I", MAX_HANDSHAKE_BYTES + 1))
    with pytest.raises(Malformed, match="longer than the 16384"):
        stream.next()
    stream = Frames(MAX_HANDSHAKE_BYTES)
    stream.expect(UPWARD)
    stream.feed(encode(protocol.Close("x" * MAX_HANDSHAKE_BYTES)))
    assert stream.next(), "the limit is that of strangers"


def test_the_longest_run_id_fits_into_a_handshake() -> None:
    hello = protocol.Hello(MAJOR, "\U0001f600" * 1024, NONCE, 0, True, "x" * 256)
    stream = Frames(MAX_HANDSHAKE_BYTES)
    stream.feed(encode(hello))
    assert stream.next() == hello


@promise("""coordinator.keys-connection-valid-token: The keys of a connection are valid for one token, run, pair of
    nonces and endpoint.""")
def test_keys_are_for_one_token_run_pair_of_nonces_and_endpoint() -> None:
    args = (b"key", (b"coordinator's", b"agent's"), "run", "10.0.0.1:1")
    others: list[Any] = [
        (b"Key", *args[1:]),
        (args[0], (b"agent's", b"coordinator's"), *args[2:]),
        (*args[:2], "other", args[3]),
        (*args[:3], "10.0.0.2:1"),
        # The same bytes, cut elsewhere.
        (args[0], (b"coordinator'", b"sagent's"), *args[2:]),
    ]
    up, down = keys.connection_keys(*args)
    assert (up, down) == keys.connection_keys(*args)
    assert up != down
    assert not {up, down} & {key for other in others for key in keys.connection_keys(*other)}


def two_sides() -> tuple[Frames, Frames]:
    agent, coordinator = Frames(), Frames()
    agent.seal(b"down", b"up")
    coordinator.seal(b"up", b"down")
    agent.expect(DOWNWARD)
    coordinator.expect(UPWARD)
    return agent, coordinator


@proves("coordinator.token-frame-sealed-heard")
def test_sealed_frames_arrive_in_both_directions() -> None:
    agent, coordinator = two_sides()
    for number in range(3):
        coordinator.feed(agent.sealed(encode(protocol.Heartbeat(number))))
        agent.feed(coordinator.sealed(encode(protocol.HeartbeatAnswer(number))))
        assert coordinator.next() == protocol.Heartbeat(number)
        assert agent.next() == protocol.HeartbeatAnswer(number)


def test_the_largest_message_fits_into_a_sealed_frame() -> None:
    agent, coordinator = two_sides()
    frame = struct.pack("!I", frames.MAX_MESSAGE_BYTES) + bytes(frames.MAX_MESSAGE_BYTES)
    coordinator.feed(agent.sealed(frame))
    with pytest.raises(Malformed, match="not a message"):  # But it was read.
        coordinator.next()


@proves("coordinator.token-frame-sealed-heard")
def test_what_a_relay_can_do_to_sealed_frames_is_noticed() -> None:
    sent = [encode(protocol.Heartbeat(number)) for number in range(3)]
    for change in (
        lambda first, second, third: second,  # dropped
        lambda first, second, third: first + first,  # repeated
        lambda first, second, third: first + third,  # reordered
        lambda first, second, third: sent[0],  # made up, not sealed at all
        lambda first, second, third: first[:-1] + b"!",  # changed
    ):
        agent, coordinator = two_sides()
        coordinator.feed(change(*(agent.sealed(frame) for frame in sent)))
        with pytest.raises(frames.SealBroken):
            _ = [coordinator.next(), coordinator.next()]
    agent, coordinator = two_sides()
    agent.feed(agent.sealed(sent[0]))  # sent back to where it came from
    with pytest.raises(frames.SealBroken):
        agent.next()


def test_a_token_of_a_run_is_its_own_token_of_that_run() -> None:
    own = keys.run_token(b"the token of all runs", "a")
    assert own == keys.run_token(own, "a") != keys.run_token(b"the token of all runs", "b")


def test_only_the_hash_of_a_secret_is_kept() -> None:
    assert keys.hash_of_secret(b"secret") != keys.hash_of_secret(b"other")
    assert b"secret" not in keys.hash_of_secret(b"secret")
    assert keys.hash_of_secret(b"") == b""
