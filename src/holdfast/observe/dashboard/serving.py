"""The dashboard's process: serve the page about a run until its end, and for some time after that.

The main thread only waits: for a signal, and from the end of the run on for the time that the page stays.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

from holdfast import loop, signals
from holdfast.errors import HostError, UserError
from holdfast.frozen import frozen
from holdfast.observe.ask import AskedRun
from holdfast.rendezvous import endpoints, settings
from holdfast.rendezvous.coordinator import launch
from holdfast.rendezvous.membership.model import is_loopback

DEFAULT_ADDRESS = "127.0.0.1:0"
DEFAULT_LINGER_S = 300.0

_BACKLOG = 128
_EVERY_ADDRESS = ("0.0.0.0", "::")
_LAST_EVENTS_LIMIT_S = 3.0


@frozen
class Service:
    """Where the page is served, for how long after the end of the run, and what it may do. With the run's token it can
    end the run."""

    address: str = DEFAULT_ADDRESS
    linger_s: float = DEFAULT_LINGER_S
    token_file: str = ""
    may_read_files: bool = True
    address_option: str = "--addr"  # What the user typed for `address`.


def serve(service: Service, find_run: Callable[[], AskedRun], announce: Callable[[str, str], None]) -> str:
    """`find_run` finds the same run each time. `announce` is called once, with the run's name and the URL. Returns how
    the run and the dashboard ended; a signal raises SignalException."""
    try:
        from holdfast.observe.dashboard import web_server
        from holdfast.observe.dashboard.access import Access
        from holdfast.observe.dashboard.run_watcher import Watch
    except ModuleNotFoundError as error:
        raise HostError(f"the package {error.name} is missing: pip install 'holdfast[dashboard]'") from None
    token = settings.read_token(service.token_file)
    host, port = endpoints.parse_rendezvous_endpoint(service.address, 0)
    with _listener(host, port) as sock:
        bound_host, bound_port = sock.getsockname()[:2]
        if not is_loopback(bound_host) and token is None:
            raise UserError(
                f"{service.address_option} {service.address} can be reached from other hosts, so the run's token is "
                "needed: give --token-file, or set HOLDFAST_TOKEN; or serve at 127.0.0.1 and use a tunnel, as in ssh -L"
            )
        own_name = os.uname().nodename
        guard = Access.for_names([own_name, host])
        dashboard = web_server.Dashboard(guard, may_stop=token is not None, facts=web_server.facts_of(service.linger_s))
        ended, down = loop.Wakeup(), loop.Wakeup()
        run = find_run()
        dashboard.watch = watch = Watch(
            run, find_run, dashboard.publish, ended.wake, may_read_files=service.may_read_files
        )
        web = web_server.server_for(dashboard.app())
        thread = threading.Thread(target=dashboard.serve, args=(web, sock, down), name="holdfast-web", daemon=True)
        shown_host = own_name if bound_host in _EVERY_ADDRESS else host
        with signals.deferred() as box:
            thread.start()
            watch.start()
            announce(run.name, f"http://{endpoints.endpoint_text(shown_host, bound_port)}/?key={guard.key}")
            goodbye = _wait(ended, down, service.linger_s)
            watch.close()
            dashboard.say_goodbye(goodbye)
            web.should_exit = True
            thread.join(_LAST_EVENTS_LIMIT_S)
            box.raise_pending()
    return f"{watch.ending} {goodbye}"


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


def _wait(ended: loop.Wakeup, down: loop.Wakeup, linger_s: float) -> str:
    """Until a signal comes, or the time after the end of the run is over. Returns the last text for open pages."""
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
