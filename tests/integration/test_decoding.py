"""Typed values that several threads read at the same time, and nobody has read before."""

from __future__ import annotations

import subprocess
import sys

import pytest

ANSWERS_OF_ETCD = """
from holdfast.rendezvous import etcd_wire as wire
from holdfast.rendezvous.etcd_http import read_as

answer = b'''{"header": {"revision": "3"}, "succeeded": true, "responses": [{"response_range": {
    "header": {"revision": "3"}, "kvs": [{"key": "YQ==", "value": "YQ==", "mod_revision": "1"}]}}]}'''
work = [lambda: read_as(answer, wire.TransactionAnswer)] * 16
"""

VALUES_OF_A_RUN = """
from holdfast.rendezvous import keyspace, messages, vocabulary
from holdfast.rendezvous.keyspace import Page, Statement, Tellings

values = (
    Page(keyspace.VERSION, vocabulary.Snapshot(vocabulary.Memory())),
    Statement(keyspace.VERSION, (messages.Leaving(),)),
    Tellings(keyspace.VERSION, ()),
)
written = [(type(value), keyspace.encode(value)) for value in values]
work = [lambda kind=kind, data=data: keyspace.decode(kind, data) for kind, data in written] * 6
"""

MESSAGES = """
from holdfast.rendezvous import messages

kinds = (messages.ToCoordinator, messages.FromCoordinator)
work = [lambda each=each: messages.Frames(each) for each in kinds] * 8
"""

DO_IT_TOGETHER = """
import sys, threading

sys.setswitchinterval(1e-6)
together = threading.Barrier(len(work))

def do(each):
    together.wait()
    each()

threads = [threading.Thread(target=do, args=(each,)) for each in work]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("attempt", range(8))
@pytest.mark.parametrize("work", [ANSWERS_OF_ETCD, VALUES_OF_A_RUN, MESSAGES])
def test_threads_that_read_the_first_value_together(work: str, attempt: int) -> None:
    """What reads them would crash the process if two threads made it learn about a type at once."""
    command = [sys.executable, "-c", work + DO_IT_TOGETHER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
