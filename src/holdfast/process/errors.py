"""How a worker reports why it failed, and how its failure reaches the user.

In the worker, `record` catches the exception of a main function and writes it as JSON into the file named by
`TORCHELASTIC_ERROR_FILE`. Workers that holdfast starts through its own bootstrap write that file without a decorator;
`record` is for Python that is started by other means, and for code that already uses it.

In the launcher, `ProcessFailure` and `ChildFailedError` show failures (`failures/records.py`) under the names that
users of torchelastic know. The files of a dying worker may be half written or foreign; nothing here raises because of
that.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from holdfast import escape
from holdfast.failures import cause, report
from holdfast.failures.records import Evidence, Failure
from holdfast.failures.report import NOT_AVAILABLE, RunReport
from holdfast.frozen import changed, dataclass, field
from holdfast.log import Logger
from holdfast.text import last_line

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
TRACEBACK_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_NO_MESSAGE = "<NONE>"
_UNKNOWN = Failure()
_ERROR_FILE_LIMIT_BYTES = 1 << 20
_MESSAGE_LIMIT_CHARS = 1 << 16
_CALLSTACK_LIMIT_CHARS = 1 << 18
_LATEST_S = 253_402_300_800  # The year 10000: no time stamp of a worker.

logger = Logger(__name__)
# A failure is described before its group is stopped, and again when the evidence is complete.
_warn_once = functools.lru_cache(maxsize=64)(logger.warning)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class ProcessFailure:
    """One failed worker, as users know it. `failure` has all that is known of it, that of its error file included.

    `message` is the `message` of the error file (text, or the nested layout that `record` writes), else it is made from
    the evidence, else from the exit code. `timestamp` is in whole seconds, from the error file if there is one, else
    the time at which this object was made.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    failure: Failure = _UNKNOWN  # With a node if that is another one; the error file is there, too.
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)
    is_elsewhere: bool = field(init=False)

    def __post_init__(self) -> None:
        is_sought, self.is_elsewhere = self.failure is not _UNKNOWN, bool(self.failure.node)
        data = None if self.is_elsewhere else self._complete_facts()
        self.timestamp, evidence = self.failure.timestamp, self.evidence
        self.error_file = evidence.error_file or NOT_AVAILABLE
        if data is None and (evidence.hang or evidence.message):
            extra = {"py_callstack": evidence.traceback} if evidence.traceback else {}
            text = f"hung: {evidence.hang}" if evidence.hang else evidence.message
            data = {"message": {"message": text, "extraInfo": {**extra, "timestamp": str(self.timestamp)}}}
        if data is not None:
            self.error_file_data, self.message = data, data["message"]
            return
        self.error_file_data = {"message": _NO_MESSAGE}
        if self.exitcode < 0:
            ended = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            self.message = f"{ended}: {evidence.memory}" if evidence.memory else ended
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        # The hint about decorators is for failures of which only the exit code is known.
        silent = f"exited with code {self.exitcode} and no error message" if is_sought else TRACEBACK_HINT
        silent = self.failure.text if self.is_elsewhere else silent
        self.message = evidence.memory or last_line(evidence.stderr_tail).strip() or silent

    def _complete_facts(self) -> dict[str, Any] | None:
        """Of a worker of this node. Returns the data of its error file."""
        known, data, now = self.failure, None, int(time.time())
        evidence, timestamp = known.evidence, known.timestamp or now
        if evidence.hang:  # An error from the time when the worker was stopped is not the cause.
            evidence, timestamp = changed(evidence, message="", traceback=""), now
        # `/dev/null` means that there is no file.
        elif self.error_file and self.error_file != os.devnull and os.path.lexists(self.error_file):
            try:
                data = _load_error_file(self.error_file)
                message, traceback, said = read_error(data)
                evidence = changed(evidence, message=message, traceback=traceback, error_file=self.error_file)
                timestamp = timestamp if said is None else said
            except (OSError, ValueError, RecursionError) as e:
                problem = getattr(e, "strerror", None) or str(e)
                _warn_once("the error file %s of pid %d is unreadable: %s", self.error_file, self.pid, problem)
                notes = [evidence.note, f"its error file {self.error_file} is unreadable: {problem}"]
                evidence = changed(evidence, note="; ".join(filter(None, notes)))
        self.failure = report.described(
            changed(
                known,
                node=os.uname().nodename,  # Not the fully qualified name: a DNS lookup may block.
                rank=known.rank if known.rank >= 0 else self.local_rank,
                exitcode=self.exitcode,
                local_rank=self.local_rank,
                pid=max(0, self.pid),
                timestamp=timestamp,
                evidence=evidence,
            )
        )
        return data

    @property
    def evidence(self) -> Evidence:
        return self.failure.evidence

    @evidence.setter
    def evidence(self, evidence: Evidence) -> None:
        """For fields from which nothing follows, such as `logs`."""
        self.failure = changed(self.failure, evidence=evidence)

    def signal_name(self) -> str:
        return report.signal_name(self.exitcode) or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Local time, with `_` between date and time."""
        return time_text(self.timestamp)

    def traceback_text(self) -> str:
        """The traceback if the worker left one, else its message."""
        text, callstack, _ = read_error({"message": self.message})
        return callstack or text or NOT_AVAILABLE


def mention_finished(
    failures: Mapping[int, ProcessFailure], ends: Mapping[int, tuple[int, bool, float | None]]
) -> None:
    """Failures that blame a peer get a note about the workers that had finished before. `ends` is from `PContext.ends`;
    both mappings are by global rank."""
    finished = {rank: at or 0.0 for rank, (code, is_stopped, at) in ends.items() if code == 0 and not is_stopped}
    for rank, each in failures.items():
        ended_at = ends[rank][2] if rank in ends else None  # One that has raised may still be ending.
        before = [other for other, at in finished.items() if other != rank and (ended_at is None or at <= ended_at)]
        each.failure = report.with_finished(each.failure, before)


def time_text(timestamp: int) -> str:
    is_time = abs(timestamp) < _LATEST_S
    return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(timestamp)) if is_time else NOT_AVAILABLE


def read_error(data: Mapping[str, Any]) -> tuple[str, str, int | None]:
    """`<type>: <message>`, the traceback and the time stamp in whole seconds, of an error file in either layout.

    Empty or None for what is missing or invalid; long texts are cut. In the flat layout, `{"message": <text>,
    "timestamp": ...}`, a missing time stamp means 0.
    """
    message: Any = data.get("message")
    text, callstack, stamp = message, None, data.get("timestamp", 0)
    if isinstance(message, Mapping):
        extra: Any = message.get("extraInfo")
        extra = extra if isinstance(extra, Mapping) else {}
        text, callstack, stamp = message.get("message"), extra.get("py_callstack"), extra.get("timestamp")
    try:
        timestamp = max(-_LATEST_S, min(_LATEST_S, int(stamp)))
    except (TypeError, ValueError, OverflowError):
        timestamp = None
    text, callstack = text if isinstance(text, str) else "", callstack if isinstance(callstack, str) else ""
    cut = escape.cut_middle
    return cut(text, _MESSAGE_LIMIT_CHARS), cut(callstack, _CALLSTACK_LIMIT_CHARS), timestamp


class ChildFailedError(Exception):
    """A group of workers failed. `failures` is by global rank.

    `stopped` maps the ranks that holdfast stopped because others had failed to the signal that stopped them (`SIGTERM`,
    `SIGKILL`). `root` and `cause` are what a run of several nodes has agreed on, so that every node names the same
    failure in the same words. `run_report` is what `holdfast run` prints in the place of `format_msg()`.
    """

    run_report: RunReport | None = None

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
        self._cause = escape.one_line(cause)
        super().__init__(self.format_msg())

    def __reduce__(self) -> tuple[Any, ...]:
        # By default exceptions are rebuilt from `args`, which holds the text only.
        return type(self), (self.name, self.failures, self.stopped, self._root, self._cause), self.__dict__

    def get_first_failure(self) -> tuple[int, ProcessFailure]:
        """The root cause: the first failure that is not the consequence of another one."""
        rank = self._root
        if rank is None or rank not in self.failures:
            rank = cause.root_of_node({rank: each.failure for rank, each in self.failures.items()})
        return rank, self.failures[rank]

    def cause(self) -> str:
        """The root cause in one line."""
        rank, failure = self.get_first_failure()
        return self._cause or report.ranked(failure.failure, rank).text

    def format_msg(self, boarder_delim: str = "=", section_delim: str = "-") -> str:
        root, _ = self.get_first_failure()
        others = [rank for rank in self.failures if rank != root]
        shown, unshown = others[: report.SHOWN_FAILURES_LIMIT], others[report.SHOWN_FAILURES_LIMIT :]
        blocks, stopped = [self._block(rank) for rank in shown], report.stopped_text(report.by_how(self.stopped))
        rulers = (boarder_delim, section_delim)
        return report.group_text(self.name, self._block(root), blocks, unshown, stopped, self.cause(), rulers)

    def _block(self, rank: int) -> str:
        failure, index = self.failures[rank], list(self.failures).index(rank)
        fields = report.facts_in_words(report.ranked(failure.failure, rank), failure.timestamp_isoformat())
        fields |= {"error_file": failure.error_file, "traceback": failure.traceback_text()}
        return report.failure_block(index, fields, failure.evidence)


class ErrorHandler:
    """Writes this process's error file, if `TORCHELASTIC_ERROR_FILE` is set. Subclass it to report elsewhere."""

    def initialize(self) -> None:
        """Called before the recorded function: print the stack of every thread on a fatal signal."""
        import faulthandler

        # It may be enabled already with another file, as by the bootstrap, which keeps the stack as evidence.
        if faulthandler.is_enabled():
            return
        try:
            faulthandler.enable(all_threads=True)
        except Exception as e:
            logger.warning("faulthandler cannot be enabled, a fatal signal will leave no stack: %s", e)

    def record_exception(self, e: BaseException) -> None:
        """Write `e` to the error file, if there is one. Raises OSError if it cannot be written."""
        from holdfast.process.spawner import bootstrap

        path = _own_error_file()
        if path is not None:
            bootstrap.write_json_atomically(path, bootstrap.error_data(e))

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a child's error file to this process's own, and add the child's exit code."""
        try:
            data = _load_error_file(rootcause_error_file)
        except (OSError, ValueError, RecursionError) as e:
            logger.warning("the error file %s cannot be passed on: %s", rootcause_error_file, e)
            return
        self.dump_error_data(rootcause_error_file, data, error_code)

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Set `message.errorCode`, in place, if the message is nested."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            text = "the error file %s has no nested message, exit code %d is not added to it"
            logger.warning(text, rootcause_error_file, error_code)

    def dump_error_data(self, source: str, data: dict[str, Any], error_code: int = 0) -> None:
        """As `dump_error_file`, with the data; `source` is its origin, for log messages."""
        from holdfast.process.spawner import bootstrap

        if error_code:
            self.override_error_code_in_rootcause_data(source, data, error_code)
        path = _own_error_file()
        if path is None:
            logger.debug("%s is not set; the root cause is in %s", ERROR_FILE_VARIABLE, source)
            return
        if os.path.isfile(path):
            logger.warning("the error file %s exists and is replaced by the root cause from %s", path, source)
        try:
            bootstrap.write_json_atomically(path, data)
        except OSError as e:
            logger.warning("the error file %s cannot be written: %s", path, e)


