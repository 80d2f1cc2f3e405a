"""The transfer process: moves parts of snapshots between nodes and to disk, so that no other process waits for it.

The spawner forks it when it is first needed. It ends with the spawner. One loop talks to the spawner and accepts
connections; threads do what blocks. Orders of the spawner, each with a number:

    fetch(number, snapshot, rank, address, port)            from another node's transfer process
    send(number, snapshot, rank, bytes, address, port)      a copy to another node; with the slot
    write(number, snapshot, rank, bytes, directory, is_copy)
                                                            with the slot; a copy is written if there is no such file
    read(number, snapshot, rank, directory)                 from disk into a slot
    complete(directory, step)                               all nodes have written that step
    given(question, bytes, why)                             the answer to `room` or `give`: with a slot, or why not

and what it says:

    done(number) or failed(number, why)                     of an order
    room(question, number, snapshot, rank, bytes)           give me a slot to fill; the number is that of the order, or
                                                            -1 for a peer's copy
    give(question, snapshot, rank)                          a peer asks for this part
    received(question)                                      the slot that was to be filled is whole and verified
    dropped(question)                                       the slot of that answer is not needed any more
    line(text)                                              what the user should know

A size that a peer announces is checked by the spawner against the limit of memory before a byte is allocated. What was
written into a slot is read again and compared with the sender's checksum before it counts.
"""

from __future__ import annotations

import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from queue import Empty, SimpleQueue
from typing import Any, NoReturn, Protocol

from holdfast import escape
from holdfast.loop import Mailbox
from holdfast.snapshots import disk, frames
from holdfast.snapshots.frames import FrameError, Pace, Part
from holdfast.snapshots.peer import CONNECT_LIMIT_S, Peer, TlsFiles, write_at

STRANGER_LIMIT_S = 5.0
MOST_CONNECTIONS = 16
_ANSWER_LIMIT_S = 10.0  # Of the spawner.
_LINES_AT_MOST = 20  # About peers that have proven nothing.
_THREADS = {"fetch": 4, "send": 2, "write": 1, "read": 2}
_NICENESS = 10
_SHORTAGE_PAUSE_S = 0.1
_REQUEST_BYTES = len(frames.request(frames.GET, Part((0, 0, 0, 1, False), 0)))

Message = tuple[Any, ...]


class Line(Protocol):
    """The channel to the spawner."""

    is_open: bool

    @property
    def has_unsent(self) -> bool: ...
    def fileno(self) -> int: ...
    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None: ...
    def flush(self) -> None: ...
    def receive(self) -> list[tuple[Message, list[int]]]: ...


