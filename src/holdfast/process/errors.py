"""How a worker tells why it failed, and how its failure reaches the user.

The worker's side is `record`: it catches the exception of a main function and leaves it, as JSON, in the file
named by `TORCHELASTIC_ERROR_FILE`. Workers that holdfast starts through its own bootstrap leave that file
without being decorated; `record` is for those who start Python by other means, and for code written with it.

The launcher's side is `ProcessFailure`, one dead worker and the evidence it left, and `ChildFailedError`, all
of them together, with the one that was the cause. Whatever a dying worker leaves may be half written or
foreign; nothing in here raises because of it.
"""

from __future__ import annotations

import copy
import functools
import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from holdfast.failures import report, wire_evidence
from holdfast.failures.report import NOT_AVAILABLE, Evidence, FailureFacts

__all__ = [
    "ChildFailedError",
    "ErrorHandler",
    "ProcessFailure",
    "get_error_handler",
    "record",
]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
TRACEBACK_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_NO_MESSAGE = "<NONE>"
_ERROR_FILE_LIMIT_BYTES = 16 * 1024 * 1024

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class ProcessFailure:
    """One worker that failed: who it was, how it ended, and what it left.

    `message` is what the worker said: the `message` of its error file (text, or the nested layout that
    `record` writes), else what can be made of the evidence, else how it ended. `timestamp` is in whole
    seconds, from the error file where there is one and otherwise the moment this object was made.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    evidence: Evidence | None = None
    order: int | None = None
    """The place of this failure in the sequence in which the spawner reaped them."""
    node: str = ""
    """Where it ran, if that was another node. Its error file is there, too."""
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        # The hint about decorators is for failures of which others know no more than the exit code.
        self._silence = TRACEBACK_HINT if self.evidence is None else f"exit code {self.exitcode}, without a word"
        self.timestamp = int(time.time())
        data = self._error_of_hang() or (None if self.node else self._read_error_file())
        if data is None:
            self.error_file = self.error_file if self.node and self.error_file else NOT_AVAILABLE
            data = self._error_of_evidence()
        if data is not None:
            self._take(data)
        else:
            self._infer()

    @classmethod
    def on_another_node(cls, node: str, exitcode: int, text: str, sent: str) -> ProcessFailure:
        """A worker's failure as another node has sent it; `text` is the line that was known of it before."""
        far = wire_evidence.decode(sent)
        if far is None:
            note = f"node {node} did not send what it knows of this failure"
            error = {"message": {"message": text}}
            return cls(-1, 0, exitcode, "", Evidence(error=error, note=note), node=node)
        return cls(far.local_rank, far.pid, exitcode, far.error_file, far.evidence, node=node)

    def encoded(self) -> str:
        """All that is known of it, for the other nodes of the run."""
        error = {} if self._has_no_error() else self.error_file_data
        return wire_evidence.encode(self.local_rank, self.pid, self.error_file, error, self.evidence or Evidence())

    def signal_name(self) -> str:
        return report.signal_name(self.exitcode) or NOT_AVAILABLE

    def exitcode_text(self) -> str:
        """One that hung did not end by itself."""
        has_hung = self.evidence is not None and self.evidence.hang
        return "none, it hung" if has_hung and self.exitcode == 0 else str(self.exitcode)

    def timestamp_isoformat(self) -> str:
        """Local time, with `_` between date and time."""
        try:
            return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))
        except (OverflowError, ValueError, OSError):
            return NOT_AVAILABLE

    def facts(self) -> FailureFacts:
        """What the ranking of failures and the cause line need of this one."""
        return FailureFacts(
            exitcode=self.exitcode,
            text="" if self._has_no_error() else report.error_text(self.error_file_data),
            order=self.order,
            timestamp=self.timestamp,
            pid=self.pid,
            evidence=self.evidence or Evidence(),
        )

    def traceback_text(self) -> str:
        """The traceback if the worker left one, else its message."""
        if isinstance(self.message, str):
            return self.message or NOT_AVAILABLE
        data = self.error_file_data
        return report.error_callstack(data) or report.error_text(data) or NOT_AVAILABLE

    def _read_error_file(self) -> dict[str, Any] | None:
        # `/dev/null` and the like stand for "no file".
        if not os.path.isfile(self.error_file):
            return None
        try:
            return _load_error_file(self.error_file)
        except (OSError, ValueError, RecursionError) as e:
            _tell_unreadable(self.error_file, self.pid, str(e))
            self._add_note(f"its error file {self.error_file} is unreadable: {e}")
            return None

    def _error_of_hang(self) -> dict[str, Any] | None:
        """Whatever it said when it was stopped: that it hung is what happened to it."""
        words = self.evidence.hang if self.evidence else ""
        if not words:
            return None
        self.error_file = NOT_AVAILABLE
        extra = {"timestamp": str(self.timestamp)}
        return {"message": {"message": f"hung: {words}", "extraInfo": extra}}

    def _error_of_evidence(self) -> dict[str, Any] | None:
        error = self.evidence.error if self.evidence else None
        return dict(error) if error is not None and _has_message(error) else None

    def _add_note(self, note: str) -> None:
        evidence = self.evidence or Evidence()
        note = f"{evidence.note}; {note}" if evidence.note else note
        self.evidence = replace(evidence, note=note)

    def _take(self, data: dict[str, Any]) -> None:
        self.error_file_data = data
        self.message = data["message"]
        timestamp = report.error_timestamp(data)
        if timestamp is not None:
            self.timestamp = timestamp

    def _infer(self) -> None:
        self.error_file_data = {"message": _NO_MESSAGE}
        if self.exitcode >= 0:
            traits = {"category": "system_terminated_error", "retryability": "False"}
            self.error_file_data["errorTraits"] = traits
        self.message = self._message_of_evidence()

    def _message_of_evidence(self) -> str:
        evidence = self.evidence or Evidence()
        if self.exitcode < 0:
            ended = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            return f"{ended}: {evidence.memory}" if evidence.memory else ended
        return evidence.memory or report.last_line(evidence.stderr_tail).strip() or self._silence

    def _has_no_error(self) -> bool:
        return bool(self.error_file_data["message"] == _NO_MESSAGE)


