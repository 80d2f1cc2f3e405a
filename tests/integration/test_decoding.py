"""Typed values that several threads read at the same time, and that were not read before."""

from __future__ import annotations

import subprocess
import sys

import pytest

MANY_THREADS = """
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


@pytest.mark.parametrize("attempt", range(8))
def test_threads_that_read_the_first_value_together(attempt: int) -> None:
    """msgspec would crash the process if two threads made it look at a type for the first time at once."""
    done = subprocess.run([sys.executable, "-c", MANY_THREADS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
