"""`holdfast adopt`: run a command whose calls of torchrun are answered by holdfast."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast import adopt, escape, signals
from holdfast.adopt import hook
from holdfast.cli import console
from holdfast.cli.arguments.parser import PlainParser
from holdfast.errors import HoldfastError, HostError, UserError
from holdfast.process import adoption

PROGRAM = "holdfast adopt"
USAGE = "holdfast adopt -- COMMAND [arguments]\n       holdfast adopt --install DIR"

_EPILOG = """\
In the command and all that it starts, `torchrun`, `python -m torch.distributed.run` and `import torch.distributed.run`
are holdfast, and so are torch's launcher and elastic modules. The workers get an environment without any of it.

HOLDFAST_OPTS adds options of `holdfast run` that the command cannot pass itself; options that it does pass, and PET_*
variables, win. A Python that runs with -I, -E or -S cannot be adopted: it reads no PYTHONPATH. See docs/torchrun.md.

examples:
  holdfast adopt -- accelerate launch train.py
  HOLDFAST_OPTS="--preload torch --hang-timeout 10m" holdfast adopt -- ./train.sh
  holdfast adopt --install /opt/holdfast
"""

# Passed on to the command. A terminal sends its signals to the command, too; those are not passed on.
_FORWARDED = (
    signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT,
)  # fmt: skip


def get_parser() -> PlainParser:
    parser = PlainParser(PROGRAM, "Run a command with holdfast in place of torchrun.", _EPILOG, USAGE)
    parser.add_argument("--install", metavar="DIR", help="write torchrun and the hook to DIR for images and module "
                        "systems, and print the variables to set")  # fmt: skip
    parser.add_argument("command", nargs="...", metavar="COMMAND", help="the command and its arguments")
    return parser


def main(argv: Sequence[str]) -> int:
    parser = get_parser()
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if (args.install is None) == (not command):
        parser.error("give a command to run, or --install DIR" if not command else "--install runs no command")
    if args.install is not None:
        return console.show(PROGRAM, lambda: _install(Path(args.install).absolute()))
    try:
        return _adopt(command)
    except (HoldfastError, OSError) as error:
        console.write_error(PROGRAM, f"cannot start {command[0]!r}: {getattr(error, 'strerror', None) or error}")
        return 2 if isinstance(error, UserError) else 1


def _install(directory: Path) -> str:
    if ":" in str(directory):
        raise UserError(f"--install {directory}: a directory in PATH cannot have a colon in its name")
    if not str(directory).isprintable():  # The lines below would name another directory.
        raise UserError(f"--install {directory}: its name has a byte that cannot be printed; choose another one")
    adopt.write_files(directory)
    return (
        f"export PATH={shlex.quote(f'{directory}/{adoption.SCRIPTS}')}:$PATH\n"
        f"export PYTHONPATH={shlex.quote(f'{directory}/{adoption.SITE}')}${{PYTHONPATH:+:$PYTHONPATH}}\n"
    )


def _adopt(command: Sequence[str]) -> int:
    directory = Path(tempfile.mkdtemp(prefix="holdfast-adopt-"))
    try:
        adopt.write_files(directory)
        if not os.access(directory / adoption.SCRIPTS / "torchrun", os.X_OK):
            raise HostError(f"programs in {directory.parent} cannot be executed; set TMPDIR to another directory")
        used = directory / "used"
        used.touch()
        code = _run(command, adopt.adopted_environment(directory, os.environ))
        _say_if_unused(command[0], used.read_text(errors="replace").splitlines())
        return code
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """The exit code of the command, 128+n if a signal has ended it."""
    program = shutil.which(command[0], path=environment["PATH"])
    if program is None:
        exists = os.path.exists(command[0])
        if "/" in command[0]:
            raise UserError("it is not an executable file" if exists else "no such program")
        raise UserError(f"it was not found on PATH{f', but ./{command[0]} exists; write that' if exists else ''}")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_FORWARDED, signal.SIGCHLD))
    early = signals.inbox().take()
    signals.inbox().handle(())  # From here on signals wait, and are taken below.
    if early is not None:
        return 128 + early
    pid = os.posix_spawn(
        program, list(command), environment, setsigmask=before, setsigdef=(signal.SIGPIPE, signal.SIGXFSZ)
    )
    while True:
        came = signal.sigwaitinfo((*_FORWARDED, signal.SIGCHLD))
        if came.si_signo != signal.SIGCHLD:
            if came.si_code <= 0:  # Sent by a process, and not by the terminal.
                os.kill(pid, came.si_signo)
            continue
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def _say_if_unused(program: str, notes: Sequence[str]) -> None:
    if any(line.startswith(hook.USED) for line in notes):
        return
    pythons = sorted({line.removeprefix(hook.WITHOUT_TORCH) for line in notes if line.startswith(hook.WITHOUT_TORCH)})
    why = f"torch is not installed for {', '.join(pythons)}" if pythons else "a Python with -I, -E or -S cannot be"
    console.write(f"{escape.PREFIX} {program} never called torchrun, so nothing was adopted ({why})\n")
