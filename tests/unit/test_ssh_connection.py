"""One ssh process and its pipes, with other programs in the place of ssh."""

from __future__ import annotations

from holdfast.hosts.ssh.connection import Connection


def test_a_host_that_never_stops_talking_is_not_listened_to_for_ever() -> None:
    """The loop has signals and other hosts to look after."""
    connection = Connection(["yes"], "mark")
    try:
        assert connection.read() is None
        assert not connection.has_ended()
    finally:
        assert connection.close() == -9


def test_all_that_was_said_is_there_when_it_has_ended() -> None:
    connection = Connection(["sh", "-c", "head -c 65000 /dev/zero; printf last >&2; exit 3"], "mark")
    try:
        connection._process.wait()
        assert connection.read() is None
        assert connection.stderr_text == "last"
        assert connection.readable_fds() == []
    finally:
        assert connection.close() == 3
