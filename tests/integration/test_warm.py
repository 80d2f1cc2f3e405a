"""Warm workers: what they see, compared with cold ones, and what happens when preloading goes wrong.

The programs of test_bootstrap.py are started cold and warm by the same spawner and must show the same. What only a fork
could spoil (random states, threads, locks, children, names) is compared by programs of its own.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast.process import DefaultLogsSpecs, Std
from holdfast.process.spawner import command, template
from holdfast.process.spawner.client import SpawnerLink
from holdfast.process.workers.group import GroupSpec, PContext
from holdfast.process.workers.start import new_group
from tests import entrypoints, support
from tests.integration.test_bootstrap import BEHAVIOUR_CASES, EXIT_CASES, FACT_CASES, Case, lay_out
from tests.promises import promise, proves

HARMLESS = "marshal"  # Built in, so that a template which preloads it has imported nothing.


class Spawner:
    """One spawner, as an agent keeps it, and groups that it starts."""

    def __init__(self, tmp_path: Path) -> None:
        self.link = SpawnerLink.launch()
        self._tmp_path = tmp_path
        self._logs = 0
        self.spec = GroupSpec("t", sys.executable, DefaultLogsSpecs("/dev/null"))

    def group(
        self, *args: Any, preload: tuple[str, ...] = (), ranks: int = 1, entrypoint: Any = sys.executable, **more: Any
    ) -> PContext:
        self._logs += 1
        logs = DefaultLogsSpecs(str(self._tmp_path / f"logs{self._logs}"), redirects=Std.ALL)
        self.spec = GroupSpec("t", entrypoint, logs, preload=preload, **more)
        envs = {rank: {"RANK": str(rank)} for rank in range(ranks)}
        return new_group(self.spec, dict.fromkeys(range(ranks), args), envs, link=self.link)

    def warm_up(self, *args: Any) -> None:
        wanted = command.template_for(self.spec, args)
        assert wanted is not None
        self.link.preload(wanted, command.bytecode())

    def wait_until_warm(self) -> None:
        while self.link.is_preloading:
            assert self.link.reports() == []
            if self.link.is_preloading:
                self.link.wait(support.DEADLINE_S)

    def run(self, *args: Any, **options: Any) -> list[tuple[int, str, str]]:
        """Exit code, stdout and stderr of each worker."""
        context = self.group(*args, **options)
        if options.get("preload"):
            self.warm_up(*args)
        context.start()
        context.wait(4 * support.DEADLINE_S)  # Some import torch several times.
        context.close(timeout=5)
        codes = [code for _, (code, *_) in sorted(context.ends().items())]
        outs, errs = ([Path(paths[rank]).read_text() for rank in paths] for paths in (context.stdouts, context.stderrs))
        for rank, path in context.error_files.items():  # Each group has its own, and tells its workers.
            outs[rank] = outs[rank].replace(path, "error.json")
        return list(zip(codes, outs, errs, strict=True))

    def template(self) -> int:
        """The pid of the template."""
        pids = support.wait_until(
            lambda: [pid for pid in support.tree(self.link.pid) if support.is_template(pid)], "there is a template"
        )
        return pids[0]


@pytest.fixture
def spawner(tmp_path: Path) -> Iterator[Spawner]:
    spawner = Spawner(tmp_path)
    yield spawner
    spawner.link.close()


def reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# The same program, cold and warm.

ENDS = ("exit_3", "exit_text", "interrupt", "segfault", "output_closed")
CASES = [*FACT_CASES, *BEHAVIOUR_CASES, *(case for case in EXIT_CASES if case.name in ENDS)]
CASES = [case for case in CASES if not case.stdin]


@promise("""workers.preload-shows-cold-shows: With `--preload` a worker shows what a cold one shows, as far as a fork
    allows ([what differs](warm-start.md#what-differs-for-a-worker)): arguments, paths, flags, environment, descriptors,
    threads, exit handlers, data loaders.""")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_warm_worker_shows_what_a_cold_one_shows(
    case: Case, spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    lay_out(case, home, sys.executable)
    monkeypatch.chdir(home)
    for name in list(os.environ):
        if name not in ("PATH", support.TEST_MARK):
            monkeypatch.delenv(name)
    for name, value in {"HOME": str(home), "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", **case.env}.items():
        monkeypatch.setenv(name, value)
    args = [*case.flags, *(argument.replace("{dir}", str(home)) for argument in case.args)]
    cold = spawner.run(*args)
    assert spawner.run(*args, preload=(HARMLESS,)) == cold


DIFFERENT = """
import json, multiprocessing, os, random, tempfile, uuid
import numpy, torch
print(json.dumps({
    "torch": torch.initial_seed(), "tensor": torch.rand(1).item(),
    "random": random.random(), "numpy": numpy.random.random(), "uuid": [str(uuid.uuid1()), uuid.getnode()],
    "file": tempfile.mktemp(), "key": bytes(multiprocessing.current_process().authkey).hex(),
}))
"""


@promise("""workers.random-numbers-keys-names: Random numbers, keys and names that differ between cold workers differ
    between warm ones.""")
def test_what_differs_between_cold_workers_differs_between_warm_ones(spawner: Spawner, tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", DIFFERENT)
    modules = ("random", "numpy", "torch", "uuid", "tempfile", "multiprocessing")
    ended = [*spawner.run(script, preload=modules, ranks=3), *spawner.run(script, preload=modules, ranks=3)]
    assert [code for code, *_ in ended] == [0] * 6, ended
    found = [json.loads(out) for _, out, _ in ended]
    for name in ("random", "numpy", "torch", "tensor", "file", "key"):
        assert len({each[name] for each in found}) == 6, name
    assert len({each["uuid"][0] for each in found}) == 6


SAME = """
import atexit, gc, logging, os, resource, signal, sys, threading
import late, numpy
print(late.SEEN, late.numbers(), os.environ.get("CHANGED"), "REMOVED" in os.environ, sys.path[0] == late.INSERTED)
print(os.environ.get("OPENBLAS_NUM_THREADS"), len(os.sched_getaffinity(0)), os.umask(0o77), os.getcwd())
print(threading.active_count(), threading.current_thread() is threading.main_thread(), gc.isenabled())
print(len(logging.getLogger().handlers), resource.getrlimit(resource.RLIMIT_CORE), os.getsid(0) == os.getpid())
print(sorted(os.readlink(f"/proc/self/fd/{fd}").split(":")[0] for fd in os.listdir("/proc/self/fd") if fd not in "012"
             and os.path.exists(f"/proc/self/fd/{fd}")))
print([signal.getsignal(n) == signal.SIG_DFL for n in range(1, 32) if n not in (9, 19)], signal.pthread_sigmask(0, ()))
product = (numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum()  # Wakes the threads of OpenBLAS.
print(product, len(os.listdir("/proc/self/task")))
atexit.register(print, "the program ends")
if os.fork() == 0:
    print("a child", flush=True)
    os._exit(0)
os.wait()
print(open("/proc/self/cmdline").read().split("\\0")[-3:], sys.orig_argv[-2:])
"""
LATE = """
import atexit, logging, os, sys
logging.basicConfig()
os.environ["CHANGED"] = "by the import"
os.environ.pop("REMOVED", None)
INSERTED = "/inserted"
sys.path.insert(0, INSERTED)
atexit.register(print, "the module ends")
SEEN = os.environ.get("OMP_NUM_THREADS")
def numbers():
    return os.environ["RANK"], os.environ["OMP_NUM_THREADS"]
"""


@proves("workers.preload-shows-cold-shows")
def test_what_imports_leave_behind_is_as_in_a_cold_worker(
    spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = support.write_script(tmp_path / "job.py", SAME)
    support.write_script(tmp_path / "late.py", LATE)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("REMOVED", "no")
    cold = spawner.run(script, "a", ranks=2)
    assert [code for code, *_ in cold] == [0, 0], cold
    assert spawner.run(script, "a", preload=("late", "numpy"), ranks=2) == cold


SLOW_TO_CLOSE = """
import os, time
template, close = os.getpid(), os.close
def close_slowly(fd):
    close(fd)
    if os.getpid() == template:
        time.sleep(0.05)
os.close = close_slowly
"""


@promise("""workers.ends-before-template-looks: A warm worker that ends before its template has closed its copies of the
    worker's descriptors counts as started, with its pid, and as ended.""")
def test_workers_that_end_while_the_template_has_their_descriptors(spawner: Spawner, tmp_path: Path) -> None:
    support.write_script(tmp_path / "slow_to_close.py", SLOW_TO_CLOSE)
    script = support.write_script(tmp_path / "job.py", "")
    context = spawner.group(script, preload=("slow_to_close",), ranks=4)
    spawner.warm_up(script)
    context.start()
    assert context.wait(support.DEADLINE_S) is not None
    assert len(set(context.pids().values())) == 4
    context.close(timeout=5)
    process = psutil.Process(spawner.link.pid)
    busy_s = process.cpu_times().user + process.cpu_times().system
    time.sleep(0.5)
    busy_s = process.cpu_times().user + process.cpu_times().system - busy_s
    assert busy_s < 0.2, "it reads a pipe again and again that is at its end"


TORCH = """
import multiprocessing, os, sys
import torch, torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

class Numbers(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index * index

def square(rank, queue):
    queue.put((rank, __name__, torch.ones(3).sum().item()))

if __name__ == "__main__":
    print(torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), torch.are_deterministic_algorithms_enabled())
    for method in ("fork", "spawn"):
        loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context=method)
        print(method, [batch.tolist() for batch in loader])
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    torch.multiprocessing.spawn(square, (queue,), nprocs=1)
    print(queue.get())
    a = torch.rand(64, 64, requires_grad=True)
    (a @ a).sum().backward()
    print(a.grad.shape, torch.get_num_interop_threads())
"""


@proves("workers.preload-shows-cold-shows")
def test_torch_and_its_data_loaders(spawner: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    support.leave_to_test_all("a long job of torch")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    script = support.write_script(tmp_path / "job.py", TORCH)
    cold = spawner.run(script)
    assert cold[0][0] == 0, cold
    assert spawner.run(script, preload=("torch",)) == cold


@proves("workers.preload-shows-cold-shows")
def test_functions_are_forked_from_the_template(spawner: Spawner) -> None:
    """As many as are ordered at once, which takes over a hundred descriptors."""
    context = spawner.group(preload=("decimal",), entrypoint=entrypoints.modules, ranks=16)
    spawner.warm_up()
    context.start()
    result = context.wait(support.DEADLINE_S)
    context.close()
    assert result is not None
    assert result.failures == {}
    assert all("decimal" in names for names in result.return_values.values())


@promise("""workers.script-read-anew-start: The script is read anew at every start. A preloaded module whose file has
    changed is imported anew before a restart, and a template that has grown or started many workers is replaced.""")
def test_the_script_is_read_anew_and_a_changed_module_is_imported_again(
    spawner: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    module = tmp_path / "mine.py"
    module.write_text("VALUE = 1\n")
    script = support.write_script(tmp_path / "job.py", "import mine\nprint('old', mine.VALUE)\n")
    assert spawner.run(script, preload=("mine",))[0][1] == "old 1\n"
    first = spawner.template()
    support.write_script(tmp_path / "job.py", "import mine\nprint('new', mine.VALUE)\n")
    assert spawner.run(script, preload=("mine",))[0][1] == "new 1\n"
    assert spawner.template() == first
    module.write_text("VALUE = 22\n")
    assert spawner.run(script, preload=("mine",))[0][1] == "new 22\n"
    assert spawner.template() != first
    assert f"mine will be preloaded again: {module} has changed" in caplog.messages


@proves("workers.script-read-anew-start")
def test_a_template_is_replaced_after_many_workers_or_when_it_has_grown(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        own = template.Template(theirs.detach(), [])
        own.size_bytes = template.resident_bytes()
        assert own.staleness() == ""
        own.forks = template.MOST_FORKS
        assert "has started 10000 workers" in own.staleness()
        own.forks, own.size_bytes = 0, template.resident_bytes() - template.GROWTH_LIMIT_BYTES - (1 << 20)
        assert "has grown by" in own.staleness()
        own.sock.close()


@proves("workers.module-fails-exits-hangs")
def test_an_opened_device_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "DEVICES", ("/dev/full",))
    assert list(template.opened_devices()) == []
    with open("/dev/full", "rb"):
        assert list(template.opened_devices()) == ["/dev/full"]


# Modules that cannot be preloaded. The workers start cold, and the line says which module and why.

UNFIT = {
    "thread": ("from threading import *\nThread(target=Event().wait, daemon=True).start()", "starts threads"),
    "raises": ("raise KeyError('no')", "bad cannot be imported: KeyError: 'no'"),
    "verbose": ("raise KeyError('\u00e9' * 50_000)", "bad cannot be imported: KeyError: '\u00e9\u00e9"),
    "unshowable": ("class Odd(Exception):\n    __str__ = None\nraise Odd", "bad cannot be imported: Odd"),
    "missing": ("import nowhere_to_be_found", "No module named 'nowhere_to_be_found'"),
    "exits": ("import sys\nsys.exit(3)", "it calls sys.exit(3)"),
    "forks": ("import os\nos.fork()", "starts a process"),
    "child": ("import subprocess\nchild = subprocess.Popen(['sleep', '600'])", "starts a process"),
    "dies": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "that imports bad was killed by signal 9"),
    "leaves": ("import os\nos._exit(7)", "that imports bad ended with exit code 7"),
}  # fmt: skip


@promise("""workers.module-fails-exits-hangs: A module that fails, exits, hangs, dies, starts threads or processes, or
    opens a device when it is imported is named, and the workers start cold.""")
@pytest.mark.parametrize("name", UNFIT)
def test_a_module_that_cannot_be_preloaded(
    name: str, spawner: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, expected = UNFIT[name]
    (tmp_path / "bad.py").write_text(source)
    script = support.write_script(tmp_path / "job.py", "print('well')\n")
    assert spawner.run(script, preload=("json", "bad")) == [(0, "well\n", "")]
    (reason,) = reasons(caplog)
    assert reason.startswith("cannot preload json, bad; the workers start without it: ")
    assert expected in reason
    support.wait_until(lambda: support.tree(spawner.link.pid) == [], "nothing of the module is left")


@proves("workers.module-fails-exits-hangs")
@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time\ntime.sleep(600)\n", "bad takes longer than 0.5 s to import"),
        ("import os\nos.kill(os.getpid(), 19)\n", "the process that imports bad was stopped by a signal"),
    ],
)
def test_a_module_that_takes_too_long(
    spawner: Spawner, source: str, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.py").write_text(source)
    script = support.write_script(tmp_path / "job.py", "print('well')\n")
    assert spawner.run(script, preload=("bad",), preload_timeout_s=0.5) == [(0, "well\n", "")]
    assert expected in reasons(caplog)[0]


@promise("""workers.template-killed-moment-lost: If the template is killed, at any moment, no worker is lost and none
    hangs. A template that does not answer within 5 s is replaced, and a line says so. If the spawner is killed, the
    template dies with it.""")
def test_a_ready_template_that_is_killed_is_replaced(
    spawner: Spawner, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    script = support.write_script(tmp_path / "job.py", "import sys\nprint('decimal' in sys.modules)\n")
    assert spawner.run(script, preload=("decimal",))[0][1] == "True\n"
    first = spawner.template()
    os.kill(first, signal.SIGKILL)
    assert support.survivors([first]) == []
    assert spawner.run(script, preload=("decimal",))[0][1] == "True\n"
    assert "decimal will be preloaded again: the template was killed by signal 9" in " ".join(caplog.messages)


@proves("workers.template-killed-moment-lost")
def test_a_template_that_is_killed_with_orders_leaves_cold_workers(spawner: Spawner, tmp_path: Path) -> None:
    script = support.write_script(tmp_path / "job.py", "import sys\nprint('decimal' in sys.modules)\n")
    context = spawner.group(script, preload=("decimal",), ranks=2)
    spawner.warm_up(script)
    spawner.wait_until_warm()
    support.halt(spawner.template())
    context.begin_start()
    os.kill(spawner.template(), signal.SIGKILL)
    drive(context)
    result = context.wait(support.DEADLINE_S)
    context.close()
    assert result is not None
    assert result.failures == {}
    assert [Path(context.stdouts[rank]).read_text() for rank in range(2)] == ["False\n"] * 2


@proves("workers.template-killed-moment-lost")
@pytest.mark.parametrize("is_asked", [True, False])
def test_a_template_that_does_not_answer_is_replaced(
    spawner: Spawner, is_asked: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """When it is asked whether it is still good, and when it is to fork: then the workers start cold meanwhile."""
    caplog.set_level(logging.INFO)
    script = support.write_script(tmp_path / "job.py", "import sys\nprint('decimal' in sys.modules)\n")
    context = spawner.group(script, preload=("decimal",), ranks=2)
    spawner.warm_up(script)
    spawner.wait_until_warm()
    halted = spawner.template()
    support.halt(halted)
    if is_asked:
        spawner.warm_up(script)
    context.start()
    assert context.wait(support.DEADLINE_S) is not None
    context.close()
    assert {Path(context.stdouts[rank]).read_text() for rank in range(2)} == {f"{is_asked}\n"}
    expected = f"decimal will be preloaded again: the template (process {halted}) did not answer within 5 s"
    assert expected in caplog.messages
    assert not support.alive(halted)
    assert spawner.run(script, preload=("decimal",))[0][1] == "True\n"


@proves("workers.template-killed-moment-lost")
def test_a_template_that_is_stopped_does_not_hold_up_a_stop(spawner: Spawner, tmp_path: Path) -> None:
    """Its orders are withdrawn by killing it."""
    script = support.write_script(tmp_path / "job.py", "import time\ntime.sleep(600)\n")
    context = spawner.group(script, preload=("decimal",), ranks=2)
    spawner.warm_up(script)
    spawner.wait_until_warm()
    halted = spawner.template()
    support.halt(halted)
    context.begin_start()
    began = time.monotonic()
    context.close(signal.SIGTERM, 600)
    assert time.monotonic() - began < 20
    assert support.survivors([halted]) == []
    assert support.tree(spawner.link.pid) == []


@proves("workers.template-killed-moment-lost")
def test_the_spawner_is_killed_while_the_template_imports(spawner: Spawner, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)\n")
    script = support.write_script(tmp_path / "job.py", "print('well')\n")
    context = spawner.group(script, preload=("slow",))
    spawner.warm_up(script)
    context.begin_start()
    pid = spawner.template()
    os.kill(spawner.link.pid, signal.SIGKILL)
    with pytest.raises(Exception, match="the spawner was killed by SIGKILL"):
        drive(context)
    assert support.survivors([pid]) == []


def drive(context: PContext) -> None:
    while not context.poll_start():
        context._spawner.wait(support.DEADLINE_S)


def test_orphans_of_a_warm_worker_go_with_it(spawner: Spawner, tmp_path: Path) -> None:
    """One that has a session of its own and executed nothing carries the mark of its worker, not of the template."""
    script = support.write_script(
        tmp_path / "job.py",
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            time.sleep(600)
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, b"%d\\n" % os.getpid())
                time.sleep(600)
            os._exit(0)
        print(os.read(read, 100).decode(), flush=True)
        """,
    )
    context = spawner.group(script, preload=("decimal",), ranks=2)
    spawner.warm_up(script)
    context.start()
    out = Path(context.stdouts[0])
    orphan = int(support.wait_until(lambda: out.read_text().strip(), "the orphan is named"))
    assert support.survivors([orphan]) == []
    assert support.alive(context.pids()[1])
    context.close(signal.SIGKILL, 0)
