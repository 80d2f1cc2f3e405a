"""Every option on its way from the command line to the agent, the worker spec and the rendezvous that it must reach.

The real command makes the real agent and the real handler; only `run` of the agent is replaced, by one that keeps the
agent. A row of `EFFECTS` gives an option and says what must differ there from a run without it. An option without a
row fails. With `--hosts` there is no agent in this process: `HOST_EFFECTS` look at the job for the hosts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import pytest

from holdfast.agent.local import LocalElasticAgent
from holdfast.agent.model import RunResult, WorkerSpec, WorkerState
from holdfast.agent.notice import NoticeSettings
from holdfast.checks.plan import Check, CheckPlan
from holdfast.cli import run as cli
from holdfast.cli import run_by_ssh
from holdfast.cli.arguments import program
from holdfast.cli.arguments.options import HOSTS, OPTIONS
from holdfast.hangs.policy import HangPolicy, Signal
from holdfast.hosts.ssh import transport as ssh
from holdfast.hosts.ssh.host_list import Host
from holdfast.hosts.ssh.transport import HostsJob
from holdfast.process.output.logs import Std
from holdfast.process.workers.cpus import AffinityMode, NumaOptions
from holdfast.process.workers.group import GroupSpec
from holdfast.rendezvous.membership.model import Admit, AgentStore, Settings
from holdfast.rendezvous.membership.restart_policy import RestartPolicy
from tests import support
from tests.promises import promise
from tests.unit.test_cli_run import RECORDER, install_logs_specs
from tests.unit.test_engine_detection import SKYPILOT

HEALTH_PORT = support.free_port()
TCP = "--rdzv-backend=tcp --rdzv-endpoint=h:7 --nnodes=1:3"
STATIC = "--nnodes=2"


def spec(agent: LocalElasticAgent) -> WorkerSpec:
    return agent.get_worker_group().spec


def policy(agent: LocalElasticAgent) -> RestartPolicy:
    return spec(agent).policy


def hangs(agent: LocalElasticAgent) -> HangPolicy | None:
    return spec(agent).hang_policy


def noticing(agent: LocalElasticAgent) -> NoticeSettings:
    found = spec(agent).notice
    assert found is not None
    return found


def beside(agent: LocalElasticAgent) -> dict[str, Any]:
    """What the dashboard is started with."""
    started = spec(agent).on_first_node
    assert isinstance(started, partial)
    return started.keywords


def group(agent: LocalElasticAgent) -> GroupSpec:
    return agent._group


def handler(agent: LocalElasticAgent) -> Any:
    return spec(agent).rdzv_handler


def meeting(agent: LocalElasticAgent) -> Any:
    """The options of a handler that meets other nodes."""
    return handler(agent)._options


def agreed(agent: LocalElasticAgent) -> Settings:
    """What this node tells the others that the run is to be like."""
    settings: Settings = meeting(agent).settings(policy(agent))
    return settings


@dataclass(frozen=True)
class Effect:
    """With the option set to `text` (none for a flag), `seen` in the agent is `expected`, and without it it is not.
    `besides` are options that it needs, `environ` variables."""

    text: str | None
    seen: Callable[[LocalElasticAgent], object]
    expected: object
    besides: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


EFFECTS = {
    "nproc_per_node": Effect("3", lambda a: spec(a).local_world_size, 3),
    "module": Effect(None, lambda a: spec(a).args, ("-u", "-m", "x.py")),
    "no_python": Effect(None, lambda a: (spec(a).entrypoint, spec(a).args), ("./x.py", ())),
    "run_path": Effect(None, lambda a: spec(a).entrypoint, program.run_script_path),
    "snapshot_dir": Effect("d", lambda a: group(a).snapshot_dir, "d"),
    "snapshot_bandwidth": Effect("9m", lambda a: group(a).snapshot_bandwidth, 9 << 20),
    "snapshot_memory": Effect("3g", lambda a: group(a).snapshot_memory, 3 << 30),
    "check": Effect("memory", lambda a: spec(a).checks, CheckPlan((Check("memory", "memory"),))),
    "check_timeout": Effect("2m", lambda a: spec(a).checks.timeout_s, 120.0, "--check=memory"),
    "check_action": Effect("exclude", lambda a: spec(a).checks.excludes, True, "--check=memory"),
    "clean_shm": Effect(None, lambda a: group(a).clean_shm, True),
    "start_method": Effect("fork", lambda a: group(a).start_method, "fork"),
    "preload": Effect("json,a.b", lambda a: group(a).preload, ("json", "a.b")),
    "preload_keep": Effect("7m", lambda a: group(a).preload_keep_s, 420.0, "--preload=json"),
    "preload_only": Effect(None, lambda a: group(a).preload_learns, None, "--preload=json"),
    "preload_timeout": Effect("7m", lambda a: group(a).preload_timeout_s, 420.0, "--preload=json"),
    "role": Effect("trainer", lambda a: spec(a).role, "trainer"),
    "virtual_local_rank": Effect(None, lambda a: spec(a).virtual_local_rank, True),
    "numa_binding": Effect("socket", lambda a: group(a).numa_options, NumaOptions(AffinityMode.SOCKET)),
    "cpus_per_worker": Effect("3", lambda a: group(a).cpus_per_worker, 3),
    "nnodes": Effect(
        "2:5", lambda a: (agreed(a).min_nodes, agreed(a).max_nodes), (2, 5), "--rdzv-backend=tcp --rdzv-endpoint=h:7"
    ),
    "no_detect": Effect(None, lambda a: handler(a).get_backend(), "standalone", environ=SKYPILOT),
    "standalone": Effect(None, lambda a: handler(a).get_backend(), "standalone", "--rdzv-endpoint=h:7"),
    "rdzv_backend": Effect("tcp", lambda a: handler(a).get_backend(), "tcp", "--rdzv-endpoint=h:7"),
    "rdzv_endpoint": Effect("host9:77", lambda a: handler(a)._addresses, [("host9", 77)], TCP),
    "rdzv_id": Effect("job7", lambda a: handler(a).get_run_id(), "job7"),
    "rdzv_conf": Effect("read_timeout=7", lambda a: meeting(a).read_timeout_s, 7.0, TCP),
    "node_rank": Effect("2", lambda a: meeting(a).rank, 2, TCP),
    "master_addr": Effect("host9", lambda a: spec(a).master_addr, "host9", STATIC),
    "master_port": Effect("77", lambda a: spec(a).master_port, 77, STATIC),
    "local_addr": Effect("10.0.0.9", lambda a: (spec(a).local_addr, meeting(a).local_addr), ("10.0.0.9",) * 2, TCP),
    "resolve_timeout": Effect("2m", lambda a: meeting(a).resolve_timeout_s, 120.0, TCP),
    "join_timeout": Effect("7m", lambda a: agreed(a).join_timeout_s, 420.0, TCP),
    "last_call": Effect("7s", lambda a: agreed(a).last_call_s, 7.0, TCP),
    "exit_barrier_timeout": Effect("7m", lambda a: a._exit_barrier_timeout, 420.0),
    "lease": Effect("70", lambda a: agreed(a).lease_s, 70.0, TCP),
    "admit": Effect("on-restart", lambda a: agreed(a).admit, Admit.ON_RESTART, TCP),
    "agent_store": Effect("off", lambda a: agreed(a).agent_store, AgentStore.OFF, TCP),
    "snapshot_copies": Effect("1", lambda a: agreed(a).snapshot_copies, 1, f"{TCP} --token-file=secret"),
    "snapshot_every": Effect("10m", lambda a: agreed(a).snapshot_every_s, 600.0, f"{TCP} --snapshot-dir=d"),
    "admit_delay": Effect("7", lambda a: agreed(a).admit_delay_s, 7.0, TCP),
    "on_isolation": Effect("continue", lambda a: meeting(a).on_isolation, "continue", TCP),
    "token_file": Effect("secret", lambda a: meeting(a).token, b"the word of the day", TCP),
    "require_token": Effect(None, lambda a: meeting(a).require_token, True, f"{TCP} --token-file=secret"),
    "tls_cert": Effect("c.pem", lambda a: meeting(a).tls.cert, "c.pem", TCP),
    "tls_key": Effect("k.pem", lambda a: meeting(a).tls.key, "k.pem", f"{TCP} --tls-cert=c.pem"),
    "tls_ca": Effect("ca.pem", lambda a: meeting(a).tls.ca, "ca.pem", TCP),
    "max_restarts": Effect("7", lambda a: (spec(a).max_restarts, policy(a).max_restarts), (7, 7)),
    "restart_window": Effect("7m", lambda a: policy(a).window_s, 420.0, "--max-restarts=1"),
    "restart_backoff": Effect("7s", lambda a: policy(a).backoff_s, 7.0),
    "no_progress_limit": Effect("7", lambda a: policy(a).no_progress_limit, 7),
    "loss_limit": Effect("7", lambda a: policy(a).loss_limit, 7),
    "loss_window": Effect("7m", lambda a: policy(a).loss_window_s, 420.0),
    "fatal_exit_codes": Effect("7", lambda a: policy(a).fatal_exit_codes, {7}),
    "fatal_exceptions": Effect("Bad", lambda a: policy(a).fatal_exceptions, {"Bad"}),
    "uncounted_exit_codes": Effect("7", lambda a: policy(a).uncounted_exit_codes, {7}),
    "uncounted_exceptions": Effect("Bad", lambda a: policy(a).uncounted_exceptions, {"Bad"}),
    "grace_period": Effect("7m", lambda a: a._shutdown_timeout, 420),
    "shutdown_timeout": Effect("7", lambda a: a._shutdown_timeout, 7),
    "signals_to_handle": Effect("SIGUSR1", lambda a: os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"], "SIGUSR1"),
    "notice_signal": Effect("SIGUSR2", lambda a: noticing(a).notice_signal, Signals.SIGUSR2),
    "notice_file": Effect("gone", lambda a: noticing(a).file, "gone"),
    "notice_time": Effect("7m", lambda a: noticing(a).time_s, 420.0),
    "notice_worker_signal": Effect("SIGUSR2", lambda a: noticing(a).worker_signal, Signals.SIGUSR2),
    "pass_signals": Effect("SIGUSR2", lambda a: noticing(a).passed, {Signals.SIGUSR2}),
    "monitor_interval": Effect("7", lambda a: spec(a).monitor_interval, 7.0),
    "hang_timeout": Effect("7m", hangs, HangPolicy(hang_timeout_s=420.0)),
    "start_timeout": Effect("7m", hangs, HangPolicy(start_timeout_s=420.0)),
    "progress_signals": Effect(
        "cpu", hangs, HangPolicy(hang_timeout_s=60.0, signals=frozenset({Signal.CPU})), "--hang-timeout=60"
    ),
    "progress_pattern": Effect("step", hangs, HangPolicy(hang_timeout_s=60.0, pattern="step"), "--hang-timeout=60"),
    "progress_every": Effect(
        "7m",
        hangs,
        HangPolicy(hang_timeout_s=60.0, pattern="step", progress_every_s=420.0),
        "--hang-timeout=60 --progress-pattern=step",
    ),
    "peer_stacks": Effect("off", lambda a: group(a).peer_stacks, "off"),
    "log_dir": Effect("logs", lambda a: group(a).logs_specs.root_log_dir, "logs"),
    "redirects": Effect("1", lambda a: group(a).logs_specs._redirects, Std.OUT),
    "log_line_prefix_template": Effect("${rank} ", lambda a: group(a).log_line_prefix_template, "${rank} "),
    "prefix": Effect("never", lambda a: group(a).prefix, "never"),
    "tee": Effect("2", lambda a: group(a).logs_specs._tee, Std.ERR),
    "local_ranks_filter": Effect("0", lambda a: group(a).logs_specs._local_ranks_filter, {0}),
    "duplicate_stdout_filters": Effect("a,b", lambda a: group(a).duplicate_stdout_filters, ["a", "b"]),
    "duplicate_stderr_filters": Effect("a,b", lambda a: group(a).duplicate_stderr_filters, ["a", "b"]),
    "logs_specs": Effect("mine", lambda a: type(group(a).logs_specs).__module__, "fake_logs"),
    "quiet": Effect(None, lambda a: logging.getLogger("holdfast").level, logging.ERROR),
    "verbose": Effect(None, lambda a: logging.getLogger("holdfast").level, logging.DEBUG),
    "event_log_handler": Effect("console", lambda a: spec(a).event_log_handler, "console"),
    "events_file": Effect("e.jsonl", lambda a: spec(a).events_file, "e.jsonl"),
    "dashboard": Effect(None, lambda a: spec(a).on_first_node is not None, True),
    "dashboard_addr": Effect("[::1]:7", lambda a: beside(a)["addr"], "[::1]:7", "--dashboard"),
    "dashboard_linger": Effect("7m", lambda a: beside(a)["linger_s"], 420.0, "--dashboard"),
    "http": Effect(":9400", lambda a: meeting(a).http, "127.0.0.1:9400", TCP),
    "health_port": Effect(str(HEALTH_PORT), lambda a: getattr(a._health_check_server, "port", None), HEALTH_PORT),
}


@pytest.fixture(autouse=True)
def _own_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch(mode=0o755)
    support.write_secret(tmp_path / "secret", "the word of the day")
    install_logs_specs(tmp_path, monkeypatch, "holdfast.logs_specs", RECORDER)


def observe(tokens: list[str], seen: Callable[[LocalElasticAgent], object], monkeypatch: pytest.MonkeyPatch) -> object:
    """What there is to see in the agent of that command line at the moment at which it would run."""
    found = []

    def keep(agent: LocalElasticAgent) -> RunResult:
        found.append(seen(agent))
        return RunResult(WorkerState.SUCCEEDED)

    monkeypatch.setattr(LocalElasticAgent, "run", keep)
    # A program of the user's own is found on PATH or by a path; as a script that path is as good as the name.
    script = "./x.py" if "--no-python" in tokens else "x.py"
    cli.main([*tokens, script])
    return found.pop()


def names_of(*, of_hosts: bool) -> list[str]:
    return [option.name for option in OPTIONS if (option.group == HOSTS) is of_hosts]


@promise("cli.option-effect-agent-workers: Every option has its effect on the agent, its workers or the rendezvous.")
@pytest.mark.parametrize("name", names_of(of_hosts=False))
def test_every_option_has_its_effect(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    effect = EFFECTS[name]
    besides = effect.besides.split()
    for variable, value in effect.environ.items():
        monkeypatch.setenv(variable, value)
    assert observe([*besides, flag_of(name, effect.text)], effect.seen, monkeypatch) == effect.expected
    assert observe(besides, effect.seen, monkeypatch) != effect.expected


def flag_of(name: str, text: str | None) -> str:
    [option] = [each for each in OPTIONS if each.name == name]
    return option.flags[-1] if text is None else f"{option.flags[-1]}={text}"


def test_no_effect_is_of_an_option_that_is_gone() -> None:
    assert set(EFFECTS) == set(names_of(of_hosts=False))
    assert set(HOST_EFFECTS) == set(names_of(of_hosts=True))


# The option's text, what is seen in the job, and what is expected there.
HOST_EFFECTS: dict[str, tuple[str | None, Callable[[HostsJob], object], object]] = {
    "hosts": ("a,b:3", lambda j: j.hosts, (Host("a"), Host("b", 3))),
    "hostfile": ("hosts", lambda j: j.hosts, (Host("c", 2),)),
    "detach": (None, lambda j: j, None),
    "host_discovery": ("echo d:2", lambda j: (j.hosts, j.discover is not None), ((Host("d", 2),), True)),
    "exclude": ("x,z", lambda j: j.hosts, (Host("y"),)),
    "rejoin_hosts": (None, lambda j: j.rejoins, True),
    "remote_python": ("/opt/python", lambda j: j.job.python, "/opt/python"),
    "env": ("A=1,OMP_NUM_THREADS", lambda j: j.job.environment, (("A", "1"), ("OMP_NUM_THREADS", "1"))),
    "copy": ("script", lambda j: j.archive is not None, True),
    "ssh": ("sh -F 'a b'", lambda j: j.ssh, ("sh", "-F", "a b")),
    "host_timeout": ("7m", lambda j: j.host_timeout_s, 420.0),
}


@pytest.mark.parametrize("name", names_of(of_hosts=True))
def test_every_option_for_hosts_has_its_effect(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts").write_text("c slots=2")
    if name == "detach":  # No job is run in this process.
        commands: list[list[str]] = []
        monkeypatch.setattr(run_by_ssh, "_detach", lambda args, job: commands.append([*args.given]))
        cli.main(["--hosts=x", "--detach", "x.py"])
        assert commands == [["hosts", "detach"]]
        return
    text, seen, expected = HOST_EFFECTS[name]
    lists = {"hosts": [], "hostfile": [], "host_discovery": ["--nnodes=1:2"], "exclude": ["--hosts=x,y"]}
    besides = lists.get(name, ["--hosts=x"])
    assert seen(job_of([*besides, flag_of(name, text)], monkeypatch)) == expected
    assert seen(job_of(["--hosts=x"], monkeypatch)) != expected


def job_of(tokens: list[str], monkeypatch: pytest.MonkeyPatch) -> HostsJob:
    jobs: list[HostsJob] = []
    monkeypatch.setattr(ssh, "run", jobs.append)
    cli.main([*tokens, "x.py"])
    return jobs.pop()


def test_the_template_of_labels_has_its_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a variable and no option."""
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}]")
    assert observe([], lambda a: group(a).log_line_prefix_template, monkeypatch) == "[${rank}]"
