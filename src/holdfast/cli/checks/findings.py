"""What the facts of a host, and of the way to a coordinator, mean for a run. Pure.

`host` and `endpoint` beside this module read the facts. Each kind of fact is a record with a function here that judges
it: all is well, a warning (a run works, but worse, or not yet), or a problem (a run does not work). A warning and a
problem come with what to do about it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import StrEnum
from typing import Any

from holdfast.frozen import frozen
from holdfast.text import size_text

_MIB, _GIB = 1 << 20, 1 << 30
FEW_OPEN_FILES, FEW_OPEN_FILES_HARD, FEW_PROCESSES = 1024, 4096, 1024
SHARED_MEMORY = "/dev/shm"
SMALL_SHM_BYTES = _GIB
LITTLE_SPACE_BYTES, NO_SPACE_BYTES = 512 * _MIB, _MIB
LITTLE_MEMORY_BYTES = 512 * _MIB


class Level(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@frozen
class Finding:
    """`fix` says what to do about a warning or a problem."""

    check: str
    level: Level
    text: str
    fix: str = ""


# The facts. A size of None is unlimited, a text that is empty means that there is none.


@frozen
class Unknown:
    """A fact that could not be read, and why."""

    reason: str


@frozen
class Software:
    python: str
    executable: str
    holdfast: str
    system: str
    release: str


@frozen
class HostName:
    name: str
    addresses: tuple[str, ...] = ()
    problem: str = ""


@frozen
class OpenFiles:
    soft: int | None
    hard: int | None


@frozen
class Processes:
    """`of_user` is the limit of the user's processes, which root is not bound to; `of_group` that of the control group,
    which counts threads, too."""

    of_user: int | None
    of_group: int | None
    is_root: bool


@frozen
class Stacks:
    """Whether py-spy could read another process. `scope` is kernel.yama.ptrace_scope; empty if there is none."""

    py_spy: str = ""
    problem: str = ""
    scope: str = ""
    is_container: bool = False


@frozen
class Space:
    """Of a directory; `problem` says why files cannot be made there."""

    path: str
    size_bytes: int = 0
    free_bytes: int = 0
    problem: str = ""


@frozen
class Kernel:
    has_pidfd: bool
    has_subreaper: bool


@frozen
class Memory:
    """Of the control group: its limit, and how many of its processes the kernel's memory killer has ended."""

    limit_bytes: int | None
    kills: int = 0


@frozen
class ControlDirectory:
    path: str
    problem: str = ""


@frozen
class EndpointName:
    name: str
    addresses: tuple[str, ...] = ()
    problem: str = ""


@frozen
class Etcd:
    endpoint: str
    problem: str = ""


@frozen
class Coordinator:
    """`other` is what was found there instead: "TLS", "HTTP" or nothing known. `is_this_host`: nothing listens there
    yet."""

    endpoint: str
    problem: str = ""
    fix: str = ""
    version: str = ""
    has_tls: bool = False
    other: str = ""
    is_this_host: bool = False


@frozen
class Token:
    """`where` it comes from. `wants`: the coordinator wants one; None if it was not reached. `is_known`: both sides
    have proved it. `is_exposed`: other hosts can reach the coordinator."""

    where: str = ""
    problem: str = ""
    wants: bool | None = None
    is_known: bool = False
    is_exposed: bool = False


@frozen
class Run:
    """`sentence` is how it stands; `problem` why that is not known."""

    name: str
    sentence: str = ""
    problem: str = ""


Verdict = tuple[Level, str, str]


def judge(facts: Mapping[str, object]) -> Iterator[Finding]:
    """One finding for each check, in their order."""
    for check, fact in facts.items():
        yield Finding(check, *_JUDGES[type(fact)](fact))


def _ok(text: str) -> Verdict:
    return Level.OK, text, ""


def _warning(text: str, fix: str) -> Verdict:
    return Level.WARNING, text, fix


def _problem(text: str, fix: str) -> Verdict:
    return Level.PROBLEM, text, fix


def _unknown(fact: Unknown) -> Verdict:
    return _warning(f"not checked: {fact.reason}", "see whether this part of the system answers at all")


# This host.


def _software(fact: Software) -> Verdict:
    text = f"{fact.python} ({fact.executable}), holdfast {fact.holdfast}, {fact.system} {fact.release}"
    return _ok(text) if fact.system == "Linux" else _problem(text, "holdfast needs Linux")


