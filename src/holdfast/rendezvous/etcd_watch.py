"""Changes of keys in etcd, as they happen.

A thread reads the stream and puts what comes into a bounded queue. Streams break: a member is killed, loses its leader,
or is cut off so that nothing comes any more. Then the thread asks for another one, at another endpoint if need be, from
the revision after the last that it has seen, so that nothing is lost or told twice. Silence proves nothing by itself,
as nothing may have changed; after `silence_s` of it the thread asks anew, and a member that does not answer is left.

The owner hears of trouble only if no endpoint has given a stream for the time of a request (`Unavailable`), or if the
revision is forgotten (`Compacted`): then it reads everything again and watches from there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.rendezvous.etcd_http import Gateway, Objection, Trouble, hang_up, lines_of, read_line_as
from holdfast.rendezvous.etcd_wire import Batch, Compacted, Complaint, EtcdError, WatchAnswer

if TYPE_CHECKING:
    import requests

    from holdfast.rendezvous.etcd_client import EtcdClient

_MAX_QUEUED = 256
_CLOSE_S = 1.0
_LEAST_STREAM_S = 0.25
_UNAUTHENTICATED = 16


class Watch:
    """Iterate over it for batches of changes, or `take` one. `close`, from any thread, ends the iteration."""

    def __init__(
        self,
        client: EtcdClient,
        span: dict[str, str],
        from_revision: int,
        silence_s: float,
        on_close: Callable[[Watch], None],
        sink: Callable[[Batch | EtcdError], None] | None = None,
    ) -> None:
        """What comes goes to `sink`, in the thread of the watch, if there is one; else it waits for `take`."""
        self._client = client
        self._span = span
        self._next_revision = from_revision
        self._silence_s = silence_s
        self._on_close = on_close
        self._queue: queue.Queue[Batch | EtcdError | None] = queue.Queue(_MAX_QUEUED)
        self._sink = self._queue.put if sink is None else sink
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._end: EtcdError | None = None
        self._response: requests.Response | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-etcd-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        while (batch := self.take()) is not None:
            yield batch

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def take(self, timeout_s: float | None = None) -> Batch | None:
        """The next changes; None if none come in time, or the watch is closed. Raises what the watch has failed of."""
        if self._end is not None:
            raise self._end
        if self.is_closed:
            return None
        try:
            found = self._queue.get(timeout=None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX))
        except queue.Empty:
            return None
        if self.is_closed:
            return None
        if isinstance(found, EtcdError):
            self._end = found
            raise found
        return found

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            response = self._response
        if response is not None:
            hang_up(response)
        self._empty_queue()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        self._on_close(self)

    def _empty_queue(self) -> None:
        """Make room for the thread, should it wait for some, and wake whoever waits in `take`."""
        try:
            while True:
                self._queue.get_nowait()
        except queue.Empty:
            pass
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # The thread was quicker, so nobody waits.

    # The thread.

    def _run(self) -> None:
        try:
            while not self.is_closed:
                began = time.monotonic()
                self._follow(self._client.open_stream(self._open))
                # So that an endpoint which gives streams that end at once is not asked as fast as it can answer.
                self._closing.wait(max(0.0, began + _LEAST_STREAM_S - time.monotonic()))
        except EtcdError as error:
            if not self.is_closed:
                self._sink(error)
        finally:
            self._hold(None)

    def _open(self, gateway: Gateway, token: str, attempt_s: float) -> Iterator[bytes]:
        """A stream of which etcd has said that it is there."""
        create = {**self._span, "start_revision": str(self._next_revision), "progress_notify": True}
        response = gateway.stream("watch", {"create_request": create}, token, attempt_s)
        self._hold(response)
        lines = lines_of(response, self._silence_s)
        answer = read_line_as(next(lines, b""), WatchAnswer)
        if answer.canceled and not answer.compact_revision:
            # etcd says the same of an unknown token and of a user who may not; only the first is worth another try.
            raise Objection(Complaint(answer.cancel_reason, code=_UNAUTHENTICATED))
        self._note(answer)
        return lines

    def _hold(self, response: requests.Response | None) -> None:
        """Keep the stream where `close` finds it, and give up the one before."""
        with self._lock:
            before, self._response = self._response, response
        if before is not None:
            before.close()
        if response is not None and self.is_closed:
            hang_up(response)

    def _follow(self, lines: Iterator[bytes]) -> None:
        """Pass on what comes until the stream ends, for whatever reason."""
        try:
            for line in lines:
                self._note(read_line_as(line, WatchAnswer))
                if self.is_closed:
                    return
        except (Trouble, Objection):
            return

    def _note(self, answer: WatchAnswer) -> None:
        if answer.compact_revision:
            text = f"etcd has forgotten revision {self._next_revision}; the oldest is {answer.compact_revision}"
            raise Compacted(text, answer.compact_revision)
        if answer.events:
            batch = answer.batch()
            self._next_revision = batch.revision + 1
            self._sink(batch)
        elif not answer.created and not answer.canceled:
            # Progress: everything up to here has been told.
            self._next_revision = max(self._next_revision, answer.header.revision + 1)
