"""Nodes without workers: for each line on stdin so many processes, each with one rendezvous handler, form a round.

    python handlers.py tcp|c10d

A line is `COUNT ENDPOINT`. The answer is the seconds from the moment when all could begin until the last one knew its
rank. The library is imported once and the nodes are forks, on both sides. The server is there before the clock starts:
of c10d, the first node hosts it; of tcp, a coordinator listens at the endpoint.
"""

import multiprocessing
import os
import signal
import struct
import sys
import time
from typing import Any

LIMIT_S = 60
RESULT = struct.Struct("iq")  # The rank, and when it was known.

backend = sys.argv[1]
if backend == "tcp":
    from holdfast.rendezvous.api import RendezvousParameters
    from holdfast.rendezvous.registry import get_rendezvous_handler
else:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

context = multiprocessing.get_context("fork")


def node(number: int, count: int, endpoint: str, ready: Any, gate: int, told: int) -> None:
    signal.alarm(LIMIT_S + 60)
    more = {"is_host": backend == "c10d" and number == 0, "join_timeout": LIMIT_S}
    parameters = RendezvousParameters(backend, endpoint, "bench", count, count, local_addr="127.0.0.1", **more)
    handler = get_rendezvous_handler(parameters)
    ready.release()
    os.read(gate, 1)
    rank = handler.next_rendezvous().rank
    os.write(told, RESULT.pack(rank, time.monotonic_ns()))  # No thread: the others still wait for their ranks.
    signal.pause()


def form(count: int, endpoint: str) -> float:
    ready, (gate, opener), (heard, told) = context.Semaphore(0), os.pipe(), os.pipe()
    nodes = [context.Process(target=node, args=(number, count, endpoint, ready, gate, told)) for number in range(count)]
    try:
        for each in nodes:
            each.start()
            if each is nodes[0]:
                assert ready.acquire(timeout=LIMIT_S)  # The host of the store comes first.
        assert all(ready.acquire(timeout=LIMIT_S) for _ in nodes[1:])
        began_ns = time.monotonic_ns()
        os.write(opener, b"." * count)
        signal.alarm(LIMIT_S)
        found = dict(RESULT.unpack(os.read(heard, RESULT.size)) for _ in nodes)
        signal.alarm(0)
    finally:
        for each in nodes:
            each.kill()
            each.join()
        for fd in (gate, opener, heard, told):
            os.close(fd)
    assert sorted(found) == list(range(count)), f"the ranks are {sorted(found)}"
    return (max(found.values()) - began_ns) / 1e9


for line in sys.stdin:
    size, *where = line.split()
    print(form(int(size), where[0]) if where else 0, flush=True)
