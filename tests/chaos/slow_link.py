"""A slow and lossy cable, for kernels that have no netem: a frame that comes in at one device goes out at the other,
later. Frames stay in order.

    python slow_link.py DEVICE DEVICE SECONDS SHARE_LOST

Frames carry the kernel's note on what is left to be done with them (a checksum to fill in, a size to cut them to), so
they may be larger than the device's limit and need not be touched.
"""

from __future__ import annotations

import random
import select
import socket
import sys
import time
from collections import deque

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ALL_PROTOCOLS = 3
MOST_BYTES = 1 << 17


def end_of(device: str) -> socket.socket:
    sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
    sock.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    sock.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    sock.bind((device, ALL_PROTOCOLS))
    return sock


class Direction:
    """`delay_s` is the mean: each frame takes from half of it to one and a half."""

    def __init__(self, source: socket.socket, target: socket.socket, delay_s: float, share_lost: float) -> None:
        self.source, self._target, self._delay_s, self._share_lost = source, target, delay_s, share_lost
        self._frames: deque[tuple[float, bytes]] = deque()

    def take(self) -> None:
        frame = self.source.recv(MOST_BYTES)
        due = time.monotonic() + self._delay_s * random.uniform(0.5, 1.5)
        if random.random() >= self._share_lost:
            self._frames.append((max(due, self._frames[-1][0] if self._frames else 0.0), frame))

    def give(self) -> float:
        """What is due. Returns the seconds until the next frame is."""
        while self._frames:
            if (left_s := self._frames[0][0] - time.monotonic()) > 0:
                return left_s
            try:
                self._target.send(self._frames.popleft()[1])
            except OSError:
                continue  # The device is down: the frame is lost.
        return 60.0


def main() -> None:
    one, other = end_of(sys.argv[1]), end_of(sys.argv[2])
    delay_s, share_lost = float(sys.argv[3]), float(sys.argv[4])
    ways = [Direction(one, other, delay_s, share_lost), Direction(other, one, delay_s, share_lost)]
    while True:
        ready, _, _ = select.select([one, other], [], [], min(way.give() for way in ways))
        for way in ways:
            if way.source in ready:
                way.take()


if __name__ == "__main__":
    main()