def _host_name(fact: HostName) -> Verdict:
    if fact.problem:
        fix = f"add {fact.name} to DNS or /etc/hosts, or give --local-addr ADDRESS with each run of several hosts"
        return _warning(f"{fact.name} does not resolve ({fact.problem})", fix)
    text = f"{fact.name} is {', '.join(fact.addresses)}"
    if all(map(_is_loopback, fact.addresses)):
        fix = f"for runs of several hosts, let {fact.name} in /etc/hosts be the address that other hosts use"
        return _warning(f"{text}, which other hosts cannot reach; some frameworks tell others this address", fix)
    return _ok(text)


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _open_files(fact: OpenFiles) -> Verdict:
    text = f"{_most(fact.soft)} for a process, {_most(fact.hard)} where it raises its limit"
    is_low = fact.soft is not None and fact.soft < FEW_OPEN_FILES
    if is_low or (fact.hard is not None and fact.hard < FEW_OPEN_FILES_HARD):
        return _warning(text, "ulimit -n 65536 before `holdfast run`; LimitNOFILE= for systemd, --ulimit nofile= "
                        "for docker")  # fmt: skip
    return _ok(text)


def _processes(fact: Processes) -> Verdict:
    of_user = None if fact.is_root else fact.of_user
    text = f"{_most(of_user)} for this user, {_most(fact.of_group)} for its control group, threads included"
    if of_user is not None and of_user < FEW_PROCESSES:
        return _warning(text, "ulimit -u 65536 before `holdfast run`, or raise nproc in /etc/security/limits.conf")
    if fact.of_group is not None and fact.of_group < FEW_PROCESSES:
        return _warning(text, "raise pids.max of the control group: --pids-limit for docker, podPidsLimit for "
                        "Kubernetes, TasksMax= for systemd")  # fmt: skip
    return _ok(text)


def _stacks(fact: Stacks) -> Verdict:
    if not fact.py_spy:
        return _warning("py-spy is not installed, so only Python workers that holdfast starts show their stacks",
                        "pip install py-spy")  # fmt: skip
    if not fact.problem:
        return _ok(f"py-spy can read other processes ({fact.py_spy})")
    if fact.is_container:
        fix = "give the container the capability SYS_PTRACE (docker run --cap-add SYS_PTRACE; in Kubernetes "
        fix += "securityContext.capabilities.add)"
    elif fact.scope not in ("", "0"):
        fix = "sysctl kernel.yama.ptrace_scope=0, or run as root"
    else:
        fix = "see that py-spy runs on this host: py-spy dump --pid PID"
    return _warning(f"{fact.problem}; only Python workers that holdfast starts show their stacks", fix)


def _space(fact: Space) -> Verdict:
    return _shared_memory(fact) if fact.path == SHARED_MEMORY else _temporary(fact)


def _shared_memory(fact: Space) -> Verdict:
    grow = "docker run --shm-size 8g; in Kubernetes an emptyDir of medium Memory at /dev/shm; else mount -o "
    grow += "remount,size=8G /dev/shm"
    if fact.problem:
        return _warning(f"{fact.path}: {fact.problem}", grow)
    text = f"{fact.path} has {size_text(fact.size_bytes)}, {size_text(fact.free_bytes)} of it free"
    if fact.size_bytes < SMALL_SHM_BYTES:
        return _warning(f"{text}; data loaders and collectives use it", grow)
    if fact.free_bytes < fact.size_bytes / 10:
        return _warning(text, "remove what killed processes have left there (`holdfast run --clean-shm` does it for "
                        "its workers)")  # fmt: skip
    return _ok(text)


def _temporary(fact: Space) -> Verdict:
    move = "let TMPDIR name a directory with space, or give --log-dir"
    if fact.problem:
        return _problem(f"no file can be made in {fact.path}: {fact.problem}", move)
    text = f"{fact.path} can be written to, {size_text(fact.free_bytes)} free"
    if fact.free_bytes < NO_SPACE_BYTES:
        return _problem(text, move)
    return _warning(text, move) if fact.free_bytes < LITTLE_SPACE_BYTES else _ok(text)


def _kernel(fact: Kernel) -> Verdict:
    missing = [
        name for name, has in (("pidfd_open", fact.has_pidfd), ("child subreapers", fact.has_subreaper)) if not has
    ]
    if not missing:
        return _ok("it has pidfd_open and child subreapers")
    return _warning(f"it lacks {' and '.join(missing)}, so ends of processes are noticed later or not at all",
                    "use Linux 5.3 or later, and a sandbox that allows these calls")  # fmt: skip


