"""The command line of ssh, and what it means that an ssh has ended."""

from __future__ import annotations

import shlex
import subprocess

import pytest

from holdfast.hosts.ssh import command
from holdfast.hosts.ssh.command import Meaning, meaning_of_failure, meaning_of_loss, ssh_command


def test_ssh_asks_nothing_and_ends_by_itself() -> None:
    words = ssh_command(("ssh", "-F", "x"), "me@node1", "/usr/bin/python3", "abc", 30)
    assert words[:3] == ["ssh", "-F", "x"]
    for setting in ("BatchMode=yes", "ServerAliveInterval=8", "ServerAliveCountMax=3", "ConnectTimeout=30"):
        assert words[words.index(setting) - 1] == "-o"
    assert words[-3:-1] == ["--", "me@node1"]


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("python", ["/bin/echo", "/tmp/it's a path/python"])
def test_a_shell_reads_the_remote_command_as_it_was_meant(shell: str, python: str) -> None:
    remote = ssh_command(("ssh",), "node1", python, "abc", 1.5)[-1]
    words = shlex.split(remote)
    assert words == ["exec", python, "-P", "-m", "holdfast.hosts.ssh.remote_agent", "abc", "1.5"]
    if python == "/bin/echo":
        said = subprocess.run([shell, "-c", remote], capture_output=True, text=True).stdout
        assert said.split() == words[2:]


@pytest.mark.parametrize(
    ("target", "expected"), [("[::1]", "::1"), ("me@[fe80::1%e]", "me@fe80::1%e"), ("me@node1", "me@node1")]
)
def test_ssh_takes_addresses_without_brackets(target: str, expected: str) -> None:
    assert command.without_brackets(target) == expected


OTHER = "; --remote-python names another one"


@pytest.mark.parametrize(
    ("status", "said", "reason"),
    [
        (255, "ssh: Could not resolve hostname nod1: Name or service not known\r\n",
         "the name does not resolve (Name or service not known); check its spelling, and ~/.ssh/config"),
        (255, "ssh: connect to host 10.0.0.1 port 2222: Connection refused\r\n",
         "connection refused: no ssh server listens there (port 2222)"),
        (255, "ssh: connect to host 10.0.0.1 port 22: Connection timed out\r\n",
         "it does not answer (connection timed out)"),
        (255, "ssh: connect to host 10.0.0.1 port 22: No route to host\r\n", "there is no route to it"),
        (255, "ssh: connect to host ::1 port 22: Network is unreachable\r\n", "its network is unreachable"),
        (255, "me@node1: Permission denied (publickey,password).\r\n",
         "ssh needs a password or a key for it, and must not ask: set up a key (`ssh-copy-id me@node1`) or an agent"),
        (255, "Received disconnect from 10.0.0.1 port 22:2: Too many authentication failures\r\n",
         "ssh offered it too many keys; name the right one in ~/.ssh/config"),
        (255, "No ED25519 host key is known for node1 and you have requested strict checking.\r\n"
              "Host key verification failed.\r\n",
         "its host key is not known; connect once by hand (`ssh me@node1`) and check it"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.\r\n",
         "its host key has changed; if that is right, remove the old one with `ssh-keygen -R` and connect once by "
         "hand"),
        (255, "/etc/ssh/config: line 3: Bad configuration option: x\n",
         "ssh failed: /etc/ssh/config: line 3: Bad configuration option: x"),
        (255, "", "ssh failed, and did not say why"),
        (-9, "", "ssh was killed by signal 9"),
        (127, "bash: line 1: exec: /opt/python: cannot execute: No such file or directory\n",
         "there is no interpreter /opt/python on it" + OTHER),
        (126, "sh: 1: exec: /opt/python: Permission denied\n",
         "there is no interpreter /opt/python on it" + OTHER),
        (1, "Traceback ...\nModuleNotFoundError: No module named 'holdfast'\n",
         "holdfast is not installed for /opt/python on it; install it there" + OTHER),
        (1, "motd: cannot get the weather: Connection refused\nModuleNotFoundError: No module named 'holdfast'\n",
         "holdfast is not installed for /opt/python on it; install it there" + OTHER),
        (1, "/opt/python: Error while finding module specification for 'holdfast.hosts.ssh.remote_agent' "
         "(ModuleNotFoundError: No module named 'holdfast')\n",
         "holdfast is not installed for /opt/python on it; install it there" + OTHER),
        (1, "ModuleNotFoundError: No module named 'holdfast.hosts.ssh'\n",
         "its holdfast (of /opt/python) is another version; install the one of this host" + OTHER),
        (2, "Unknown option: -P\nusage: /opt/python [option] ... [-c cmd | -m mod | file | -] [arg] ...\n",
         "/opt/python on it cannot run holdfast, which needs Python 3.11 or newer" + OTHER),
        (1, '    match command:\nSyntaxError: invalid syntax\n',
         "/opt/python on it cannot run holdfast, which needs Python 3.11 or newer" + OTHER),
        (1, "This account is currently not available.\n",
         "holdfast cannot be started with /opt/python on it (exit status 1): This account is currently not available."),
        (0, "", "holdfast cannot be started with /opt/python on it (exit status 0), and did not say why"),
    ],
)  # fmt: skip
def test_what_it_means_that_ssh_has_ended_before_the_hello(status: int, said: str, reason: str) -> None:
    assert meaning_of_failure(status, said, "me@node1", "/opt/python", 30) == Meaning(reason)


@pytest.mark.parametrize(
    "said",
    [
        "kex_exchange_identification: Connection closed by remote host\r\nConnection closed by 10.0.0.1 port 22\r\n",
        "kex_exchange_identification: read: Connection reset by peer\r\n",
        "Connection closed by UNKNOWN port 65535\r\n",
    ],
)
def test_a_server_that_hangs_up_is_worth_another_try(said: str) -> None:
    assert meaning_of_failure(255, said, "node1", "python", 30).may_pass


def test_a_host_that_did_not_answer() -> None:
    found = meaning_of_failure(-9, "Welcome\nPress any key\n", "node1", "python", 30, is_cut=True)
    assert found == Meaning("it did not answer within 30 s; its last words were: Press any key")


@pytest.mark.parametrize(
    ("status", "last", "reason"),
    [
        (255, "Timeout, server node1 not responding.", "it does not answer any more"),
        (255, "Connection to node1 closed by remote host.",
         "the connection broke (Connection to node1 closed by remote host.)"),
        (255, "", "the connection broke"),
        (-15, "", "ssh was killed by signal 15"),
        (137, "", "its agent ended with exit status 137"),
    ],
)  # fmt: skip
def test_what_it_means_that_ssh_has_ended_without_the_agents_end(status: int, last: str, reason: str) -> None:
    assert meaning_of_loss(status, last) == reason
