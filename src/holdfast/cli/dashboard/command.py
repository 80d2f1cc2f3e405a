"""`holdfast dashboard`: serve the page about a run, in the foreground; and the same process beside an agent.

The main thread only waits: for a signal, and from the end of the run on for the time that the page stays. An agent that
was started with --dashboard starts this command detached (`--agent PID`). It then says where it serves, or why not, in
one line on its standard output, lets go of it, and depends on nothing of the agent any more: the agent does not wait
for it, and it ends by itself some time after the run, or after the agent was killed.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence

from holdfast import loop, signals
from holdfast.cli import console, runs
from holdfast.cli.options import duration_s, host_and_port
from holdfast.cli.parser import PlainParser, argument
from holdfast.errors import HostError, UserError
from holdfast.observe import ask
from holdfast.observe.ask import AskedRun
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership.model import is_loopback

PROGRAM = "holdfast dashboard"
DEFAULT_ADDRESS = "127.0.0.1:0"

_BACKLOG = 128
_EVERY_ADDRESS = ("0.0.0.0", "::")
_LAST_WORDS_S = 3.0

_EPILOG = """\
The page shows the nodes and workers of the run, its rounds and what ended each, live logs, stacks and the failure
report. It is read-only unless the run's token is given (--token-file or HOLDFAST_TOKEN); then it can end the run, too.
The URL has a key in it, which is all one needs to look. On an address that other hosts can reach, the token is needed.
It needs the packages of `pip install 'holdfast[dashboard]'`.

exit status:
  0      the run has ended, and the page was there for --linger after that
  1      there is no such run, it cannot be asked, or the page cannot be served
  2      wrong usage, or several runs fit
  128+n  ended by signal n, for example 130 after Ctrl-C

examples:
  holdfast dashboard
  holdfast dashboard job7 --rdzv-endpoint node1:29400 --token-file token
"""


def get_parser() -> PlainParser:
    description = "Serve a page about a run: nodes, workers, rounds, logs, failures."
    parser = runs.parser_for(PROGRAM, description, _EPILOG, json_help="")
    parser.add_argument("--addr", type=argument(host_and_port), default=DEFAULT_ADDRESS, metavar="HOST:PORT",
                        help=f"where to serve (default: {DEFAULT_ADDRESS}; port 0 is any free one)")  # fmt: skip
    parser.add_argument("--linger", type=argument(duration_s), default=300.0, metavar="TIME", help="how long to stay "
                        "after the run has ended (default: 5m)")  # fmt: skip
    parser.add_argument("--agent", type=int, metavar="PID", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str]) -> int:
    args = get_parser().parse_args(argv)
    if args.agent is not None:
        # Whatever the agent blocks or ignores, this process can be stopped as any other can.
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
    code = console.show(PROGRAM, lambda: _serve(args))
    if args.agent is not None:
        os._exit(code)  # A thread may wait for an agent that does not answer.
    return code


def _serve(args: argparse.Namespace) -> str:
    try:
        from holdfast.cli.dashboard import server
        from holdfast.cli.dashboard.access import Access
        from holdfast.cli.dashboard.watch import Watch
    except ModuleNotFoundError as error:
        raise HostError(f"the package {error.name} is missing: pip install 'holdfast[dashboard]'") from None
    token = settings.read_token(args.token_file)
    host, port = endpoints.parse_rendezvous_endpoint(args.addr, 0)
    with _listener(host, port) as sock:
        name, number = sock.getsockname()[:2]
        if not is_loopback(name) and token is None:
            option = "--addr" if args.agent is None else "--dashboard-addr"
            raise UserError(
                f"{option} {args.addr} can be reached from other hosts, so the run's token is needed: give "
                "--token-file, or set HOLDFAST_TOKEN; or serve at 127.0.0.1 and use a tunnel, as in ssh -L"
            )
        shown = os.uname().nodename if name in _EVERY_ADDRESS else host
        guard = Access.fresh([os.uname().nodename, host])
        dashboard = server.Dashboard(guard, may_stop=token is not None, facts=server.facts_of(args.linger))
        ended, down = loop.Wakeup(), loop.Wakeup()
        run = open_run(args)
        args.run, args.rdzv_id = run.name, None  # Others may come to this host later.
        dashboard.watch = watch = Watch(
            run, lambda: open_run(args), dashboard.publish, ended.wake, may_read_files=not args.all_users
        )
        web = server.server_for(dashboard.app())
        thread = threading.Thread(target=dashboard.serve, args=(web, sock, down), name="holdfast-web", daemon=True)
        with signals.deferred() as box:
            thread.start()
            watch.start()
            _announce(args, run.name, f"http://{endpoints.endpoint_text(shown, number)}/?key={guard.key}")
            goodbye = _wait(ended, down, args.linger)
            watch.close()
            dashboard.say_goodbye(goodbye)
            web.should_exit = True
            thread.join(_LAST_WORDS_S)
            box.raise_pending()
    return f"{watch.ending} {goodbye}\n" if args.agent is None else ""


def open_run(args: argparse.Namespace) -> AskedRun:
    """The run that is meant. On this host the token is for what the page may do, not for asking."""
    if args.rdzv_endpoint is not None:
        return runs.open_run(args)
    if args.agent is not None:
        agents, _ = ask.find()
        found = [each for each in agents if (each.status.run_id, each.pid) == (args.run, args.agent)]
        if not found:
            raise HostError(f"the agent {args.agent} of run {args.run!r} is not found")
        return ask.LocalRun(found)
    return runs.open_run(argparse.Namespace(**{**vars(args), "token_file": ""}))


def _listener(host: str, port: int) -> socket.socket:
    try:
        sock = launch.bind(host, port)
    except socket.gaierror as error:
        raise HostError(endpoints.unresolved(host, error)) from None
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise HostError(f"cannot listen at {endpoints.endpoint_text(host, port)}: {error.strerror}") from None
    return sock


def _announce(args: argparse.Namespace, name: str, url: str) -> None:
    if args.agent is None:
        console.print_out(f"dashboard of run {name} (pid {os.getpid()}, Ctrl-C ends it): {url}\n")
        return
    try:
        os.write(1, f"{url} {os.getpid()}\n".encode())
    except OSError:
        raise HostError("the agent has ended meanwhile, and the URL is not known to anyone") from None
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    os.chdir("/")


def _wait(ended: loop.Wakeup, down: loop.Wakeup, linger_s: float) -> str:
    """Until a signal comes, or the time after the end of the run is over. Returns what to tell the pages."""
    until: float | None = None
    while not signals.inbox().has_pending:
        loop.wait_readable([ended.fileno(), down.fileno()], None if until is None else until - time.monotonic())
        if loop.is_readable(down.fileno()):
            raise HostError("the web server has ended (please report)")
        if loop.is_readable(ended.fileno()):
            ended.clear()
            until = time.monotonic() + linger_s
        if until is not None and time.monotonic() >= until:
            return f"The dashboard has ended: it stays for {linger_s:g} s after the end of the run."
    return "The dashboard was ended."
