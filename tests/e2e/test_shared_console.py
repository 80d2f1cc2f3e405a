"""Several workers on one console: their lines do not tear each other, and a terminal can be read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast, ends_of
from tests.e2e.terminal import on_terminal, seen, terminal
from tests.promises import promise, proves
from tests.support import Mailbox

COUNT = 2000

# Lines of many lengths, each in several writes, on both streams.
CHATTER = f"""
    import os, random
    rank = os.environ["RANK"]
    random.seed(rank)
    for index in range({COUNT}):
        stream = 1 + index % 2
        line = f"{{rank}}-{{index}}-" + rank * (index * 7 % 401) + "\\n"
        while line:
            cut = random.randrange(1, len(line) + 1)
            line = line[os.write(stream, line[:cut].encode()) :]  # Less than all, if the process was stopped meanwhile.
"""

# Every rank comes to the same point before it writes.
TOGETHER = """
    import os, sys, time
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    def meet(name):
        open(f"{name}.{rank}", "w").close()
        while not all(os.path.exists(f"{name}.{each}") for each in range(world)):
            time.sleep(0.001)
"""

CLAIM = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"


def chatter(rank: int, stream: int) -> list[str]:
    indices = range(stream - 1, COUNT, 2)
    return [f"{rank}-{index}-" + str(rank) * (index * 7 % 401) for index in indices]


def assert_in_order(lines: list[str], stream: list[str]) -> None:
    among = set(stream)
    assert [line for line in lines if line in among] == stream, "each stream keeps its order"


def labelled(shown: str) -> list[tuple[set[int], str]]:
    """The lines on a terminal with the ranks that their labels name."""
    found = []
    for line in shown.splitlines():
        match = re.fullmatch(r"\[ranks? ([\d, -]+)\] (.*)", line)
        assert match, f"no label: {line!r}"
        ends = [[int(end) for end in each.split("-")] for each in match[1].split(", ")]
        found.append(({number for end in ends for number in range(end[0], end[-1] + 1)}, match[2]))
    return found


@promise("""output.lines-several-workers-console: Lines of several workers on one console do not tear each other, on
    stdout, on stderr and on both in one pipe. Each stream keeps its order.""")
def test_no_line_is_torn_in_a_pipe(holdfast: Holdfast) -> None:
    """stdout and stderr are one pipe, as with `2>&1 |`, and without a prefix."""
    running = holdfast.start(
        "-q", "--nproc-per-node=4", holdfast.script(CHATTER), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert running.process.stdout is not None
    text = running.process.stdout.read().decode()
    assert running.wait().code == 0
    lines = text.splitlines()
    assert Counter(lines) == Counter(line for rank in range(4) for stream in (1, 2) for line in chatter(rank, stream))
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"{rank}-")]
        for stream in (1, 2):
            assert_in_order(mine, chatter(rank, stream))


@proves("output.terminal-prefixes-line-several")
def test_the_same_lines_are_folded_on_a_terminal_only(holdfast: Holdfast) -> None:
    script = holdfast.script(
        TOGETHER
        + """
    for index in range(10):
        meet(f"{sys.argv[1]}{index}")
        print(f"same {index}")
        print(f"own {rank} {index}")
    """
    )
    options = ("-q", "--nproc-per-node=4", "--tee=1", "--log-dir=logs")
    same = [f"same {index}" for index in range(10)]
    for prefix in ("--prefix=auto", "--prefix=always"):
        ended, shown = on_terminal(holdfast, *options[:2], prefix, script, prefix)
        assert ended.code == 0
        found = labelled(shown)
        for rank in range(4):
            own = [f"own {rank} {index}" for index in range(10)]
            mine = [line for ranks, line in found if rank in ranks]
            assert mine == [line for pair in zip(same, own, strict=True) for line in pair]
        assert any(len(ranks) > 1 for ranks, _ in found), "none of forty same lines was folded"
    piped = holdfast.run(*options[:2], script, "piped")
    assert Counter(piped.lines)["same 3"] == 4
    assert "[" not in piped.out
    always = holdfast.run(*options[:2], "--prefix=always", script, "always")
    assert {f"[rank {rank}] same 3" for rank in range(4)} <= set(always.lines)
    plain, shown = on_terminal(holdfast, *options[:2], "--prefix=never", script, "plain")
    assert Counter(shown.splitlines())["same 3"] == 4
    assert "[" not in shown
    # Files have what the workers wrote, and nothing else.
    teed, shown = on_terminal(holdfast, *options, script, "teed")
    assert (plain.code, teed.code) == (0, 0)
    for rank in range(4):
        (log,) = (holdfast.directory / "logs").glob(f"*/attempt_0/{rank}/stdout.log")
        assert log.read_text() == "".join(f"same {index}\nown {rank} {index}\n" for index in range(10))
        assert f"[default{rank}]:own {rank} 3\r\n" in shown


@promise("""output.lines-prefix-tee-several: Lines have a prefix if they are tee'd or if several workers share a
    terminal; with `--prefix always` all have one, with `--prefix never` none.""")
@pytest.mark.parametrize(
    ("options", "out"),
    [
        (["--nproc-per-node=2"], "x\nx\n"),
        (["--nproc-per-node=2", "--local-ranks-filter=1", "--prefix=always"], "[rank 1] x\n"),
        (["--nproc-per-node=1", "-t1", "--prefix=always"], "[default0]:x\n"),
        (["--nproc-per-node=1", "-t1", "--prefix=never"], "x\n"),
    ],
    ids=" ".join,
)
def test_prefixes_in_a_pipe(holdfast: Holdfast, options: list[str], out: str) -> None:
    ended = holdfast.run("-q", *options, holdfast.script("print('x')"))
    assert (ended.code, ended.out) == (0, out)


@promise("""output.run-several-nodes-label: In a run of several nodes the label of a worker has the host's name:
    `[node1:rank 3]`. `--log-line-prefix-template` replaces the label and may name the host.""")
def test_prefixes_name_the_host_if_there_are_several_nodes(holdfast: Holdfast) -> None:
    endpoint = f"127.0.0.1:{support.free_port()}"
    place = ("--nnodes", "2", "--rdzv-backend", "tcp", "--rdzv-endpoint", endpoint, "--rdzv-id", "job")
    options = ("-q", *place, "--prefix=always", "--node-rank")
    script = holdfast.script("print('x')")
    hosts = {"HOLDFAST_HOST_NAME": "node1"}
    template = ("--log-line-prefix-template", "<${hostname} ${rank}> ")
    nodes = [
        holdfast.start(*options, "0", script, env=hosts),
        holdfast.start(*options, "1", *template, script, env=hosts),
    ]
    assert [ended.out for ended in ends_of(*nodes)] == ["[node1:rank 0] x\n", "<node1 1> x\n"]


@promise("""output.single-worker-writes-stdout: A single worker writes to holdfast's stdout itself, unless a prefix is
    asked for.""")
def test_one_worker_writes_to_the_console_itself(holdfast: Holdfast) -> None:
    ended = holdfast.run("-q", holdfast.script("import os; print(os.readlink('/proc/self/fd/1'))"))
    assert ended.out == f"{holdfast.directory / '1.out'}\n"


@proves("output.terminal-progress-bars-several")
def test_a_progress_bar_among_lines(holdfast: Holdfast) -> None:
    gate = holdfast.directory / "gate"
    os.mkfifo(gate)
    script = holdfast.script("""
        import os, sys
        rank = os.environ["RANK"]
        if rank == "0":
            for percent in range(101):
                sys.stderr.write(f"\\r{percent}%|" + "#" * (percent // 5))
                if percent == 50:
                    open("gate").close()
            sys.stderr.write("\\n")
        else:
            for index in range(200):
                print(f"line {index} of {rank}")
    """)
    with terminal() as (near, far):
        options = ("-q", "--nproc-per-node=3", script)
        running = holdfast.start(*options, stdin=far, stdout=far, stderr=far, env={"TERM": "xterm"})
        os.close(far)
        shown = near.read_until("[rank 0] 50%|##########")
        support.open_gate(gate)
        shown += near.read_to_end()
        assert running.wait().code == 0
    lines = seen(shown)
    assert lines.count("[rank 0] 100%|####################") == 1
    for rank in (1, 2):
        mine = [line for line in lines if line.endswith(f" of {rank}")]
        assert mine == [f"[rank {rank}] line {index} of {rank}" for index in range(200)]
    assert [line for line in lines if "%" in line] == ["[rank 0] 100%|####################"], "it stays one line"


@promise("""output.pipe-state-progress-bar: In a pipe every state of a progress bar passes at once. A line of another
    worker begins a new line.""")
def test_a_progress_bar_in_a_pipe_joins_no_line_of_another_worker(holdfast: Holdfast) -> None:
    script = holdfast.script(
        TOGETHER
        + """
    for index in range(20):
        if rank == "0":
            os.write(1, b"%d%%\\r" % index)
        meet(f"bar{index}")
        if rank == "1":
            print("line", index)
        meet(f"line{index}")
    """
    )
    ended = holdfast.run("-q", "--nproc-per-node=2", script)
    assert ended.code == 0
    lines = ended.raw_out.split(b"\n")
    assert [line for line in lines if b"line" in line] == [b"line %d" % index for index in range(20)]
    assert b"".join(line for line in lines if b"%" in line) == b"".join(b"%d%%\r" % index for index in range(20))


@promise("""output.new-size-terminal-reaches: A new size of the terminal reaches workers at once, also those that write
    nothing.""")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_new_size_reaches_workers_that_write_nothing(holdfast: Holdfast, mailbox: Mailbox, workers: int) -> None:
    script = holdfast.script("""
        import os, sys, time
        def tell():
            with open(sys.argv[1], "w") as box:
                box.write(f"{tuple(os.get_terminal_size(2))}\\n")
        first = os.get_terminal_size(2)
        tell()
        while os.get_terminal_size(2) == first:
            time.sleep(0.01)
        tell()
    """)
    margin = 9 if workers > 1 else 0
    with terminal(33, 101) as (near, far):
        options = ("-q", f"--nproc-per-node={workers}", script, str(mailbox))
        running = holdfast.start(*options, stdin=far, stdout=far, stderr=far, before=CLAIM)
        os.close(far)
        assert mailbox.take(workers) == [f"({101 - margin}, 33)"] * workers
        near.resize(44, 88)
        assert mailbox.take(workers) == [f"({88 - margin}, 44)"] * workers
        near.read_to_end()
        assert running.wait().code == 0


FLOOD = """
    import os, sys, time
    with open(sys.argv[1], "w") as box:
        box.write(f"{os.getpid()}\\n")
    if os.environ["RANK"] == sys.argv[2]:
        open(sys.argv[3]).close()
        sys.exit(3)
    while True:
        os.write(1, b"x" * 999 + b"\\n")
"""


@promise("""output.nobody-reads-stdout-failure: If nobody reads stdout, a failure still stops the workers and ends the
    run. Workers that write end with a killed agent.""")
def test_a_failure_ends_the_run_though_nobody_reads_stdout(holdfast: Holdfast, mailbox: Mailbox) -> None:
    gate = holdfast.directory / "gate"
    os.mkfifo(gate)
    reader, writer = os.pipe()
    try:
        options = ("-q", "--nproc-per-node=3", holdfast.script(FLOOD), str(mailbox), "1", str(gate))
        running = holdfast.start(*options, stdout=writer)
        os.close(writer)
        workers = [int(pid) for pid in mailbox.take(3)]
        support.open_gate(gate)
        assert support.survivors(workers) == []
        ended = running.wait()
        assert ended.code == 1
        assert ended.last.startswith("Cause: rank 1 exited with code 3")
    finally:
        os.close(reader)


@proves("output.nobody-reads-stdout-failure")
def test_workers_that_write_end_with_a_killed_agent(holdfast: Holdfast, mailbox: Mailbox) -> None:
    """What was read before is whole."""
    options = ("-q", "--nproc-per-node=2", holdfast.script(FLOOD), str(mailbox), "none", "")
    running = holdfast.start(*options)
    workers = [int(pid) for pid in mailbox.take(2)]
    out = Path(holdfast.directory / "1.out")
    support.wait_until(lambda: out.stat().st_size > 1 << 20, "a lot was written")
    running.send(signal.SIGKILL)
    assert support.survivors(workers) == []
    running.process.wait()
    support.wait_until(lambda: not running.left(), "the spawner has ended, too")
    lines = out.read_bytes().split(b"\n")
    assert set(lines[:-1]) == {b"x" * 999}
