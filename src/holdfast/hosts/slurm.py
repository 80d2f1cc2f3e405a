"""Slurm: a job as a batch script (`holdfast render slurm`), and the command that submits it and waits for its end.

The script starts one agent a node with `srun`. The agents find out where they meet from Slurm's variables
(`hosts.engine_detection`); the script adds what only it knows: a run id of its own for each time that Slurm starts the
job, and a token. `submit` gives the script to `sbatch --wait`, which ends with the job, shows what the job writes to
its output file, and cancels the job if it is stopped itself.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

from holdfast import escape, loop, signals, stdio
from holdfast.errors import HostError, UserError
from holdfast.frozen import frozen
from holdfast.hosts.console import EngineConsole
from holdfast.hosts.engines import Engine, EngineOption
from holdfast.hosts.job import LONG_EXIT_BARRIER, JobSpec
from holdfast.hosts.own_lines import PREFIX_VARIABLE, prefix_template
from holdfast.log import Logger
from holdfast.process.output.lines import HeldLine

log = Logger(__name__)

_LOOK_AGAIN_S = 0.3  # At the output file, which another host writes: no event says that it has grown.
_ANSWER_TIMEOUT_S = 60.0
_QUEUE_LOOK_S, _QUEUE_LOOK_AGAIN_S = 5.0, 60.0  # When to ask why the job waits.
_LAST_AGENTS_S = 60  # How long the other agents may go on when the first one has ended.
_LAST_ANSWER_S = 5.0  # How long sbatch may still take to submit the job after a signal.
_PIECE_BYTES = 1 << 16
_GOING_ON = ("PENDING", "RUNNING", "COMPLETING", "SUSPENDED")
# Slurm has names and comments of other users, in any encoding.
_TEXT: Any = {"text": True, "errors": "surrogateescape"}


class Slurm(Engine):
    name = "slurm"
    options = (
        EngineOption("--partition NAME", "the partition; the cluster's default if left out"),
        EngineOption("--account NAME", "the account that pays for the job"),
        EngineOption("--time LIMIT", "how long the job may run, as Slurm writes it: 90 (minutes), 1:30:00, 2-0"),
        EngineOption("--gpus-per-node N", "GPUs on each node; without --nproc-per-node, one worker for each"),
        EngineOption("--cpus-per-node N", "CPUs on each node, for the agent and its workers together"),
        EngineOption("--output FILE", "where the job's output goes, with Slurm's patterns", default="slurm-%j.out"),
        EngineOption("--sbatch OPTIONS", "more options of sbatch, as one text: '--constraint=a100 --exclusive'"),
    )
    # The user may have a coordinator or an etcd of his own.
    decides = tuple(name for name in Engine.decides if name not in ("rdzv_backend", "rdzv_endpoint"))

    def render(self, job: JobSpec, settings: Mapping[str, Any]) -> str:
        _check(job)
        head = ["#!/bin/bash", *(f"#SBATCH {_directive(name, value)}" for name, value in _directives(job, settings))]
        return "\n".join([*head, *_body(job, settings)]) + "\n"

    def submit(self, job: JobSpec, settings: Mapping[str, Any]) -> int:
        script = self.render(job, settings)
        if shutil.which("sbatch") is None:
            raise HostError("sbatch was not found: this host has no commands of Slurm, or they are not on PATH")
        if settings["detach"]:
            done = _ask("sbatch", "--parsable", text=script)
            if done.returncode:
                raise _refusal(done.stderr)
            stdio.write(sys.stdout, f"{done.stdout.strip()}\n", may_drop=False)
            return 0
        return _Submission(script, job).wait()


# --- the script: pure -----------------------------------------------------------------------------------------------


def _check(job: JobSpec) -> None:
    given = {option.partition("=")[0] for option in job.options}
    if "--rdzv-endpoint" in given and "--rdzv-backend" not in given:
        raise UserError("--rdzv-endpoint: on Slurm it needs --rdzv-backend tcp or etcd; leave both out as a rule")


def _directives(job: JobSpec, settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    low, high = job.min_nodes, job.max_nodes
    yield "--job-name", os.path.basename(job.program[0]) or "holdfast"
    if low == high:
        yield "--nodes", f"{low}"
        yield "--ntasks-per-node", "1"
    else:
        yield "--nodes", f"{low}-{high}"  # With a number of tasks, Slurm would give no more than the minimum.
        yield "--no-kill", ""  # A node that Slurm loses does not end the job: the others go on.
    yield "--chdir", job.directory
    yield "--output", settings["output"]
    for option, name in (("partition", "--partition"), ("account", "--account"), ("time", "--time"),
                         ("gpus_per_node", "--gpus-per-node"), ("cpus_per_node", "--cpus-per-task")):  # fmt: skip
        if settings[option]:
            yield name, settings[option]
    try:
        words = shlex.split(settings["sbatch"] or "")
    except ValueError as error:
        raise UserError(f"--sbatch {settings['sbatch']!r} cannot be split into words: {error}") from None
    for word in words:
        name, _, value = word.partition("=")
        if not name.startswith("-"):
            raise UserError(f"--sbatch: write options with an equals sign, as in --qos=high, not {word!r}")
        yield name, value


def _directive(name: str, value: str) -> str:
    text = f"{name}={value}" if value else name
    if escape.one_line(text) != text or '"' in text:
        raise UserError(f"an option of sbatch contains a quote or a control character: {text!r}")
    if not value:
        return name
    return f'{name}="{value}"' if re.search(r"[\s#'\\]", value) else f"{name}={value}"


def _quoted(word: str) -> str:
    """As one word for bash. Control characters are written so that the script can be shown as it is."""
    if escape.lines(word) == word:
        return shlex.quote(word)
    octets = (chr(each) if chr(each).isalnum() and each < 0x80 else f"\\x{each:02x}" for each in os.fsencode(word))
    return f"$'{''.join(octets)}'"


def _body(job: JobSpec, settings: Mapping[str, Any]) -> Iterator[str]:
    given = {option.partition("=")[0] for option in job.options}
    holdfast = " ".join(map(_quoted, job.holdfast))
    yield ""
    yield from (f"export {name}={_quoted(value)}" for name, value in job.environment)
    yield f"run_id={_quoted(job.run_id)}"
    yield "# A job that was put back into the queue is a new run."
    yield '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || run_id="$run_id-requeue$SLURM_RESTART_COUNT"'
    yield ""
    yield "# SIGTERM goes on to the agents, which stop their workers with grace, and ends only the wait below."
    yield "# scancel runs in the background: while Slurm itself ends the job, it takes long to return."
    yield """trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2> /dev/null &' TERM"""
    if job.max_nodes > 1 and "--token-file" not in given:
        yield ""
        yield "# A secret that keeps others out of the run, if all nodes can read this directory."
        yield 'if [ -z "${HOLDFAST_TOKEN:-}" ]; then'
        yield '    if private=$(mktemp -d "$PWD/.holdfast-XXXXXXXXXX"); then'
        yield """        trap 'rm -rf "$private"' EXIT"""
        yield '        token="$private/token"'
        yield f'        (umask 077 && set -C && {holdfast} token > "$token")'
        yield '        if [ -s "$token" ] && srun test -r "$token"; then'
        yield '            export PET_TOKEN_FILE="$token"'
        yield "        fi"
        yield "    fi 2> /dev/null"
        yield "fi"
    cpus = f" --cpus-per-task={_quoted(settings['cpus_per_node'])}" if settings["cpus_per_node"] else ""
    own = {f"--rdzv-id={job.run_id}": '"--rdzv-id=$run_id"'}
    wait, patience = "", []
    if job.min_nodes == job.max_nodes and "--exit-barrier-timeout" not in given:
        # A run of a fixed size cannot go on without one of its agents, and Slurm starts no other. It does not ask how
        # an agent has ended, so those that have succeeded must wait for the others.
        wait, patience = f" --wait={_LAST_AGENTS_S}", [LONG_EXIT_BARRIER]
    words = [own.get(word) or _quoted(word) for word in job.agent_command(*patience, *job.prefix_options)]
    yield ""
    if job.has_prefixes:
        yield "# Lines of workers begin with their node and rank."
        template = prefix_template("$SLURMD_NODENAME").replace("${rank}", "\\${rank}")
        words = ["bash", "-c", f"""'export {PREFIX_VARIABLE}="{template}"; exec "$@"'""", "agent", *words]
    yield f"srun --ntasks-per-node=1{wait}{cpus} {' '.join(words)} &"
    yield "agents=$!"
    yield 'wait "$agents"; code=$?'
    yield 'while kill -0 "$agents" 2> /dev/null; do wait "$agents"; code=$?; done'
    yield 'exit "$code"'


