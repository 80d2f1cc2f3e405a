"""How a worker reports why it failed, and how its failure reaches the user.

In the worker, `record` catches the exception of a main function and writes it as JSON into the file named by
`TORCHELASTIC_ERROR_FILE`. Workers that holdfast starts through its own bootstrap write that file without a decorator;
`record` is for Python that is started by other means, and for code that already uses it.

In the launcher, `ProcessFailure` is one dead worker with its evidence, and `ChildFailedError` is all of them together,
with the cause. The files of a dying worker may be half written or foreign; nothing here raises because of that.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from holdfast import escape
from holdfast.failures import report
from holdfast.failures.report import NOT_AVAILABLE, Evidence, FailureFacts, Fold, SentFailure
from holdfast.frozen import changed, dataclass, field
from holdfast.log import Logger

if TYPE_CHECKING:
    from holdfast.failures.run_report import RunReport

__all__ = ["ChildFailedError", "ErrorHandler", "ProcessFailure", "get_error_handler", "record"]

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"
TRACEBACK_HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
_NO_MESSAGE = "<NONE>"
_NOT_SOUGHT = Evidence()
_ERROR_FILE_LIMIT_BYTES = 1 << 20

logger = Logger(__name__)
# A failure is described before its group is stopped, and again when the evidence is complete.
_warn_once = functools.lru_cache(maxsize=64)(logger.warning)

P = ParamSpec("P")
R = TypeVar("R")


@dataclass
class ProcessFailure:
    """One failed worker: which one, how it ended, and its evidence.

    `message` is the `message` of the error file (text, or the nested layout that `record` writes), else it is made from
    the evidence, else from the exit code. `timestamp` is in whole seconds, from the error file if there is one, else
    the time at which this object was made.
    """

    local_rank: int
    pid: int
    exitcode: int
    error_file: str
    evidence: Evidence = _NOT_SOUGHT
    order: int | None = None  # The position in which the spawner reaped this failure.
    node: str = ""  # The host, if that is another node. The error file is there, too.
    error_file_data: dict[str, Any] = field(init=False)
    message: str | dict[str, Any] = field(init=False)
    timestamp: int = field(init=False)

    def __post_init__(self) -> None:
        # The hint about decorators is for failures of which only the exit code is known.
        is_hint_due, hang = self.evidence is _NOT_SOUGHT, self.evidence.hang
        self.timestamp = int(time.time())
        data = None if hang or self.node else self._read_error_file()
        if data is None and (hang or not self.node or not self.error_file):
            self.error_file = NOT_AVAILABLE
        evidence = self.evidence
        if hang:  # An error from the time when the worker was stopped is not the cause.
            data = {"message": {"message": f"hung: {hang}", "extraInfo": {"timestamp": str(self.timestamp)}}}
        elif data is None and evidence.error is not None and _has_message(evidence.error):
            data = dict(evidence.error)
        if data is not None:
            self.error_file_data, self.message = data, data["message"]
            _, _, timestamp = report.read_error(data)
            self.timestamp = self.timestamp if timestamp is None else timestamp
            return
        self.error_file_data = {"message": _NO_MESSAGE}
        if self.exitcode < 0:
            ended = f"Signal {-self.exitcode} ({self.signal_name()}) received by PID {self.pid}"
            self.message = f"{ended}: {evidence.memory}" if evidence.memory else ended
            return
        self.error_file_data["errorTraits"] = {"category": "system_terminated_error", "retryability": "False"}
        silent = TRACEBACK_HINT if is_hint_due else f"exited with code {self.exitcode} and no error message"
        self.message = evidence.memory or report.last_line(evidence.stderr_tail).strip() or silent

    @classmethod
    def on_another_node(cls, node: str, exitcode: int, text: str, sent: str) -> ProcessFailure:
        """A failure that another node has sent; `text` is its cause line, for a node that sent no more than that."""
        note = f"node {node} did not send its evidence of this failure"
        known_by_text = SentFailure(-1, 0, "", Evidence(error={"message": {"message": text}}, note=note))
        far = report.decode_evidence(sent) or known_by_text
        return cls(far.local_rank, far.pid, exitcode, far.error_file, far.evidence, node=node)

    def encoded(self, round: int = 0, also: Sequence[Fold] = ()) -> str:
        """The failure with its evidence, for the other nodes of the run. `also` are other failures of this node."""
        who, error = (self.local_rank, self.pid, self.error_file), self._error()
        return report.encode_evidence(*who, error, self.evidence, round=round, also=also)

    def signal_name(self) -> str:
        return report.signal_name(self.exitcode) or NOT_AVAILABLE

    def timestamp_isoformat(self) -> str:
        """Local time, with `_` between date and time."""
        try:
            return time.strftime("%Y-%m-%d_%H:%M:%S", time.localtime(self.timestamp))
        except (OverflowError, ValueError, OSError):
            return NOT_AVAILABLE

    def facts(self) -> FailureFacts:
        """For the ranking of failures and the cause line."""
        text, _, _ = report.read_error(self._error())
        return FailureFacts(self.exitcode, text, self.order, self.timestamp, self.pid or None, self.evidence)

    def traceback_text(self) -> str:
        """The traceback if the worker left one, else its message."""
        text, callstack, _ = report.read_error({"message": self.message})
        return callstack or text or NOT_AVAILABLE

    def _read_error_file(self) -> dict[str, Any] | None:
        # `/dev/null` means that there is no file.
        if not self.error_file or self.error_file == os.devnull or not os.path.lexists(self.error_file):
            return None
        try:
            return _load_error_file(self.error_file)
        except (OSError, ValueError, RecursionError) as e:
            problem = getattr(e, "strerror", None) or str(e)
            _warn_once("the error file %s of pid %d is unreadable: %s", self.error_file, self.pid, problem)
            notes = [self.evidence.note, f"its error file {self.error_file} is unreadable: {problem}"]
            self.evidence = changed(self.evidence, note="; ".join(filter(None, notes)))
            return None

    def _error(self) -> dict[str, Any]:
        """The worker's own error; empty if it left none."""
        return {} if self.error_file_data["message"] == _NO_MESSAGE else self.error_file_data


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
            rank = report.root_cause({rank: failure.facts() for rank, failure in self.failures.items()})
        return rank, self.failures[rank]

    def cause(self) -> str:
        """The root cause in one line."""
        rank, failure = self.get_first_failure()
        return self._cause or report.cause_line(rank, failure.facts())

    def format_msg(self) -> str:
        root, _ = self.get_first_failure()
        others = [rank for rank in self.failures if rank != root]
        shown, unshown = others[: report.SHOWN_FAILURES_LIMIT], others[report.SHOWN_FAILURES_LIMIT :]
        blocks, stopped = [self._block(rank) for rank in shown], report.stopped_text(self.stopped)
        return report.report(self.name, self._block(root), blocks, unshown, stopped, self.cause())

    def _block(self, rank: int) -> str:
        failure, index = self.failures[rank], list(self.failures).index(rank)
        name = report.signal_name(failure.exitcode)
        # A hung worker did not end by itself, so 0 is not its exit code.
        exitcode = "none, it hung" if failure.evidence.hang and failure.exitcode == 0 else str(failure.exitcode)
        pid = [f"(pid: {failure.pid})"] if failure.pid > 0 or not failure.node else []
        fields = {
            "time": failure.timestamp_isoformat(),
            # Not the fully qualified name: a DNS lookup may block.
            "host": failure.node or os.uname().nodename,
            "rank": f"{rank} (local_rank: {failure.local_rank})" if failure.local_rank >= 0 else str(rank),
            "exitcode": " ".join([exitcode, *pid, *([f"({name})"] if name else [])]),
            "error_file": failure.error_file,
            "traceback": failure.traceback_text(),
        }
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
    if not failure.node and os.path.isfile(failure.error_file):
        handler.dump_error_file(failure.error_file, failure.exitcode)
        return
    data = deepcopy(failure.error_file_data)
    if not failure.facts().text:
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
