"""Typed values that several threads read at the same time, and none has read before."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.promises import promise

ANSWERS_OF_ETCD = """
from holdfast.rendezvous.etcd.gateway import _read

answer = b'''{"header": {"revision": "3"}, "succeeded": true, "responses": [{"response_range": {
    "header": {"revision": "3"}, "kvs": [{"key": "YQ==", "value": "YQ==", "mod_revision": "1"}]}}]}'''
work = [lambda: _read("here", 200, answer)] * 16
"""

MESSAGES = """
from holdfast.rendezvous.membership import frames, protocol
from holdfast.rendezvous.membership.model import NodeFacts, Notice, Settings

written = [
    (decoder, frames.encode(message)[4:])
    for decoder, message in (
        (frames.HANDSHAKE, protocol.Welcome()),
        (frames.UPWARD, protocol.Join(NodeFacts("a"), Settings())),
        (frames.DOWNWARD, Notice("news")),
    )
]
work = [lambda each=each: frames.decode(*each) for each in written] * 6
"""

DO_IT_TOGETHER = """
import sys, threading

sys.setswitchinterval(1e-6)
together = threading.Barrier(16)
read = []

def do():
    together.wait()
    from holdfast.rendezvous.membership import frames, protocol

    sent = frames.encode(protocol.Heartbeat(1))
    read.append(frames.decode(frames.UPWARD, sent[4:]))

threads = [threading.Thread(target=do) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(read) == 16, read
"""


@promise("""etcd.several-threads-decode-first: Several threads may decode the first value of a type at the same moment
    (answers of etcd, messages) without crashing the agent.""")
@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("work", [ANSWERS_OF_ETCD, MESSAGES], ids=["etcd", "messages"])
def test_threads_that_read_the_first_value_together(work: str, attempt: int) -> None:
    """What reads them would crash the process if two threads made it learn about a type at once."""
    command = [sys.executable, "-c", work + DO_IT_TOGETHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