class _Refused(Exception):  # noqa: N818
    """The spawner gives no slot. `is_held`: because the part is here already."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.is_held = why == "held"


class Transfer:
    """The process. `listener` is None for a node at which no peer may ask. `tls` are the certificate, its key and the
    authority, if connections are to speak TLS; files are of the run `run_id`."""

    def __init__(
        self,
        line: Line,
        listener: socket.socket | None,
        key: bytes,
        bandwidth: int,
        directory: str,
        tls: TlsFiles | None = None,
        run_id: str = "",
    ) -> None:
        self._line, self._listener, self._key, self._directory = line, listener, key, directory
        self._tls, self._run_id = tls, run_id
        self._pace, self._pace_lock = Pace(bandwidth), threading.Lock()
        self._posts: Mailbox[Message | None] = Mailbox()  # For the spawner; None: a connection has ended.
        self._questions = itertools.count()
        self._waiting: dict[int, SimpleQueue[tuple[int, str, list[int]]]] = {}
        self._lock = threading.Lock()
        self._connections = 0
        self._incoming: set[tuple[object, int]] = set()
        self._lanes: dict[str, SimpleQueue[Callable[[], None]]] = {}
        self._lines = 0

    # The loop.

    def run(self) -> None:
        """Until the spawner is gone."""
        if self._listener is not None:
            self._listener.setblocking(False)
        while self._line.is_open:
            poller = select.poll()
            poller.register(self._line.fileno(), select.POLLIN | (select.POLLOUT if self._line.has_unsent else 0))
            poller.register(self._posts, select.POLLIN)
            if self._listener is not None and self._connections < MOST_CONNECTIONS:
                poller.register(self._listener, select.POLLIN)  # Others wait in the queue of the kernel.
            ready = [fd for fd, _ in poller.poll()]
            self._line.flush()
            for post in self._posts.take():
                if post is None:
                    self._connections -= 1
                else:
                    self._line.send(post)
            for message, fds in self._line.receive() if self._line.fileno() in ready else ():
                self._obey(message, fds)
            if self._listener is not None and self._listener.fileno() in ready:
                self._accept(self._listener)

    def _post(self, *message: Any) -> None:
        """From any thread."""
        self._posts.put(message)

    def _obey(self, message: Message, fds: list[int]) -> None:
        match message:
            case ("given", question, size, why):
                with self._lock:
                    waiting = self._waiting.pop(question, None)
                if waiting is not None:
                    waiting.put((size, why, fds))
                    return
                _close(fds)  # The thread has given up.
                self._post("dropped", question)
            case ("fetch", number, snapshot, rank, address, port):
                self._order("fetch", number, lambda: self._fetch(number, Part(snapshot, rank), (address, port)))
            case ("send", number, snapshot, rank, size, address, port):
                part = Part(snapshot, rank, size)
                self._order("send", number, lambda: self._send_copy(part, fds[0], (address, port)), fds)
            case ("write", number, snapshot, rank, size, directory, is_copy):
                part = Part(snapshot, rank, size)
                self._order("write", number, lambda: self._write(directory, part, fds[0], is_copy), fds)
            case ("read", number, snapshot, rank, directory):
                self._order("read", number, lambda: self._read(number, Part(snapshot, rank), directory))
            case ("complete", directory, step):
                self._order("write", -1, lambda: _note_complete(directory, step))
            case _:
                raise ValueError(f"the transfer process does not know the message {message[0]!r}")

    def _order(self, kind: str, number: int, act: Callable[[], None], fds: list[int] | None = None) -> None:
        def carry_out() -> None:
            try:
                act()
            except _Refused as refused:
                self._post(*(("done", number) if refused.is_held else ("failed", number, str(refused))))
            except Exception as error:
                self._post("failed", number, _words(error))
            else:
                self._post("done", number)
            finally:
                _close(fds or [])

        if kind not in self._lanes:
            self._lanes[kind] = SimpleQueue()
            for _ in range(_THREADS[kind]):
                threading.Thread(target=_work, args=(self._lanes[kind],), daemon=True).start()
        self._lanes[kind].put(carry_out)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # No descriptor is free. The peer waits.
            time.sleep(_SHORTAGE_PAUSE_S)
            return
        try:
            threading.Thread(target=self._serve, args=(sock, address[0]), daemon=True).start()
            self._connections += 1
        except RuntimeError as error:  # A process at its limit.
            sock.close()
            self._complain(address[0], None, str(error))

    # In threads.

    def _ask(self, *message: Any) -> tuple[int, int, int]:
        """What the spawner gives: the number of the question, a descriptor, and its size."""
        question, answer = next(self._questions), SimpleQueue[tuple[int, str, list[int]]]()
        with self._lock:
            self._waiting[question] = answer
        self._post(message[0], question, *message[1:])
        try:
            size, why, fds = answer.get(timeout=_ANSWER_LIMIT_S)
        except Empty:
            with self._lock:
                is_unanswered = self._waiting.pop(question, None) is not None
            if is_unanswered:
                raise _Refused("the spawner does not answer") from None
            size, why, fds = answer.get()
        if not fds:
            raise _Refused(why)
        return question, fds[0], size

    def _fetch(self, number: int, part: Part, address: tuple[str, int]) -> None:
        with self._connected(address) as peer:
            peer.send(frames.request(frames.GET, part))
            size = frames.size_in(bytes(peer.receive()))
            if size is None:
                raise FrameError("sent something other than an answer")
            with self._slot(number, part, size) as fd:
                peer.receive_data(fd, size)

    def _send_copy(self, part: Part, fd: int, address: tuple[str, int]) -> None:
        with self._connected(address) as peer:
            peer.send(frames.request(frames.PUT, part))
            if frames.size_in(bytes(peer.receive())) is None:
                return
            peer.send_data(fd, part.bytes, self._pace, self._pace_lock)
            if frames.size_in(bytes(peer.receive())) is not None:
                raise FrameError("sent something other than an answer")

    def _read(self, number: int, part: Part, directory: str) -> None:
        source, size = disk.open_part(directory, part)
        try:
            with self._slot(number, part, size) as fd:
                offset = 0
                while offset < size:
                    piece = os.pread(source, frames.FRAME_BYTES, offset)
                    if not piece:
                        raise ValueError("the file was cut short")
                    write_at(fd, memoryview(piece), offset)
                    offset += len(piece)
        finally:
            os.close(source)

    def _write(self, directory: str, part: Part, fd: int, is_copy: bool) -> None:
        if is_copy and os.path.exists(disk.path_of(directory, part)):
            return
        disk.write(directory, part, fd, self._run_id)
        if directory == self._directory:  # In another one, of an export, all steps stay.
            disk.prune(directory)

    @contextmanager
    def _slot(self, number: int, part: Part, size: int) -> Iterator[int]:
        """To be filled in the block. If the block raises, the slot does not count."""
        question, fd, _ = self._ask("room", number, part.snapshot, part.rank, size)
        outcome = "dropped"
        try:
            try:
                os.posix_fallocate(fd, 0, size)  # An error now, and not a signal when there is no memory for a page.
            except OSError as error:
                raise _Refused(f"there is no memory for {size} bytes: {error.strerror}") from None
            yield fd
            outcome = "received"
        finally:
            os.close(fd)
            self._post(outcome, question)

    @contextmanager
    def _connected(self, address: tuple[str, int]) -> Iterator[Peer]:
        try:
            with socket.create_connection(address, CONNECT_LIMIT_S) as sock, closing(Peer(sock)) as peer:
                peer.be_client(self._key, self._tls)
                yield peer
        except (OSError, FrameError) as error:
            raise FrameError(f"the node at {address[0]}:{address[1]} {_words_of_peer(error)}") from None

    def _serve(self, sock: socket.socket, name: str) -> None:
        """One connection that a peer has made, and one request."""
        part = None
        try:
            with sock, closing(Peer(sock)) as peer:
                peer.be_server(self._key, self._tls, STRANGER_LIMIT_S)
                body = bytes(peer.receive(_REQUEST_BYTES))
                peer.until, part = None, frames.part_in(body)
                serve = self._serve_get if body[:1] == frames.GET else self._serve_put
                serve(peer, part)
        except (OSError, FrameError) as error:
            self._complain(name, part, _words_of_peer(error))
        except Exception as error:
            self._complain(name, part, f"met a failure: {_words(error)}")
        finally:
            self._posts.put(None)

    def _complain(self, name: str, part: Part | None, words: str) -> None:
        self._lines += part is None
        if part is not None:
            self._post("line", f"snapshots: the node at {name} {words} ({part.name})")
        elif self._lines <= _LINES_AT_MOST:
            more = " (further lines of this kind are left out)" if self._lines == _LINES_AT_MOST else ""
            self._post("line", f"snapshots: a connection from {name} was closed: it {words}{more}")

    def _serve_get(self, peer: Peer, part: Part) -> None:
        question = None
        try:
            try:
                question, fd, size = self._ask("give", part.snapshot, part.rank)
            except _Refused:
                if part.snapshot[:2] != (0, 0) or not self._directory:
                    raise
                fd, size = disk.open_part(self._directory, part)  # Such a snapshot is held by its file.
        except (_Refused, OSError, ValueError) as error:
            peer.send(frames.no(_words(error)))
            return
        try:
            peer.send(frames.yes(size))
            peer.send_data(fd, size, self._pace, self._pace_lock)
        finally:
            os.close(fd)
            if question is not None:
                self._post("dropped", question)

    def _serve_put(self, peer: Peer, part: Part) -> None:
        key = (part.snapshot, part.rank)
        with self._lock:
            is_second = key in self._incoming
            self._incoming.add(key)
        if is_second:
            peer.send(frames.no("another node is sending this part"))
            return
        try:
            with self._slot(-1, part, part.bytes) as fd:
                peer.send(frames.yes(part.bytes))
                peer.receive_data(fd, part.bytes)
            answer = frames.HELD
        except _Refused as refused:
            answer = frames.HELD if refused.is_held else frames.no(str(refused))
        finally:
            with self._lock:
                self._incoming.discard(key)
        peer.send(answer)  # Last: a node that has it may send the part once more.


def _work(lane: SimpleQueue[Callable[[], None]]) -> NoReturn:
    while True:
        lane.get()()


def _note_complete(directory: str, step: int) -> None:
    disk.mark_complete(directory, step)
    disk.prune(directory)


def _words(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return escape.one_line(text)


def _words_of_peer(error: OSError | FrameError) -> str:
    if isinstance(error, FrameError):
        return _words(error)
    if isinstance(error, TimeoutError):
        return "took too long to answer"
    return f"cannot be reached: {_words(error)}"


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def serve(line: Line, listener_fd: int, *settings: Any) -> NoReturn:
    """In the forked process. The settings are those of `Transfer`."""
    os.nice(_NICENESS)
    listener = socket.socket(fileno=listener_fd) if listener_fd >= 0 else None
    Transfer(line, listener, *settings).run()
    os._exit(0)
