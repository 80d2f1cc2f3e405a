"""The command line of ssh for one host, and what it means that an ssh has ended. Pure.

Every setting of the user's ssh counts (keys, jump hosts, ports, users in ~/.ssh/config), except those that would make
it ask questions, keep it in the background or end it early. What OpenSSH says on stderr is not translated into other
languages, so its words can be told apart; what is not known here is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from holdfast.frozen import frozen
from holdfast.text import last_line

PINGS_IN_TIMEOUT = 4
_SSH_FAILED = 255  # The exit code of ssh itself. Agents do not use it.
_NOT_FOUND = (126, 127)

# These words need no quotes, whatever the login shell. -P keeps the directory in which ssh starts it out of the path of
# imports: a file there could have the name of a module.
_REMOTE = "-P -m holdfast.hosts.ssh.remote_agent {mark} {timeout_s:g}"


def ssh_command(ssh: Sequence[str], target: str, python: str, mark: str, timeout_s: float) -> list[str]:
    """That starts a remote agent."""
    remote = f"exec {quoted(python)} {_REMOTE.format(mark=mark, timeout_s=timeout_s)}"
    return ssh_words(ssh, target, timeout_s, remote)


def ssh_words(ssh: Sequence[str], target: str, timeout_s: float, remote: str) -> list[str]:
    """`ssh` are the words of --ssh; options there come first and win, as ssh reads them. `remote` is for the login
    shell."""
    interval_s = max(1, round(timeout_s / PINGS_IN_TIMEOUT))
    settings = (
        "BatchMode=yes",
        f"ConnectTimeout={max(1, round(timeout_s))}",
        f"ServerAliveInterval={interval_s}",
        f"ServerAliveCountMax={PINGS_IN_TIMEOUT - 1}",
        "ControlMaster=no",  # It may use a master connection, but must not become one that stays.
        "ClearAllForwardings=yes",
        "RemoteCommand=none",
    )
    options = [word for setting in settings for word in ("-o", setting)]
    return [*ssh, "-T", "-e", "none", *options, "--", without_brackets(target), remote]


def without_brackets(target: str) -> str:
    """ssh takes an IPv6 address bare."""
    user, at, host = target.rpartition("@")
    return f"{user}{at}{host[1:-1] if host.startswith('[') else host}"


def quoted(word: str) -> str:
    """For the login shell."""
    return word if re.fullmatch(r"[\w@%+=:,./-]+", word) else "'" + word.replace("'", "'\\''") + "'"


@frozen
class Meaning:
    """Why a host cannot take part. `may_pass`: it is worth another try."""

    reason: str
    may_pass: bool = False


# A part of what ssh says, in the order in which they are looked for, and what it means. `{0}` is the rest of the line.
_WORDS: tuple[tuple[str, str], ...] = (
    ("REMOTE HOST IDENTIFICATION HAS CHANGED",
     "its host key has changed; if that is right, remove the old one with `ssh-keygen -R` and connect once by hand"),
    ("Host key verification failed",
     "its host key is not known; connect once by hand (`ssh {target}`) and check it"),
    ("No route to host", "there is no route to it"),
    ("Network is unreachable", "its network is unreachable"),
    ("Could not resolve hostname", "the name does not resolve{0}; check its spelling, and ~/.ssh/config"),
    ("Connection refused", "connection refused: no ssh server listens there{port}"),
    ("Connection timed out", "it does not answer (connection timed out)"),
    ("Operation timed out", "it does not answer (connection timed out)"),
    ("Permission denied (",
     "ssh needs a password or a key for it, and must not ask: set up a key (`ssh-copy-id {target}`) or an agent"),
    ("Too many authentication failures", "ssh offered it too many keys; name the right one in ~/.ssh/config"),
    ("cannot execute command-line and remote command", "~/.ssh/config gives it a RemoteCommand"),
)  # fmt: skip
# A server, or a jump host, that has too many newcomers at once (MaxStartups) hangs up on some of them.
_PASSING = ("kex_exchange_identification", "ssh_exchange_identification", "Connection closed by", "Connection reset by")


def meaning_of_failure(
    status: int, said: str, target: str, python: str, timeout_s: float, *, is_cut: bool = False
) -> Meaning:
    """An ssh that has ended before the host said hello, with this exit status. `said` is its stderr."""
    last = last_line(said)
    if is_cut:
        words = f"; its last words were: {last}" if last else ""
        return Meaning(f"it did not answer within {timeout_s:g} s{words}")
    if status < 0:
        return Meaning(f"ssh was killed by signal {-status}")
    if status != _SSH_FAILED:
        return Meaning(_meaning_of_start(status, said, last, python))
    for words, meaning in _WORDS:
        if words in said:
            port = re.search(r"connect to host \S+ (port \d+)", said)
            rest = re.search(rf"{re.escape(words)} [^\n:]*: ([^\n\r]+)", said)
            at_port = f" ({port[1]})" if port else ""
            return Meaning(meaning.format(f" ({rest[1]})" if rest else "", target=target, port=at_port))
    may_pass = any(words in said for words in _PASSING)
    return Meaning(f"ssh failed: {last}" if last else "ssh failed, and did not say why", may_pass)


def _meaning_of_start(status: int, said: str, last: str, python: str) -> str:
    """The host was reached, but the agent did not start."""
    other = "; --remote-python names another one"
    if status in _NOT_FOUND:
        return f"there is no interpreter {python} on it{other}"
    if re.search(r"No module named '?holdfast\.", said):
        return f"its holdfast (of {python}) is another version; install the one of this host{other}"
    if re.search(r"No module named '?holdfast'?\)?\s*$", said):
        return f"holdfast is not installed for {python} on it; install it there{other}"
    if "SyntaxError" in said or "nknown option: -P" in said or "requires" in last:
        return f"{python} on it cannot run holdfast, which needs Python 3.11 or newer{other}"
    words = f": {last}" if last else ", and did not say why"
    return f"holdfast cannot be started with {python} on it (exit status {status}){words}"


def meaning_of_loss(status: int, last: str) -> str:
    """An ssh that has ended before the agent's end was told."""
    if status < 0:
        return f"ssh was killed by signal {-status}"
    if "not responding" in last:
        return "it does not answer any more"
    words = f" ({last})" if last else ""
    if status == _SSH_FAILED:
        return f"the connection broke{words}"
    return f"its agent ended with exit status {status}{words}"
