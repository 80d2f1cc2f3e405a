"""What crosses the wire: every kind survives the journey, and nothing else is let in."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, get_args

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
from holdfast.rendezvous.membership.model import (
    Admit,
    End,
    Memory,
    NodeFacts,
    Outcome,
    Place,
    Settings,
    Stage,
    Stop,
    World,
)
from holdfast.rendezvous.membership.protocol import MAJOR, Join, Return
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from holdfast.rendezvous.membership.round import Round
from holdfast.telemetry.stragglers import LINES, STEPS, Straggler

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
    Return(FACTS, SETTINGS, PLACE, Stage.FINISHED),
    protocol.Heartbeat(12),
    protocol.Failed(7, FAILURE),
    protocol.Succeeded(7),
    protocol.Leaving(),
    protocol.Left(),
    protocol.Close("by the user"),
    protocol.Query(3, b'{"command": "status"}', "node-b"),
    protocol.Answer(4, b'{"result": {}}'),
]
FROM_COORDINATORS: list[Any] = [
    protocol.StoreAnswer(9, (b"\x00\xff",), 2**63 - 1, "timeout"),
    protocol.HeartbeatAnswer(12),
    protocol.Query(4, b"{}"),
    protocol.Answer(3, b'{"error": "busy"}'),
    model.Sealed("node-a/3", PLACE),
    model.StandBy(7, "round 7 runs with 3 nodes, this node stands by"),
    Stop(7, "node-b leaves"),
    Stop(7, "rank 2 hung", is_failure=True, is_hang=True),
    model.Refused("rank 2 is taken"),
    model.Expelled("it was silent for 5 s"),
    model.Ended(Outcome(End.FAILED, "no restarts are left", FAILURE)),
    model.Progress(6, 8, 10, 540.5),
    model.Notice("standing by"),
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


# Honest messages.


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


@pytest.mark.parametrize("decoder", DECODERS)
def test_messages_that_come_together_are_taken_apart(decoder: Any) -> None:
    assert received(b"".join(map(encode, DECODERS[decoder])), decoder) == DECODERS[decoder]


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


NAMES = st.text(min_size=1, max_size=20)
TIMES = st.floats(0, 1e10)
COUNTS = st.integers(0, 2**53)


@st.composite
def some_facts(draw: st.DrawFn) -> NodeFacts:
    rank = draw(st.none() | st.integers(-5, 5000))
    port, workers = draw(st.integers(0, 65535)), draw(st.integers(1, 1000))
    return NodeFacts(
        draw(NAMES), draw(COUNTS), draw(NAMES), port, draw(NAMES), workers, rank, draw(st.floats(0, 86400)), draw(NAMES)
    )


@st.composite
def some_settings(draw: st.DrawFn) -> Settings:
    low = draw(st.integers(4, 5000))  # No place is among more nodes.
    heartbeat_s = draw(st.floats(0.1, 10.0))
    times = [draw(TIMES), draw(TIMES), heartbeat_s, heartbeat_s * draw(st.floats(2.0, 10.0)), draw(st.floats(0.1, 9.0))]
    codes, words = st.frozensets(st.integers(-64, 255), max_size=4), st.frozensets(NAMES, max_size=4)
    window_s = draw(st.none() | TIMES)
    policy = RestartPolicy(
        draw(COUNTS), window_s, draw(TIMES), draw(TIMES), draw(codes), draw(words), draw(codes), draw(words)
    )
    high = low + draw(st.integers(0, 5000))
    times += [draw(st.floats(0, 86400))]
    return Settings(low, high, *times, draw(st.sampled_from(Admit)), policy, draw(st.floats(0, 3600)))


@st.composite
def some_place(draw: st.DrawFn) -> Place:
    members = draw(st.lists(some_facts(), min_size=1, max_size=4, unique_by=lambda each: each.key))
    world = World.of(draw(COUNTS), draw(st.integers(1, 2**53)), members, draw(COUNTS))
    return world.place_of(draw(st.sampled_from(world.keys)))


SOME_FOLDED = st.builds(Folded, st.lists(st.integers(0, 2**32 - 1), max_size=4).map(tuple), NAMES, st.text())
SOME_EVIDENCE = st.builds(
    Evidence,
    st.text(),
    stack=st.text(),
    is_waiting=st.booleans(),
    left=st.lists(st.text(), max_size=2).map(tuple),
    others=st.lists(SOME_FOLDED, max_size=2).map(tuple),
)
SOME_FAILURE = st.builds(
    Failure,
    NAMES,
    st.integers(-1, 9999),
    st.integers(-64, 255),
    NAMES,
    st.text(),
    st.booleans(),
    SOME_EVIDENCE,
    pid=COUNTS,
    order=st.none() | COUNTS,
)
SOME_STOP = st.builds(Stop, COUNTS, st.text(), st.booleans(), st.booleans())
SOME_OUTCOME = st.builds(Outcome, st.sampled_from(End), st.text(), st.none() | SOME_FAILURE)
SOME_REQUEST = st.builds(
    protocol.StoreRequest,
    st.binary(max_size=32),
    COUNTS,
    NAMES,
    st.lists(st.text()).map(tuple),
    st.lists(st.binary()).map(tuple),
    st.integers(-(2**63), 2**63 - 1),
    TIMES,
)
SOME_JOIN = st.builds(
    Join, some_facts(), some_settings(), st.none() | some_place(), COUNTS, st.booleans(), st.none() | SOME_FAILURE
)
SOME_UPWARD = st.one_of(
    SOME_JOIN,
    st.builds(Return, some_facts(), some_settings(), some_place(), st.sampled_from(Stage)),
    st.builds(protocol.Failed, COUNTS, SOME_FAILURE),
    SOME_REQUEST,
)
SOME_DOWNWARD = st.one_of(SOME_STOP, st.builds(model.Sealed, NAMES, some_place()), st.builds(model.Ended, SOME_OUTCOME))


@given(
    st.tuples(st.just(UPWARD), st.lists(SOME_UPWARD, max_size=3))
    | st.tuples(st.just(DOWNWARD), st.lists(SOME_DOWNWARD, max_size=3)),
    st.randoms(use_true_random=False),
)
def test_any_messages_survive_any_cut(sent: tuple[Any, list[Any]], random: Any) -> None:
    decoder, messages = sent
    stream, data = reader(decoder), b"".join(map(encode, messages))
    found: list[object] = []
    while data:
        size = random.randint(1, max(1, len(data)))
        stream.feed(data[:size])
        data = data[size:]
        while (message := stream.next()) is not None:
            found.append(message)
    assert found == messages


# Everything else.


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


def wrong_settings(**changes: Any) -> Join:
    return Join(FACTS, replace(SETTINGS, **changes))


def wrong_policy(**changes: Any) -> Join:
    return wrong_settings(policy=replace(POLICY, **changes))


def wrong_facts(**changes: Any) -> Join:
    return Join(replace(FACTS, **changes), SETTINGS)


def wrong_place(**changes: Any) -> Return:
    return Return(FACTS, SETTINGS, replace(PLACE, **changes), Stage.RUNNING)


def wrong_failure(**changes: Any) -> protocol.Failed:
    return protocol.Failed(1, replace(FAILURE, **changes))


def wrong_evidence(**changes: Any) -> protocol.Failed:
    return wrong_failure(evidence=replace(EVIDENCE, **changes))


def wrong_straggler(**changes: Any) -> protocol.Failed:
    return wrong_evidence(stragglers=(replace(SLOW[0], **changes),))


NAN, INF = float("nan"), float("inf")
TOO_LONG = "x" * 20_000
SENSELESS: list[tuple[Any, str]] = [
    (wrong_settings(min_nodes=0), "$.settings.min_nodes"),
    (wrong_settings(min_nodes=5), "Join makes no sense: a run of 5 to 4 nodes"),
    (wrong_settings(max_nodes=10**9), "$.settings.max_nodes"),
    *((wrong_settings(lease_s=value), "$.settings.lease_s") for value in (NAN, INF, -1.0, 0.0, 1e300)),
    (wrong_settings(heartbeat_s=0.0), "$.settings.heartbeat_s"),
    (wrong_settings(heartbeat_s=3.0), "a lease of 5 s with a heartbeat every 3 s"),
    *((wrong_settings(leader_lease_s=value), "$.settings.leader_lease_s") for value in (NAN, -1.0, 1e6)),
    (wrong_settings(drop_timeout_s=0.0), "$.settings.drop_timeout_s"),
    *((wrong_settings(close_linger_s=value), "$.settings.close_linger_s") for value in (NAN, 1e6)),
    (wrong_policy(max_restarts=-1), "$.settings.policy.max_restarts"),
    (wrong_policy(window_s=NAN), "$.settings.policy.window_s"),
    (wrong_policy(backoff_s=-INF), "$.settings.policy.backoff_s"),
    (wrong_policy(fatal_exceptions=frozenset(map(str, range(2000)))), "$.settings.policy.fatal_exceptions"),
    (wrong_policy(uncounted_exceptions=frozenset({"x" * 1025})), "$.settings.policy.uncounted_exceptions"),
    (wrong_policy(fatal_exit_codes=frozenset(range(2000))), "$.settings.policy.fatal_exit_codes"),
    (wrong_facts(node_id=""), "length >= 1 - at `$.facts.node_id`"),
    (wrong_facts(node_id="x" * 257), "length <= 256 - at `$.facts.node_id`"),
    (wrong_facts(role="x" * 129), "length <= 128 - at `$.facts.role`"),
    (wrong_facts(grace_s=86401.0), "<= 86400.0 - at `$.facts.grace_s`"),
    (wrong_facts(stop_margin_s=60.1), "<= 60.0 - at `$.facts.stop_margin_s`"),
    (wrong_place(node_count=6), "a place among 6 nodes in a run of at most 4"),
    (wrong_facts(role="x" * 1025), "$.facts.role"),
    (wrong_facts(incarnation=-1), "$.facts.incarnation"),
    (wrong_facts(port=65536), "$.facts.port"),
    (wrong_facts(local_world_size=0), "$.facts.local_world_size"),
    (wrong_facts(local_world_size=2**40), "$.facts.local_world_size"),
    *((wrong_facts(grace_s=value), "$.facts.grace_s") for value in (NAN, INF, -1.0, 1e11)),
    (Join(FACTS, SETTINGS, heard_round=-1), "$.heard_round"),
    (Join(FACTS, SETTINGS, replace(PLACE, rank=3)), "Join makes no sense: rank 3 of 3 nodes"),
    (Join(FACTS, SETTINGS, stop=Stop(1, TOO_LONG)), "$.stop.reason"),
    (wrong_place(round=0), "$.place.round"),
    (wrong_place(term=-1), "$.place.term"),
    (wrong_place(rank=3), "Return makes no sense: rank 3 of 3 nodes"),
    (wrong_place(rank=-1), "$.place.rank"),
    (wrong_place(node_count=10**9), "$.place.node_count"),
    (wrong_place(shapes=(("a", 0),)), "$.place.shapes[0][1]"),
    (wrong_place(shapes=(("a", 1),) * 1025), "length <= 1024 - at `$.place.shapes`"),
    (wrong_place(pattern=bytes(600_000)), "$.place.pattern"),
    (wrong_place(restarts_used=-1), "$.place.restarts_used"),
    (wrong_place(restarts_used=2**54), "$.place.restarts_used"),
    (wrong_place(master_port=-1), "$.place.master_port"),
    (wrong_failure(text=TOO_LONG), "$.failure.text"),
    (wrong_failure(node="x" * 2000), "$.failure.node"),
    (wrong_failure(exitcode=2**60), "$.failure.exitcode"),
    (wrong_failure(pid=-1), "$.failure.pid"),
    (wrong_evidence(traceback=TOO_LONG), "$.failure.evidence.traceback"),
    (wrong_evidence(note="x" * 2049), "$.failure.evidence.note"),
    (wrong_evidence(left=("x",) * 17), "$.failure.evidence.left"),
    (wrong_evidence(left=("x" * 1025,)), "$.failure.evidence.left[0]"),
    (wrong_evidence(others=(FOLDED,) * 17), "$.failure.evidence.others"),
    (wrong_evidence(others=(replace(FOLDED, ranks=(0,) * 1025),)), "$.failure.evidence.others[0].ranks"),
    (wrong_evidence(others=(replace(FOLDED, ranks=(1 << 32,)),)), "$.failure.evidence.others[0].ranks[0]"),
    (wrong_evidence(others=(replace(FOLDED, words="x" * 513),)), "$.failure.evidence.others[0].words"),
    (wrong_evidence(stragglers=SLOW * 9), "$.failure.evidence.stragglers"),
    *((wrong_straggler(per_s=value), "$.failure.evidence.stragglers[0].per_s") for value in (NAN, INF, -0.5)),
    (wrong_straggler(rank=-1), "$.failure.evidence.stragglers[0].rank"),
    (wrong_straggler(unit="\x1b"), "$.failure.evidence.stragglers[0].unit"),
    (protocol.Close(TOO_LONG), "$.reason"),
    (protocol.StoreRequest(b"", 1, "get", ("k",), timeout_s=NAN), "$.timeout_s"),
    (protocol.StoreRequest(b"", 1, "get", ("k",), timeout_s=INF), "$.timeout_s"),
    (protocol.StoreRequest(b"", 1, "get", ("k",), timeout_s=-1.0), "$.timeout_s"),
    (protocol.StoreRequest(b"x" * 33, 1, "get", ("k",)), "$.sender"),
    (model.Sealed("a/0", replace(PLACE, node_count=4)), "Sealed makes no sense: a world of 4 nodes describes another"),
    (model.Sealed("a/0", replace(PLACE, pattern=b"junk")), "Sealed makes no sense: a world whose pattern"),
    (model.Ended(Outcome(End.FAILED, TOO_LONG)), "$.outcome.reason"),
    (model.Progress(1, 1, 1, NAN), "$.seconds_left"),
    (protocol.Hello(MAJOR, "run", b"short"), "Hello makes no sense: a nonce of 5 bytes"),
    (protocol.Challenge(MAJOR, b"", True), "Challenge makes no sense: a nonce of 0 bytes"),
    (protocol.Hello(MAJOR, "run", NONCE, endpoint=TOO_LONG), "$.endpoint"),
    (protocol.Introduction("a", bytes(2000)), "$.secret"),
    (protocol.StoreRequest(b"", 1, "wait", ("",) * (protocol.MAX_STORE_KEYS + 1)), "$.keys"),
    (protocol.Introduction("a", term=-1), "$.term"),
]


@pytest.mark.parametrize(("message", "words"), SENSELESS)
def test_values_that_make_no_sense(message: Any, words: str) -> None:
    [decoder] = [each for each, kinds in DECODERS.items() if type(message) in map(type, kinds)]
    assert words in refused(encode(message), decoder)


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


# Memory, which is written down and read back by the same rules.


def test_memory_is_read_back_as_it_was_written() -> None:
    memory = Memory(5, 4, 7, ("a/0", "b/1"), 3, (1.5, 0.0), SETTINGS, Outcome(End.FAILED, "why", FAILURE), True)
    for codec in (msgspec.msgpack, msgspec.json):
        assert codec.decode(codec.encode(memory), type=Memory) == memory
        with pytest.raises(msgspec.ValidationError):
            codec.decode(codec.encode(replace(memory, last_round=-1)), type=Memory)


# Sizes.


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


# Seals.


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
