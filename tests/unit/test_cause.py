"""The root cause among several failures."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from holdfast.failures.cause import exception_name, is_consequence, kind_of, root_cause, root_of_node
from holdfast.failures.records import Evidence, Failure
from tests.promises import promise, proves

NCCL_ABORT = """\
[rank1]:[E ProcessGroupNCCL.cpp:537] Some operations have failed or timed out.
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=4) ran for 1800011 ms
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:632 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96
frame #1: clone + 0x3f
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ValueError: boom", False),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("KeyError: 'connection'", False),
        ("TimeoutError: the download took too long", False),
        ("DistNetworkError: The server socket has failed to listen: EADDRINUSE, address already in use", False),
        ("DistBackendError: NCCL watchdog thread terminated with exception: CUDA error: device assert", False),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("requests.exceptions.ConnectionError: HTTPConnectionPool(host='x')", True),
        ("brokenpipeerror", True),
        ("SignalException: Process 12 got signal: 15", True),
        ("RuntimeError: [/x/gloo/pair.cc:537] Read error [127.0.0.1]:27528: Connection reset by peer.", True),
        ("RuntimeError: [/x/gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1", True),
        ("RuntimeError: [unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete", True),
        ("RuntimeError: Gloo connectFullMesh failed with ... CONNECTION REFUSED, remote=[::1]:3", True),
        ("DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed.", True),
        ("DistNetworkError: Broken pipe", True),
        ("DistStoreError: wait timeout after 6000ms, keys: /default_pg/0//x", True),
        ("DistStoreError: Timed out after 5 seconds waiting for clients. 1/2 clients joined.", True),
        ("DistNetworkError: The client socket has timed out after 4000ms while trying to connect", True),
        ("RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms", True),
        ("DistBackendError: NCCL error in: x.cpp:1, remote process exited or there was a network error", True),
        ("DistBackendError: NCCL error\nncclRemoteError: A call failed\nLast error:\n", True),
        ("RuntimeError: Horovod has been shut down. This was caused by an exception", True),
    ],
)
def test_an_exception_is_judged_by_its_type_and_words(text: str, expected: bool) -> None:
    assert is_consequence(1, Evidence(text)) is expected


@pytest.mark.parametrize(
    ("exitcode", "text", "stderr_tail", "expected"),
    [
        pytest.param(-signal.SIGSEGV, "", "", False, id="segfault"),
        pytest.param(-signal.SIGKILL, "", "", False, id="killed"),
        pytest.param(-signal.SIGTERM, "", "", True, id="our own SIGTERM"),
        pytest.param(128 + signal.SIGTERM, "", "", True, id="SIGTERM seen through a shell"),
        pytest.param(-signal.SIGPIPE, "", "", True, id="broken pipe without an exception"),
        pytest.param(-signal.SIGTERM, "ValueError: boom", "", False, id="raised, then stopped"),
        pytest.param(-signal.SIGSEGV, "ConnectionResetError: x", "", True, id="raised, then crashed"),
        pytest.param(-signal.SIGABRT, "", NCCL_ABORT, True, id="watchdog's abort"),
        pytest.param(-signal.SIGABRT, "", "free(): invalid pointer\n", False, id="abort of its own"),
        pytest.param(-signal.SIGSEGV, "", "Connection refused\n", False, id="a signal outweighs stderr"),
        pytest.param(7, "", "", False, id="plain exit code"),
        pytest.param(1, "", "x\nRuntimeError: Connection refused\n\n", True, id="last line of stderr"),
        pytest.param(1, "", "Connection refused\nValueError: boom\n", False, id="only the last line counts"),
        pytest.param(1, "", "[rank0]: BrokenPipeError: x\n", True, id="torch's prefix"),
        pytest.param(1, "ValueError: boom", "Connection refused\n", False, id="the exception outweighs stderr"),
    ],
)
def test_an_end_is_judged_by_what_is_known(exitcode: int, text: str, stderr_tail: str, expected: bool) -> None:
    assert is_consequence(exitcode, Evidence(text, stderr_tail=stderr_tail)) is expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("ValueError: boom", "ValueError"),
        ("a.b.MyError", "MyError"),
        ("[rank12]: torch.distributed.DistStoreError: x", "DistStoreError"),
        ("two words: x", ""),
        ("", ""),
    ],
)
def test_exception_name(text: str, name: str) -> None:
    assert exception_name(text) == name


