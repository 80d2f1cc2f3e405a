"""So many nodes of torch's c10d rendezvous, each a process of its own that is forked once torch is imported.

Prints the seconds from the moment when all could begin until the last one knew its rank.
"""

import os
import select
import signal
import socket
import struct
import sys
import time

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

RESULT = struct.Struct("iq")

count, limit_s = int(sys.argv[1]), int(sys.argv[2])
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]

ready_read, ready_write = os.pipe()
go_read, go_write = os.pipe()
result_read, result_write = os.pipe()


def node(number: int) -> None:
    os.close(go_write)
    parameters = RendezvousParameters(
        "c10d", f"127.0.0.1:{port}", "bench", count, count, "127.0.0.1", is_host=number == 0, join_timeout=limit_s
    )
    handler = get_rendezvous_handler(parameters)
    os.write(ready_write, b".")
    os.read(go_read, 1)
    rank = handler.next_rendezvous().rank
    os.write(result_write, RESULT.pack(rank, time.monotonic_ns()))
    signal.pause()


def start(number: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            node(number)
        finally:
            os._exit(1)
    return pid


def take(fd: int, size: int, ends: float) -> bytes:
    """So many bytes, or as many as come in time."""
    data = b""
    while len(data) < size and select.select([fd], [], [], max(0.0, ends - time.monotonic()))[0]:
        data += os.read(fd, size - len(data))
    return data


ends = time.monotonic() + limit_s
children = [start(0)]
try:
    take(ready_read, 1, ends)  # The host of the store comes first.
    children += [start(number) for number in range(1, count)]
    ready = 1 + len(take(ready_read, count - 1, ends))
    began_ns = time.monotonic_ns()
    os.close(go_write)
    found = list(RESULT.iter_unpack(take(result_read, RESULT.size * count, ends)))
finally:
    for pid in children:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
if sorted(rank for rank, _ in found) != list(range(count)):
    sys.exit(f"{ready} of {count} nodes were ready, and {len(found)} had a rank after {limit_s} s")
print((max(at_ns for _, at_ns in found) - began_ns) / 1e9)
