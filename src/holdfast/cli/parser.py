"""How command lines are read, and how the options are shown to people: `--help` and docs/cli.md.

    python -m holdfast.cli.parser > docs/cli.md

For `holdfast run` the tokens are scanned from the left until the first one that is neither an option nor an option's
value: that is the script, and all that follows is the script's own, whatever it looks like. Before the script a name
may be shortened as long as it means one option, and dashes and underscores mean the same. Only then does argparse see
the options, each in its full spelling, and convert the values. What the command line leaves open comes from
`PET_<NAME>`, read at that moment, and otherwise from the default. An empty variable counts as unset.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from holdfast.cli import console
from holdfast.cli.options import GROUPS, OPTIONS, OUTPUT, PROGRAM, USAGE, Option
from holdfast.frozen import frozen

# Options of other launchers that have no counterpart, and what to do instead.
_FOREIGN = {
    "-n": "did you mean --nproc-per-node?",
    "-np": "did you mean --nproc-per-node?",
    "-N": "did you mean --nnodes?",
    "--use-env": "workers always get their local rank in LOCAL_RANK, and never as an argument; leave the option out",
}


class _UsageError(Exception):
    pass


@frozen
class _Split:
    """A command line taken apart: options in full for argparse, what they set, and the script's part."""

    tokens: list[str]
    dests: set[str]
    rest: list[str]


def _with_dashes(name: str) -> str:
    return "--" + name[2:].replace("_", "-")


def _looks_like_option(token: str) -> bool:
    if len(token) < 2 or token[0] != "-":
        return False
    try:
        float(token)
    except ValueError:
        return True
    return False


