"""Slurm: a job as a batch script (`holdfast render slurm`), and the command that submits it and waits for its end.

The script starts one agent a node with `srun`. The agents find out where they meet from Slurm's variables
(`hosts.engine_detection`); the script adds what only it knows: a run id of its own for each time that Slurm starts the
job, and a token. `submit` gives the script to `sbatch`, shows what the job writes to its output file, and cancels the
job if it is stopped itself.

How `submit` learns that the job has ended: the script says so in the job's output (`_LAST_LINE`), and Slurm is asked
then until it knows, too. A job that could not say it (killed, cancelled, out of time) is noticed by the questions that
are asked every few seconds anyway. A job that Slurm puts back into the queue writes on into the same file. Before it
starts again, `submit` excludes the nodes that the runs of the job have lost more than once, as the output says.

Slurm starts no task again. So in a job of several nodes the task is a shell, which starts an agent that was killed
again (`_KEEP_AGENT`). Such an agent must not begin the run anew when the others have ended it. So the shells share a
file that says that an agent has ended by itself; without a directory for it, no agent is started again. If the run ends
a moment later, its coordinator still remembers it (`close_linger`).
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
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import IO, Any

from holdfast import escape, loop, signals, stdio
from holdfast.errors import WENT_AWAY, HoldfastError, HostError, UserError
from holdfast.frozen import frozen
from holdfast.hosts.console import EngineConsole
from holdfast.hosts.engines import OWN, Engine, ask, tell
from holdfast.hosts.job import LONG_EXIT_BARRIER, JobSpec
from holdfast.hosts.own_lines import PREFIX_VARIABLE, prefix_template
from holdfast.log import Logger
from holdfast.option import Options, count, optional, value
from holdfast.process.output.lines import HeldLine
from holdfast.process.spawner.client import SUCCESS_FILE_VARIABLE

log = Logger(__name__)

_LOOK_AGAIN_S = 0.3  # At the output file, which another host writes: no event says that it has grown.
_ASK_AGAIN_S = 5.0  # How the job stands.
_LAST_AGENTS_S = 60  # How long the other agents may go on when the first one has ended.
_LAST_ANSWER_S = 5.0  # How long sbatch may still take to submit the job after a signal.
_PIECE_BYTES = 1 << 16
_TELLING_S = 5.0  # In this time the agents have heard of a notice.
_GOING_ON = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "REQUEUE_HOLD", "STAGE_OUT")
_LAST_LINE = "holdfast: the agents of Slurm job {} have ended with exit code "
# The id of a node, and the first part of its host name, which Slurm calls it by as a rule.
_LOST = re.compile(rb"^holdfast: .*?(([\w-]+?)(?:\.[\w.-]*)?-\d+-[0-9a-f]{8}) is lost: ", re.MULTILINE)
_MOST_LOSSES = 1  # Of a node that may be used again.
# The delays are those of lost hosts (`agent_fleet`). Depending on the cluster Slurm signals the shell alone, or every
# process of the task; so the shell passes signals on. It would start a background command with two of them ignored.
# A listing is newer than what NFS remembers of a file that was missing.
# With the task Slurm ends the coordinator on that node, which may have to tell other nodes that the run goes away.
_KEEP_AGENT = f"""\
set +eu
private=${{{SUCCESS_FILE_VARIABLE}%/*}} stopped=
for name in HUP INT QUIT TERM; do trap "stopped=$name; kill -$name \\$! 2> /dev/null" $name; done
for name in USR1 USR2; do trap "kill -$name \\$! 2> /dev/null" $name; done
is_over() {{ [ -n "$stopped" ] || ! listed=$(ls "$private" 2> /dev/null) || [[ $listed = *ended* ]]; }}
for delay in 5 10 20 ""; do
    (trap - INT QUIT; exec "$@") &
    [ -z "$stopped" ] || kill -$stopped $!
    {{ wait $!; code=$?; while kill -0 $!; do wait $!; code=$?; done; }} 2> /dev/null
    [ $code = {128 + signal.SIGKILL} ] || {{ [ ! -d "$private" ] || : > "$private/ended"; break; }}
    [ -n "$delay" ] && ! is_over || break
    echo "holdfast: the agent on $SLURMD_NODENAME was killed; it is started again in $delay s" >&2
    for ((; delay > 0; delay--)); do is_over || sleep 1; done
    ! is_over || break
done
[ $code != {WENT_AWAY} ] || sleep 2
exit $code"""
# What Slurm's commands say when it is not the user's input that is wrong.
_TROUBLE = re.compile(
    "Unable to contact|Socket timed out|timed out|Connection refused|Unable to connect|Zero Bytes|[Aa]uthentication"
    "|Unable to resolve|Communication|[Mm]unge|not responding|in standby mode|temporarily unable"
)
# Slurm has names and comments of other users, in any encoding.
_TEXT: Any = {"text": True, "errors": "surrogateescape"}


class SlurmOptions(Options):
    # fmt: off
    partition = optional("--partition NAME", OWN, str, help="the partition; the cluster's default if left out")
    account = optional("--account NAME", OWN, str, help="the account that pays for the job")
    qos = optional("--qos NAME", OWN, str, help="the quality of service")
    time = optional("--time LIMIT", OWN, str, help=
        "how long the job may run, as Slurm writes it: 90 (minutes), 1:30:00, 2-0")
    notice = optional("--notice SECONDS", OWN, count, help=
        "how long before the time limit all workers are told that the run goes away (docs/notice.md): 120")
    nodelist = optional("--nodelist NODES", OWN, str, help="nodes that the job must have, as in node[1-4]")
    exclude = optional("--exclude NODES", OWN, str, help="nodes that the job must not have")
    gpus_per_node = optional("--gpus-per-node N", OWN, str, help=
        "GPUs on each node; without --nproc-per-node, one worker for each")
    cpus_per_node = optional("--cpus-per-node N", OWN, str, help=
        "CPUs on each node, for the agent and its workers together")
    output = value("--output FILE", OWN, str, "slurm-%j.out", help=
        "where the job's output goes, with Slurm's patterns")
    setup = optional("--setup COMMANDS", OWN, str, help=
        "commands of bash that run on each node before the agent: 'module load cuda; source env/bin/activate'")
    sbatch = value("--sbatch OPTIONS", OWN, str, "", takes_dashes=True, joined_by=" ", help=
        "more options of sbatch, as one text: '--constraint=a100 --exclusive'; may be given several times")
    srun = value("--srun OPTIONS", OWN, str, "", takes_dashes=True, joined_by=" ", help=
        "options of the srun that starts the agents, as one text: '--container-image=me/train --mpi=none'; may be "
        "given several times")
    # fmt: on


class Slurm(Engine[SlurmOptions]):
    name = "slurm"
    options = SlurmOptions
    takes_notice = True
    # The user may have a coordinator or an etcd of his own.
    decides = tuple(name for name in Engine.decides if name not in ("rdzv_backend", "rdzv_endpoint"))

    def render(self, job: JobSpec, settings: SlurmOptions) -> str:
        _check(job)
        head = ["#!/bin/bash", *(f"#SBATCH {_directive(name, text)}" for name, text in _directives(job, settings))]
        return "\n".join([*head, *_body(job, settings)]) + "\n"

    def submit(self, job: JobSpec, settings: SlurmOptions, *, detach: bool) -> int:
        script = self.render(job, settings)
        if any(word.startswith(("--array", "-a")) for word in _words("--sbatch", settings.sbatch)) and not detach:
            remedy = "give --detach, or `holdfast render slurm ... > job.sbatch` and `sbatch job.sbatch`"
            raise UserError(f"--sbatch --array: the tasks of an array have an output file each; {remedy}")
        if shutil.which("sbatch") is None:
            raise HostError("sbatch was not found: this host has no commands of Slurm, or they are not on PATH")
        submitted = _submitted(script)
        if detach:
            stdio.write(sys.stdout, f"{submitted.parsable}\n", may_drop=False)
            return 0
        return _Submission(submitted, job).wait()


# --- the script: pure -----------------------------------------------------------------------------------------------


def _check(job: JobSpec) -> None:
    if "--rdzv-endpoint" in job.given and "--rdzv-backend" not in job.given:
        raise UserError("--rdzv-endpoint: on Slurm it needs --rdzv-backend tcp or etcd; leave both out as a rule")


def _directives(job: JobSpec, settings: SlurmOptions) -> Iterator[tuple[str, str]]:
    low, high = job.min_nodes, job.max_nodes
    yield "--job-name", os.path.basename(job.program[0]) or "holdfast"
    if low == high:
        yield "--nodes", f"{low}"
        yield "--ntasks-per-node", "1"
    else:
        yield "--nodes", f"{low}-{high}"  # With a number of tasks, Slurm would give no more than the minimum.
        yield "--no-kill", ""  # A node that Slurm loses does not end the job: the others go on. The step needs it, too.
    yield "--chdir", job.directory
    yield "--output", settings.output
    yield "--open-mode", "append"  # Slurm would truncate the output of a job that it starts again.
    own = (
        ("--partition", settings.partition), ("--account", settings.account), ("--qos", settings.qos),
        ("--time", settings.time), ("--nodelist", settings.nodelist), ("--exclude", settings.exclude),
        ("--gpus-per-node", settings.gpus_per_node), ("--cpus-per-task", settings.cpus_per_node),
    )  # fmt: skip
    yield from ((name, text) for name, text in own if text)
    if settings.notice:
        yield "--signal", f"B:USR1@{settings.notice}"
    for word in _words("--sbatch", settings.sbatch):
        name, _, text = word.partition("=")
        if not name.startswith("-"):
            raise UserError(f"--sbatch: write options with an equals sign, as in --qos=high, not {word!r}")
        yield name, text


def _words(flag: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{flag} {text!r} cannot be split into words: {error}") from None


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


def _body(job: JobSpec, settings: SlurmOptions) -> Iterator[str]:
    given = job.given
    holdfast = " ".join(map(_quoted, job.holdfast))
    yield ""
    yield from (f"export {name}={_quoted(value)}" for name, value in job.environment)
    yield "# Each time that Slurm starts this script is a run of its own, and so is each task of an array."
    yield f"run_id={_quoted(job.run_id if job.is_named else 'slurm')}-${{SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}}"
    yield 'run_id="$run_id${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"'
    yield '[ "${SLURM_RESTART_COUNT:-0}" = 0 ] || run_id="$run_id-requeue$SLURM_RESTART_COUNT"'
    yield ""
    yield "# SIGTERM goes on to the agents, which stop their workers with grace, and ends only the wait below."
    yield "# scancel runs in the background: while Slurm itself ends the job, it takes long to return."
    yield """trap 'scancel --signal=TERM "$SLURM_JOB_ID" 2> /dev/null &' TERM"""
    yield "# SIGUSR1 says that the run goes away: the agent on this node tells all others, and they their workers."
    left_s = max(0.0, settings.notice - _TELLING_S) if settings.notice else job.notice_s
    reason = "time limit" if settings.notice else "SIGUSR1"
    tell = f'{holdfast} notice "$run_id" --whole-run --in {left_s:g} --reason "{reason}"'
    yield f"""trap {_quoted(f'{tell} || scancel --signal=TERM "$SLURM_JOB_ID" &')} USR1"""
    srun = ["srun", "--ntasks-per-node=1"]
    if job.min_nodes < job.max_nodes:
        srun.append("--no-kill")
    if settings.cpus_per_node:
        srun.append(f"--cpus-per-task={_quoted(settings.cpus_per_node)}")
    if job.max_nodes > 1:
        yield ""
        yield "# What the nodes share, if all of them can reach this directory: a secret that keeps others out of the"
        yield "# run, and whether the run has succeeded; srun would report an agent that was lost on the way."
        yield 'if private=$(mktemp -d "$PWD/.holdfast-XXXXXXXXXX"); then'
        yield """    trap 'rm -rf "$private"' EXIT"""
        yield f'    export {SUCCESS_FILE_VARIABLE}="$private/succeeded"; token="$private/token"'
        if "--token-file" not in given:
            yield '    if [ -z "${HOLDFAST_TOKEN:-}" ]; then'
            yield f'        (umask 077 && set -C && {holdfast} token > "$token")'
            yield '        if [ -s "$token" ] && srun test -r "$token"; then'
            yield '            export PET_TOKEN_FILE="$token"'
            yield "        fi"
            yield "    fi"
        yield "fi 2> /dev/null"
    own = {f"--rdzv-id={job.run_id}": '"--rdzv-id=$run_id"'}
    patience = []
    if job.min_nodes == job.max_nodes and "--exit-barrier-timeout" not in given:
        # A run of a fixed size cannot go on without one of its agents, and Slurm starts no other. It does not ask how
        # an agent has ended, so those that have succeeded must wait for the others.
        srun.append(f"--wait={_LAST_AGENTS_S}")
        patience = [LONG_EXIT_BARRIER]
    words = [own.get(word) or _quoted(word) for word in job.agent_command(*patience, *job.prefix_options)]
    yield ""
    before = [f"{{ {settings.setup}\n}} || exit"] if settings.setup else []
    if job.has_prefixes:
        yield "# Lines of workers begin with their node and rank."
        template = prefix_template("$SLURMD_NODENAME").replace("${rank}", "\\${rank}")
        before.append(f'export {PREFIX_VARIABLE}="{template}"')
    if job.max_nodes > 1:
        yield "# An agent that is killed is started again, later each time, unless the run has ended or is stopped."
        before.append(_KEEP_AGENT)
    elif before:
        before.append('exec "$@"')
    if before:
        words = ["bash", "-c", _quoted("\n".join(before)), "agent", *words]
    yield f"{' '.join([*srun, *map(_quoted, _words('--srun', settings.srun)), *words])} &"
    yield "agents=$!"
    yield 'wait "$agents"; code=$?'
    yield 'while kill -0 "$agents" 2> /dev/null; do wait "$agents"; code=$?; done'
    if job.max_nodes > 1:
        yield f'[ ! -e "${{{SUCCESS_FILE_VARIABLE}:-}}" ] || code=0'
    yield f'echo "{_LAST_LINE.format("$SLURM_JOB_ID")}$code"'
    yield 'exit "$code"'


# --- submit ---------------------------------------------------------------------------------------------------------


def _refusal(text: str) -> HoldfastError:
    """What sbatch has said, which ends with a hint at its help."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("Try ")]
    said = lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else "sbatch did not say why"
    return HostError(f"Slurm cannot be asked: {said}") if _TROUBLE.search(said) else UserError(
        f"Slurm refused the job: {said}")  # fmt: skip


@frozen
class _SlurmJob:
    """`cluster` is empty for the cluster that Slurm's commands ask by default. Each cluster has its own numbers."""

    number: str
    cluster: str

    def __str__(self) -> str:
        return f"{self.number} of cluster {self.cluster}" if self.cluster else self.number

    @property
    def parsable(self) -> str:
        return f"{self.number};{self.cluster}" if self.cluster else self.number

    @property
    def words(self) -> list[str]:
        """For a command of Slurm."""
        return [*([f"--clusters={self.cluster}"] if self.cluster else []), self.number]

    def facts(self) -> dict[str, str] | None:
        """What Slurm knows of the job, by its own names; nothing if it has forgotten the job, None if it does not
        answer."""
        *where, number = self.words
        try:
            done = ask("scontrol", *where, "show", "job", number)
        except HostError:
            return None
        if done.returncode:
            return {} if "Invalid job id" in done.stderr else None
        first = done.stdout.partition("\n\n")[0]  # Of an array or a heterogeneous job, which has several.
        return dict(re.findall(r"(\w+)=(.*?)(?=\s+\S+?=|\s*$)", first, re.MULTILINE))


def _submitted(script: str) -> _SlurmJob:
    """A controller that is down makes sbatch try for a while. A signal waits for the id, within limits: the job that
    sbatch submits at this moment has to be cancelled by its id."""
    box, ends_at = signals.inbox(), float("inf")
    # In a session of its own, so that Ctrl-C does not end it.
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **_TEXT}
    sbatch = subprocess.Popen(["sbatch", "--parsable"], start_new_session=True, **pipes)
    watch = os.pidfd_open(sbatch.pid)
    try:
        with contextlib.suppress(BrokenPipeError):  # It has given up, and says why.
            assert sbatch.stdin is not None
            sbatch.stdin.write(script)
            sbatch.stdin.close()
        sbatch.stdin = None
        while sbatch.poll() is None:
            left_s = None if ends_at == float("inf") else ends_at - time.monotonic()
            loop.wait_readable([watch], left_s, new_signals_only=left_s is not None)
            if box.has_pending:
                ends_at = min(ends_at, time.monotonic() + _LAST_ANSWER_S)
            if time.monotonic() >= ends_at or box.wants_haste:
                box.raise_pending()
        said, problem = sbatch.communicate()
    finally:
        sbatch.kill()
        sbatch.wait()
        os.close(watch)
    if sbatch.returncode < 0:
        raise HostError(
            f"sbatch was killed by {signals.signal_name(-sbatch.returncode)}; `squeue --me` shows your jobs"
        )
    if sbatch.returncode:
        raise _refusal(problem)
    number, _, cluster = said.strip().partition(";")
    return _SlurmJob(number, cluster)


class _Output:
    """Shows what the job writes to its output file. Slurm makes the file when the job starts. `has_said_end`: the
    script has said that the agents have ended."""

    def __init__(self, number: str, *, has_prefixes: bool) -> None:
        self.path = ""  # Until Slurm has said it.
        self._is_over = threading.Event()
        self._file: IO[bytes] | None = None
        self._last_line = _LAST_LINE.format(number).encode()
        self.has_said_end = False
        self._lost: dict[bytes, str] = {}  # The hosts of lost nodes, by the ids of these.
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
                self._file = self._file or open(self.path, "rb", buffering=0)  # noqa: SIM115  (open until the job ends)
                while piece := self._file.read(_PIECE_BYTES):
                    self._show(held.take(piece))
        self._show(held.flush())

    def _show(self, lines: bytes) -> None:
        self._lost |= {found[1]: found[2].decode() for found in _LOST.finditer(lines)}
        if self._last_line in lines:
            self.has_said_end = True
            lines = b"".join(line for line in lines.splitlines(keepends=True) if not line.startswith(self._last_line))
        is_written = threading.Event()
        self._console.write("", [("stdout", lines)], is_written.set)
        is_written.wait()

    def losses(self) -> dict[str, int]:
        """How often each host was lost, if more than once."""
        counts = Counter(self._lost.values())
        return {host: count for host, count in sorted(counts.items()) if count > _MOST_LOSSES}

    def close(self) -> None:
        self._is_over.set()
        while self._reader.is_alive():
            self._reader.join(_LOOK_AGAIN_S)
            if self._console.is_stuck:
                self._console.abandon()
        self._console.close()


class _Submission:
    """One job from its submission to its end. Signals are noted in the inbox, and handled between two looks."""

    def __init__(self, submitted: _SlurmJob, job: JobSpec) -> None:
        self._job = submitted
        self._said, self._stopped_by = "", None  # type: tuple[str, signal.Signals | None]
        run_id = f"{job.run_id if job.is_named else 'slurm'}-{submitted.number}"
        log.info("submitted as Slurm job %s, run %r", submitted, run_id)
        self._output = _Output(submitted.number, has_prefixes=job.has_prefixes)
        self._find_output(submitted.facts() or {})

    def wait(self) -> int:
        """The job's exit code, when it has ended."""
        try:
            facts = self._await_end()
        finally:
            self._output.close()
        if self._output.losses():
            log.warning("%s", self._excluded)
        return self._code(facts)

    def _find_output(self, facts: Mapping[str, str]) -> None:
        if not self._output.path and (path := facts.get("StdOut", "")):
            log.info("the output of the job goes to %s", path)
            self._output.path = path

    def _await_end(self) -> Mapping[str, str]:
        """What Slurm knows of the job then."""
        box, ask_at = signals.inbox(), time.monotonic() + _LOOK_AGAIN_S
        while True:
            loop.wait_readable([], _LOOK_AGAIN_S)
            if (number := box.take()) is not None:
                if self._is_enough(number):
                    return {}
                ask_at = 0.0
            if box.take_notice() is not None:
                self._give_notice()
            if time.monotonic() < ask_at and not self._output.has_said_end:
                continue
            facts = self._job.facts()
            state = (facts or {}).get("JobState", "")
            self._find_output(facts or {})
            if facts is not None and (not facts or state not in _GOING_ON):
                return facts
            self._tell(facts or {}, state)
            is_ending = self._stopped_by is not None or state == "COMPLETING"
            self._output.has_said_end &= state in ("RUNNING", "COMPLETING")  # Slurm may start the job once more.
            ask_at = time.monotonic() + (_LOOK_AGAIN_S if is_ending else _ASK_AGAIN_S)

    def _tell(self, facts: Mapping[str, str], state: str) -> None:
        """Of a job that has not started, why it waits, and whether it waits again."""
        reason = facts.get("Reason", "None")
        if state != "PENDING":
            self._said = ""
        elif reason not in ("None", self._said) and self._stopped_by is None:
            again = "is back in the queue" if int(facts.get("Restarts", "0")) else "waits in the queue"
            self._said = reason
            log.info("Slurm job %s %s: %s", self._job, again, reason)
            self._exclude(facts)

    def _exclude(self, facts: Mapping[str, str]) -> None:
        """Slurm changes the list of a job that waits alone."""
        listed = [name for name in facts.get("ExcNodeList", "").split(",") if name not in ("", "(null)")]
        new = [host for host in self._output.losses() if host not in listed]
        if not new:
            return
        *where, number = self._job.words
        change = (f"JobId={number}", f"ExcNodeList={','.join([*listed, *new])}")
        if problem := tell("scontrol", *where, "update", *change):
            log.warning("cannot exclude %s: %s", ", ".join(new), problem)
        else:
            log.warning("%s: the job does not start there again", self._excluded)

    @property
    def _excluded(self) -> str:
        return f"exclude: {', '.join(f'{host} ({count} losses)' for host, count in self._output.losses().items())}"

    def _give_notice(self) -> None:
        """To the script, whose first agent tells the run."""
        log.warning("got the signal of a notice, passing it on to Slurm job %s", self._job)
        if problem := tell("scancel", "--batch", "--signal=USR1", *self._job.words):
            log.warning("cannot give notice: %s", problem)

    def _is_enough(self, number: signal.Signals) -> bool:
        """The first signal cancels the job, the second ends the wait for its end."""
        is_first, self._stopped_by = self._stopped_by is None, number
        if not is_first:
            return True
        log.warning("got %s, cancelling Slurm job %s", number.name, self._job)
        if problem := tell("scancel", *self._job.words):
            log.error("cannot cancel it: %s", problem)
        return bool(problem)

    def _code(self, facts: Mapping[str, str]) -> int:
        state = facts.get("JobState", "")
        if state and state not in ("COMPLETED", "FAILED"):
            log.warning("Slurm job %s ended as %s", self._job, state)
        if self._stopped_by is not None:
            return 128 + self._stopped_by
        if not state:
            raise HostError(f"Slurm does not know job {self._job} any more; `sacct -j {self._job.number}` may")
        if not self._output.is_found:
            log.warning("the job's output file %s cannot be read from here", self._output.path)
        code, _, number = facts.get("ExitCode", "1:0").partition(":")
        if int(code) or state == "COMPLETED":
            return int(code)
        is_stopped = state in ("CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE")
        return 128 + (int(number) or signal.SIGTERM) if is_stopped else 1