def failure(
    text: str = "", order: int | None = None, timestamp: int = 0, exitcode: int = 1, **evidence: Any
) -> Failure:
    judged = is_consequence(exitcode, Evidence(text, **evidence))
    return Failure(exitcode=exitcode, is_consequence=judged, order=order, timestamp=timestamp)


@promise("""failures.root-cause-first-explains: The root cause is the first failure that explains itself. A broken
    connection, a collective's timeout or SIGTERM never hides it.""")
@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        pytest.param({3: failure()}, 3, id="the only one"),
        pytest.param({0: failure(exitcode=-15)}, 0, id="the only one, even if a consequence"),
        pytest.param(
            {0: failure("BrokenPipeError: x", 0, 1), 1: failure("ValueError: x", 9, 9)}, 1, id="speaks for itself"
        ),
        pytest.param({0: failure(order=2, timestamp=1), 1: failure(order=1, timestamp=5)}, 1, id="order"),
        pytest.param({0: failure(order=2, timestamp=5), 1: failure(timestamp=3)}, 1, id="time without order"),
        pytest.param({0: failure(timestamp=5), 1: failure(timestamp=3)}, 1, id="time"),
        pytest.param({4: failure(timestamp=3), 1: failure(timestamp=3)}, 4, id="tie"),
        pytest.param(
            # Compared in pairs these form a circle: 0 before 1 and 1 before 2 by time, 2 before 0 by order.
            {0: failure(order=1, timestamp=1), 1: failure(timestamp=2), 2: failure(order=0, timestamp=3)},
            1,
            id="circle",
        ),
        pytest.param(
            {
                0: failure("", 0, exitcode=-6, stderr_tail=NCCL_ABORT),
                1: failure("", 1, exitcode=-9, memory="the kernel did it"),
            },
            1,
            id="out of memory outranks a watchdog's abort",
        ),
    ],
)
def test_the_root_cause_of_a_node(failures: dict[int, Failure], expected: int) -> None:
    assert root_of_node(failures) == expected


def test_a_hang_explains_itself_unless_it_waited_for_others() -> None:
    hung, waiting = failure(exitcode=-15, hang="no output"), failure(exitcode=-15, hang="no output", is_waiting=True)
    assert root_of_node({0: failure("ConnectionResetError: by peer"), 1: waiting, 2: hung}) == 2
    assert (waiting.is_consequence, hung.is_consequence) == (True, False)


FIRST, SECOND = Failure("a", 0, text="first"), Failure("b", 1, text="second")
RESULT = Failure("c", 2, text="connection closed by peer", is_consequence=True)
LATER_RESULT = Failure("d", 3, text="connection reset", is_consequence=True)


@proves("failures.root-cause-first-explains")
@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([FIRST], FIRST),
        ([FIRST, SECOND], FIRST),
        ([RESULT, SECOND, FIRST], SECOND),
        ([RESULT, LATER_RESULT], RESULT),
        ([RESULT], RESULT),
    ],
)
def test_the_root_cause_of_a_run(failures: list[Failure], expected: Failure) -> None:
    assert root_cause(failures) is expected


KILLED = "the kernel's memory killer ended 1 process of this host while it ran"


@pytest.mark.parametrize(
    ("exitcode", "evidence", "expected"),
    [
        (1, Evidence("ValueError: boom"), "exception"),
        (-15, Evidence("ValueError: boom"), "exception"),
        (3, Evidence(), "exit code"),
        (-11, Evidence(), "signal"),
        (-9, Evidence(), "signal"),
        (-9, Evidence(memory=KILLED), "out of memory"),
        (137, Evidence(memory=KILLED), "out of memory"),
        (-15, Evidence(hang="no output for 9 s"), "hang"),
        (1, Evidence(refusal="no such file"), "could not start"),
    ],
)
def test_kinds(exitcode: int, evidence: Evidence, expected: str) -> None:
    assert kind_of(exitcode, evidence) == expected
