"""What to do about a failure, as advice for schedulers and people. Pure.

`RULES` is a table over the records of a failure: the first rule that matches gives the verdict. holdfast itself does
not act on it: the restart policy decides about restarts. docs/verdicts.md is made from this table.

A verdict is `restart` (the same nodes may try again), `stop` (another try ends in the same way) or `exclude-node`
(try again without the host of the failure). `certain` is for evidence that has no other explanation. The texts are the
worker's own, so a program that prints the words of a hardware error gets its verdict.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from signal import Signals

from holdfast.failures.cause import SEARCHED_CHARS, exception_name
from holdfast.failures.records import HANG, LOST_NODE, REFUSAL, Failure
from holdfast.frozen import frozen
from holdfast.text import last_line

RESTART, STOP, EXCLUDE_NODE = "restart", "stop", "exclude-node"
CERTAIN, LIKELY, UNKNOWN = "certain", "likely", "unknown"


def _message(failure: Failure) -> str:
    """The exception, else the whole of stderr after an abort, else its last line, else the words about the failure."""
    evidence = failure.evidence
    aborted = evidence.stderr_tail[-SEARCHED_CHARS:] if failure.exitcode == -Signals.SIGABRT else ""
    said = evidence.message or aborted or last_line(evidence.stderr_tail)
    return said[:SEARCHED_CHARS] or failure.words.removeprefix("failed: ")


def _any_text(failure: Failure) -> str:
    evidence = failure.evidence
    return "\n".join((_message(failure), evidence.stderr_tail[-SEARCHED_CHARS:], evidence.note, failure.words))


def _kind(failure: Failure) -> str:
    if failure.exception == REFUSAL:
        return f"{failure.kind} (lasting)"
    return f"{failure.kind}: {failure.words}" if failure.kind == LOST_NODE else failure.kind


# What a rule looks at: words for docs/verdicts.md, and the text in which its pattern is searched for.
SUBJECTS: dict[str, tuple[str, Callable[[Failure], str]]] = {
    "kind": ("the kind of death, as in the report", _kind),
    "exit code": ("negative for a signal; shells make 128+n of signal n", lambda failure: str(failure.exitcode)),
    "exception": (
        "the name of its class, without the module",
        lambda failure: failure.exception or exception_name(_message(failure)),
    ),
    "message": (
        "the exception with its text; without one the last line of stderr, or all its lines after SIGABRT",
        _message,
    ),
    "any text": ("the message, the last lines of stderr and the notes of holdfast", _any_text),
    "consequence": (
        "whether holdfast takes the failure for the result of another one",
        lambda failure: "yes" if failure.is_consequence else "no",
    ),
}
_WHOLE = ("exit code", "exception", "consequence")  # The pattern must match the whole text, and case counts.


@frozen
class Rule:
    """`why` is one sentence for people."""

    name: str
    looks_at: str
    pattern: str
    verdict: str
    confidence: str
    why: str

    def matches(self, failure: Failure) -> bool:
        text = SUBJECTS[self.looks_at][1](failure)
        if self.looks_at in _WHOLE:
            return re.fullmatch(self.pattern, text) is not None
        return re.search(self.pattern, text, re.IGNORECASE) is not None


NONE = Rule("none", "", "", RESTART, UNKNOWN, "No rule matched.")

# fmt: off
RULES = (
    # The machine. These texts count wherever they stand: the exception is often only a result.
    Rule("xid-hardware", "any text", r"\bXid \([^)]{0,40}\): (48|62|64|74|79|95|119|120|140|143)\b", EXCLUDE_NODE,
         CERTAIN, "The driver reported an error of the GPU's hardware."),
    Rule("xid-program", "any text", r"\bXid \([^)]{0,40}\): (13|31|43|45|94)\b", RESTART, LIKELY,
         "The driver reported an error that ends one program and leaves the GPU usable."),
    Rule("gpu-memory-error", "any text", r"uncorrectable (ECC|NVLink) error", EXCLUDE_NODE, CERTAIN,
         "The memory or a link of a GPU is damaged."),
    Rule("gpu-lost", "any text", r"GPU has fallen off the bus|GPU is lost", EXCLUDE_NODE, CERTAIN,
         "A GPU no longer answers until the host is reset."),
    Rule("machine-memory-error", "any text", r"\[Hardware Error\]|machine check exception|hardware memory corruption|"
         r"\bEDAC \S+: \d+ UE\b", EXCLUDE_NODE, CERTAIN, "The processor or the memory of the host reported an error."),
    Rule("stuck-in-kernel", "any text", r"in uninterruptible sleep for", EXCLUDE_NODE, LIKELY,
         "A device or a mount of the host does not answer."),
    Rule("io-error", "message", r"\bErrno (5|116)\b|input/output error|\bI/O error\b|stale file handle",
         EXCLUDE_NODE, LIKELY,
         "A disk or a mount of the host fails."),
    Rule("gpu-not-usable", "message", r"no CUDA-capable device|No CUDA GPUs are available|CUDA error: (unknown error|"
         r"initialization error|system not yet initialized)|CUDA unknown error|nvidia-smi has failed|"
         r"found no NVIDIA driver", EXCLUDE_NODE, LIKELY, "The driver or the GPUs of the host do not work."),
    # The end of a node, of a spawner, of a start.
    Rule("silent-node", "kind", f"^{LOST_NODE}: .*was silent", EXCLUDE_NODE, LIKELY,
         "The host or its network stopped without a word."),
    Rule("lost-node", "kind", f"^{LOST_NODE}", RESTART, LIKELY, "The agent of a node was ended."),
    Rule("cannot-start", "kind", r"^could not start \(lasting\)$", STOP, LIKELY,
         "The program is missing or cannot be executed, perhaps only on this host."),
    Rule("start-failed", "kind", r"^could not start$", RESTART, LIKELY, "The host lacked something for a moment."),
    Rule("lost-spawner", "any text", r"the spawner that owned it", RESTART, LIKELY,
         "The process that owned the workers was killed."),
    Rule("expired-timer", "any text", r"\bits timer .{0,99} had expired", RESTART, LIKELY,
         "The worker took longer than the timer allowed."),
    Rule("hang", "kind", f"^{HANG}$", RESTART, LIKELY, "Most hangs are races or lost peers."),
    # Memory and space.
    Rule("memory-killer", "kind", r"^out of memory$", RESTART, LIKELY,
         "The kernel killed the worker; memory that grows, or that others use, is free after a restart."),
    Rule("gpu-out-of-memory", "message", r"CUDA out of memory|HIP out of memory|CUDA error: out of memory|"
         r"CUBLAS_STATUS_ALLOC_FAILED|RESOURCE_EXHAUSTED: Out of memory", STOP, LIKELY,
         "The same program with the same sizes needs the same memory."),
    Rule("shared-memory", "any text", r"(insufficient|out of) shared memory|unable to (allocate shared memory|"
         r"write to file </torch_)|Error while creating shared memory segment", STOP, LIKELY,
         "/dev/shm is too small for the workers."),
    Rule("disk-full", "message", r"\bErrno (28|122)\b|no space left on device|disk quota exceeded|"
         r"PytorchStreamWriter failed", STOP, LIKELY, "A file system is full until files are removed."),
    Rule("host-memory", "message", r"^MemoryError\b|\bErrno 12\b|cannot allocate memory|can't allocate memory|"
         r"std::bad_alloc", RESTART, LIKELY, "Memory that grows, or that others use, is free after a restart."),
    # The program.
    Rule("import-error", "exception", r"ImportError|ModuleNotFoundError", STOP, CERTAIN,
         "A module is missing or broken."),
    Rule("syntax-error", "exception", r"SyntaxError|IndentationError|TabError", STOP, CERTAIN,
         "The program cannot be compiled."),
    Rule("wrong-arguments", "message", r"^\S+: error: (unrecognized arguments|the following arguments are required|"
         r"argument )", STOP, CERTAIN, "The program does not know its arguments."),
    Rule("command-missing", "exit code", r"126|127", STOP, LIKELY, "A shell did not find or could not run a command."),
    Rule("program-error", "exception", r"NameError|UnboundLocalError|AttributeError|TypeError|NotImplementedError",
         STOP, LIKELY, "The program does the same next time."),
    Rule("missing-file", "message", r"^(FileNotFound|NotADirectory|IsADirectory)Error\b|no such file or directory",
         STOP, LIKELY, "A path is wrong or not mounted."),
    Rule("no-permission", "message", r"^PermissionError\b|permission denied|\bErrno 30\b|read-only file system",
         STOP, LIKELY, "The user may not do this."),
    Rule("broken-file", "message", r"UnpicklingError: |^EOFError: Ran out of input|PytorchStreamReader failed|"
         r"SafetensorError: ", STOP, LIKELY,
         "A file, such as a checkpoint, is not complete or of another kind."),
    Rule("tensor-mismatch", "message", r"shapes cannot be multiplied|must match the size of tensor|size mismatch|"
         r"Error\(s\) in loading state_dict|on the (same|expected) device|is out of bounds", STOP, LIKELY,
         "The model, the data and the checkpoint do not fit together."),
    Rule("device-assert", "message", r"device-side assert", STOP, LIKELY,
         "A kernel found a value out of range, such as a wrong label; the same data do the same."),
    Rule("wrong-build", "message", r"no kernel image is available|driver version is insufficient|driver on your system "
         r"is too old|not compiled with CUDA|does ?n.t have NCCL built in|GLIBC\w*_\S+. not found", STOP, LIKELY,
         "The libraries do not fit the host."),
    Rule("gpu-numbers", "message", r"invalid device ordinal|duplicate GPU detected|ncclInvalidUsage|, invalid usage\b",
         STOP, LIKELY, "There are more workers than GPUs, or two workers use one GPU."),
    Rule("gpu-memory-access", "message", r"illegal memory access|unspecified launch failure|misaligned address",
         RESTART, LIKELY, "A kernel used a wrong address; often a race."),
    # Peers and the network.
    Rule("port-in-use", "any text", r"EADDRINUSE|address already in use", RESTART, LIKELY,
         "Another process has the port; a new round has a new one."),
    Rule("name-lookup", "message", r"name or service not known|temporary failure in name resolution|"
         r"no address associated with hostname", RESTART, LIKELY, "Name servers fail for a moment."),
    Rule("nccl-remote", "message", r"ncclRemoteError|remote process exited", RESTART, LIKELY,
         "NCCL lost a peer, which is the cause."),
    Rule("nccl-system", "message", r"nccl(System|Internal)Error|unhandled system error", RESTART, LIKELY,
         "NCCL met an error of the network or of the system."),
    Rule("collective-timeout", "message", r"collective operation timeout|timed out waiting|wait timeout after|"
         r"seconds waiting for clients|barrier timed out|failed to pass monitoredBarrier|heartbeat|timed out after",
         RESTART, LIKELY, "A peer was late or gone, which is the cause."),
    # Signals and codes.
    Rule("signal-from-outside", "exit code", r"-(1|2|9|15)|129|130|137|143", RESTART, LIKELY,
         "Another process ended the worker."),
    Rule("peer-gone", "consequence", "yes", RESTART, LIKELY, "A peer closed the connection, which is the cause."),
    Rule("resource-limit", "exit code", r"-(24|25)|152|153", STOP, LIKELY,
         "The limit of CPU time or file size is used up."),
    Rule("illegal-instruction", "exit code", r"-4|132", STOP, LIKELY,
         "The program was built for another processor."),
    Rule("crash", "exit code", r"-(6|7|8|11)|134|135|136|139", RESTART, UNKNOWN,
         "A crash of native code may be a race or a bug."),
    Rule("own-exit-code", "exit code", r"[3-9]|\d\d|1[01]\d|12[0-5]", RESTART, UNKNOWN,
         "Only the program knows the meaning of its exit code."),
)
# fmt: on


# After these, the places of the other workers say more than the one that failed (`--peer-stacks`).
_ABOUT_PEERS = frozenset({"nccl-remote", "nccl-system", "collective-timeout", "peer-gone", "hang", "expired-timer"})


def is_about_peers(failure: Failure) -> bool:
    """Whether it failed of a time-out, a closed connection or a hang, so that a peer may be the cause. Other nodes wait
    for the answer, and to compile the whole table takes milliseconds: most failures match none of these rules."""
    may_be = any(rule.matches(failure) for rule in RULES if rule.name in _ABOUT_PEERS)
    return may_be and judged(failure).name in _ABOUT_PEERS


def judged(failure: Failure) -> Rule:
    """The first rule that matches, else `NONE`."""
    return next((rule for rule in RULES if rule.matches(failure)), NONE)


def fields(failure: Failure | None) -> dict[str, str | None]:
    """For `report.json` and events; without a failure all are null."""
    rule = judged(failure) if failure is not None else None
    names = {"verdict": "verdict", "confidence": "confidence", "rule": "name"}
    return {key: getattr(rule, name, None) for key, name in names.items()}


def words(failure: Failure) -> str:
    """For the text of the report: only what is certain, and only if it says more than to try again."""
    rule = judged(failure)
    if rule.confidence != CERTAIN or rule.verdict == RESTART:
        return ""
    what = f"do not use host {failure.node} again" if rule.verdict == EXCLUDE_NODE else "do not try again"
    return f"Verdict: {what}: {rule.why[0].lower()}{rule.why[1:].rstrip('.')} ({rule.name})"
