"""Many light clients of one coordinator in one process: they speak the real protocol and have no workers.

async with crowd(endpoint, run_id, 1000) as clients:     connected, joined, and all in one sealed world
    ...                                                  they send heartbeats as agents do
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from holdfast.rendezvous.membership import frames, model, protocol
from holdfast.rendezvous.membership.frames import Frames, encode
from holdfast.rendezvous.membership.model import NodeFacts, Settings

_PATIENCE_S = 120.0


@dataclass(slots=True)
class Crowd:
    """`formed_s` is the time from the first attempt to connect until the last client knew its rank."""

    clients: list[LightClient]
    formed_s: float

    @property
    def ranks(self) -> set[int]:
        return {client.rank for client in self.clients}


class LightClient(asyncio.Protocol):
    """One node: says hello, joins, and sends heartbeats once it has a place."""

    def __init__(self, run_id: str, facts: NodeFacts, settings: Settings) -> None:
        self._run_id, self._facts, self._settings = run_id, facts, settings
        self._frames = Frames()
        self._loop = asyncio.get_running_loop()
        self._heartbeats = 0
        self._timer: asyncio.TimerHandle | None = None
        self.sealed: asyncio.Future[int] = self._loop.create_future()
        self.rank = -1
        self.answers = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.sealed.done():
            self.sealed.set_exception(ConnectionError(f"{self._facts.node_id} was disconnected: {error}"))

    def data_received(self, data: bytes) -> None:
        self._frames.feed(data)
        while (message := self._frames.next()) is not None:
            match message:
                case protocol.Challenge():
                    hello = protocol.Hello(protocol.MAJOR, self._run_id, os.urandom(protocol.NONCE_BYTES))
                    self._transport.write(encode(hello) + encode(protocol.Introduction(self._facts.node_id)))
                case protocol.Welcome():
                    self._frames.expect(frames.DOWNWARD)
                    self._send(protocol.Join(self._facts, self._settings))
                    self._heartbeat()
                case model.Sealed(_, place):
                    self.rank = place.rank
                    self.sealed.set_result(place.rank)
                case protocol.HeartbeatAnswer():
                    self.answers += 1
                case model.Progress():
                    pass
                case _:
                    self.sealed.set_exception(ConnectionError(f"{self._facts.node_id} was told {message}"))

    def _heartbeat(self) -> None:
        self._heartbeats += 1
        self._send(protocol.Heartbeat(self._heartbeats))
        self._timer = self._loop.call_later(self._settings.heartbeat_s, self._heartbeat)

    def _send(self, message: protocol.ToCoordinator) -> None:
        self._transport.write(encode(message))

    def close(self) -> None:
        self._transport.abort()


@asynccontextmanager
async def crowd(host: str, port: int, run_id: str, count: int) -> AsyncIterator[Crowd]:
    """So many clients, in one world when the block begins, and gone when it has ended."""
    settings = Settings(min_nodes=count, max_nodes=count)
    began = time.perf_counter()
    clients = await _connect(host, port, run_id, count, settings)
    try:
        async with asyncio.timeout(_PATIENCE_S):
            await asyncio.gather(*(client.sealed for client in clients))
        yield Crowd(clients, time.perf_counter() - began)
    finally:
        for client in clients:
            client.close()


async def _connect(host: str, port: int, run_id: str, count: int, settings: Settings) -> list[LightClient]:
    """All at once, as far as the backlog of a listening socket allows."""
    loop = asyncio.get_running_loop()
    turn = asyncio.Semaphore(512)

    async def connect(number: int) -> LightClient:
        facts = NodeFacts(f"node-{number:05d}", 0, host, 1024 + number, "trainer", 8)
        async with turn:
            _, client = await loop.create_connection(lambda: LightClient(run_id, facts, settings), host, port)
            return client

    return list(await asyncio.gather(*(connect(number) for number in range(count))))
