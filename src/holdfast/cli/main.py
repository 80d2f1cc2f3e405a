"""The `holdfast` command: finds the command that is meant and imports only that."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module

import holdfast
from holdfast.cli import console

PROGRAM = "holdfast"

# Command -> the function that returns its exit code, and what it does.
COMMANDS = {
    "run": ("holdfast.cli.run:command", "start workers on this machine and keep them together"),
    "adopt": ("holdfast.cli.adopt:main", "run a command that calls torchrun, with holdfast in its place"),
    "submit": ("holdfast.cli.submit:submit", "start a job on the nodes of an engine, such as Slurm"),
    "render": ("holdfast.cli.submit:render", "print the batch script or manifest of a job for an engine"),
    "rehearse": ("holdfast.cli.rehearse:main", "run a job under faults, and say which it survives"),
    "coordinator": ("holdfast.cli.coordinator:main", "serve the membership of a run"),
    "token": ("holdfast.cli.token:main", "make the secret that keeps others out of a run"),
    "status": ("holdfast.cli.status:main", "show how a run stands and what it waits for"),
    "ps": ("holdfast.cli.status:list_runs", "list the runs on this host"),
    "top": ("holdfast.cli.top:main", "watch a run, its nodes and workers, live"),
    "dashboard": ("holdfast.cli.dashboard:main", "serve a page about a run to browsers"),
    "logs": ("holdfast.cli.logs:main", "show or follow the log files of a run's workers"),
    "attach": ("holdfast.cli.attach:main", "show the output of a run that goes on without its terminal"),
    "stop": ("holdfast.cli.stop:main", "end a run on all its nodes"),
    "notice": ("holdfast.cli.notice:main", "announce that a node, or a whole run, goes away soon"),
    "stacks": ("holdfast.cli.stacks:main", "show where the workers of a run are right now"),
    "snapshots": ("holdfast.cli.snapshots:main", "list the snapshots of a run, or write them as files"),
    "warm": ("holdfast.cli.warm:main", "keep modules in memory, so that the next runs start at once"),
    "doctor": ("holdfast.cli.doctor:main", "check this host and the way to a coordinator"),
    "bundle": ("holdfast.cli.bundle:main", "collect what is needed to look into a problem, without secrets"),
    "completion": ("holdfast.cli.completion:main", "print a script with which bash, zsh or fish completes commands"),
}

# Commands that holdfast itself starts, by this name, in adopted programs.
_INTERNAL = {
    "adopted-torchrun": "holdfast.adopt.launch:torchrun_command",
    "adopted-run": "holdfast.adopt.launch:run_command",
    "adopted-launch": "holdfast.adopt.launch:launch_command",
}

_USAGE = f"usage: {PROGRAM} COMMAND [options]"


def _help() -> str:
    commands = "\n".join(f"  {name:<13}{what}" for name, (_, what) in COMMANDS.items())
    return (
        f"{_USAGE}\n\n"
        "holdfast starts a group of worker processes on one machine or many, keeps the group alive through\n"
        "failures, and says exactly what went wrong when it cannot.\n\n"
        f"Commands:\n{commands}\n\n"
        "Options:\n  -h, --help   show this text\n  --version    show the version\n\n"
        f"`{PROGRAM} COMMAND --help` describes a command.\n"
    )


def main(args: Sequence[str]) -> int:
    """Run the command that `args` begin with; its exit code is the result."""
    if not args:
        console.write(_help())
        return 2
    first, rest = args[0], args[1:]
    if first in COMMANDS or first in _INTERNAL:
        where = COMMANDS[first][0] if first in COMMANDS else _INTERNAL[first]
        module, _, function = where.partition(":")
        return int(getattr(import_module(module), function)(rest))
    if first in ("-h", "--help", "help"):
        return console.show(PROGRAM, _help)
    if first == "--version":
        return console.show(PROGRAM, lambda: f"{PROGRAM} {holdfast.__version__}\n")
    console.write(f"{_USAGE}\n")
    kind = "option" if first.startswith("-") else "command"
    console.write_error(PROGRAM, f"unknown {kind} {first!r}{_suggestion(first)}")
    return 2


def _suggestion(word: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
    if close:
        return f"; did you mean `{PROGRAM} {close[0]}`?"
    if word.startswith("--") or word.endswith(".py") or os.path.exists(word):
        return f"; did you mean `{PROGRAM} run {word}`?"
    return f"; the commands are: {', '.join(COMMANDS)}"
