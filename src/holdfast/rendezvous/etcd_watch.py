"""Changes of keys in etcd, as they happen.

A thread reads the stream and keeps a bounded number of batches for the owner. Streams break: a member is killed, loses
its leader, or is cut off so that nothing comes any more. Then the thread asks for another one, at another endpoint if
need be, from the revision after the last that it has seen, so that nothing is lost or told twice. Silence proves
nothing by itself, as nothing may have changed; after `silence_s` of it the thread asks anew, and a member that does not
answer is left.

The owner hears of trouble only if no endpoint has given a stream for the time of a request (`Unavailable`), or if the
revision is forgotten (`Compacted`): then it reads everything again and watches from there.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from holdfast.rendezvous.etcd_connections import Answer, Trouble
from holdfast.rendezvous.etcd_http import Gateway, Objection, lines_of, read_line_as
from holdfast.rendezvous.etcd_wire import Batch, Compacted, Complaint, EtcdError, WatchAnswer

if TYPE_CHECKING:
    from holdfast.rendezvous.etcd_client import EtcdClient

_MAX_BATCHES = 256
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
        self._sink = self._pass_on if sink is None else sink
        self._fail = self._note_failure if sink is None else sink
        self._batches: deque[Batch] = deque()
        self._failure: EtcdError | None = None
        self._is_closed = False
        self._stream: Answer | None = None
        # Guards the four above.
        self._changed = threading.Condition()
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
        return self._is_closed

    def take(self, timeout_s: float | None = None) -> Batch | None:
        """The next changes; None if none come in time, or the watch is closed. Raises what the watch has failed of."""
        limit_s = None if timeout_s is None else min(timeout_s, threading.TIMEOUT_MAX)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._batches or self._failure, limit_s)
            if self._is_closed:
                return None
            if self._batches:
                self._changed.notify_all()
                return self._batches.popleft()
            if self._failure is not None:
                raise self._failure
            return None

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            stream = self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.hang_up()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(_CLOSE_S)
        self._on_close(self)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_closed:
                began = time.monotonic()
                self._follow(self._client.open_stream(self._open))
                self._rest(began + _LEAST_STREAM_S - time.monotonic())
        except EtcdError as error:
            if not self._is_closed:
                self._fail(error)
        finally:
            self._hold(None)

    def _rest(self, seconds: float) -> None:
        """So that an endpoint which gives streams that end at once is not asked as fast as it can answer."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, max(0.0, seconds))

    def _open(self, gateway: Gateway, token: str, attempt_s: float) -> Iterator[bytes]:
        """A stream of which etcd has said that it is there."""
        create = {**self._span, "start_revision": str(self._next_revision), "progress_notify": True}
        stream = gateway.stream("watch", {"create_request": create}, token, attempt_s)
        self._hold(stream)
        lines = lines_of(stream)
        answer = read_line_as(next(lines, b""), WatchAnswer)
        if answer.canceled and not answer.compact_revision:
            # etcd says the same of an unknown token and of a user who may not; only the first is worth another try.
            raise Objection(Complaint(answer.cancel_reason, code=_UNAUTHENTICATED))
        self._note(answer)
        stream.be_patient(self._silence_s)
        return lines

    def _hold(self, stream: Answer | None) -> None:
        """Keep the stream where `close` finds it, and give up the one before."""
        with self._changed:
            before, self._stream = self._stream, stream
        if before is not None:
            before.close()
        if stream is not None and self._is_closed:
            stream.hang_up()

    def _follow(self, lines: Iterator[bytes]) -> None:
        """Pass on what comes until the stream ends, for whatever reason."""
        try:
            for line in lines:
                self._note(read_line_as(line, WatchAnswer))
                if self._is_closed:
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

    def _pass_on(self, batch: Batch) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or len(self._batches) < _MAX_BATCHES)
            self._batches.append(batch)
            self._changed.notify_all()

    def _note_failure(self, error: EtcdError) -> None:
        with self._changed:
            self._failure = error
            self._changed.notify_all()