class ChildFailedError(Exception):
    """A group of workers failed. `failures` maps the global rank to what happened to it.

    `stopped` maps the ranks that did not fail but were stopped by holdfast because others had, to how they
    were stopped (`SIGTERM`, `SIGKILL`). `root` and `cause` are what a run of several nodes has agreed on, so that
    every node names the same failure in the same words.
    """

    def __init__(
        self,
        name: str,
        failures: Mapping[int, ProcessFailure],
        stopped: Mapping[int, str] | None = None,
        root: int | None = None,
        cause: str = "",
    ) -> None:
        if not failures:
            raise AssertionError(f"ChildFailedError of {name!r} needs at least one failure, got none")
        self.name = name
        self.failures = dict(failures)
        self.stopped = dict(stopped or {})
        self._root = root
        self._cause = cause
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions are rebuilt from `args` by default, which holds the text only.
        return type(self), (self.name, self.failures, self.stopped, self._root, self._cause), self.__dict__

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The root cause: the first failure that is not the consequence of another one."""
        rank = self._root
        if rank is None or rank not in self.failures:
            rank = report.root_cause({rank: failure.facts() for rank, failure in self.failures.items()})
        return rank, self.failures[rank]

    def cause(self) -> str:
        """The root cause in one line."""
        rank, failure = self.get_first_failure()
        return self._cause or report.cause_line(rank, failure.facts())

    def format_msg(self) -> str:
        root, _ = self.get_first_failure()
        indices = {rank: index for index, rank in enumerate(self.failures)}
        others = [rank for rank in self.failures if rank != root]
        shown, unshown = others[: report.SHOWN_FAILURES_LIMIT], others[report.SHOWN_FAILURES_LIMIT :]
        return report.report(
            self.name,
            self._block(indices[root], root),
            [self._block(indices[rank], rank) for rank in shown],
            unshown=unshown,
            stopped=self.stopped,
            cause=self.cause(),
        )

    def _block(self, index: int, rank: int) -> str:
        failure = self.failures[rank]
        name = report.signal_name(failure.exitcode)
        pid = [f"(pid: {failure.pid})"] if failure.pid > 0 or not failure.node else []
        fields = {
            "time": failure.timestamp_isoformat(),
            # Not the fully qualified name: asking DNS may block, and at the worst moment.
            "host": failure.node or os.uname().nodename,
            "rank": f"{rank} (local_rank: {failure.local_rank})" if failure.local_rank >= 0 else str(rank),
            "exitcode": " ".join([failure.exitcode_text(), *pid, *([f"({name})"] if name else [])]),
            "error_file": failure.error_file,
            "traceback": failure.traceback_text(),
        }
        return report.failure_block(index, fields, failure.evidence or Evidence())


class ErrorHandler:
    """Writes a process's own error file. Subclass it to report elsewhere as well.

    Without `TORCHELASTIC_ERROR_FILE` in the environment nothing is written.
    """

    def initialize(self) -> None:
        """Called before the recorded function: have the stack of every thread printed on a fatal signal."""
        import faulthandler

        # Whoever enabled it before chose where the stack goes; a worker's bootstrap keeps it as evidence.
        if faulthandler.is_enabled():
            return
        try:
            faulthandler.enable(all_threads=True)
        except Exception as e:
            logger.warning("faulthandler cannot be enabled, a fatal signal will leave no stack: %s", e)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file, if one is configured. Raises OSError if it cannot be written."""
        from holdfast.process.spawner import bootstrap

        path = self._own_error_file()
        if path is not None:
            bootstrap.write_json_atomically(path, bootstrap.error_data(e))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Make a copy of a child's error file this process's own, with the child's exit code in it."""
        try:
            data = _load_error_file(rootcause_error_file)
        except (OSError, ValueError, RecursionError) as e:
            logger.warning("the error file %s cannot be passed on: %s", rootcause_error_file, e)
            return
        self.dump_error_data(rootcause_error_file, data, error_code)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set `message.errorCode`, in place, where the layout has room for one."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            logger.warning(
                "the error file %s has no nested message, exit code %d is not added to it",
                rootcause_error_file,
                error_code,
            )

    def dump_error_data(self, source: str, data: dict[str, Any], error_code: int = 0) -> None:
        """As `dump_error_file`, for data that is at hand; `source` says where it is from."""
        from holdfast.process.spawner import bootstrap

        if error_code:
            self.override_error_code_in_rootcause_data(source, data, error_code)
        path = self._own_error_file()
        if path is None:
            logger.debug("%s is not set; the root cause is in %s", ERROR_FILE_VARIABLE, source)
            return
        if os.path.isfile(path):
            logger.warning("the error file %s exists and is replaced by the root cause from %s", path, source)
        try:
            bootstrap.write_json_atomically(path, data)
        except OSError as e:
            logger.warning("the error file %s cannot be written: %s", path, e)

    def _own_error_file(self) -> str | None:
        path = os.environ.get(ERROR_FILE_VARIABLE)
        # Replacing a file atomically would put a plain file in the place of the device.
        return None if not path or path == os.devnull else path


