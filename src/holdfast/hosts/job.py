"""One job as data: `JobSpec`, what an engine starts on each of its nodes, and `Outcome`, how it ended. Pure.

An engine starts one agent a node, always by the same command: `python -P -m holdfast run OPTIONS PROGRAM`. `OPTIONS`
are the user's, and those by which the engine says where this node meets the others. With `-P` the agent does not import
stray modules of the working directory.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from holdfast.errors import HoldfastError
from holdfast.frozen import frozen

# For engines that end the job when the first agent has succeeded: those that have finished wait for the others.
LONG_EXIT_BARRIER = "--exit-barrier-timeout=20d"


@frozen
class JobSpec:
    """`options` are those of `holdfast run`, as the user gave them, without the ones that have a field here; `program`
    is the script with its arguments. `is_named`: the run id is the user's. `nproc_per_node` is empty if the user left
    it out. `environment` are variables that every agent gets in addition. `directory` and `python` are where and by
    which interpreter the agents run.
    `grace_s` and `join_timeout_s` are how long agents may take to stop and to meet, `health_port` where they answer
    probes. `notice_signal` gives notice that the run goes away in `notice_s`, and `passed_signals` go to the workers.
    What the user gave of these is in `options`, too."""

    options: tuple[str, ...]
    program: tuple[str, ...]
    run_id: str
    min_nodes: int = 1
    max_nodes: int = 1
    nproc_per_node: str = ""
    directory: str = ""
    python: str = "python3"
    environment: tuple[tuple[str, str], ...] = ()
    grace_s: float = 30.0
    join_timeout_s: float = 600.0
    health_port: int | None = None
    is_named: bool = False
    notice_signal: signal.Signals | None = None
    notice_s: float = 120.0
    passed_signals: frozenset[signal.Signals] = frozenset()

    @property
    def nnodes(self) -> str:
        """As `--nnodes` has it."""
        return f"{self.min_nodes}" if self.min_nodes == self.max_nodes else f"{self.min_nodes}:{self.max_nodes}"

    @property
    def given(self) -> dict[str, str]:
        """The values of `options`, by flag; that of a flag without one is empty."""
        return {flag: text for flag, _, text in (word.partition("=") for word in self.options)}

    @property
    def has_prefixes(self) -> bool:
        """Whether the lines of workers begin with host and rank, as they do unless the user objects."""
        return self.given.get("--prefix") != "never"

    @property
    def prefix_options(self) -> list[str]:
        return ["--prefix=always"] if self.has_prefixes else []

    def agent_command(self, *engine_options: str) -> list[str]:
        return [*self.holdfast, *self.agent_arguments(*engine_options)]

    @property
    def holdfast(self) -> list[str]:
        """The `holdfast` command of the nodes."""
        return [self.python, "-P", "-m", "holdfast"]

    def agent_arguments(self, *engine_options: str) -> list[str]:
        """The arguments of `holdfast` for one agent. What the engine says comes last, so that it wins."""
        nproc = [f"--nproc-per-node={self.nproc_per_node}"] if self.nproc_per_node else []
        own = [f"--nnodes={self.nnodes}", f"--rdzv-id={self.run_id}", *nproc, *self.options, *engine_options]
        return ["run", *own, "--", *self.program]


@frozen
class AgentOrder:
    """`arguments` are those of `holdfast`; the interpreter is that of the process that starts the agent, and so is an
    empty directory. The agent gets neither the variables of `without` nor any `PET_` variable: all options are in
    `arguments`."""

    arguments: tuple[str, ...]
    directory: str
    environment: Mapping[str, str]
    grace_s: float
    without: tuple[str, ...] = ()


@frozen
class Outcome:
    """`words` are the last words of an agent. Otherwise `error` is why the job failed, in one line."""

    code: int
    words: str = ""
    error: str = ""

    def raise_failure(self, program: str) -> None:
        """Returns if the job has succeeded. `program` is the command that started it."""
        if self.code:
            raise JobFailed(self.code, self.words or f"{program}: error: {self.error}\n")


class JobFailed(HoldfastError):  # noqa: N818
    """The job has ended, with that exit code and these last words."""

    def __init__(self, exit_code: int, last_words: str) -> None:
        super().__init__(last_words)
        self.exit_code, self.last_words = exit_code, last_words
