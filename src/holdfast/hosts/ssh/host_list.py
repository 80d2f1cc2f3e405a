"""The hosts of a run, as the user writes them: `--hosts node1,node2:8`, or a hostfile as MPI users have it. Pure.

A host is whatever ssh accepts: a name, an alias of ~/.ssh/config, an address, each with `user@` if need be. A number
after a colon is the number of workers there, its slots, and not a port: ports belong into ~/.ssh/config. An IPv6
address has brackets, which tell its colons from that one. A hostfile has a host a line, with `slots=8` or `:8`:

    # the rack on the left
    node1 slots=8
    node2 slots=4 max_slots=8    # max_slots is accepted and not used
    node3:8 env=NCCL_SOCKET_IFNAME=ib0 env='GREETING=two words'
"""

from __future__ import annotations

import re
import shlex

from holdfast.errors import UserError
from holdfast.frozen import frozen

MOST_HOSTS = 10_000
_MOST_SLOTS = 100_000
# A name that began with a dash would be an option of ssh.
_HOST = re.compile(r"(?:[\w.+][\w.+-]*@)?(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|\w[\w.-]*)")
_KNOWN_KEYS = ("slots", "max_slots", "max-slots")


@frozen
class Host:
    """`target` is for ssh, and may have a user in it; `name` is for people. No slots: as --nproc-per-node says. `env`
    are variables for this host alone."""

    target: str
    slots: int | None = None
    env: tuple[tuple[str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.target.rpartition("@")[2]


def parse_hosts(text: str) -> tuple[Host, ...]:
    where = f"--hosts {text!r}"
    words = [word.strip() for word in text.split(",")]
    if not any(words):
        raise UserError(f"{where} names no host")
    if "" in words:
        raise UserError(f"{where} has an empty element: write the hosts with one comma between them")
    return _checked(where, [_host(f"{where}: ", word) for word in words])


def parse_hostfile(path: str, text: str) -> tuple[Host, ...]:
    return parse_lines(f"--hostfile {path!r}", text)


def parse_lines(where: str, text: str) -> tuple[Host, ...]:
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise UserError(f"{where}, line {number}: {error}") from None
        if words:
            hosts.append(_host_of_line(f"{where}, line {number}: ", words))
    if not hosts:
        raise UserError(f"{where} names no host: write one a line, as in `node1 slots=8`")
    return _checked(where, hosts)


def _host_of_line(where: str, words: list[str]) -> Host:
    host = _host(where, words[0])
    slots, env = host.slots, list[tuple[str, str]]()
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if key == "env":
            name, equals, text = value.partition("=")
            if not equals or not name.isidentifier():
                raise UserError(f"{where}{word!r} is not a variable, as in env=NCCL_DEBUG=INFO")
            env.append((name, text))
            continue
        if not equals or key not in _KNOWN_KEYS:
            raise UserError(f"{where}{word!r} is not understood; a line is a host and slots=N, as in `node1 slots=8`")
        number = _slots(where, value)
        if key == "slots":
            if slots is not None:
                raise UserError(f"{where}the slots of {host.name} are given twice")
            slots = number
    return Host(host.target, slots, tuple(env))


def _host(where: str, word: str) -> Host:
    bare = word.rpartition("@")[2]
    if bare.count(":") > 1 and not bare.startswith("["):
        raise UserError(f"{where}write an IPv6 address in brackets, as in [{bare}] or [{bare}]:8 for eight workers")
    name, slots = word, None
    if not word.endswith("]") and ":" in word:
        name, _, number = word.rpartition(":")
        slots = _slots(where, number)
    if not _HOST.fullmatch(name):
        raise UserError(f"{where}{name!r} is not a host: write a name or an address, and :N for N workers on it")
    return Host(name, slots)


def _slots(where: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal()) or not 0 < int(text[:9]) <= _MOST_SLOTS:
        raise UserError(f"{where}{text!r} is not a number of workers; ports belong into ~/.ssh/config")
    return int(text)


def _checked(where: str, hosts: list[Host]) -> tuple[Host, ...]:
    seen: set[str] = set()
    for host in hosts:
        if host.name in seen:
            raise UserError(f"{where}: {host.name} is there twice; give its workers together, as in {host.name}:8")
        seen.add(host.name)
    if len(hosts) > MOST_HOSTS:
        raise UserError(f"{where} has {len(hosts)} hosts; the limit is {MOST_HOSTS}")
    return tuple(hosts)