def get_error_handler() -> ErrorHandler:
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorate a worker's main function so that its exception is left in the error file.

    The exception itself goes on as before. `sys.exit(0)` and `sys.exit()` in `fn` make the call return None.
    A `ChildFailedError` of a launcher within `fn` passes the error of its root cause on.
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as e:
            if not _means_success(e.code):
                raise
            return None
        except ChildFailedError as e:
            _attempt(_pass_on_root_cause, handler, e)
            raise
        except Exception as e:
            _attempt(handler.record_exception, e)
            raise

    return wrapper


def _means_success(code: object) -> bool:
    """Would the interpreter exit with 0? An empty text would not: it is printed, and the code is 1."""
    return code is None or (isinstance(code, int) and code == 0)


def _attempt(action: Callable[..., None], *args: Any) -> None:
    """Record as well as possible, but never let the recording hide the exception that is on its way."""
    try:
        action(*args)
    except Exception as e:
        path = os.environ.get(ERROR_FILE_VARIABLE)
        why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
        logger.warning("the failure cannot be recorded in the error file %s: %s", path, why)


def _pass_on_root_cause(handler: ErrorHandler, error: ChildFailedError) -> None:
    """The launcher's error file tells the cause whatever the worker left, if only in the words of the report."""
    rank, failure = error.get_first_failure()
    if not failure.node and os.path.isfile(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
        return
    data = copy.deepcopy(failure.error_file_data) if failure.facts().text else _error_of(error.cause(), failure)
    handler.dump_error_data(f"the evidence of rank {rank}", data, failure.exitcode)


def _error_of(cause: str, failure: ProcessFailure) -> dict[str, Any]:
    """What stands for the error file of a worker that left none: it was killed, or said nothing."""
    stack = failure.evidence.stack if failure.evidence else ""
    details = {"py_callstack": stack or failure.traceback_text(), "timestamp": str(failure.timestamp)}
    return {"message": {"message": cause, "extraInfo": details}}


@functools.lru_cache(maxsize=64)
def _tell_unreadable(path: str, pid: int, problem: str) -> None:
    """Once, though a failure is described before its group is stopped and again when the evidence is complete."""
    logger.warning("the error file %s of pid %d is unreadable: %s", path, pid, problem)


def _load_error_file(path: str) -> dict[str, Any]:
    """Read one error file. Raises OSError, ValueError or RecursionError if that is not what it is."""
    # Opening a FIFO would block.
    if not os.path.isfile(path):
        raise ValueError("no such regular file")
    with open(path, "rb") as file:
        content = file.read(_ERROR_FILE_LIMIT_BYTES + 1)
    if len(content) > _ERROR_FILE_LIMIT_BYTES:
        raise ValueError(f"larger than {_ERROR_FILE_LIMIT_BYTES} bytes")
    data = json.loads(content)
    if not isinstance(data, dict) or not _has_message(data):
        raise ValueError('no JSON object with a "message"')
    return data


def _has_message(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("message"), (str, dict))