def _own_error_file() -> str | None:
    path = os.environ.get(ERROR_FILE_VARIABLE)
    # An atomic replacement would put a plain file in the place of the device.
    return None if not path or path == os.devnull else path


def get_error_handler() -> ErrorHandler:
    return ErrorHandler()


def record(fn: Callable[P, R], error_handler: ErrorHandler | None = None) -> Callable[P, R | None]:
    """Decorate a worker's main function so that its exception is written to the error file and raised again.

    `sys.exit(0)` and `sys.exit()` in `fn` make the call return None. Of a `ChildFailedError`, which a launcher within
    `fn` raises, the error of the root cause is written.
    """
    handler = error_handler or get_error_handler()

    @functools.wraps(fn)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R | None:
        handler.initialize()
        try:
            return fn(*args, **kwargs)
        except SystemExit as e:
            # An empty text is no success: it is printed, and the exit code is 1.
            if e.code is None or (isinstance(e.code, int) and e.code == 0):
                return None
            raise
        except Exception as e:
            _write(handler, e)
            raise

    return wrapper


def _write(handler: ErrorHandler, error: Exception) -> None:
    """A failure to write must not hide the exception that is being raised."""
    try:
        if isinstance(error, ChildFailedError):
            _write_root_cause(handler, error)
        else:
            handler.record_exception(error)
    except Exception as e:
        path = os.environ.get(ERROR_FILE_VARIABLE)
        why = getattr(e, "strerror", None) or f"{type(e).__name__}: {e}"
        logger.warning("the failure cannot be recorded in the error file %s: %s", path, why)


