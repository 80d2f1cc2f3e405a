"""The hosts of a run, from --hosts and from a hostfile."""

from __future__ import annotations

import pytest

from holdfast.errors import UserError
from holdfast.hosts.ssh.host_list import MOST_HOSTS, Host, parse_hostfile, parse_hosts
from tests.promises import promise, proves


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", [Host("node1")]),
        ("node1,node2:8", [Host("node1"), Host("node2", 8)]),
        (" node1 , me@node2:1 ", [Host("node1"), Host("me@node2", 1)]),
        ("10.0.0.1:4,[fe80::1%eth0],[::1]:2", [Host("10.0.0.1", 4), Host("[fe80::1%eth0]"), Host("[::1]", 2)]),
        ("a-b.example.com,a_b", [Host("a-b.example.com"), Host("a_b")]),
    ],
)
def test_hosts_with_their_slots(text: str, hosts: list[Host]) -> None:
    assert parse_hosts(text) == tuple(hosts)


def test_a_name_for_people_has_no_user() -> None:
    assert Host("me@node2", 1).name == "node2"


@promise("""ssh.hosts-hostfiles-options-make: Hosts, hostfiles and options that make no sense are refused before any
    ssh.""")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--hosts '' names no host"),
        (" , ", "--hosts ' , ' names no host"),
        ("a,,b", "has an empty element"),
        ("a,", "has an empty element"),
        ("a,b,a", "a is there twice"),
        ("a,me@a", "a is there twice"),
        ("a:2,a:3", "a is there twice"),
        ("::1", r"write an IPv6 address in brackets, as in \[::1\]"),
        ("me@fe80::1", r"as in \[fe80::1\]"),
        ("a:x", "'x' is not a number of workers; ports belong into ~/.ssh/config"),
        ("a:0", "'0' is not a number of workers"),
        ("a:-1", "'-1' is not a number"),
        ("a:", "'' is not a number"),
        ("a:1000000000000", "is not a number of workers"),
        ("a:٣", "is not a number of workers"),
        ("-oProxyCommand=x", "'-oProxyCommand=x' is not a host"),
        ("a b", "'a b' is not a host"),
        ("node[1-4]", "is not a host"),
        ("$(reboot)", "is not a host"),
        ("@a", "is not a host"),
        ("[::1", "is not a host|in brackets"),
    ],
)
def test_hosts_that_make_no_sense(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_hosts(text)


def test_a_hostfile_as_mpi_users_have_it() -> None:
    text = """
        # the rack on the left
        node1 slots=8
        node2   slots=4   max_slots=8   # half of it
        node3:2

        me@node4
        node5 max-slots=3
    """
    hosts = [Host("node1", 8), Host("node2", 4), Host("node3", 2), Host("me@node4"), Host("node5")]
    assert parse_hostfile("hosts", text) == tuple(hosts)


@proves("ssh.hosts-hostfiles-options-make")
@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "--hostfile 'h' names no host"),
        ("\n# only a comment\n", "names no host"),
        ("a\nb slots=0", "line 2: '0' is not a number of workers"),
        ("a slots", "line 1: 'slots' is not understood"),
        ("a cpus=3", "line 1: 'cpus=3' is not understood"),
        ("a:3 slots=3", "line 1: the slots of a are given twice"),
        ("a slots=3 slots=3", "the slots of a are given twice"),
        ("import os, sys", "'os,' is not understood"),
        ("a\n::1", "line 2: write an IPv6 address in brackets"),
        ("a\na", "a is there twice"),
        ("\x00\x01", "is not a host"),
    ],
)
def test_a_hostfile_that_makes_no_sense(text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        parse_hostfile("h", text)


def test_there_is_a_limit() -> None:
    with pytest.raises(UserError, match=f"the limit is {MOST_HOSTS}"):
        parse_hosts(",".join(f"n{number}" for number in range(MOST_HOSTS + 1)))
