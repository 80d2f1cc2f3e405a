"""One connection between the transfer processes of two nodes (`transfer`): frames with seals (`frames`), and TLS if
the nodes have certificates.

The files are read for each connection, because certificates are renewed. Nodes need not have their addresses in their
certificates: a peer proves the token, and proves it for this certificate (`frames.seals_of`).
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import zlib

from holdfast.snapshots import frames
from holdfast.snapshots.frames import FrameError, Pace, Seals

FRAME_LIMIT_S = 30.0
CONNECT_LIMIT_S = 10.0
_PATIENCE_S = 60.0  # For a place among the connections of a busy peer.

TlsFiles = tuple[str, str, str]


class Peer:
    """One connection to another transfer process. All calls block, with limits."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self.until: float | None = None  # For everything until then; else each frame has its limit.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(frames.FRAME_BYTES))
        self._in = self._out = Seals(b"")
        self._has_proven = False
        self._certificate, self._more = b"", socket.MSG_MORE

    def _speak_tls(self, files: TlsFiles, limit_s: float, *, is_server: bool) -> None:
        import ssl

        from holdfast.tls import ReloadingTls

        self._sock.settimeout(limit_s)
        context = ReloadingTls(*files, is_server=is_server).context()
        context.check_hostname = False
        made = context.wrap_socket(self._sock, server_side=is_server)
        if is_server:
            with open(files[0], encoding="ascii", errors="replace") as file:
                own = re.search(f"{ssl.PEM_HEADER}.*?{ssl.PEM_FOOTER}", file.read(), re.DOTALL)
            self._certificate = ssl.PEM_cert_to_DER_cert(own[0]) if own else b""
        else:
            self._certificate = made.getpeercert(binary_form=True) or b""
        self._sock, self._more = made, socket.MsgFlag(0)

    def close(self) -> None:
        self._sock.close()

    def be_client(self, key: bytes, tls: TlsFiles | None) -> None:
        if tls is not None:
            self._speak_tls(tls, CONNECT_LIMIT_S, is_server=False)
        nonce = os.urandom(frames.NONCE_BYTES)
        self._sock.settimeout(CONNECT_LIMIT_S)
        self._sock.sendall(frames.MAGIC + nonce)
        theirs = bytes(self._read(frames.NONCE_BYTES, time.monotonic() + _PATIENCE_S))
        self._out, self._in = frames.seals_of(key, nonce, theirs, self._certificate)

    def be_server(self, key: bytes, tls: TlsFiles | None, limit_s: float) -> None:
        """The limit is for all until `until` is None again."""
        self.until = limit = time.monotonic() + limit_s
        if tls is not None:
            self._speak_tls(tls, limit_s, is_server=True)
        if self._read(len(frames.MAGIC), limit) != frames.MAGIC:
            raise FrameError("is no transfer process")
        theirs, nonce = bytes(self._read(frames.NONCE_BYTES, limit)), os.urandom(frames.NONCE_BYTES)
        self._in, self._out = frames.seals_of(key, theirs, nonce, self._certificate)
        self._sock.sendall(nonce)

    def _limit(self) -> float:
        return self.until if self.until is not None else time.monotonic() + FRAME_LIMIT_S

    def _read(self, size: int, until: float) -> memoryview:
        have = 0
        while have < size:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            self._sock.settimeout(left_s)
            got = self._sock.recv_into(self._buffer[have:size])
            if not got:
                unproven = "" if self._has_proven else " before it had proven that it knows this run's token"
                raise FrameError(f"closed the connection{unproven}")
            have += got
        return self._buffer[:size]

    def receive(self, at_most: int = frames.FRAME_BYTES) -> memoryview:
        """The body of the next frame, until the next call."""
        limit = self._limit()
        length, seal = frames.length_in(bytes(self._read(frames.HEADER.size, limit)))
        if length > at_most:
            raise FrameError(f"announced a frame of {length} bytes")
        body = self._read(length, limit)
        self._in.check(seal, body)
        self._has_proven = True
        return body

    def send(self, body: bytes) -> None:
        self._send(body[:1], body[1:])

    def _send(self, kind: bytes, body: bytes | memoryview) -> None:
        self._sock.settimeout(FRAME_LIMIT_S)
        self._sock.sendall(self._out.header(kind, body), self._more if len(body) else 0)
        self._sock.sendall(body)

    def send_data(self, fd: int, size: int, pace: Pace, lock: threading.Lock) -> None:
        piece, checksum, offset = memoryview(bytearray(pace.piece_bytes)), 0, 0
        while offset < size:
            got = os.preadv(fd, [piece[: min(len(piece), size - offset)]], offset)
            if not got:
                raise FrameError("gets less than was announced, because the slot is too short")
            with lock:
                delay_s = pace.delay_s(got, time.monotonic())
            if delay_s:
                time.sleep(delay_s)
            checksum = zlib.crc32(piece[:got], checksum)
            self._send(frames.DATA, piece[:got])
            offset += got
        self.send(frames.end(checksum))

    def receive_data(self, fd: int, size: int) -> None:
        """Into the slot. FrameError unless exactly these bytes came, and are there when they are read again."""
        offset = 0
        while (body := self.receive())[:1] == frames.DATA:
            if offset + len(body) - 1 > size:
                raise FrameError(f"sent more than the {size} bytes that it announced")
            write_at(fd, body[1:], offset)
            offset += len(body) - 1
        if offset != size:
            raise FrameError(f"sent {offset} bytes and had announced {size}")
        if frames.checksum_in(bytes(body)) != _checksum_of(fd, size):
            raise FrameError("sent data whose checksum is wrong")


def write_at(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _checksum_of(fd: int, size: int) -> int:
    piece, checksum, offset = memoryview(bytearray(frames.FRAME_BYTES)), 0, 0
    while offset < size and (got := os.preadv(fd, [piece[: min(len(piece), size - offset)]], offset)):
        checksum, offset = zlib.crc32(piece[:got], checksum), offset + got
    return checksum