def _memory(fact: Memory) -> Verdict:
    limit = "no limit" if fact.limit_bytes is None else f"at most {size_text(fact.limit_bytes)}"
    text = f"{limit} for its control group"
    raise_it = "raise the limit (docker run --memory, resources.limits.memory in Kubernetes), or start fewer workers"
    if fact.limit_bytes is not None and fact.kills:
        killed = f"{fact.kills} of its processes" if fact.kills > 1 else "one of its processes"
        return _warning(f"{text}; the kernel has killed {killed} for memory", raise_it)
    if fact.limit_bytes is not None and fact.limit_bytes < LITTLE_MEMORY_BYTES:
        return _warning(text, raise_it)
    return _ok(text)


def _control_directory(fact: ControlDirectory) -> Verdict:
    if not fact.problem:
        return _ok(f"{fact.path} is private")
    return _warning(f"{fact.path}: {fact.problem}; agents of this user make another directory in /tmp",
                    f"remove it or make it private (chmod 700 {fact.path}), or let XDG_RUNTIME_DIR or TMPDIR name a "
                    "directory of this user")  # fmt: skip


# The way to a coordinator.


def _endpoint_name(fact: EndpointName) -> Verdict:
    if fact.problem:
        return _problem(fact.problem, "correct the name in --rdzv-endpoint, or add it to DNS or /etc/hosts")
    is_number = fact.addresses == (fact.name,)
    return _ok(f"{fact.name} is an address" if is_number else f"{fact.name} is {', '.join(fact.addresses)}")


def _etcd(fact: Etcd) -> Verdict:
    if fact.problem:
        return _problem(fact.problem, "compare the endpoint with that of etcd, and see that etcd runs")
    return _ok(f"{fact.endpoint} answers")


def _coordinator(fact: Coordinator) -> Verdict:
    where = fact.endpoint
    compare = "compare host and port with --rdzv-endpoint of the run"
    if not fact.problem:
        return _ok(f"reached at {where}, protocol {fact.version}, {'with' if fact.has_tls else 'without'} TLS")
    if fact.other == "TLS":
        return _problem(f"{where} speaks TLS, and this command does not",
                        "give --rdzv-conf tls_ca=FILE, as the nodes of the run have it")  # fmt: skip
    if fact.other == "HTTP":
        return _problem(f"{where} is an HTTP server, not a holdfast coordinator", compare)
    if fact.is_this_host:
        return _warning(f"nothing listens at {where} yet; it is an address of this host",
                        "`holdfast run` on this host starts a coordinator there")  # fmt: skip
    return _problem(fact.problem, fact.fix or compare)


def _token(fact: Token) -> Verdict:
    make = "make one with `holdfast token > FILE`, and give every node --token-file FILE"
    if fact.problem:
        text, _, fix = fact.problem.partition("; ")
        return _problem(text, fix or "give the file with the token of the run: --token-file FILE")
    if fact.wants is None:
        return _ok(f"from {fact.where}; it was not compared with a coordinator's" if fact.where else "none is given")
    if fact.wants and not fact.where:
        return _problem("the coordinator wants a token, and none is given",
                        "give the file that the nodes of the run have: --token-file FILE, or set "
                        "HOLDFAST_TOKEN")  # fmt: skip
    if fact.wants and fact.is_known:
        return _ok(f"from {fact.where}; the coordinator has the same")
    if fact.wants:
        return _problem(f"that from {fact.where} is not the coordinator's",
                        "give the file that the nodes of the run have; one of `holdfast token --run ID` opens that run "
                        "alone, so name it: RUN")  # fmt: skip
    if fact.where:
        return _problem(f"one is given by {fact.where}, but the coordinator was started without",
                        "leave it out, or start all nodes of the run with --token-file")  # fmt: skip
    if fact.is_exposed:
        return _warning("none: every host that can reach the coordinator can join or disturb its runs", make)
    return _ok("none, and the coordinator wants none")


def _run(fact: Run) -> Verdict:
    if not fact.problem:
        return _ok(fact.sentence)
    fix = "compare RUN with --rdzv-id of the run; a run is known while one of its agents is there"
    return _problem(fact.problem, fix)


def _most(number: int | None) -> str:
    return "no limit" if number is None else f"at most {number}"


_JUDGES: dict[type, Callable[[Any], Verdict]] = {
    Unknown: _unknown,
    Software: _software,
    HostName: _host_name,
    OpenFiles: _open_files,
    Processes: _processes,
    Stacks: _stacks,
    Space: _space,
    Kernel: _kernel,
    Memory: _memory,
    ControlDirectory: _control_directory,
    EndpointName: _endpoint_name,
    Etcd: _etcd,
    Coordinator: _coordinator,
    Token: _token,
    Run: _run,
}
