"""A store that torch's client (`torch.distributed.TCPStore`) speaks to; fresh in every round, it outlives rank 0. Pure.

The agent of rank 0 makes the round's master port listen, and the spawner forks a process that serves this store there.
Workers are clients. The process ends with the round: the next round has another port and another process, so a client
of an earlier round meets a closed connection and never a key of the past.

The wire is that of torch: one byte names the operation, its arguments follow; a key or a value is a length of 8 bytes
and its bytes; all numbers are little-endian. A connection has one request at a time, except that `CANCEL_WAIT` may
follow `WAIT`.

`TorchStore` has the keys, the queues and the clients that wait. It takes bytes and leaves bytes in `Client.output`. If
bytes of a request are missing, it is begun again when they have come. A request with many keys keeps those that were
there (`Client.taken`), so that they are not read twice. `torch_store_server` has the sockets around it.

A client that breaks the protocol, exceeds a limit or speaks another protocol is told nothing, as nothing could reach it
in its words: its connection is closed, and one line says why.
"""

from __future__ import annotations

import struct

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import: a fork of the spawner runs this.
if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable
else:
    from _collections import deque

_MAGIC = b"\xce\xf7\x85\x3c"
MAX_KEY_BYTES = 8 << 10
MAX_VALUE_BYTES = 8 << 20
MAX_KEYS = 128 << 10  # In one request.
MAX_REQUEST_BYTES = 256 << 20
MAX_STORE_BYTES = 2 << 30
_KEY_COST_BYTES = 200  # What an entry costs besides its bytes.
_MAX_UNREAD_BYTES = MAX_REQUEST_BYTES  # Answers that the client has not read when it asks again.

_U64 = struct.Struct("<Q")
_I64 = struct.Struct("<q")
_U32 = struct.Struct("<I")
_DONE, _NOT_READY, _CANCELLED = b"\0", b"\1", b"\1"

# The beginnings of other protocols.
_OTHER_PROTOCOLS = {
    b"\x16": "TLS",
    b"GET ": "HTTP",
    b"POST": "HTTP",
    b"HEAD": "HTTP",
    b"PRI ": "HTTP/2",
    b"SSH-": "ssh",
}


class ProtocolError(Exception):
    """The connection is closed. The text says why."""


class _Incomplete(Exception):  # noqa: N818
    """More bytes are needed."""


class Client:
    """One connection. `operation` is the number of the request that is being read, -1 between two. `missing` are the
    keys of a `WAIT` that is not answered yet. `barrier` is the key of a `BARRIER` that is not answered yet."""

    __slots__ = ("at", "barrier", "begun", "count", "input", "is_validated", "later", "missing", "name", "needed",
                 "operation", "output", "size", "taken")  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.input, self.output = b"", bytearray()
        self.at = 0  # How much of the input has been read.
        self.begun = 0  # Where the arguments begin that are read again if bytes are missing.
        self.later: list[bytes] = []  # What has come behind an input that is known to be incomplete.
        self.needed = 0  # How many bytes have to come before it can be complete.
        self.operation = -1
        self.count = -1  # Of the texts of a request with many keys; -1 before it is known.
        self.taken: list[bytes] = []  # Of these texts, those that have come.
        self.size = 0  # Of them together.
        self.missing: set[bytes] = set()
        self.barrier: bytes | None = None
        self.is_validated = False


