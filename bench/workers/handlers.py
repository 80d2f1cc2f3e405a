"""Nodes without workers: so many rendezvous handlers in one process, each with the threads that an agent would have.

    python handlers.py BACKEND ENDPOINT RUN_ID COUNT TOTAL

For every line on stdin all of them ask for a round, at once, and when the last one has it the time of the monotonic
clock is printed, in nanoseconds. A process with COUNT handlers is one of several that have TOTAL together.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.rendezvous.api import RendezvousHandler, RendezvousParameters
from holdfast.rendezvous.registry import get_rendezvous_handler

PATIENCE_S = 60


def make(backend: str, endpoint: str, run_id: str, total: int) -> RendezvousHandler:
    more = {"is_host": False} if backend == "tcp" else {}
    params = RendezvousParameters(backend, endpoint, run_id, total, total, join_timeout=PATIENCE_S, **more)
    return get_rendezvous_handler(params)


def at_once(calls: list[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(len(calls)) as pool:
        for call in [pool.submit(call) for call in calls]:
            call.result()


def main(backend: str, endpoint: str, run_id: str, count: str, total: str) -> None:
    handlers = [make(backend, endpoint, run_id, int(total)) for _ in range(int(count))]
    print("ready", flush=True)
    for _ in sys.stdin:
        at_once([handler.next_rendezvous for handler in handlers])
        print(time.monotonic_ns(), flush=True)
    at_once([handler.shutdown for handler in handlers])


if __name__ == "__main__":
    main(*sys.argv[1:])
