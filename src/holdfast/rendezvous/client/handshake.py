"""How an agent gets a connection to its coordinator: dial, TLS if it is wanted, and the handshake (`protocol`).

Errors name the endpoint. What trying again may cure is an `OSError`; what a person has to put right is `TurnedAway`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from holdfast.errors import HoldfastError
from holdfast.rendezvous.client.reachability import Obstacle
from holdfast.rendezvous.endpoints import endpoint_text, for_lookup
from holdfast.rendezvous.membership import frames, keys, protocol

if TYPE_CHECKING:
    import ssl

    from holdfast.tls import ReloadingTls

HANDSHAKE_TIMEOUT_S = 5.0
_READ_BYTES = 1 << 14
_HUNG_UP = (errno.ECONNRESET, "it closed the connection")

OpenConnection = tuple[socket.socket, frames.Frames, protocol.Welcome]


class TurnedAway(HoldfastError):  # noqa: N818
    """The coordinator rejects this agent, is not one, or says nothing. `fix` says what to do, where that is known."""

    def __init__(self, text: str, obstacle: Obstacle = Obstacle.MISTAKE, fix: str = "") -> None:
        super().__init__(text)
        self.obstacle, self.fix = obstacle, fix


class OtherToken(TurnedAway):
    pass


def obstacle_of(error: OSError | HoldfastError) -> Obstacle:
    if isinstance(error, HoldfastError):
        return error.obstacle if isinstance(error, TurnedAway) else Obstacle.MISTAKE
    is_doubtful = isinstance(error, (socket.gaierror, ConnectionResetError, BrokenPipeError))
    return Obstacle.DOUBTFUL if is_doubtful else Obstacle.PASSING


@dataclass(frozen=True, slots=True)
class Target:
    """Where the coordinator is and how to speak to it."""

    host: str
    port: int
    run_id: str
    token: bytes | None = None
    tls: ReloadingTls | None = None
    timeout_s: float = 2.0
    asker: str = "this agent"
    handshake_timeout_s: float = field(default_factory=lambda: HANDSHAKE_TIMEOUT_S)

    @property
    def endpoint(self) -> str:
        return endpoint_text(self.host, self.port)

    @property
    def _who(self) -> str:
        return f"the coordinator at {self.endpoint}"

    @property
    def address(self) -> tuple[str, int]:
        return (self.host, self.port)

    def connect(self, node: protocol.Introduction) -> OpenConnection:
        """A connection on which both sides have proved themselves. Raises OSError or `TurnedAway`."""
        sock = self._open()
        try:
            stream = frames.Frames()
            welcome = self.greet(sock, stream, node)
            stream.expect(frames.DOWNWARD)
            sock.setblocking(False)
            return sock, stream, welcome
        except BaseException:
            sock.close()
            raise

    def look(self) -> protocol.Challenge:
        """What the coordinator says to every client that connects. Raises OSError or `TurnedAway`."""
        with self._open() as sock:
            return self._challenge(sock, frames.Frames())

    def _open(self) -> socket.socket:
        """A connection, with TLS if it is wanted."""
        sock = self._reach()
        try:
            if sock.getsockname() == sock.getpeername():  # On one host the kernel may connect a socket to itself.
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.settimeout(self.handshake_timeout_s)
            return sock if self.tls is None else self._secure(sock, self.tls.context())
        except BaseException:
            sock.close()
            raise

    def _reach(self) -> socket.socket:
        """A refusal tells that no coordinator runs only if every address of the name refuses."""
        try:
            where: Any = (for_lookup(self.host), self.port)
            return socket.create_connection(where, self.timeout_s, all_errors=True)
        except ExceptionGroup as group:
            errors = [each for each in group.exceptions if isinstance(each, OSError)]
            raise next((each for each in errors if not isinstance(each, ConnectionRefusedError)), errors[0]) from None

    def _secure(self, sock: socket.socket, tls: ssl.SSLContext) -> socket.socket:
        import ssl

        try:
            return tls.wrap_socket(sock, server_hostname=self.host)
        except ssl.SSLCertVerificationError as error:
            problem = f"the certificate of {self.endpoint} is not accepted: {error.verify_message}"
            fix = ("give the authority that signed it (--rdzv-conf tls_ca=FILE); the certificate must be valid and "
                   "name the host of the endpoint")  # fmt: skip
            raise TurnedAway(problem, fix=fix) from None
        except ssl.SSLEOFError:
            raise ConnectionResetError(*_HUNG_UP) from None
        except ssl.SSLError as error:
            hint = "; does it speak TLS?" if error.reason == "WRONG_VERSION_NUMBER" else ""
            fix = "leave tls_ca, tls_cert and tls_key out, or give the nodes of the run --tls-cert and --tls-key"
            raise TurnedAway(f"no TLS connection to {self.endpoint}: {error.reason or error}{hint}", fix=fix) from None
        except TimeoutError:
            raise self._silent("does it speak TLS?") from None

    def greet(self, sock: socket.socket, stream: frames.Frames, node: protocol.Introduction) -> protocol.Welcome:
        """The handshake, on a connection that blocks."""
        challenge = self._challenge(sock, stream)
        nonce, dialled = os.urandom(protocol.NONCE_BYTES), endpoint_text(*sock.getpeername()[:2])
        has_token = self.token is not None
        hello = frames.encode(protocol.Hello(protocol.MAJOR, self.run_id, nonce, protocol.MINOR, has_token, dialled))
        if self.token is None:  # Nothing has to be waited for.
            sock.sendall(hello + frames.encode(node))
        else:
            sock.sendall(hello)
            key = keys.run_token(self.token, self.run_id)
            upward, downward = keys.connection_keys(key, (challenge.nonce, nonce), self.run_id, dialled)
            stream.seal(downward, upward)
            self._read(sock, stream, protocol.Proved)  # Until then the agent tells nothing of itself.
            sock.sendall(stream.sealed(frames.encode(node)))
        welcome: protocol.Welcome = self._read(sock, stream, protocol.Welcome)
        return welcome

    def _challenge(self, sock: socket.socket, stream: frames.Frames) -> protocol.Challenge:
        challenge: protocol.Challenge = self._read(sock, stream, protocol.Challenge)
        ours, theirs = protocol.MAJOR, challenge.version
        if theirs != ours:
            problem = f"{self._who} speaks version {theirs} of the protocol, {self.asker} speaks {ours}"
            raise TurnedAway(problem, fix="install the same version of holdfast on all hosts")
        return challenge

    def _not_sealed(self, sock: socket.socket, stream: frames.Frames, body: bytes) -> TurnedAway:
        """The coordinator has another token; or it has none, and turned the agent away in a frame without a seal."""
        with contextlib.suppress(frames.Malformed):
            answer = frames.decode(frames.HANDSHAKE, body)
            if isinstance(answer, protocol.Denied):
                return self._denied(answer)
        with contextlib.suppress(OSError):  # So that the coordinator can say what was wrong, too.
            sock.sendall(stream.sealed(frames.encode(protocol.Denied("the token is another one"))))
        return OtherToken(f"{self._who} does not know {self.asker}'s token")

    def _denied(self, denied: protocol.Denied) -> TurnedAway:
        obstacle = Obstacle.PASSING if denied.is_passing else Obstacle.MISTAKE
        return TurnedAway(f"{self._who} turned {self.asker} away: {denied.reason}", obstacle)

    def _read(self, sock: socket.socket, stream: frames.Frames, kind: type) -> Any:
        """The next message, which is of that kind. Certificates of clients are looked at after the client's side of
        the TLS handshake is over."""
        ends = time.monotonic() + self.handshake_timeout_s
        try:
            while (message := stream.next()) is None:
                sock.settimeout(max(0.001, ends - time.monotonic()))
                data = sock.recv(_READ_BYTES)
                if not data and self.tls is not None:
                    why = "closed the connection after the TLS handshake; does it want another certificate (tls_cert)?"
                    raise self._tls_refused(why)
                if not data:
                    raise ConnectionResetError(*_HUNG_UP)
                stream.feed(data)
        except frames.SealBroken as error:
            raise self._not_sealed(sock, stream, error.body) from None
        except frames.Malformed:
            message = None
        except TimeoutError:
            hint = "is it a coordinator?" if self.tls is not None else "is it a coordinator, and without TLS?"
            raise self._silent(hint) from None
        except OSError as error:
            if self.tls is None:
                raise
            reason = getattr(error, "reason", "") or error.strerror
            raise self._tls_refused(f"does not accept {self.asker}'s certificate: {reason}") from None
        if isinstance(message, protocol.Denied):
            raise self._denied(message)
        if not isinstance(message, kind):
            raise TurnedAway(f"{self.endpoint} answers, but it is not a holdfast coordinator")
        return message

    def _tls_refused(self, why: str) -> TurnedAway:
        fix = "give a certificate that the coordinator's authority has signed: --rdzv-conf tls_cert=FILE,tls_key=FILE"
        return TurnedAway(f"{self.endpoint} {why}", Obstacle.DOUBTFUL, fix)

    def _silent(self, hint: str) -> TurnedAway:
        fix = "compare host and port with --rdzv-endpoint of the run; a coordinator that is frozen is silent, too"
        return TurnedAway(f"{self.endpoint} accepts connections but says nothing; {hint}", Obstacle.PASSING, fix)
