"""The names of torch's launcher that programs use: ours take the same arguments and show the same values."""

from __future__ import annotations

import inspect
import multiprocessing
from importlib import import_module
from types import ModuleType
from typing import Any

from holdfast.adopt import hook
from holdfast.agent import WorkerState
from holdfast.cli import run
from holdfast.process.errors import ChildFailedError, ProcessFailure
from holdfast.rendezvous.api import RendezvousStoreInfo
from holdfast.telemetry.events import EventSource, NodeState
from holdfast.telemetry.health import HealthCheckServer
from holdfast.timer import LocalTimerServer
from tests.promises import promise, proves

MODULES = {
    **hook.ALIASES,
    "torch.distributed.elastic.agent.server.health_check_server": "holdfast.telemetry.health",
    "torch.distributed.elastic.rendezvous.etcd_server": "holdfast.rendezvous.etcd_server",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous": "holdfast.rendezvous.static",
    "torch.distributed.elastic.utils.store": "holdfast.rendezvous.store",
}


# Abstract: its subclasses are called, and have the place of `numa_options` that torch's have.
KEPT = ("PContext",)


def callables_of(module: ModuleType) -> dict[str, Any]:
    """Public functions and classes that programs call, and methods of the classes."""
    found: dict[str, Any] = {}
    for name, each in vars(module).items():
        if name.startswith("_") or not getattr(each, "__module__", "").startswith("torch.distributed"):
            continue
        if inspect.isfunction(each):
            found[name] = each
        elif inspect.isclass(each):
            found[name] = each
            methods = inspect.getmembers(each, inspect.isfunction)
            found |= {f"{name}.{key}": method for key, method in methods if not key.startswith("_")}
    return found


def ours_of(module: str, path: str) -> Any:
    found: Any = import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def parameters_of(function: Any) -> list[inspect.Parameter]:
    try:
        return [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    except (TypeError, ValueError):
        return []


@promise("""adopted-commands.functions-classes-take: Functions and classes take the arguments of torch's under their
    names and in their places; states have torch's texts, parsed arguments torch's defaults.""")
def test_every_argument_of_torch_is_taken_under_its_name_and_in_its_place() -> None:
    differing = []
    for theirs, ours in MODULES.items():
        for path, function in callables_of(import_module(theirs)).items():
            mine = ours_of(ours, path)
            wanted, given = parameters_of(function), parameters_of(mine)
            if path in KEPT or mine is None or any(each.kind is each.VAR_POSITIONAL for each in given):
                continue
            names = [each.name for each in wanted if each.kind is not each.VAR_KEYWORD]
            if [each.name for each in given][: len(names)] != names:
                differing.append(f"{theirs}.{path}: {names} and not {[each.name for each in given]}")
    assert differing == []


@proves("adopted-commands.functions-classes-take")
def test_texts_of_states() -> None:
    events, server = import_module("torch.distributed.elastic.events"), "torch.distributed.elastic.agent.server"
    pairs = ((EventSource, events.EventSource), (NodeState, events.NodeState))
    for ours, theirs in (*pairs, (WorkerState, import_module(server).WorkerState)):
        assert [(str(each), f"{each}", each.value) for each in ours] == [
            (str(each), f"{each}", each.value) for each in theirs
        ]


@proves("adopted-commands.functions-classes-take")
def test_defaults_of_parsed_arguments() -> None:
    torchs = vars(import_module("torch.distributed.run").get_args_parser().parse_args(["x.py"]))
    ours = vars(run.get_args_parser().parse_args(["x.py"]))
    assert torchs.keys() <= ours.keys()
    # Ours are values already where torch has texts that are parsed later.
    parsed = {"redirects", "tee", "local_ranks_filter"}
    assert {name: ours[name] for name in torchs.keys() - parsed} == {
        name: value for name, value in torchs.items() if name not in parsed
    }


@proves("adopted-commands.functions-classes-take")
def test_objects_that_programs_change_and_ask() -> None:
    info = RendezvousStoreInfo("a", 1)
    info.master_port = 2
    assert info == RendezvousStoreInfo("a", 2)
    assert HealthCheckServer(lambda: 5, 0, 1).alive_callback() == 5
    local = import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    constants = {name: value for name, value in vars(local).items() if name.startswith("TORCHELASTIC_")}
    ours = import_module("holdfast.agent.local")
    assert {name: getattr(ours, name) for name in constants} == constants


@proves("adopted-commands.functions-classes-take")
def test_rulers_of_the_report() -> None:
    failed = ChildFailedError("job", {0: ProcessFailure(0, 1, 1, "")})
    lines = failed.format_msg("#", "~").splitlines()
    assert {line[:1] for line in lines if len({*line}) == 1} == {"#", "~"}


@proves("adopted-commands.functions-classes-take")
def test_a_timer_server_that_is_started_twice() -> None:
    server = LocalTimerServer(multiprocessing.Queue())
    try:
        server.start()
        server.start()
    finally:
        server.stop()
