"""`holdfast top` in a real terminal, that of tmux: keys, another size, no colours, and how it leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import nodes, support
from tests.e2e.command import COMMAND
from tests.e2e.terminal import terminal as pty_terminal
from tests.nodes import Scene
from tests.promises import promise, proves

SHOWN = r"^RANK +NODE +PID"


@pytest.fixture(autouse=True)
def _has_terminal() -> None:
    support.need_tools("tmux")


class Terminal:
    """A shell in a window of tmux, on a server of its own."""

    def __init__(self, home: Path, env: dict[str, str], width: int = 100, height: int = 30) -> None:
        self._socket = str(home / "tmux")
        self._env = {**env, "TERM": "xterm-256color", "PS1": "$ ", "ENV": "", "LANG": "C.UTF-8"}
        self._env.pop("TMUX", None)
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(width), "-y", str(height), "sh")
        self.await_text(r"^[$#]")

    def tmux(self, *args: str) -> str:
        done = subprocess.run(
            ["tmux", "-S", self._socket, *args], capture_output=True, text=True, timeout=30, env=self._env
        )
        assert done.returncode == 0, f"{args}: {done.stderr}"
        return done.stdout

    @property
    def screen(self) -> str:
        return self.tmux("capture-pane", "-p")

    @property
    def coloured(self) -> str:
        return self.tmux("capture-pane", "-p", "-e")

    def type(self, text: str) -> None:
        self.tmux("send-keys", "-l", text)
        self.tmux("send-keys", "Enter")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def await_text(self, pattern: str) -> re.Match[str]:
        try:
            found = support.wait_until(lambda: re.search(pattern, self.screen, re.MULTILINE), repr(pattern))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen}") from None
        assert found is not None
        return found

    def is_plain_again(self, code: int) -> None:
        """The shell is back, shows what is typed, and the exit code is that."""
        # While the command still reads keys, it would take what is typed for the shell.
        support.wait_until(lambda: self.has_plain_screen, "that the screen of the shell is back")
        self.type("echo code=$?")
        self.await_text(rf"code={code}$")
        assert self.has_plain_screen
        self.type("stty -a | tr ' ;' '\\n\\n' | grep -x -e echo -e icanon | tr '\\n' ,")
        self.await_text("icanon,echo,|echo,icanon,")

    @property
    def has_plain_screen(self) -> bool:
        return self.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag}").split() == ["0", "1"]

    def close(self) -> None:
        self.tmux("kill-server")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(support.TEST_MARK, mark)
    with nodes.scene(tmp_path / uuid.uuid4().hex[:8], mark) as stage:
        for name in "ab":
            stage.start(name, "2", "--nproc-per-node", "2", "--max-restarts", "3")
        stage.await_world(4)
        yield stage
        stage.order("exit 0")
        assert stage.ended() == {"a": 0, "b": 0}


@pytest.fixture
def terminal(scene: Scene) -> Iterator[Terminal]:
    # What is left in a terminal is not the run's, so it has no mark.
    window = Terminal(scene.home, {k: v for k, v in os.environ.items() if k != support.TEST_MARK})
    yield window
    window.close()


@promise("""steering.top-shows-nodes-workers: `holdfast top` shows nodes and workers live, keeps failed workers in view,
    and follows the size of the terminal down to 40 columns.""")
def test_a_failed_worker_stays_visible(scene: Scene, terminal: Terminal) -> None:
    terminal.type(f"{COMMAND} top {scene.run_id}")
    terminal.await_text(rf"^run {scene.run_id}: running, round 1, 2 of 2 nodes here")
    for rank in range(4):
        terminal.await_text(rf"^{rank} +[01] +\d+ +running")
    scene.order("exit 3", round=1, rank=1)
    terminal.await_text(r"^run \S+: running, round 2, .* 1 of 3 restarts used$")
    terminal.await_text(r"^earlier, in round 1: rank 1 \(pid \d+\) failed \(exit code 3\)")
    terminal.press("Down", "q")
    terminal.await_text(r"^All 4 workers are running\.$")
    terminal.is_plain_again(0)


@proves("steering.top-shows-nodes-workers")
def test_forty_columns_and_a_new_size(scene: Scene, terminal: Terminal) -> None:
    terminal.type(f"COLUMNS=90 LINES=30 NO_COLOR=1 {COMMAND} top {scene.run_id}")
    terminal.await_text(SHOWN)
    terminal.tmux("resize-window", "-x", "40", "-y", "12")
    terminal.await_text(rf"^run {scene.run_id}: running, round.*\.\.\.$")
    terminal.await_text(SHOWN)
    assert max(map(len, terminal.screen.splitlines())) <= 40
    assert not re.search(r"\x1b\[[34][0-7]", terminal.coloured), "there are colours"
    terminal.tmux("resize-window", "-x", "120", "-y", "40")
    terminal.await_text(r"restarts used$")
    terminal.press("C-c")
    terminal.is_plain_again(130)


@promise("""steering.top-puts-terminal-back: `holdfast top` puts the terminal back, however it ends. Without a terminal,
    or when it is gone, there is one line. Hostile names stay on their line.""")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_puts_the_terminal_back(scene: Scene, terminal: Terminal, number: signal.Signals) -> None:
    terminal.type(f"{COMMAND} top {scene.run_id}")
    terminal.await_text(SHOWN)
    terminal.press("C-z")  # Ignored: it would leave the screen as it is.
    pane = int(terminal.tmux("display-message", "-p", "#{pane_pid}"))
    [child] = psutil.Process(pane).children()
    child.send_signal(number)
    terminal.is_plain_again(128 + number)


def test_the_end_of_the_run_is_shown(scene: Scene, terminal: Terminal) -> None:
    terminal.type(f"{COMMAND} top {scene.run_id}")
    terminal.await_text(SHOWN)
    scene.order("exit 0")
    assert scene.ended() == {"a": 0, "b": 0}
    terminal.await_text("the run has ended or cannot be asked")
    terminal.press("q")
    terminal.is_plain_again(0)


@proves("steering.top-puts-terminal-back")
def test_a_terminal_that_is_gone_is_one_line(scene: Scene) -> None:
    errors = scene.home / "errors"
    with pty_terminal() as (near, far), errors.open("wb") as stderr:
        command = [sys.executable, "-m", "holdfast", "top", scene.run_id]
        environ = {**scene.environment("command"), "TERM": "xterm"}
        top = subprocess.Popen(command, stdin=far, stdout=far, stderr=stderr, start_new_session=True, env=environ)
        os.close(far)
        near.read_until("restarts used")
    assert top.wait(60) == 1
    assert errors.read_text().startswith("holdfast top: error: the terminal is gone: "), errors.read_text()
    assert len(errors.read_text().splitlines()) == 1


@proves("steering.top-puts-terminal-back")
def test_what_is_no_terminal_is_one_line(scene: Scene, terminal: Terminal) -> None:
    terminal.type(f"{COMMAND} top {scene.run_id} </dev/null")
    terminal.await_text("holdfast top: error: this needs a terminal; `holdfast status` prints the same once")
    terminal.is_plain_again(2)
    terminal.type(f"TERM=dumb {COMMAND} top {scene.run_id}")
    terminal.await_text(r"this terminal \(TERM\) cannot show a live view")
    terminal.is_plain_again(1)
