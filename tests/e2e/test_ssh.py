"""`holdfast run --hosts` with real ssh servers, on loopback: two hosts, node1 and node2, which are this machine."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import support
from tests.e2e.command import COMMAND, Holdfast, Running
from tests.engines import Engines, Ssh, agent_of
from tests.promises import promise, proves
from tests.support import Mailbox


@pytest.fixture
def cluster(holdfast: Holdfast, mailbox: Mailbox, tmp_path: Path) -> Iterator[Ssh]:
    with Engines().engine("ssh", holdfast, mailbox, tmp_path) as made:
        assert isinstance(made, Ssh)
        yield made


def ssh_of(running: Running, host: str) -> int:
    """The process that keeps the connection to that host."""
    [found] = [each.pid for each in psutil.Process(running.pid).children() if host in each.cmdline()]
    return found


def test_without_a_server(holdfast: Holdfast) -> None:
    """A stand-in for ssh runs the remote command in a shell of this host."""
    here = 'SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"'
    ssh = holdfast.script(f'#!/bin/sh\nfor last; do :; done\n{here} exec sh -c "$last"\n', "ssh", executable=True)
    job = holdfast.script("import os; print('rank', os.environ['RANK'], 'of', os.environ['WORLD_SIZE'])")
    ended = holdfast.run("--hosts=node1,node2", f"--ssh=./{ssh}", job)
    assert (ended.code, sorted(ended.lines)) == (0, ["[node1:0] rank 0 of 2", "[node2:1] rank 1 of 2"]), ended


@promise("""ssh.hosts-starts-agent-host: `--hosts` starts one agent a host, with ranks in the order of the hosts and as
    many workers as each host's number says, in the same directory; every line has its host and rank.""")
def test_two_hosts_are_one_run(cluster: Ssh) -> None:
    script = cluster.holdfast.script("""
        import os
        names = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
        print(*(os.environ[name] for name in names), os.getcwd())
    """)
    ended = cluster.run("--hosts", "node1,node2:3", "--nproc-per-node", "2", script)
    assert ended.code == 0, ended
    here = cluster.holdfast.directory
    sizes = {0: "2 0", 1: "2 0", 2: "3 1", 3: "3 1", 4: "3 1"}
    nodes = {0: "node1", 1: "node1", 2: "node2", 3: "node2", 4: "node2"}
    expected = [f"[{nodes[rank]}:{rank}] {rank} 5 {sizes[rank]} 127.0.0.1 {here}" for rank in range(5)]
    assert sorted(ended.lines) == expected
    assert ended.own[0] == "holdfast: 2 hosts connected: node1, node2"
    assert sum("started" in line for line in ended.own) == 2
    assert not [line for line in ended.own if "no token" in line]


@promise("""ssh.host-beyond-number-nodes: A host beyond the number of nodes stands by, and takes the place of one that
    is lost. A host whose workers take longer than the others wait (`--exit-barrier-timeout`) goes on; if it fails, the
    command fails.""")
def test_a_host_that_stands_by_takes_the_place_of_one_that_is_lost(cluster: Ssh, tmp_path: Path) -> None:
    running = cluster.work("wait", options=("--hosts=node1,node2", "--nnodes=1"))
    pids = cluster.pids(1)
    os.kill(agent_of(pids[0]), signal.SIGKILL)
    cluster.pids(1)
    cluster.done.touch()
    ended = running.wait()
    assert ended.code == 0, ended
    assert ended.lines[-1] == "[node2:0] done 0"


@promise("""ssh.env-remote-python-copy: `--env`, `--remote-python` and `--copy` do what they say. A copy is removed at
    the end, also if the agent is killed.""")
