"""Answers of etcd that several threads read at the same time."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_ANSWER = b"""{"header": {"revision": "3"}, "succeeded": true, "responses": [{"response_range": {
    "header": {"revision": "3"}, "kvs": [{"key": "YQ==", "value": "YQ==", "mod_revision": "1"}]}}]}"""

READ_TOGETHER = """
import sys, threading
from holdfast.rendezvous import etcd_wire as wire
from holdfast.rendezvous.etcd_http import read_as

sys.setswitchinterval(1e-6)
together = threading.Barrier(16)
answer = sys.argv[1].encode()

def read():
    together.wait()
    read_as(answer, wire.TransactionAnswer)

threads = [threading.Thread(target=read) for _ in range(16)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("attempt", range(20))
def test_threads_that_read_the_first_answer_together(attempt: int) -> None:
    """What reads them would crash the agent if two threads made it learn about the answer at once."""
    done = subprocess.run(
        [sys.executable, "-c", READ_TOGETHER, FIRST_ANSWER], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
