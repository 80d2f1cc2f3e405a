"""Many light clients of one coordinator in one process: they speak the real protocol and have no workers.

async with crowd(endpoint, run_id, 1000) as clients:     connected, joined, and all in one sealed world
    ...                                                  they send heartbeats as agents do
    await come_back(clients, port)                       after a restart of the coordinator, with their places
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.frames import Frames, encode
from holdfast.rendezvous.membership.model import NodeFacts, Place, Settings, Stage

_PATIENCE_S = 60.0  # Also the lease: one process that stands for thousands of nodes may be late with a heartbeat.


class LightClient(asyncio.Protocol):
    """One node: says hello, joins or returns to its place, and sends heartbeats from then on.

    `sealed` is done when it knows its place, `answered` when a heartbeat was answered.
    """

    def __init__(self, run_id: str, facts: NodeFacts, settings: Settings) -> None:
        self._run_id, self._facts, self._settings = run_id, facts, settings
        self._loop = asyncio.get_running_loop()
        self._heartbeats = 0
        self._transport: asyncio.Transport | None = None
        self.place: Place | None = None
        self.answers = 0
        self.sealed: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._frames = transport, Frames()
        self._timer: asyncio.TimerHandle | None = None
        self.welcomed: asyncio.Future[None] = self._loop.create_future()
        self.answered: asyncio.Future[None] = self._loop.create_future()

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fail(f"was disconnected: {error}")

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (message := self._frames.next()) is not None:
            match message:
                case protocol.Challenge():
                    hello = protocol.Hello(protocol.MAJOR, self._run_id, os.urandom(protocol.NONCE_BYTES))
                    introduction = protocol.Introduction(self._facts.node_id, self._facts.node_id.encode())
                    self._send(hello, introduction)
                case protocol.Welcome():
                    self.welcomed.set_result(None)
                    self._frames.expect(frames.DOWNWARD)
                    self._send(self._request())
                    self._heartbeat()
                case model.Sealed(_, place):
                    self.place = place
                    self.sealed.set_result(None)
                case protocol.HeartbeatAnswer():
                    self.answers += 1
                    if not self.answered.done():
                        self.answered.set_result(None)
                case model.Progress():
                    pass
                case _:
                    self._fail(f"was told {message}")

    def _request(self) -> protocol.Join | protocol.Return:
        if self.place is None:
            return protocol.Join(self._facts, self._settings)
        return protocol.Return(self._facts, self._settings, self.place, Stage.RUNNING)

    def _fail(self, what: str) -> None:
        for future in (self.welcomed, self.sealed, self.answered):
            if not future.done():
                future.set_exception(ConnectionError(f"{self._facts.node_id} {what}"))
                future.exception()  # Not every one is waited for.

    def _heartbeat(self) -> None:
        self._heartbeats += 1
        self._send(protocol.Heartbeat(self._heartbeats))
        self._timer = self._loop.call_later(self._settings.heartbeat_s, self._heartbeat)

    def _send(self, *messages: protocol.ToCoordinator | protocol.Hello | protocol.Introduction) -> None:
        assert self._transport is not None
        self._transport.write(b"".join(encode(message) for message in messages))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@asynccontextmanager
async def crowd(port: int, run_id: str, count: int, heartbeat_s: float = 10.0) -> AsyncIterator[list[LightClient]]:
    """So many clients, in one world when the block begins, and gone when it has ended."""
    settings = Settings(min_nodes=count, max_nodes=count, heartbeat_s=heartbeat_s, lease_s=_PATIENCE_S)
    facts = [NodeFacts(f"node-{number:05d}", 0, "127.0.0.1", 1024 + number, "trainer", 8) for number in range(count)]
    clients = [LightClient(run_id, each, settings) for each in facts]
    try:
        await _connect(clients, port)
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*(client.sealed for client in clients))
        yield clients
    finally:
        for client in clients:
            client.close()


async def come_back(clients: Sequence[LightClient], port: int) -> None:
    """Connect again, with the places that they have, until each one's first heartbeat is answered."""
    await _connect(clients, port)
    async with asyncio.timeout(_PATIENCE_S):
        await asyncio.gather(*(client.answered for client in clients))


async def _connect(clients: Sequence[LightClient], port: int) -> None:
    """All at once, as far as a coordinator lets strangers in."""
    loop = asyncio.get_running_loop()
    turn = asyncio.Semaphore(512)

    async def connect(client: LightClient) -> None:
        async with turn:
            await loop.create_connection(lambda: client, "127.0.0.1", port)
            await client.welcomed

    await asyncio.gather(*(connect(client) for client in clients))