def _write_root_cause(handler: ErrorHandler, error: ChildFailedError) -> None:
    """The launcher's error file names the cause even if the worker left no error file."""
    from copy import deepcopy

    rank, failure = error.get_first_failure()
    if not failure.is_elsewhere and os.path.isfile(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
        return
    data = deepcopy(failure.error_file_data)
    if read_error(data)[0] in ("", _NO_MESSAGE):
        callstack = failure.evidence.stack or failure.traceback_text()
        details = {"py_callstack": callstack, "timestamp": str(failure.timestamp)}
        data = {"message": {"message": error.cause(), "extraInfo": details}}
    handler.dump_error_data(f"the evidence of rank {rank}", data, failure.exitcode)


def _load_error_file(path: str) -> dict[str, Any]:
    """Raises OSError, ValueError or RecursionError if the path is not a valid error file."""
    from holdfast.process.output.logs import open_left_file

    with open_left_file(path) as file:
        content = file.read(_ERROR_FILE_LIMIT_BYTES + 1)
    if len(content) > _ERROR_FILE_LIMIT_BYTES:
        raise ValueError(f"larger than {_ERROR_FILE_LIMIT_BYTES} bytes")
    import json

    data = json.loads(content)
    if not isinstance(data, dict) or not _has_message(data):
        raise ValueError('no JSON object with a "message"')
    return data


def _has_message(data: Mapping[str, Any]) -> bool:
    return isinstance(data.get("message"), (str, dict))