class TorchStore:
    """The data of one round. `_woken` are clients that got an answer because of what another one did."""

    def __init__(self) -> None:
        self._values: dict[bytes, bytes] = {}
        self._queues: dict[bytes, deque[bytes]] = {}
        self._waiting: dict[bytes, dict[Client, None]] = {}  # By key, in order of arrival.
        # By key, the numbers that its counter must reach, by client, and one that none of them is below.
        self._barriers: dict[bytes, tuple[int, dict[Client, int]]] = {}
        self._size = 0
        self._woken: list[Client] = []
        self._operations: dict[int, Callable[[Client], bytes]] = {
            1: self._set,
            2: self._compare_set,
            3: self._get,
            4: self._add,
            5: self._check,
            6: self._wait,
            7: self._count_keys,
            8: self._delete,
            9: self._append,
            10: self._get_many,
            11: self._set_many,
            12: self._cancel_wait,
            13: self._ping,
            14: self._push,
            15: self._pop,
            16: self._queue_length,
            17: self._list_keys,
            18: self._barrier,
        }

    def take(self, client: Client, data: bytes) -> tuple[list[Client], str]:
        """Bytes from a client. Returns the clients that have got output, and why the connection of this one has to be
        closed, if it has to."""
        if client.needed > len(data):
            client.later.append(data)
            client.needed -= len(data)
            return [], ""
        client.input = data = b"".join((client.input, *client.later, data)) if client.input or client.later else data
        client.at = client.begun = client.needed = 0
        problem = ""
        try:
            if not client.is_validated:
                self._validate(client)
            size = len(data)
            while client.at < size:
                self._take_request(client, data)
            client.input = b""
        except _Incomplete:
            client.input = data[client.begun :]
        except ProtocolError as error:
            problem = str(error)
        if client.later:
            client.later.clear()
        if not self._woken:
            return [client] if client.output else [], problem
        woken, self._woken = self._woken, []
        return [client, *woken] if client.output else woken, problem

    def drop(self, client: Client) -> None:
        """Its connection is closed."""
        self._stop_waiting(client)

    # Reading requests. Arguments that are not all there raise _Incomplete.

    def _take_request(self, client: Client, data: bytes) -> None:
        if client.operation < 0:
            client.operation = data[client.at]
            client.at += 1
        client.begun = client.at
        operation = self._operations.get(client.operation)
        if operation is None:
            raise ProtocolError(f"sent the operation {client.operation}, which this store does not know")
        client.output += operation(client)
        client.operation = -1
        if len(client.output) > _MAX_UNREAD_BYTES:
            raise ProtocolError(f"left {len(client.output) >> 20} MiB of answers unread")

    def _validate(self, client: Client) -> None:
        if client.input[:1] != b"\0":
            if len(client.input) < 4 and any(each.startswith(client.input) for each in _OTHER_PROTOCOLS):
                raise _Incomplete
            raise ProtocolError(_foreign(client.input[:4]))
        if len(client.input) < 5:
            raise _Incomplete
        if client.input[1:5] != _MAGIC:
            raise ProtocolError("is not a client of torch's store")
        client.is_validated, client.at = True, 5

    def _text(self, client: Client, limit: int = MAX_KEY_BYTES) -> bytes:
        data, begins = client.input, client.at + 8
        if begins > len(data):
            raise _incomplete(client, begins)
        ends: int = begins + _U64.unpack_from(data, client.at)[0]
        if ends - begins > limit:
            what = "key" if limit == MAX_KEY_BYTES else "value"
            raise ProtocolError(f"sent a {what} of {ends - begins} bytes; at most {limit} are possible")
        if ends > len(data):
            raise _incomplete(client, ends)
        client.at = ends
        return data[begins:ends]

    def _value(self, client: Client) -> bytes:
        return self._text(client, MAX_VALUE_BYTES)

    def _number(self, client: Client, layout: struct.Struct = _I64) -> int:
        ends = client.at + layout.size
        if ends > len(client.input):
            raise _incomplete(client, ends)
        number: int = layout.unpack_from(client.input, client.at)[0]
        client.at = ends
        return number

    def _many(self, client: Client, *limits: int) -> list[bytes]:
        """The texts of a request that says how many keys it names; each key has as many texts as there are limits."""
        if client.count < 0:
            keys = self._number(client, _U64)
            if keys > MAX_KEYS:
                raise ProtocolError(f"named {keys} keys in one request; at most {MAX_KEYS} are possible")
            client.count, client.begun = keys * len(limits), client.at
        taken = client.taken
        while len(taken) < client.count:
            taken.append(text := self._text(client, limits[len(taken) % len(limits)]))
            client.begun = client.at
            client.size += len(text)
            if client.size > MAX_REQUEST_BYTES:
                raise ProtocolError(f"sent a request of more than {MAX_REQUEST_BYTES >> 20} MiB")
        client.taken, client.count, client.size = [], -1, 0
        return taken

    def _keys(self, client: Client) -> list[bytes]:
        return self._many(client, MAX_KEY_BYTES)

    # Operations. Each reads all its arguments first, and returns its answer, which is empty if there is none, or none
    # yet.

    def _set(self, client: Client) -> bytes:
        key = self._text(client)
        self._store(key, self._value(client))
        return b""

    def _compare_set(self, client: Client) -> bytes:
        key, expected, desired = self._text(client), self._value(client), self._value(client)
        present = self._values.get(key)
        if present is None and expected:
            return _sized(expected)
        if present is None or present == expected:
            self._store(key, desired)
            present = desired
        return _sized(present)

    def _get(self, client: Client) -> bytes:
        return _sized(self._values.get(self._text(client), b""))

    def _add(self, client: Client) -> bytes:
        key = self._text(client)
        return _I64.pack(self._increase(key, self._number(client)))

    def _check(self, client: Client) -> bytes:
        return _DONE if all(map(self._is_there, self._keys(client))) else _NOT_READY

    def _wait(self, client: Client) -> bytes:
        keys = self._keys(client)
        self._stop_waiting(client)
        client.missing = {key for key in keys if not self._is_there(key)}
        for key in client.missing:
            self._waiting.setdefault(key, {})[client] = None
        return b"" if client.missing else _DONE

    def _cancel_wait(self, client: Client) -> bytes:
        self._stop_waiting(client)
        return _CANCELLED

    def _count_keys(self, client: Client) -> bytes:
        return _I64.pack(len(self._values))

    def _list_keys(self, client: Client) -> bytes:
        return _I64.pack(len(self._values)) + b"".join(map(_sized, self._values))

    def _delete(self, client: Client) -> bytes:
        key = self._text(client)
        value = self._values.pop(key, None)
        if value is not None:
            self._size -= len(key) + len(value) + _KEY_COST_BYTES
        return _I64.pack(value is not None)

    def _append(self, client: Client) -> bytes:
        key, value = self._text(client), self._value(client)
        self._store(key, self._values.get(key, b"") + value)
        return b""

    def _get_many(self, client: Client) -> bytes:
        values = [self._values.get(key, b"") for key in self._keys(client)]
        if sum(map(len, values)) > MAX_REQUEST_BYTES:
            raise ProtocolError(f"asked for more than {MAX_REQUEST_BYTES >> 20} MiB in one request")
        return b"".join(map(_sized, values))

    def _set_many(self, client: Client) -> bytes:
        texts = self._many(client, MAX_KEY_BYTES, MAX_VALUE_BYTES)
        for key, value in zip(texts[::2], texts[1::2], strict=True):
            self._store(key, value)
        return b""

    def _ping(self, client: Client) -> bytes:
        return _U32.pack(self._number(client, _U32))

    def _push(self, client: Client) -> bytes:
        key, value = self._text(client), self._value(client)
        self._grow(len(key) + len(value) + _KEY_COST_BYTES)
        self._queues.setdefault(key, deque()).append(value)
        for waiting in [*self._waiting.get(key, ())][:1]:  # One value is for one client.
            self._arrived(key, waiting)
        return b""

    def _pop(self, client: Client) -> bytes:
        key = self._text(client)
        queue = self._queues.get(key)
        if not queue:
            return _I64.pack(0)
        answer = _I64.pack(len(queue)) + _sized(value := queue.popleft())
        self._size -= len(key) + len(value) + _KEY_COST_BYTES
        if not queue:
            del self._queues[key]
        return answer

    def _queue_length(self, client: Client) -> bytes:
        return _I64.pack(len(self._queues.get(self._text(client), ())))

    def _barrier(self, client: Client) -> bytes:
        key, world = self._text(client), self._number(client)
        if self._increase(key, 1) >= world:
            return _DONE
        self._stop_waiting(client)
        client.barrier = key
        least, waiting = self._barriers.get(key, (world, {}))
        waiting[client] = world
        self._barriers[key] = min(least, world), waiting
        return b""

    # Data and the clients that wait for it.

    def _is_there(self, key: bytes) -> bool:
        return key in self._values or key in self._queues

    def _increase(self, key: bytes, by: int) -> int:
        """Numbers are decimal text, and wrap as 64-bit integers do."""
        try:
            number = _leading_number(self._values.get(key, b"0")) + by
        except ValueError:
            raise ProtocolError(f"counts with the key {_shown(key)}, whose value is no number") from None
        number = (number + (1 << 63)) % (1 << 64) - (1 << 63)
        self._store(key, b"%d" % number)
        return number

    def _store(self, key: bytes, value: bytes) -> None:
        before = self._values.get(key)
        kept = 0 if before is None else len(before) + len(key) + _KEY_COST_BYTES
        self._grow(len(key) + len(value) + _KEY_COST_BYTES - kept)
        self._values[key] = value
        if key in self._waiting:
            for waiting in [*self._waiting[key]]:
                self._arrived(key, waiting)
        if key in self._barriers and len(value) < 20 and value.isdigit() and int(value) >= self._barriers[key][0]:
            self._reached(key, int(value))  # No counter is longer, and `int` refuses thousands of digits.

    def _grow(self, size: int) -> None:
        if self._size + size > MAX_STORE_BYTES:
            raise ProtocolError(f"wants to store more than {MAX_STORE_BYTES >> 30} GiB")
        self._size += size

    def _arrived(self, key: bytes, client: Client) -> None:
        """A key that the client waits for has been written."""
        client.missing.discard(key)
        self._forget_waiting(key, client)
        if not client.missing:
            client.output += _DONE
            self._woken.append(client)

    def _reached(self, key: bytes, number: int) -> None:
        """The counter of a barrier has that value."""
        _, waiting = self._barriers.pop(key)
        left = {}
        for client, world in waiting.items():
            if world > number:
                left[client] = world
                continue
            client.barrier = None
            client.output += _DONE
            self._woken.append(client)
        if left:
            self._barriers[key] = min(left.values()), left

    def _stop_waiting(self, client: Client) -> None:
        for key in client.missing:
            self._forget_waiting(key, client)
        if client.barrier is not None:
            waiting = self._barriers[client.barrier][1]
            del waiting[client]
            if not waiting:
                del self._barriers[client.barrier]
        client.missing, client.barrier = set(), None

    def _forget_waiting(self, key: bytes, client: Client) -> None:
        waiting = self._waiting[key]
        del waiting[client]
        if not waiting:
            del self._waiting[key]


def _incomplete(client: Client, ends: int) -> _Incomplete:
    """The argument that is being read ends there."""
    client.needed = ends - len(client.input)
    return _Incomplete()


def _sized(value: bytes) -> bytes:
    return _U64.pack(len(value)) + value


def _leading_number(value: bytes) -> int:
    """What comes behind it does not count, as in torch's own server."""
    text = value.lstrip()
    digits = text[text[:1] in (b"-", b"+") :]
    return int(text[: len(text) - len(digits.lstrip(b"0123456789"))])


def _shown(key: bytes) -> str:
    return repr(key.removeprefix(b"/")[:100])[1:]


def _foreign(beginning: bytes) -> str:
    for start, name in _OTHER_PROTOCOLS.items():
        if beginning.startswith(start):
            return f"speaks {name}; this port is for torch's store"
    return "is not a client of torch's store"
