"""The contract of an engine, which starts agents on many nodes, and the table that finds one by its name.

`holdfast submit NAME` and `holdfast render NAME` read the command line of `holdfast run`, make a `JobSpec` of it
and hand it to the engine. An engine is one subclass of `Engine` that implements `submit`, `render` or both. Those that
are built in are imported when they are asked for. A plug-in adds another by an entry point in the group
`holdfast.engines`: the engine's name, and its class.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from holdfast.errors import HostError, UserError
from holdfast.hosts.job import JobSpec
from holdfast.option import Options
from holdfast.text import last_line

if TYPE_CHECKING:
    import subprocess

GROUP = "holdfast.engines"
OWN = "Options of the engine"  # The group of them all.

# Name -> module and class.
_BUILT_IN: dict[str, str] = {
    "kubernetes": "holdfast.hosts.kubernetes:Kubernetes",
    "ray": "holdfast.hosts.ray:Ray",
    "slurm": "holdfast.hosts.slurm:Slurm",
}

# Options of `holdfast run` that say where this node meets the others: each node's own, or the engine's to decide.
_PLACES = ("standalone", "node_rank", "rdzv_backend", "rdzv_endpoint", "master_addr", "master_port", "local_addr")

_ANSWER_TIMEOUT_S = 60.0

O = TypeVar("O", bound=Options)  # noqa: E741  (the type of an engine's options)


class Engine(Generic[O]):
    """`options` is the table of the engine's own options (`holdfast.option`), and `settings` an object of it: their
    values. Errors are `UserError` (wrong input) or `HostError` (the engine fails), with one line.

    `decides` are the options of `holdfast run` that the engine settles itself, so that a user must not give them.
    `takes_notice`: while `submit` waits, it asks the inbox of `signals` for a notice, and gives it to the run.
    """

    name: ClassVar[str]
    options: type[O] = Options  # type: ignore[assignment]  # An engine need not have any.
    decides: ClassVar[tuple[str, ...]] = _PLACES
    takes_notice: ClassVar[bool] = False

    def submit(self, job: JobSpec, settings: O, *, detach: bool) -> int:
        """Start the job and return its exit code. With `detach`, return 0 once the engine has accepted it."""
        raise NotImplementedError

    def render(self, job: JobSpec, settings: O) -> str:
        """The text (a batch script, a manifest) that starts the job when it is given to the engine."""
        raise NotImplementedError

    def advice(self, job: JobSpec, settings: O) -> list[str]:
        """Lines for the user about the text that `render` has made."""
        return []

    @classmethod
    def can(cls, what: str) -> bool:
        """Whether it implements `submit` or `render`."""
        return getattr(cls, what) is not getattr(Engine, what)


def names() -> list[str]:
    return sorted({*_BUILT_IN, *_plug_ins()})


def find(name: str, what: str) -> Engine[Any]:
    """The engine of that name, which can do `what`: "submit" or "render"."""
    kind = _kind(name)
    if not kind.can(what):
        other = "render" if what == "submit" else "submit"
        use = f"use `holdfast {other} {name}`, or for {what}: {_those_that_can(what)}"
        raise UserError(f"engine {name!r} does not {what} jobs; {use}")
    return kind()


def kinds() -> list[type[Engine[Any]]]:
    """All engines that can be loaded, in the order of their names."""
    found = []
    for name in names():
        try:
            found.append(_kind(name))
        except UserError:
            continue  # A broken plug-in is an error for those who ask for it.
    return found


def _kind(name: str) -> type[Engine[Any]]:
    place = _BUILT_IN.get(name) or _plug_ins().get(name)
    if place is None:
        raise UserError(f"there is no engine {name!r}; the engines are: {', '.join(names())}")
    module, _, attribute = place.partition(":")
    try:
        kind = getattr(import_module(module), attribute)
    except Exception as error:
        raise UserError(f"engine {name!r} ({place}) cannot be loaded: {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Engine)):
        raise UserError(f"engine {name!r} ({place}) is not a subclass of holdfast.hosts.engines.Engine")
    return kind


def _plug_ins() -> dict[str, str]:
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=GROUP)}


def _those_that_can(what: str) -> str:
    return ", ".join(kind.name for kind in kinds() if kind.can(what)) or "no engine is installed"


def ask(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a tool of an engine that answers at once. In a session of its own, so that Ctrl-C does not end it: a job that
    it creates at that moment has to be cancelled."""
    import subprocess

    try:
        return subprocess.run(
            command, input=text, capture_output=True, text=True, errors="surrogateescape", timeout=_ANSWER_TIMEOUT_S,
            start_new_session=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HostError(f"{command[0]} has not answered within {_ANSWER_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise HostError(f"cannot start {command[0]}: {error.strerror}") from None


def tell(*command: str, text: str = "") -> str:
    """Have such a tool do something. Returns why it did not, or nothing: the job goes on either way."""
    try:
        done = ask(*command, text=text)
    except HostError as error:
        return str(error)
    return (last_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""