def test_variables_and_interpreter_are_given_to_the_hosts(cluster: Ssh) -> None:
    python = cluster.holdfast.script(f'#!/bin/sh\nVIA=wrapper exec {sys.executable} "$@"\n', "python", executable=True)
    script = cluster.holdfast.script("""
        import os
        print(*(os.environ.get(name) for name in ("A", "SECRET", "VIA", "OTHER", "PET_NNODES", "HOLDFAST_TOKEN")))
    """)
    ended = cluster.run(
        "--hosts=node1,node2", "--env", "A=1,,2", "--env", "SECRET", "--remote-python",
        str(cluster.holdfast.directory / python), script, env={"SECRET": "s", "OTHER": "o"},
    )  # fmt: skip
    assert ended.code == 0, ended
    assert sorted(ended.lines) == [f"[node{number}:{number - 1}] 1,2 s wrapper None None None" for number in (1, 2)]


@proves("ssh.token-values-env-name")
def test_the_token_is_in_no_command_line_and_in_no_environment_that_others_can_read(
    cluster: Ssh, tmp_path: Path
) -> None:
    token = "the word of the day"
    secrets = {"HOLDFAST_TOKEN": token, "API_KEY": "hush"}
    running = cluster.work("wait", options=("--hosts=node1,node2", "--env=API_KEY"), env=secrets)
    pids = cluster.pids(2)
    everything = support.marked(cluster.holdfast.mark)
    files = [f"/proc/{pid}/cmdline" for pid in everything]
    assert not [file for file in files for word in (token, "hush") if word.encode() in Path(file).read_bytes()]
    assert not [pid for pid in pids.values() if token.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    if os.geteuid() == 0:
        (tmp_path / "words").write_text(f"{token}\nhush\n")
        files = [f"/proc/{pid}/{name}" for pid in everything for name in ("cmdline", "environ")]
        with (tmp_path / "words").open() as file:
            looked = subprocess.run(
                ["grep", "-alsFf", "-", *files], stdin=file, stdout=subprocess.PIPE, text=True, cwd="/",
                user=65534, group=65534, extra_groups=[],
            )  # fmt: skip
        assert looked.stdout == ""
    running.send(signal.SIGTERM)
    assert running.wait().code == 143


@proves("ssh.env-remote-python-copy")
@pytest.mark.parametrize("what", ["script", "directory"])
def test_a_copy_is_run_and_removed(cluster: Ssh, what: str) -> None:
    home = cluster.holdfast.directory
    (home / "data.txt").write_text("the data")
    script = cluster.holdfast.script("""
        import os
        print(os.getcwd(), os.path.exists("data.txt"), os.path.basename(__file__))
    """)
    ended = cluster.run("--hosts=node1,node2", f"--copy={what}", script)
    assert ended.code == 0, ended
    assert f"copying {home if what == 'directory' else repr(script)}" in ended.err
    places = [re.fullmatch(r"\[node\d:\d\] (\S+) (\w+) job\.py", line) for line in ended.lines]
    assert [place[2] for place in places if place] == [str(what == "directory")] * 2
    directories = [Path(place[1]) for place in places if place]
    assert directories[0] != directories[1]
    assert not [each for each in directories if each == home or each.exists()]


@proves("ssh.env-remote-python-copy")
def test_a_copy_is_removed_though_the_agent_is_killed(cluster: Ssh) -> None:
    running = cluster.work("wait", options=("--hosts=node1", "--copy=script"))
    pids = cluster.pids(1)
    place = Path(f"/proc/{pids[0]}/cwd").resolve()
    assert place.name.startswith("holdfast-copy-")
    os.kill(agent_of(pids[0]), signal.SIGKILL)
    ended = running.wait()
    assert (ended.code, ended.last) == (1, "holdfast run: error: node1 is lost: its agent was killed"), ended
    support.wait_until(lambda: not place.exists(), "the copy is removed")


def slow_python(cluster: Ssh) -> str:
    source = f"#!/bin/sh\necho Press any key >&2\ntouch {cluster.holdfast.directory}/called\nread line\n"
    return str(cluster.holdfast.directory / cluster.holdfast.script(source, "slow", executable=True))


@proves("ssh.command-killed-stands-cut")
def test_a_command_that_stands_still_is_not_waited_for(cluster: Ssh) -> None:
    running = cluster.work("wait", options=("--hosts=node1,node2", "--host-timeout=4s"))
    cluster.pids(2)
    support.halt(running.pid)
    assert cluster.mailbox.take(2) == ["signal SIGTERM"] * 2
    running.send(signal.SIGCONT)
    running.send(signal.SIGKILL)
    cluster.await_nothing(running)


@promise("ssh.script-place-ends-started: A script in the place of ssh ends with what it has started.")
def test_a_script_in_the_place_of_ssh_leaves_nothing(cluster: Ssh) -> None:
    """It runs ssh as a child, which is killed with it."""
    wrapper = cluster.holdfast.script(f'#!/bin/sh\n{cluster.servers.ssh} "$@"\n', "wrapper", executable=True)
    python = slow_python(cluster)
    running = cluster.holdfast.start("--ssh", str(cluster.holdfast.directory / wrapper), "--hosts=node1",
                                     "--remote-python", python, cluster.holdfast.script(""))  # fmt: skip
    support.wait_until(lambda: (cluster.holdfast.directory / "called").exists(), "the host is connecting")
    below = support.tree(running.pid)
    running.send(signal.SIGTERM)
    assert running.process.wait(support.DEADLINE_S) == 143
    assert support.survivors(below) == []
    cluster.await_nothing(running)


@promise("""ssh.host-agent-killed-network: A host whose ssh or agent is killed, or whose network is cut, is a lost node.
    The run goes on if `--nnodes` allows it, else it ends.""")
def test_the_run_goes_on_without_a_host_whose_ssh_is_killed(cluster: Ssh) -> None:
    running = cluster.work("wait", options=("--hosts=node1,node2", "--nnodes=1:2"))
    cluster.pids(2)
    os.kill(ssh_of(running, "node1"), signal.SIGKILL)
    cluster.pids(1)
    cluster.done.touch()
    ended = running.wait()
    assert ended.code == 0, ended
    why = "ssh was killed by signal 9; the run goes on with 1 host, if they can still reach the coordinator there"
    assert f"holdfast: node1 is lost: {why}" in ended.own
    assert "[node2:0] done 0" in ended.lines


def failing(cluster: Ssh, *args: str) -> str:
    """The one line that is printed; nothing is left (`Running.wait`)."""
    ended = cluster.run(*args, cluster.holdfast.script("print('started')"))
    assert (ended.code, ended.out) == (1, ""), ended
    assert len(ended.err.splitlines()) == 1, ended
    return ended.last.removeprefix("holdfast run: error: ")


@promise("""ssh.host-take-part-line: A host that cannot take part is one line with the reason and the remedy, in bounded
    time, and nothing is left anywhere: unknown name, connection refused, password needed, host key unknown or changed,
    no interpreter, no holdfast, another version, no answer.""")
def test_hosts_that_cannot_be_reached(cluster: Ssh) -> None:
    """What ssh says of each becomes one line for all of them."""
    cluster.servers.enter("unknown", "HostName no.such.host.invalid")
    port = support.free_port()
    cluster.servers.enter("refused", "HostName 127.0.0.1", f"Port {port}")
    said = failing(cluster, "--hosts=node1,unknown,refused")
    assert "unknown: the name does not resolve (" in said
    assert f"refused: connection refused: no ssh server listens there (port {port})" in said


@proves("ssh.host-take-part-line")
def test_hosts_that_ssh_would_ask_about(cluster: Ssh) -> None:
    """A password, a host key that is unknown, and one that has changed."""
    cluster.servers.add("locked", server=["PasswordAuthentication yes", "PubkeyAuthentication no"])
    cluster.servers.add("strange", is_known=False, client=["StrictHostKeyChecking ask"])
    port = cluster.servers.add("changed", is_known=False)
    key = " ".join((cluster.servers.directory / "node1_key.pub").read_text().split()[:2])
    with (cluster.servers.directory / "known_hosts").open("a") as file:
        file.write(f"[127.0.0.1]:{port} {key}\n")
    said = failing(cluster, "--hosts=locked,strange,changed")
    assert "locked: ssh needs a password or a key for it, and must not ask: set up a key" in said
    assert "strange: its host key is not known; connect once by hand" in said
    assert "changed: its host key has changed; if that is right" in said


@proves("ssh.host-take-part-line")
def test_a_host_without_holdfast_or_its_interpreter(cluster: Ssh) -> None:
    said = failing(cluster, "--hosts=node1", "--remote-python=/nowhere/python")
    assert said == "node1: there is no interpreter /nowhere/python on it; --remote-python names another one"
    python = cluster.holdfast.script(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', "bare", executable=True)
    said = failing(cluster, "--hosts=node1", f"--remote-python={cluster.holdfast.directory}/{python}")
    assert "holdfast is not installed for" in said


@proves("ssh.host-take-part-line")
def test_a_host_with_another_version(cluster: Ssh) -> None:
    source = f"""#!/bin/sh
shift 3
exec {sys.executable} -c "import os, sys, holdfast; holdfast.__version__ = '9.9'
from holdfast.hosts.ssh import remote_agent; os._exit(remote_agent.serve(sys.argv[1], 30.0))" "$@"
"""
    python = cluster.holdfast.script(source, "other", executable=True)
    said = failing(cluster, "--hosts=node1,node2", f"--remote-python={cluster.holdfast.directory}/{python}")
    assert re.search(r"node[12]: it has holdfast 9\.9 \(of \S+\), and this host holdfast \S+; install the same", said)


@promise("ssh.noise-host-shell-stdout: Noise of a host's shell on stdout does no harm.")
def test_noise_before_the_first_line_is_ignored(cluster: Ssh) -> None:
    source = f"""#!/bin/sh
head -c 200000 /dev/urandom; printf 'Welcome!'; echo 'do not panic' >&2
exec {sys.executable} "$@"
"""
    python = cluster.holdfast.script(source, "noisy", executable=True)
    ended = cluster.run(
        "--hosts=node1,node2", f"--remote-python={cluster.holdfast.directory}/{python}",
        cluster.holdfast.script("print('work')"),
    )  # fmt: skip
    assert (ended.code, sorted(ended.lines)) == (0, ["[node1:0] work", "[node2:1] work"]), ended


@proves("ssh.host-take-part-line")
def test_a_host_that_does_not_answer(cluster: Ssh) -> None:
    ended = cluster.run(
        "--hosts=node1", "--host-timeout=5s", "--remote-python", slow_python(cluster), cluster.holdfast.script("")
    )
    assert ended.code == 1, ended
    assert ended.own == [
        "holdfast: 0 of 1 hosts are ready, waiting for node1",
        "holdfast run: error: node1: it did not answer within 5 s; its last words were: Press any key",
    ]


def test_a_working_directory_that_a_host_does_not_have(cluster: Ssh, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    source = f'#!/bin/sh\nrmdir {gone}\nexec {sys.executable} "$@"\n'
    python = cluster.holdfast.directory / cluster.holdfast.script(source, "python", executable=True)
    ended = cluster.run("--hosts=node1", "--remote-python", str(python), "job.py", cwd=gone)
    assert (ended.code, ended.last) == (
        2, f"holdfast run: error: node1: cannot use the working directory '{gone}': No such file or directory; start "
        "the command in a directory that all hosts have, or use --copy directory",
    ), ended  # fmt: skip


def test_a_script_that_one_host_does_not_have(cluster: Ssh) -> None:
    ended = cluster.run("--hosts=node1,node2", "nosuch.py")
    assert (ended.code, ended.last) == (1, ended.last), ended
    assert "script 'nosuch.py' does not exist" in ended.last
    assert ended.err.count("FAILED") == 1


@promise("""ssh.commands-reach-run: On the machine of the command, `holdfast ps` lists its run, and `status`, `logs` and
    `stop` reach it over ssh, whether or not its coordinator can be reached from there.""")
def test_commands_reach_the_run_through_the_command_that_started_it(cluster: Ssh, tmp_path: Path) -> None:
    """Named by its pid, the command alone is asked, and not the agents, which are on this machine, too."""
    running = cluster.work("lines", "wait", options=("--nnodes=2", "--tee=3", f"--log-dir={tmp_path}/logs"))
    cluster.pids(2)
    pid = str(running.pid)

    def asked(*words: str) -> str:
        environ = {**os.environ, **cluster.holdfast.environment()}
        done = subprocess.run([COMMAND, *words], capture_output=True, text=True, env=environ, timeout=60)
        assert done.returncode == 0, done
        return done.stdout

    listed = re.compile(rf"^\S+ +{pid} +\d of 2 +running", re.MULTILINE)  # Both agents are on this machine.
    # Answers come behind output, of which there is much.
    support.wait_until(lambda: listed.search(asked("ps")), "it is listed", 4 * support.DEADLINE_S, lambda: asked("ps"))
    shown = asked("status", pid, "--all")
    assert re.search(r"^1 +\S+ +\S+ +running", shown, re.MULTILINE), shown
    assert "All 2 workers are running" in shown
    assert "1 1999 " in asked("logs", pid, "--rank=1")
    asked("stop", pid)
    ended = running.wait()
    assert ended.code == 94, ended


@promise("""notice.hosts: `holdfast notice` on the machine of `holdfast run` with `--hosts` is about the whole run, and
    reaches it over ssh.""")
def test_a_notice_through_the_command_that_started_the_run(cluster: Ssh) -> None:
    running = cluster.work("save")
    cluster.pids(2)
    words = [COMMAND, "notice", str(running.pid), "--in=1m", "--reason=maintenance"]
    environ = {**os.environ, **cluster.holdfast.environment()}
    done = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=60)
    assert re.fullmatch(r"run \S+ goes away in 1 min\n", done.stdout), done
    ended = running.wait()
    assert ended.code == 95, ended
    assert sorted(cluster.mailbox.take(2)) == ["saved 0", "saved 1"]
    assert "notice: the whole run goes away in 60 s (maintenance)" in ended.err


@promise("""ssh.lost-host-rejoins: With `--rejoin-hosts` a host that was lost is connected again and joins the run.
    Hosts that were lost repeatedly are named at the end.""")
def test_a_lost_host_rejoins(cluster: Ssh) -> None:
    running = cluster.work("wait", options=("--nnodes=1:2", "--rejoin-hosts", "--last-call=1s", "--admit-delay=0"))
    pids = cluster.pids(2)
    os.kill(agent_of(pids[1]), signal.SIGKILL)
    cluster.pids(1)
    cluster.pids(2)
    cluster.done.touch()
    ended = running.wait()
    assert ended.code == 0, ended
    assert "holdfast: node2 is lost: its agent was killed; it is started again" in ended.own
    assert sorted(line for line in ended.lines if "done" in line) == ["[node1:0] done 0", "[node2:1] done 1"]


@promise("""ssh.host-discovery: `--host-discovery` names the hosts, and is asked again while the run goes on: new hosts
    join, and hosts that are missing leave.""")
def test_hosts_are_discovered_while_the_run_goes_on(cluster: Ssh, tmp_path: Path) -> None:
    listed = tmp_path / "listed"
    listed.write_text("node1\n")
    ssh = cluster.command[:4]
    words = (*ssh, "--nnodes=1:2", f"--host-discovery=cat {listed}", "--last-call=1s", "--admit-delay=0")
    running = cluster.holdfast.start(*words[2:], "job.py", str(cluster.mailbox), str(cluster.done), "wait")
    cluster.pids(1)
    (tmp_path / "new").write_text("node1\nnode2 slots=2\n")
    (tmp_path / "new").rename(listed)
    cluster.pids(3)
    (tmp_path / "new").write_text("node1\n")
    (tmp_path / "new").rename(listed)
    cluster.pids(1)
    cluster.done.touch()
    ended = cluster.ended(running)
    assert ended.code == 0, ended
    assert [line for line in ended.own if line.startswith("holdfast: node2 is lost: it is not in the list of hosts")]


@promise("ssh.variables-one-host: A hostfile can give variables to one host.")
def test_variables_of_one_host(cluster: Ssh) -> None:
    (cluster.holdfast.directory / "hosts.txt").write_text("node1 env=COLOUR=red env='WORDS=two words'\nnode2\n")
    script = cluster.holdfast.script("import os; print(os.environ.get('COLOUR'), os.environ.get('WORDS'))")
    ended = cluster.holdfast.run(*cluster.command[2:4], "--hostfile=hosts.txt", script)
    assert (ended.code, sorted(ended.lines)) == (0, ["[node1:0] red two words", "[node2:1] None None"]), ended


def test_a_host_that_cannot_be_reached_is_not_waited_for(cluster: Ssh) -> None:
    """Nodes would wait for it for the whole --last-call."""
    cluster.servers.enter("nowhere", "HostName 127.0.0.1", f"Port {support.free_port()}")
    script = cluster.holdfast.script("print('done')")
    ended = cluster.run("--hosts=node1,nowhere", "--nnodes=1:2", "--last-call=10m", script)
    assert (ended.code, ended.lines) == (0, ["[node1:0] done"]), ended


@promise("""ssh.detach-attach: With `--detach` the command returns when the agents have been started, and the run goes
    on; `holdfast attach` shows its output and ends with its exit code. A run that cannot start is an error at once.""")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_a_run_that_goes_on_without_its_terminal(cluster: Ssh, is_stopped: bool) -> None:
    environ = {**os.environ, **cluster.holdfast.environment()}
    program, run_id = ("job.py", str(cluster.mailbox), str(cluster.done), "wait"), f"team/{uuid.uuid4().hex}"
    started = cluster.holdfast.start(
        *cluster.command[2:], "--detach", f"--rdzv-id={run_id}", *program, command=(COMMAND, "run")
    )
    assert started.process.wait(60) == 0, started.so_far()
    assert f"`holdfast attach {run_id}` shows it, and `holdfast stop {run_id}` ends it" in started.so_far().err
    pids = cluster.pids(2)
    [owner] = [pid for pid in support.marked(cluster.holdfast.mark)
               if f"--ssh={cluster.servers.ssh}" in psutil.Process(pid).cmdline()]  # fmt: skip
    attach = [COMMAND, "attach", str(owner)]
    attached = subprocess.Popen(attach, stdout=subprocess.PIPE, env=environ, cwd=cluster.holdfast.directory)
    try:
        assert attached.stdout is not None
        assert b"2 hosts connected" in attached.stdout.readline()
        if is_stopped:
            subprocess.run([COMMAND, "stop", str(owner)], check=True, env=environ, timeout=60)
        cluster.done.touch()
        out, _ = attached.communicate(timeout=60)
    finally:
        attached.kill()
    assert (attached.returncode, out.count(b"] done ")) == ((94, 0) if is_stopped else (0, 2)), out
    assert support.survivors(pids.values()) == []
    support.wait_until(lambda: not support.marked(cluster.holdfast.mark), "nothing is left")


@proves("ssh.detach-attach")
def test_a_detached_run_that_cannot_start(cluster: Ssh) -> None:
    ended = cluster.run("--hosts=node1,[::1", "--detach", cluster.holdfast.script("pass"))
    assert ended.code == 2
    cluster.servers.enter("nowhere", "HostName 127.0.0.1", f"Port {support.free_port()}")
    ended = cluster.run("--hosts=nowhere", "--detach", cluster.holdfast.script("pass"))
    assert (ended.code, "nowhere: connection refused" in ended.err) == (1, True), ended
