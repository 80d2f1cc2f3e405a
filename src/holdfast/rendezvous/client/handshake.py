"""How an agent gets a connection to its coordinator: dial, TLS if it is wanted, and the handshake.

Errors name the endpoint. What trying again may cure is an `OSError`; what a person has to put right is `TurnedAway`.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.rendezvous.client.reachability import Obstacle
from holdfast.rendezvous.endpoints import endpoint_text
from holdfast.rendezvous.membership import frames, protocol

if TYPE_CHECKING:
    import ssl

    from holdfast.rendezvous.tls import ReloadingTls

HANDSHAKE_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 14
_HUNG_UP = (errno.ECONNRESET, "it closed the connection")


class TurnedAway(HoldfastError):  # noqa: N818
    """The coordinator rejects this agent, is not one, or says nothing."""

    def __init__(self, text: str, obstacle: Obstacle = Obstacle.TURNED_AWAY) -> None:
        super().__init__(text)
        self.obstacle = obstacle


@dataclass(frozen=True, slots=True)
class Target:
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

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)

    def connect(self, term: int) -> tuple[socket.socket, frames.Frames, protocol.Welcome]:
        """Both sides have proved themselves. `term` is the node's highest. Raises OSError or `TurnedAway`."""
        sock = self._reach()
        try:
            if sock.getsockname() == sock.getpeername():  # On one host the kernel may connect a socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(HANDSHAKE_TIMEOUT_S)
            if self.tls is not None:
                sock = self._secure(sock, self.tls.context())
            stream = frames.Frames()
            welcome = self._shake_hands(sock, stream, term)
            stream.expect(frames.DOWNWARD)
            sock.setblocking(False)
            return sock, stream, welcome
        except BaseException:
            sock.close()
            raise

    def _reach(self) -> socket.socket:
        """A refusal tells that no coordinator runs only if every address of the name refuses."""
        try:
            return socket.create_connection(self.address, self.timeout_s, all_errors=True)
        except ExceptionGroup as group:
            errors = [each for each in group.exceptions if isinstance(each, OSError)]
            raise next((each for each in errors if not isinstance(each, ConnectionRefusedError)), errors[0]) from None

    def _secure(self, sock: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        import ssl

        try:
            return tls.wrap_socket(sock, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            raise TurnedAway(f"the certificate of {self.endpoint} is not accepted: {error.verify_message}") from None
        except ssl.SSLEOFError:
            raise ConnectionResetError(*_HUNG_UP) from None
        except ssl.SSLError as error:
            hint = "; does it speak TLS?" if error.reason == "WRONG_VERSION_NUMBER" else ""
            raise TurnedAway(f"no TLS connection to {self.endpoint}: {error.reason or error}{hint}") from None
        except TimeoutError:
            raise self._silent("does it speak TLS?") from None

    def _shake_hands(self, sock: socket.socket, stream: frames.Frames, term: int) -> protocol.Welcome:
        coordinator = f"the coordinator at {self.endpoint}"
        challenge = self._read(sock, stream, protocol.Challenge)
        ours, theirs = protocol.MAJOR, challenge.version
        if theirs != ours:
            raise TurnedAway(f"{coordinator} speaks version {theirs} of the protocol, this agent speaks {ours}")
        token, nonces = self.token, (challenge.nonce, os.urandom(protocol.NONCE_BYTES))
        proof = b"" if token is None else frames.prove(token, b"agent", self.run_id, *nonces)
        hello = protocol.Hello(ours, self.run_id, nonces[1], proof, protocol.MINOR, term)
        sock.sendall(frames.encode(hello))
        answer: protocol.Welcome | protocol.Denied = self._read(sock, stream, protocol.Welcome | protocol.Denied)
        if isinstance(answer, protocol.Denied):
            raise TurnedAway(f"{coordinator} turned this agent away: {answer.reason}")
        if token is not None:
            expected = frames.prove(token, b"coordinator", self.run_id, *reversed(nonces))
            if not frames.is_proof(answer.proof, expected):
                raise TurnedAway(f"{coordinator} does not know this agent's token")
        return answer

    def _read(self, sock: socket.socket, stream: frames.Frames, kind: Any) -> Any:
        """The next message. A client's certificate is looked at after its side of the TLS handshake is over."""
        ends = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            while (message := stream.next()) is None:
                sock.settimeout(max(0.001, ends - time.monotonic()))
                data = sock.recv(_READ_BYTES)
                if not data and self.tls is not None:
                    why = "closed the connection after the TLS handshake; does it want another certificate (tls_cert)?"
                    raise TurnedAway(f"{self.endpoint} {why}", Obstacle.TLS_REFUSED)
                if not data:
                    raise ConnectionResetError(*_HUNG_UP)
                stream.feed(data)
        except frames.Malformed:
            message = None
        except TimeoutError:
            hint = "is it a coordinator?" if self.tls is not None else "is it a coordinator, and without TLS?"
            raise self._silent(hint) from None
        except OSError as error:
            if self.tls is None:
                raise
            reason = getattr(error, "reason", "") or error.strerror
            problem = f"{self.endpoint} does not accept this agent's certificate: {reason}"
            raise TurnedAway(problem, Obstacle.TLS_REFUSED) from None
        if not isinstance(message, kind):
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator")
        return message

    def _silent(self, hint: str) -> TurnedAway:
        text = f"{self.endpoint} accepts connections but says nothing; {hint}"
        return TurnedAway(text, Obstacle.UNREACHABLE)
