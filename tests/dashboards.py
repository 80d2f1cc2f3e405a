"""The dashboard as a process, and a client that speaks HTTP to it without a browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests import support
from tests.nodes import Scene

DEADLINE_S = 60.0


class Dashboard:
    """`holdfast dashboard` in the foreground, or any process that serves a page at this URL."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | None = None, log: Path | None = None) -> None:
        self.url, self.process, self.log = url, process, log
        parts = urlsplit(url)
        self.host, self.port = parts.hostname or "", parts.port or 0
        self.key = parts.query.removeprefix("key=")

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], str]:
        """As any program would: without the cookie, unless it is among the headers."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=DEADLINE_S)
        with contextlib.closing(connection):
            data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, data, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()

    @property
    def cookie(self) -> dict[str, str]:
        status, headers, _ = self.request("GET", f"/?key={self.key}")
        assert status == 200
        return {"Cookie": headers["set-cookie"].partition(";")[0]}

    @property
    def own(self) -> dict[str, str]:
        """The headers that our own page sends."""
        return {**self.cookie, "Origin": f"http://{self.host}:{self.port}"}

    def events(self) -> Events:
        return Events(self)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        assert self.process is not None
        return self.process.wait(deadline_s)

    @property
    def said(self) -> str:
        assert self.log is not None
        return self.log.read_text()


class Events:
    """The stream of events of one page, and the picture as the page has it."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._connection = http.client.HTTPConnection(dashboard.host, dashboard.port, timeout=DEADLINE_S)
        self._connection.request("GET", "/events", headers=dashboard.cookie)
        self._answer = self._connection.getresponse()
        self.status = self._answer.status
        self.picture: dict[str, Any] = {}
        self.logs: list[dict[str, Any]] = []
        self.names: list[str] = []
        self.hello = self.next("hello") if self.status == 200 else {}

    def __iter__(self) -> Iterator[tuple[str, dict[str, Any]]]:
        name = ""
        while line := self._answer.readline():
            field, _, value = line.decode().rstrip("\n").partition(": ")
            if field == "event":
                name = value
            elif field == "data":
                self.names.append(name)
                data = json.loads(value)
                self._take(name, data)
                yield name, data

    def _take(self, name: str, data: dict[str, Any]) -> None:
        if name == "picture":
            self.picture = data
        elif name == "change":
            nodes = {**self.picture["nodes"], **data.pop("nodes", {})}
            self.picture |= {**data, "nodes": {key: node for key, node in nodes.items() if node is not None}}
        elif name == "log":
            self.logs.append(data)

    def next(self, name: str) -> dict[str, Any]:
        for found, data in self:
            if found == name:
                return data
        raise AssertionError(f"the stream ended without {name!r}: {self.names[-20:]}")

    def until(self, condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """The first picture of which the condition holds."""
        if self.picture and condition(self.picture):
            return self.picture
        for _ in self:
            if self.picture and condition(self.picture):
                return self.picture
        raise AssertionError(f"the stream ended: {self.picture}")

    def log_until(self, text: str) -> str:
        """The log that the page follows, as soon as it has that text."""
        shown = ""
        for name, data in self:
            if name == "log":
                shown = ("" if data.get("begins") else shown) + data.get("text", "") + data.get("problem", "")
            if text in shown:
                return shown
        raise AssertionError(f"the stream ended: {shown}")

    def close(self) -> None:
        self._connection.close()


def start(scene: Scene, *args: str, env: dict[str, str] | None = None) -> Dashboard:
    """Returns when it serves."""
    process, log = launch(scene, *args, env=env)

    def find() -> re.Match[str] | None:
        assert process.poll() is None, log.read_text()
        return re.search(r"http://\S+\n", log.read_text())

    found = support.wait_until(find, "the dashboard serves")
    assert found is not None
    return Dashboard(found[0].strip(), process, log)


def launch(scene: Scene, *args: str, env: dict[str, str] | None = None) -> tuple[subprocess.Popen[bytes], Path]:
    log = scene.home / f"dashboard.{len(list(scene.home.glob('dashboard.*')))}"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "holdfast", "dashboard", *args],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**scene.environment("command"), **(env or {})},
            cwd=scene.home,
            start_new_session=True,
        )
    return process, log


def refused(scene: Scene, *args: str, code: int, env: dict[str, str] | None = None) -> str:
    """The one line of a dashboard that does not start."""
    process, log = launch(scene, *args, env=env)
    assert process.wait(DEADLINE_S) == code, log.read_text()
    [line] = log.read_text().splitlines()
    return line


def beside(log: str) -> tuple[Dashboard, int] | None:
    """The dashboard that an agent has started, by its log, and its pid."""
    found = re.search(r"holdfast: dashboard: (http://\S+) \(process (\d+), ", log)
    return (Dashboard(found[1]), int(found[2])) if found else None
