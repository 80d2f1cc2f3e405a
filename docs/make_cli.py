"""Prints docs/cli.md, which is made from the parsers of the commands.

python docs/make_cli.py > docs/cli.md
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Sequence

from holdfast.cli import catalogue
from holdfast.cli.arguments import parser
from holdfast.cli.arguments.options import GROUPS, OPTIONS, USAGE
from holdfast.cli.main import COMMANDS
from holdfast.option import Option
from holdfast.rendezvous.membership.model import Settings
from holdfast.rendezvous.settings import TABLE

_NAME = re.compile(r"'--[^']*'|`[^`]*`|(?<![\w-])--[a-z][\w-]*|\bPET_[A-Z_]+")
_READING_RULES = (
    "The first token that is neither an option nor an option's value is the script; all that follows is the "
    "script's own. A value comes from the command line (the last one given wins), else from the environment "
    "variable beside it, else it is the default. An empty variable counts as unset.",
    "Options are written with dashes or underscores, and may be shortened as long as they mean one option: "
    "`--nproc 4` is `--nproc-per-node 4`. Later versions add options that must be written in full, so a shortened name "
    "keeps its meaning. In the script's arguments, `${local_rank}` stands for the "
    "worker's local rank, and `$$` for a dollar sign.",
)

_SETTINGS = (
    "`--rdzv-conf` takes `key=value,key=value`, `LaunchConfig` the same settings as `rdzv_configs`. If a setting has "
    "an option of its own (`--lease 5s`), give one of the two. If a setting is the same on all nodes, the first node "
    "fixes it, and a node with another value is rejected."
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
    (
        "MASTER_PORT",
        "the port there where the workers meet; torch's store listens there, unless `--agent-store` says otherwise",
    ),
    ("HOLDFAST_FREE_PORT", "another port there, on which nothing listens, for a program that needs one"),
    ("TORCHELASTIC_RUN_ID", "the name of the run"),
    ("TORCHELASTIC_RESTART_COUNT", "how many restarts after failures there have been, the same on every node"),
    ("TORCHELASTIC_MAX_RESTARTS", "what `--max-restarts` says"),
    (
        "TORCHELASTIC_USE_AGENT_STORE",
        "`True`: torch's store is served by holdfast. `False`: the worker of rank 0 hosts it itself",
    ),
    ("TORCHELASTIC_ERROR_FILE", "where a worker may write why it failed; empty with `--log-dir /dev/null`"),
    ("TORCHELASTIC_SIGNALS_TO_HANDLE", "what `--signals-to-handle` says"),
    ("TORCHELASTIC_TIMER_FILE", "the pipe of the watchdog, if there is one"),
    ("HOLDFAST_ROUND", "a number that grows with every new world, whatever the reason"),
    ("HOLDFAST_NOTICE_FILE", "a file that appears when a node of the run is to go away ([notice.md](notice.md))"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1, unless the environment of holdfast says otherwise"),
    (
        "OMP_NUM_THREADS",
        "that of holdfast's environment. If it is unset: the worker's share of the cores to which it is bound "
        "([placement.md](placement.md)), else 1 if there are more workers than one",
    ),
    ("CUDA_VISIBLE_DEVICES", "that of holdfast's environment; the worker's one device with `--virtual-local-rank`"),
)

_OTHER_VARIABLES: tuple[tuple[str, str], ...] = (
    ("PYTHON_EXEC", "the Python that runs the workers, instead of holdfast's own"),
    ("OMP_NUM_THREADS", "if unset: 1 for several local workers, or the cores to which each is bound"),
    (
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        "what stands in front of tee'd lines, with `${role_name}`, `${rank}` and `${local_rank}`",
    ),
    ("TORCHELASTIC_ERROR_FILE", "where the cause is written, as JSON, if the run fails"),
    ("TORCHELASTIC_HEALTH_CHECK_PORT", "a port, if `--health-port` is not given"),
    ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "seconds, if `--shutdown-timeout` is not given"),
    ("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "seconds, if `--exit-barrier-timeout` is not given"),
    ("HOLDFAST_OPTS", "under `holdfast adopt`: options of `holdfast run` that the adopted command cannot pass"),
    ("HOLDFAST_TOKEN", "the secret of the run, if `--token-file` is not given"),
    (
        "HOLDFAST_HOST_NAME",
        "the machine that this node is on, if its own name is that of a container; nodes of a machine that is lost "
        "repeatedly have to wait",
    ),
    ("HOLDFAST_ETCD_PASSWORD", "the password of etcd's user, if `password_file` is not in `--rdzv-conf`"),
    (
        "TORCHELASTIC_ENABLE_FILE_TIMER",
        "1 starts a watchdog that kills workers whose timers expire; its pipe is at `TORCHELASTIC_TIMER_FILE`, or "
        "else at a place that it chooses",
    ),
    (
        "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
        "seconds after which a worker in uninterruptible sleep counts as failed; unset, this is not checked",
    ),
    ("TORCH_ELASTIC_WORKER_IDENTICAL", "1 says that all nodes have the same role and size, to plug-in rendezvous only"),
    ("LOGLEVEL", "how much holdfast logs if neither `-q` nor `-v` is given: `debug`, `info`, `warning` or `error`"),
    ("NO_COLOR", "if set, holdfast's own lines are never coloured"),
)


def document() -> str:
    """docs/cli.md."""
    parts = ["# Commands and options", f"```\n{USAGE}\n```", *map(_marked, parser.INTRODUCTION), *_READING_RULES]
    for group in GROUPS:
        options = [(option.invocation, _meaning(option)) for option in OPTIONS if option.group == group]
        parts.append(f"## {group}\n\n{_table('option', options)}")
    parts += ["## Settings of `--rdzv-conf`", _SETTINGS, _settings()]
    for title, first, rows in (
        ("Other environment variables", "variable", _OTHER_VARIABLES),
        ("What a worker finds in its environment", "variable", _WORKER_VARIABLES),
        ("Exit status", "status", parser.EXIT_CODES),
    ):
        parts.append(f"## {title}\n\n{_table(first, rows)}")
    examples = "\n\n".join(parser.EXAMPLES)
    pages = [_page(catalogue.parser_of(name)) for name in COMMANDS if name != "run"]
    parts += [f"## Examples\n\n```sh\n{examples}\n```", *pages]
    return "\n\n".join(parts) + "\n"


def _table(first: str, rows: Sequence[tuple[str, str | None]]) -> str:
    cells = [[cell.replace("|", "\\|") for cell in (f"`{name}`", _marked(meaning or ""))] for name, meaning in rows]
    return "\n".join([f"| {first} | meaning |", "|---|---|", *(f"| {' | '.join(row)} |" for row in cells)])


def _settings() -> str:
    rows = []
    for row in TABLE:
        default = row.shown or str(row.default).lower().removesuffix(".0") or "none"
        facts = [f"Value: {row.kind.words}.", f"Default: {default}.", f"Backends: {row.backends.replace(' ', ', ')}."]
        facts += ["Same on all nodes."] if hasattr(Settings, row.field) else []
        names = ", ".join(f"`{name}`" for name in row.names.split()[1:])
        facts += [f"Other names: {names}."] if names else []
        rows.append((row.name, f"{row.help}<br>{' '.join(facts)}"))
    return _table("key", rows)


def _meaning(option: Option) -> str:
    """With the default and the variable after it: columns for them would leave no room on a narrow screen."""
    facts = [f"Default: `{option.default_text}`."] if option.default_text else []
    facts += [f"Environment: `{option.variable}`."] if option.variable else []
    return " ".join([option.help, *facts])


def _marked(text: str) -> str:
    """Help is written for a terminal. Here options and variables are code, and pages are links."""
    text = _NAME.sub(lambda name: name[0] if name[0].startswith("`") else f"`{name[0]}`", text)
    text = text.replace("docs/cli.md", "[This page](#settings-of---rdzv-conf)")
    return re.sub(r"(?<![\w[/-])(?<!\]\()(?:docs/)?([\w-]+\.md)", r"[\1](\1)", text)


def _page(command: argparse.ArgumentParser) -> str:
    """A command whose options are declared with argparse."""
    shown = [each for each in command._actions if each.help not in (None, argparse.SUPPRESS) and each.dest != "help"]
    rows = [
        (f"{', '.join(each.option_strings)} {each.metavar or ''}".strip(), (each.help or "").replace("%%", "%"))
        for each in shown
    ]
    description, epilog = _marked(command.description or ""), (command.epilog or "").strip()
    parts = [_part(part) for part in epilog.split("\n\n") if part]
    return "\n\n".join([f"## {command.prog}", description, _table("option", rows), *parts])


def _part(text: str) -> str:
    """Of the end of a help text: a paragraph, examples, or lines of a name and its meaning, such as exit codes."""
    head, _, body = text.partition(":\n")
    if not body.startswith("  "):
        return _marked(text.replace("\n", " "))
    lines = textwrap.dedent(body).split("\n")
    if head.startswith("example"):
        return "\n".join([f"{head.capitalize()}:", "", "```sh", *lines, "```"])
    body = re.sub(r"\n +", " ", "\n".join(lines))
    rows = [re.split("  +", line, maxsplit=1) for line in body.split("\n")]
    if all(len(row) == 2 for row in rows):
        return _table(head, [(name, meaning) for name, meaning in rows])
    return f"{_marked(head)}:\n\n```\n{body}\n```"


if __name__ == "__main__":
    sys.stdout.write(document())