# --- submit ---------------------------------------------------------------------------------------------------------


def _refusal(text: str) -> UserError:
    return UserError(f"Slurm refused the job: {_last_line(text) or 'sbatch did not say why'}")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else ""


class _Output:
    """Shows what the job writes to its output file. Slurm makes the file when the job starts."""

    def __init__(self, path: str, *, has_prefixes: bool) -> None:
        self._path, self._is_over = path, threading.Event()
        self._file: IO[bytes] | None = None
        self._console = EngineConsole(has_prefixes=has_prefixes)
        self._reader = threading.Thread(target=self._read_all, name="holdfast-output", daemon=True)
        self._reader.start()

    @property
    def is_found(self) -> bool:
        return self._file is not None

    def _read_all(self) -> None:
        is_over, held = False, HeldLine()
        while not is_over:
            is_over = self._is_over.wait(_LOOK_AGAIN_S)
            with contextlib.suppress(OSError):  # Not there yet, or its server does not answer now.
                self._file = self._file or open(self._path, "rb", buffering=0)  # noqa: SIM115  (open until the job ends)
                while piece := self._file.read(_PIECE_BYTES):
                    self._show(held.take(piece))
        self._show(held.flush())

    def _show(self, lines: bytes) -> None:
        is_written = threading.Event()
        self._console.write("", [("stdout", lines)], is_written.set)
        is_written.wait()

    def close(self) -> None:
        self._is_over.set()
        while self._reader.is_alive():
            self._reader.join(_LOOK_AGAIN_S)
            if self._console.is_stuck:
                self._console.abandon()
        self._console.close()


