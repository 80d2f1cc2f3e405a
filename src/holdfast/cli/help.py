"""The table of options as people read it: the text of `holdfast run --help`, and docs/cli.md.

python -m holdfast.cli.help > docs/cli.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from holdfast.cli.options import GROUPS, OPTIONS, OUTPUT, PROGRAM, USAGE, Option

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
    ("2", "wrong usage; nothing was started"),
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
        "the second of two machines, each looking after its own workers",
        "--nnodes 2 --node-rank 1 --master-addr 10.0.0.1 \\\n    --rdzv-conf coordinator_port=off train.py",
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
    (
        "LOGLEVEL",
        "how much holdfast says if neither `-q` nor `-v` is given: `debug`, `info`, `warning` or `error`",
    ),
    ("NO_COLOR", "if set, holdfast's own lines are never coloured"),
)


def document() -> str:
    """docs/cli.md."""
    parts = ["# holdfast run", f"```\n{USAGE}\n```", *_INTRODUCTION, *_READING_RULES]
    for group in GROUPS:
        header = f"## {group}\n\n| option | default | environment | meaning |\n|---|---|---|---|"
        parts.append("\n".join([header, *(_row(option) for option in OPTIONS if option.group == group)]))
    parts.append(_small_table("Other environment variables", "variable", _OTHER_VARIABLES))
    parts.append(_small_table("Exit status", "status", EXIT_CODES))
    examples = "\n\n".join(_examples())
    parts.append(f"## Examples\n\n```sh\n{examples}\n```")
    return "\n\n".join(parts) + "\n"


def _small_table(title: str, first: str, rows: Sequence[tuple[str, str]]) -> str:
    lines = [f"## {title}", "", f"| {first} | meaning |", "|---|---|", *(f"| `{a}` | {b} |" for a, b in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(document())