def _listed(names: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


class _Scanner:
    """Splits one command line; `actions` maps every spelling to what argparse knows of it."""

    def __init__(self, actions: Mapping[str, argparse.Action]) -> None:
        self._short = {name[1]: action for name, action in actions.items() if len(name) == 2}
        self._long = {_with_dashes(name): action for name, action in actions.items() if name.startswith("--")}

    def split(self, tokens: Sequence[str]) -> _Split:
        found = _Split([], set(), [])
        queue = iter(tokens)
        for token in queue:
            if token == "--":
                break
            if not _looks_like_option(token):
                found.rest.append(token)
                break
            reader = self._long_option if token.startswith("--") else self._short_options
            for action, value in reader(token, queue):
                found.dests.add(action.dest)
                name = action.option_strings[-1]
                found.tokens.append(name if value is None else f"{name}={value}")
        found.rest.extend(queue)
        return found

    def _long_option(self, token: str, queue: Iterator[str]) -> Iterator[tuple[argparse.Action, str | None]]:
        name, equals, value = token.partition("=")
        action = self._resolve(name)
        if action.nargs != 0:
            yield action, value if equals else self._next_value(name, queue)
        elif equals:
            raise _UsageError(f"{name} is on or off and takes no value, not {value!r}")
        else:
            yield action, None

    def _short_options(self, token: str, queue: Iterator[str]) -> Iterator[tuple[argparse.Action, str | None]]:
        """`-m`, `-mv`, `-r3` and `-r 3`."""
        letters = token[1:]
        while letters:
            letter, letters = letters[0], letters[1:]
            action = self._short.get(letter)
            if action is None:
                raise _UsageError(self._unknown_letter(letter, token.partition("=")[0]))
            if action.nargs == 0:
                yield action, None
                continue
            yield action, letters.removeprefix("=") or self._next_value(f"-{letter}", queue)
            return

    def _unknown_letter(self, letter: str, token: str) -> str:
        """A whole word behind one dash was probably meant to have two."""
        name = token.rstrip("0123456789")
        suggestion = f"; {_FOREIGN[name]}" if name in _FOREIGN else self._suggestion(f"-{token}")
        if suggestion or token == f"-{letter}":
            return f"unknown option {token}{suggestion}"
        return f"unknown option -{letter} in {token}"

    def _next_value(self, name: str, queue: Iterator[str]) -> str:
        value = next(queue, None)
        if value is None:
            raise _UsageError(f"{name} needs a value")
        if _looks_like_option(value):
            raise _UsageError(f"{name} needs a value, but {value} follows (write {name}={value} if it is meant)")
        return value

    def _resolve(self, name: str) -> argparse.Action:
        full = _with_dashes(name)
        if full in self._long:
            return self._long[full]
        matches = sorted(known for known in self._long if known.startswith(full))
        if not matches:
            raise _UsageError(f"unknown option {name}{self._suggestion(full)}")
        if len(matches) > 1:
            raise _UsageError(f"{name} is short for more than one option: {_listed(matches)}")
        return self._long[matches[0]]

    def _suggestion(self, name: str) -> str:
        from difflib import get_close_matches

        if name in _FOREIGN:
            return f": {_FOREIGN[name]}"
        close = get_close_matches(name, list(self._long), n=1, cutoff=0.7)
        return f"; did you mean {close[0]}?" if close else ""


class RunParser(argparse.ArgumentParser):
    """An argparse parser that reads `OPTIONS`, a script and the script's arguments."""

    def __init__(self) -> None:
        super().__init__(prog=PROGRAM, usage=USAGE, allow_abbrev=False)
        for option in OPTIONS:
            if option.is_flag:
                self.add_argument(*option.flags, action="store_true", dest=option.dest)
            else:
                self.add_argument(*option.flags, type=option.read, default=option.default, dest=option.dest)

    # Any in the signature, because the base class has overloads that this one need not tell apart.
    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        tokens = list(sys.argv[1:] if args is None else args)
        try:
            found = _Scanner(self._option_string_actions).split(tokens)
        except _UsageError as error:
            self.error(str(error))
        namespace, extras = super().parse_known_args(found.tokens, namespace)
        self._fill_from_environment(namespace, found.dests)
        if namespace.quiet and namespace.verbose:
            self.error("--quiet and --verbose exclude each other")
        if not found.rest:
            self.error("a script to run is required")
        namespace.training_script, *namespace.training_script_args = found.rest
        return namespace, extras

    def _fill_from_environment(self, namespace: argparse.Namespace, given: set[str]) -> None:
        namespace.from_environment = []
        for option in OPTIONS:
            text = os.environ.get(option.variable or "", "")
            if not text or option.dest in given:
                continue
            try:
                setattr(namespace, option.dest, option.read(text))
                namespace.from_environment.append(option)
            except argparse.ArgumentTypeError as error:
                self.error(f"environment variable {option.variable}: {error}")

    def format_help(self) -> str:
        return help_text(console.width())

    def print_help(self, file: Any = None) -> None:
        if file is None:
            console.print_out(self.format_help())
        else:
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        console.write(f"usage: {USAGE}\n")
        console.write_error(PROGRAM, message.removeprefix("argument "))  # As argparse puts it.
        raise SystemExit(2)


class PlainParser(argparse.ArgumentParser):
    """For the small commands: argparse, with errors in one line as `holdfast run` has them."""

    def __init__(self, program: str, description: str, epilog: str) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(program, None, description, epilog, formatter_class=formatter, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        console.write_error(self.prog, message.removeprefix("argument "))
        raise SystemExit(2)

    def page(self) -> str:
        """Its part of docs/cli.md."""
        shown = [each for each in self._actions if each.help not in (None, argparse.SUPPRESS) and each.dest != "help"]
        rows = [(f"{', '.join(each.option_strings)} {each.metavar or ''}".rstrip(), each.help) for each in shown]
        epilog = (self.epilog or "").strip()
        return f"# {self.prog}\n\n{self.description}\n\n{_table('option', rows)}\n\n```\n{epilog}\n```"


# Help and documentation.

_INTRODUCTION = (
    "Start workers on this machine, as part of a run on one machine or many, and keep them together: if one "
    "fails, all are stopped and, if restarts are left, started again.",
    "An option that is not given is taken from the environment: --max-restarts from PET_MAX_RESTARTS, and "
    "so on. For a flag 1, true or yes means on and 0, false or no means off.",
)

EXIT_CODES: tuple[tuple[str, str], ...] = (
    ("0", "all workers succeeded"),
    ("1", "the workers failed for good, or the run could not go on"),
    ("2", "wrong usage, or a node that does not fit into the run; nothing was started"),
    ("128+n", "stopped by signal n, for example 143 after SIGTERM"),
)

EXAMPLES: tuple[tuple[str, str], ...] = (
    ("four workers on this machine, restarted at most three times", "--nproc-per-node 4 --max-restarts 3 train.py"),
    ("one worker for each GPU, their output on the console and in files", "--nproc-per-node gpu -t 3 train.py"),
    (
        "the same line on each of two machines, one of which is node1",
        "--nnodes 2 --rdzv-backend tcp --rdzv-endpoint node1:29400 \\\n"
        "    --rdzv-id job7 --nproc-per-node 4 --max-restarts 3 train.py",
    ),
)


def _options_of(group: str) -> Iterator[tuple[str, str]]:
    for option in OPTIONS:
        if option.group == group:
            note = f" (default: {option.default_text})" if option.default_text else ""
            yield option.invocation, option.help + note
    if group == OUTPUT:
        yield "-h, --help", "Show this text."


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


def _row(option: Option) -> str:
    default = f"`{option.default_text}`" if option.default_text else ""
    variable = f"`{option.variable}`" if option.variable else ""
    cells = (f"`{option.invocation}`", default, variable, option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


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
    ("HOLDFAST_ROUND", "a number that grows with every new world, whatever the reason"),
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
        "seconds after which a worker in uninterruptible sleep counts as failed; unset, this is not checked",
    ),
    ("TORCH_ELASTIC_WORKER_IDENTICAL", "1 says that all nodes have the same role and size, to plug-in rendezvous only"),
    ("LOGLEVEL", "how much holdfast logs if neither `-q` nor `-v` is given: `debug`, `info`, `warning` or `error`"),
    ("NO_COLOR", "if set, holdfast's own lines are never coloured"),
)


def document() -> str:
    """docs/cli.md."""
    from holdfast.cli import coordinator, stacks  # Only the documentation needs them.

    parts = ["# holdfast run", f"```\n{USAGE}\n```", *_INTRODUCTION, *_READING_RULES]
    for group in GROUPS:
        header = f"## {group}\n\n| option | default | environment | meaning |\n|---|---|---|---|"
        parts.append("\n".join([header, *(_row(option) for option in OPTIONS if option.group == group)]))
    for title, first, rows in (
        ("Other environment variables", "variable", _OTHER_VARIABLES),
        ("What a worker finds in its environment", "variable", _WORKER_VARIABLES),
        ("Exit status", "status", EXIT_CODES),
    ):
        parts.append(f"## {title}\n\n{_table(first, rows)}")
    examples = "\n\n".join(_examples())
    parts += [f"## Examples\n\n```sh\n{examples}\n```", coordinator.get_parser().page(), stacks.get_parser().page()]
    return "\n\n".join(parts) + "\n"


def _table(first: str, rows: Sequence[tuple[str, str | None]]) -> str:
    return "\n".join([f"| {first} | meaning |", "|---|---|", *(f"| `{name}` | {meaning} |" for name, meaning in rows)])


if __name__ == "__main__":
    sys.stdout.write(document())
