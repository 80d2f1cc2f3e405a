"""Options as people read them: the text of `holdfast run --help`, and docs/cli.md with those of every command.

python -m holdfast.cli.help > docs/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from holdfast.cli.options import GROUPS, OPTIONS, OUTPUT, PROGRAM, USAGE, Option

if TYPE_CHECKING:
    from holdfast.cli.plain import PlainParser

_HELP_INVOCATION = "-h, --help"
_HELP_TEXT = "Show this text."

_INTRODUCTION = (
    "Start workers on this machine, as part of a run on one machine or many, and keep them together: if one "
    "fails, all are stopped and, if restarts are left, started again.",
    "An option that is not given is taken from the environment: --max-restarts from PET_MAX_RESTARTS, and "
    "so on. For a flag 1, true or yes means on and 0, false or no means off.",
)

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "all workers succeeded"),
    ("1", "the workers failed for good, or the run could not be carried on"),
    ("2", "wrong usage, or a node that does not fit into the run; nothing was started"),
    ("128+n", "stopped by signal n, for example 143 after SIGTERM"),
)

EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "four workers on this machine, restarted at most three times",
        "--nproc-per-node 4 --max-restarts 3 train.py",
    ),
    (
        "one worker for each GPU, their output on the console and in files",
        "--nproc-per-node gpu -t 3 train.py",
    ),
    (
        "the same line on each of two machines, one of which is node1",
        "--nnodes 2 --rdzv-backend tcp --rdzv-endpoint node1:29400 \\\n"
        "    --rdzv-id job7 --nproc-per-node 4 --max-restarts 3 train.py",
    ),
)


# --- help and documentation ---------------------------------------------------------------------------------


def _options_of(group: str) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        if option.group == group:
            note = f" (default: {option.default_text})" if option.default_text else ""
            yield option.invocation, option.help + note
    if group == OUTPUT:
        yield _HELP_INVOCATION, _HELP_TEXT


def _examples() -> Iterator[str]:
    return (f"# {what}\n{PROGRAM} {line}" for what, line in EXAMPLES)


def help_text(width: int) -> str:
    """What `--help` prints, at most `width` columns wide."""
    from textwrap import TextWrapper, indent

    def wrap(text: str, column: int) -> str:
        pad = " " * column
        wrapper = TextWrapper(width, initial_indent=pad, subsequent_indent=pad, break_on_hyphens=False)
        return wrapper.fill(text)

    def entry(name: str, text: str, column: int = 24) -> str:
        body = wrap(text, column)
        head = f"  {name}"
        return head + body[len(head) :] if len(head) + 2 <= column else f"{head}\n{body}"

    parts = [f"usage: {USAGE}", *(wrap(text, 0) for text in _INTRODUCTION)]
    for group in GROUPS:
        parts.append("\n".join([f"{group}:", *(entry(name, text) for name, text in _options_of(group))]))
    parts.append("\n".join(["Exit status:", *(entry(code, text, 10) for code, text in EXIT_CODES)]))
    parts.append("\n".join(["Examples:", *(indent(example, "  ") for example in _examples())]))
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(option: Option) -> str:
    default = f"`{option.default_text}`" if option.default_text else ""
    variable = f"`{option.variable}`" if option.variable else ""
    cells = (f"`{option.invocation}`", default, variable, option.help)
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


_READING_RULES = (
    "The first token that is neither an option nor an option's value is the script; all that follows is the "
    "script's own. A value comes from the command line (the last one given wins), else from the environment "
    "variable named below, else it is the default. An empty variable counts as unset.",
    "Options are written with dashes or underscores, and may be shortened as long as they mean one option: "
    "`--nproc 4` is `--nproc-per-node 4`. In the script's arguments, `${local_rank}` stands for the "
    "worker's local rank, and `$$` for a dollar sign.",
)

_WORKER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("RANK", "its rank in the whole run, from 0"),
    ("WORLD_SIZE", "how many workers the run has"),
    ("LOCAL_RANK", "its rank on this node, from 0; always 0 with `--virtual-local-rank`"),
    ("LOCAL_WORLD_SIZE", "how many workers this node has"),
    ("GROUP_RANK", "the rank of this node"),
    ("GROUP_WORLD_SIZE", "how many nodes there are"),
    ("ROLE_NAME", "what `--role` says"),
    ("ROLE_RANK", "its rank among the workers of that role"),
    ("ROLE_WORLD_SIZE", "how many workers of that role there are"),
    ("MASTER_ADDR", "where the node of rank 0 is"),
    ("MASTER_PORT", "a port there that the worker of rank 0 may listen on"),
    ("TORCHELASTIC_RUN_ID", "the name of the run"),
    ("TORCHELASTIC_RESTART_COUNT", "how many restarts after failures there have been, the same on every node"),
    ("TORCHELASTIC_MAX_RESTARTS", "what `--max-restarts` says"),
    ("TORCHELASTIC_USE_AGENT_STORE", "`False`: the worker of rank 0 hosts the store itself; plug-ins may say `True`"),
    ("TORCHELASTIC_ERROR_FILE", "where a worker may write why it failed; empty with `--log-dir /dev/null`"),
    ("TORCHELASTIC_SIGNALS_TO_HANDLE", "what `--signals-to-handle` says"),
    ("TORCHELASTIC_TIMER_FILE", "the pipe of the watchdog, if there is one"),
    ("HOLDFAST_ROUND", "a number that rises with every new world, whatever the reason"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1, unless the environment of holdfast says otherwise"),
    ("OMP_NUM_THREADS", "that of holdfast's environment; 1 if it is unset and there are more workers than one"),
    ("CUDA_VISIBLE_DEVICES", "that of holdfast's environment; the worker's one device with `--virtual-local-rank`"),
)

_OTHER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("PYTHON_EXEC", "the Python that runs the workers, instead of holdfast's own"),
    ("OMP_NUM_THREADS", "if unset and there is more than one local worker, the workers get 1"),
    (
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "what stands in front of tee'd lines, with `${role_name}`, `${rank}` and `${local_rank}`",
    ),
    ("TORCHELASTIC_ERROR_FILE", "where the cause is written, as JSON, if the run fails"),
    ("TORCHELASTIC_HEALTH_CHECK_PORT", "a port, if `--health-port` is not given"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "seconds, if `--shutdown-timeout` is not given"),
    ("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "seconds, if `--exit-barrier-timeout` is not given"),
    ("HOLDFAST_TOKEN", "the secret of the run, if `--token-file` is not given"),
    ("HOLDFAST_ETCD_PASSWORD", "the password of etcd's user, if `password_file` is not in `--rdzv-conf`"),
    (
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        "1 starts a watchdog that kills workers whose timers expire; its pipe is at `TORCHELASTIC_TIMER_FILE`, or "
        "else at a place that it chooses",
    ),
    (
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        "seconds after which a worker in uninterruptible sleep counts as failed; without it nobody looks",
    ),
    ("TORCH_ELASTIC_WORKER_IDENTICAL", "1 says that all nodes have the same role and size, to plug-in rendezvous only"),
    (
        "LOGLEVEL",
        "how much holdfast says if neither `-q` nor `-v` is given: `debug`, `info`, `warning` or `error`",
    ),
    ("NO_COLOR", "if set, holdfast's own lines are never coloured"),
)


def document() -> str:
    """docs/cli.md."""
    from holdfast.cli import coordinator, stacks  # Nobody who only asks for help needs them.

    parts = ["# holdfast run", f"```\n{USAGE}\n```", *_INTRODUCTION, *_READING_RULES]
    for group in GROUPS:
        header = f"## {group}\n\n| option | default | environment | meaning |\n|---|---|---|---|"
        parts.append("\n".join([header, *(_row(option) for option in OPTIONS if option.group == group)]))
    parts.append(_small_table("Other environment variables", "variable", _OTHER_VARIABLES))
    parts.append(_small_table("What a worker finds in its environment", "variable", _WORKER_VARIABLES))
    parts.append(_small_table("Exit status", "status", EXIT_CODES))
    examples = "\n\n".join(_examples())
    parts.append(f"## Examples\n\n```sh\n{examples}\n```")
    parts += [_page(coordinator.get_parser()), _page(stacks.get_parser())]
    return "\n\n".join(parts) + "\n"


def _page(parser: PlainParser) -> str:
    """A small command."""
    lines = [f"| `{name}` | {meaning} |" for name, meaning in parser.rows()]
    table = "\n".join(["| option | meaning |", "|---|---|", *lines])
    return f"# {parser.prog}\n\n{parser.description}\n\n{table}\n\n```\n{(parser.epilog or '').strip()}\n```"


def _small_table(title: str, first: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"## {title}", "", f"| {first} | meaning |", "|---|---|", *(f"| `{a}` | {b} |" for a, b in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
