"""How an agent gets a connection to its coordinator: dial, TLS if it is wanted, and the handshake.

Whatever goes wrong is told in words that name the endpoint. What trying again may cure is an `OSError`; what a person
has to put right is `TurnedAway`.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.errors import HoldfastError
from holdfast.rendezvous import messages
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.messages import PROTOCOL_VERSION, Frames, Malformed, encode

if TYPE_CHECKING:
    from holdfast.rendezvous.tls import ReloadingTls

HANDSHAKE_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 14


class TurnedAway(HoldfastError):  # noqa: N818
    """The coordinator does not want to talk to us, or is not one. Trying again would not help."""


class Silent(TurnedAway):
    """Somebody accepts connections and says nothing."""


class TlsRefused(TurnedAway):
    """Somebody hangs up as soon as it has seen our certificate, or that we have none."""


@dataclass(frozen=True, slots=True)
class Dial:
    """Where the coordinator is and how to speak to it."""

    host: str
    port: int
    run_id: str
    token: bytes | None = None
    tls: ReloadingTls | None = None
    timeout_s: float = 2.0

    @property
    def endpoint(self) -> str:
        return endpoint_text(self.host, self.port)

    def connect(self) -> tuple[socket.socket, Frames]:
        """A connection on which both sides have proved who they are. Raises OSError or `TurnedAway`."""
        sock = self._reach()
        try:
            if sock.getsockname() == sock.getpeername():  # On one host the kernel may connect a socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            if self.tls is not None:
                sock = self._wrap(sock)
            frames = self._shake_hands(sock)
            sock.setblocking(False)
            return sock, frames
        except BaseException:
            sock.close()
            raise

    def _reach(self) -> socket.socket:
        """A refusal tells that no coordinator runs only if every address of the name refuses."""
        try:
            return socket.create_connection((self.host, self.port), self.timeout_s, all_errors=True)
        except ExceptionGroup as group:
            errors = [each for each in group.exceptions if isinstance(each, OSError)]
            raise next((each for each in errors if not isinstance(each, ConnectionRefusedError)), errors[0]) from None

    def _wrap(self, sock: socket.socket) -> socket.socket:
        import ssl

        assert self.tls is not None
        try:
            return self.tls.context().wrap_socket(sock, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise TurnedAway(f"the certificate of {self.endpoint} is not accepted: {error.verify_message}") from None
        except ssl.SSLEOFError:
            raise ConnectionResetError(errno.ECONNRESET, "it closed the connection") from None
        except ssl.SSLError as error:
            hint = "; does it speak TLS?" if error.reason == "WRONG_VERSION_NUMBER" else ""
            raise TurnedAway(f"no TLS connection to {self.endpoint}: {error.reason or error}{hint}") from None
        except TimeoutError:
            raise Silent(f"{self.endpoint} accepts connections but says nothing; does it speak TLS?") from None

    def _shake_hands(self, sock: socket.socket) -> Frames:
        frames = Frames(messages.Handshake)
        challenge = self._read(sock, frames)
        if not isinstance(challenge, messages.Challenge):
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator")
        if challenge.version != PROTOCOL_VERSION:
            raise TurnedAway(
                f"the coordinator at {self.endpoint} speaks version {challenge.version} of the protocol, "
                f"this agent speaks {PROTOCOL_VERSION}"
            )
        nonce = os.urandom(messages.NONCE_BYTES)
        proof = b""
        if self.token is not None:
            proof = messages.prove(self.token, b"agent", self.run_id, challenge.nonce, nonce)
        sock.sendall(encode(messages.Hello(PROTOCOL_VERSION, self.run_id, nonce, proof)))
        self._check(self._read(sock, frames), nonce, challenge.nonce)
        frames.expect(messages.Answer)
        return frames

    def _hung_up(self) -> Exception:
        """Certificates of clients are looked at after the client's side of the TLS handshake is over."""
        if self.tls is None:
            return ConnectionResetError(errno.ECONNRESET, "it closed the connection")
        return TlsRefused(
            f"{self.endpoint} closed the connection after the TLS handshake; "
            "does it want another certificate (tls_cert)?"
        )

    def _check(self, answer: object, nonce: bytes, challenge: bytes) -> None:
        if isinstance(answer, messages.Denied):
            raise TurnedAway(f"the coordinator at {self.endpoint} turned this agent away: {answer.reason}")
        if not isinstance(answer, messages.Welcome):
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator")
        if self.token is None:
            return
        expected = messages.prove(self.token, b"coordinator", self.run_id, nonce, challenge)
        if not messages.is_proof(answer.proof, expected):
            raise TurnedAway(f"the coordinator at {self.endpoint} does not know this agent's token")

    def _read(self, sock: socket.socket, frames: Frames) -> object:
        ends = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            while (message := frames.next()) is None:
                sock.settimeout(max(0.001, ends - time.monotonic()))
                data = sock.recv(_READ_BYTES)
                if not data:
                    raise self._hung_up()
                frames.feed(data)
            return message
        except Malformed:
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator") from None
        except TimeoutError:
            hint = "is it a coordinator?" if self.tls is not None else "is it a coordinator, and without TLS?"
            raise Silent(f"{self.endpoint} accepts connections but says nothing; {hint}") from None
        except OSError as error:
            if self.tls is None:
                raise
            reason = getattr(error, "reason", "") or error.strerror
            raise TlsRefused(f"{self.endpoint} does not accept this agent's certificate: {reason}") from None