@frozen
class _SlurmJob:
    """`cluster` is empty for the cluster that Slurm's commands ask by default. Each cluster has its own numbers."""

    number: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.number} of cluster {self.cluster}" if self.cluster else self.number

    @property
    def words(self) -> list[str]:
        """For a command of Slurm."""
        return [*([f"--clusters={self.cluster}"] if self.cluster else []), self.number]

    def facts(self) -> dict[str, str]:
        """What Slurm knows of the job, by its own names; nothing if it does not answer or has forgotten the job."""
        *where, number = self.words
        try:
            lines = _ask("scontrol", *where, "show", "job", number).stdout.splitlines()
        except HostError:
            return {}
        return {name: value for line in lines for name, value in re.findall(r"(\w+)=(.*?)(?=\s+\S+?=|\s*$)", line)}


class _Submission:
    """One job from its submission to its end. Signals are noted in the inbox, and handled between two looks."""

    def __init__(self, script: str, job: JobSpec) -> None:
        self._has_prefixes = job.has_prefixes
        self._reason, self._next_question = "", time.monotonic() + _QUEUE_LOOK_S
        self._stopped_by: signal.Signals | None = None
        # In a session of its own, so that Ctrl-C does not end it: it is what knows when the job is over.
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **_TEXT}
        self._sbatch = subprocess.Popen(["sbatch", "--wait", "--parsable"], start_new_session=True, **pipes)
        self._watch = os.pidfd_open(self._sbatch.pid)
        try:
            self._job = self._submit(script)
            self._path = self._job.facts().get("StdOut", "")
        except BaseException:
            self._end_sbatch()
            raise
        log.info("submitted as Slurm job %s, run %r; its output goes to %s", self._job, job.run_id, self._path)

    def _submit(self, script: str) -> _SlurmJob:
        """sbatch prints the id and then waits. A controller that is down makes it try for a while. A signal waits for
        the id, too, within limits: the job that sbatch submits at this moment has to be cancelled by its id."""
        into, out, box = self._sbatch.stdin, self._sbatch.stdout, signals.inbox()
        assert into is not None
        assert out is not None
        try:
            into.write(script)
            into.close()
        except BrokenPipeError:
            pass  # It has given up, and says why.
        self._sbatch.stdin = None
        ends_at = float("inf")
        while not loop.is_readable(out.fileno()) and self._sbatch.poll() is None:
            left_s = None if ends_at == float("inf") else ends_at - time.monotonic()
            loop.wait_readable([out.fileno(), self._watch], left_s, new_signals_only=left_s is not None)
            if box.has_pending:
                ends_at = min(ends_at, time.monotonic() + _LAST_ANSWER_S)
            if time.monotonic() >= ends_at or box.wants_haste:
                box.raise_pending()
        number, _, cluster = out.readline().strip().partition(";")
        if not number:
            _, problem = self._sbatch.communicate(timeout=_ANSWER_TIMEOUT_S)
            raise _refusal(problem)
        return _SlurmJob(number, cluster)

    def wait(self) -> int:
        """The job's exit code, when it has ended."""
        self._output = _Output(self._path, has_prefixes=self._has_prefixes)
        try:
            facts = self._await_end()
        finally:
            self._end_sbatch()
            self._output.close()
        return self._code(facts)

    def _end_sbatch(self) -> None:
        self._sbatch.kill()
        self._sbatch.wait()
        os.close(self._watch)

    def _await_end(self) -> dict[str, str]:
        """What Slurm knows of the job then."""
        box = signals.inbox()
        while self._sbatch.poll() is None:
            loop.wait_readable([self._watch], _LOOK_AGAIN_S)
            if (number := box.take()) is not None and self._is_enough(number):
                return {}
            if time.monotonic() > self._next_question and self._is_over():
                self._sbatch.kill()
        # The job's processes may end a moment after sbatch has noticed.
        ends = time.monotonic() + _ANSWER_TIMEOUT_S
        while (facts := self._job.facts()).get("JobState") == "COMPLETING" and time.monotonic() < ends:
            loop.wait_readable([], _LOOK_AGAIN_S)
            if box.has_pending and self._stopped_by is not None:
                break
        return facts

    def _is_over(self) -> bool:
        """Whether a job that was cancelled has ended: sbatch itself looks only every ten seconds. Of a job that has not
        started, say why it waits."""
        self._next_question = time.monotonic() + (_LOOK_AGAIN_S if self._stopped_by else _QUEUE_LOOK_AGAIN_S)
        if self._stopped_by is None and self._output.is_found:
            return False
        facts = self._job.facts()
        state, reason = facts.get("JobState", ""), facts.get("Reason", "None")
        if state == "PENDING" and reason not in ("None", self._reason):
            self._reason = reason
            log.info("Slurm job %s waits in the queue: %s", self._job, reason)
        return self._stopped_by is not None and state not in _GOING_ON

    def _is_enough(self, number: signal.Signals) -> bool:
        """The first signal cancels the job, the second ends the wait for its end."""
        is_first, self._stopped_by = self._stopped_by is None, number
        if not is_first:
            return True
        self._next_question = time.monotonic() + _LOOK_AGAIN_S
        log.warning("got %s, cancelling Slurm job %s", number.name, self._job)
        done = _ask("scancel", *self._job.words)
        if done.returncode:
            log.error("cannot cancel it: %s", _last_line(done.stderr))
        return bool(done.returncode)

    def _code(self, facts: Mapping[str, str]) -> int:
        state = facts.get("JobState", "")
        if self._stopped_by is not None:
            if state and state not in _GOING_ON:
                log.warning("Slurm job %s ended as %s", self._job, state)
            return 128 + self._stopped_by
        if self._sbatch.returncode < 0 and (not state or state in _GOING_ON):
            way_out = f"if the job goes on, `scancel {' '.join(self._job.words)}` ends it"
            raise HostError(f"sbatch, which waits for the end of Slurm job {self._job}, was killed; {way_out}")
        if not self._output.is_found:
            log.warning("the job's output file %s cannot be read from here", self._path)
        code, _, number = facts.get("ExitCode", f"{self._sbatch.returncode}:0").partition(":")
        if state not in ("COMPLETED", "FAILED", ""):
            log.warning("Slurm job %s ended as %s", self._job, state)
        if int(code) or state in ("COMPLETED", ""):
            return int(code)
        is_stopped = state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")
        return 128 + (int(number) or signal.SIGTERM) if is_stopped else 1


def _ask(*command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command of Slurm that answers at once."""
    try:
        return subprocess.run(command, input=text, capture_output=True, timeout=_ANSWER_TIMEOUT_S, **_TEXT)
    except subprocess.TimeoutExpired:
        raise HostError(f"{command[0]} has not answered within {_ANSWER_TIMEOUT_S:g} s") from None
    except OSError as error:
        raise HostError(f"cannot start {command[0]}: {error.strerror}") from None
