"""Makes docs/recordings/*.svg: what commands print on a terminal, from real runs, at the speed at which they print it.

    python docs/make_recordings.py [NAME ...]

Each command runs in a pty. Directories, the host and pids are replaced, as the pages do. The pictures need no script:
all lines are there from the start, and an animation of CSS brightens each one when it was printed. For readers who want
no motion, all are bright at once.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "recordings"
COLUMNS = 108
LONGEST_PAUSE_S = 0.8
TUTORIAL = (
    "holdfast run --nnodes 1:2 --nproc-per-node 2 --rdzv-backend tcp --rdzv-endpoint 127.0.0.1:29400 --rdzv-id job7 "
    "--token-file token --max-restarts 3 --preload torch train.py"
)
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_OTHER_CODES = re.compile(r"\x1b(?:\[[\d;?]*[A-Za-ln-z]|\][^\x07]*\x07|[=>])")
_COLOURS = {31: "red", 32: "green", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan", 1: "bold", 2: "dim"}

Line = tuple[float, str]
"""When it was printed, in seconds from the start, and the line with its colours."""


def main(names: Sequence[str]) -> None:
    makers = {"demo": demo, "hang": hang, "lost-node": lost_node}
    FOLDER.mkdir(exist_ok=True)
    for name in names or makers:
        title, lines = makers[name]()
        (FOLDER / f"{name}.svg").write_text(drawn(title, neutral(lines)))


# --- what is recorded -----------------------------------------------------------------------------------------------


def demo() -> tuple[str, list[Line]]:
    command = "holdfast run --standalone --nproc-per-node 4 --max-restarts 2 examples/demo/train.py"
    return "A worker fails, and the job finishes", recorded(command)


def hang() -> tuple[str, list[Line]]:
    command = "holdfast run --standalone --nproc-per-node 4 --hang-timeout 3s --max-restarts 1 examples/hang.py lock"
    return "A job hangs, and goes on", recorded(command)


def lost_node() -> tuple[str, list[Line]]:
    """The last part of the tutorial."""
    with tempfile.TemporaryDirectory() as folder:
        script = re.findall(
            r"^```python\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL
        )[1]
        Path(folder, "train.py").write_text(script)
        with Path(folder, "token").open("w") as file:
            subprocess.run(words("holdfast token"), stdout=file, check=True)
        with contextlib.ExitStack() as nodes:
            second: list[subprocess.Popen[bytes]] = []
            start = ("last call", lambda: second.append(nodes.enter_context(background(TUTORIAL, folder))))
            lines = recorded(TUTORIAL, folder, [start, ("step 29,", lambda: second[0].kill())])
    return "A node is lost, and the training goes on without a lost step", lines


# --- running --------------------------------------------------------------------------------------------------------


def words(command: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", *shlex.split(command)[1:]]


@contextlib.contextmanager
def background(command: str, folder: str | Path = ROOT) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words(command), cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def recorded(
    command: str, folder: str | Path = ROOT, meanwhile: Sequence[tuple[str, Callable[[], object]]] = ()
) -> list[Line]:
    """The lines of a command. When a text of `meanwhile` is printed, its function is called; one after the other."""
    waiting = list(meanwhile)
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as scratch:
        size = f"stty rows 40 cols {COLUMNS} < /dev/stdin; exec {shlex.join(words(command))}"
        env = {**os.environ, "TERM": "xterm-256color", "TMPDIR": scratch}
        process = subprocess.Popen(["sh", "-c", size], cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        lines, rest, began = [(0.0, f"$ {command}")], b"", time.monotonic()
        with contextlib.suppress(OSError):  # The other end is closed when the command has ended.
            while data := os.read(ours, 65536):
                *whole, rest = (rest + data).split(b"\n")
                lines += [(time.monotonic() - began, each.decode(errors="replace").rstrip("\r")) for each in whole]
                if waiting and any(waiting[0][0] in line for _, line in lines):
                    waiting.pop(0)[1]()
        process.wait()
        os.close(ours)
    return lines


# --- drawing --------------------------------------------------------------------------------------------------------


def neutral(lines: Sequence[Line]) -> list[Line]:
    """Without this machine's directories, host and pids."""
    host = socket.gethostname()
    known: dict[str, str] = {}
    text = " ".join(line for _, line in lines)
    for number in re.findall(r"\d+", " ".join(re.findall(r"(?:pids? |AGENT|-)(\d{3,}(?:, \d+)*)", text))):
        known.setdefault(number, str(4101 + len(known)))
    found = []
    for at_s, line in lines:
        line = re.sub(r"/tmp/tmp\w+/", "~/", line.replace(str(ROOT), "~/holdfast").replace(host, "node1"))
        line = re.sub(r"\S*/torchelastic_\w+/\w+/", "/tmp/holdfast/job7/", line)
        found.append((at_s, re.sub(r"\b\d{3,}\b", lambda each: known.get(each[0], each[0]), line)))
    return found


def drawn(title: str, lines: Sequence[Line]) -> str:
    rows = [(at_s, row) for at_s, line in paced(lines) for row in wrapped(_OTHER_CODES.sub("", line))]
    height, width = 18 * len(rows) + 58, 7.85 * COLUMNS + 32
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect width="{width:.0f}" height="{height}" rx="9" class="screen"/>',
        *(
            f'<circle cx="{x}" cy="19" r="5.5" fill="{fill}"/>'
            for x, fill in ((22, "#e06c5c"), (40, "#d9a441"), (58, "#5ca866"))
        ),
    ]
    for number, (at_s, row) in enumerate(rows):
        y = 52 + 18 * number
        parts.append(
            f'<text x="16" y="{y}" style="animation-delay:{at_s:.2f}s" xml:space="preserve">{spans(row)}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def paced(lines: Sequence[Line]) -> Iterator[Line]:
    """Pauses are shown, but not in full."""
    shown_s = before_s = 0.0
    for at_s, line in lines:
        shown_s, before_s = shown_s + min(at_s - before_s, LONGEST_PAUSE_S), at_s
        yield shown_s, line


def wrapped(line: str) -> Iterator[str]:
    """Cut at the width of the screen; codes take no room."""
    room, row, code = COLUMNS, "", ""
    for piece in re.split(r"(\x1b\[[\d;]*m)", line):
        code = piece if piece.startswith("\x1b") else code
        while piece and not piece.startswith("\x1b") and len(piece) > room:
            yield row + piece[:room]
            piece, room, row = piece[room:], COLUMNS, code
        row, room = row + piece, room - (0 if piece.startswith("\x1b") else len(piece))
    yield row


def spans(row: str) -> str:
    made: list[str] = []
    kinds: list[str] = []
    for index, piece in enumerate(_SGR.split(row)):
        if index % 2:
            numbers = [int(each or 0) for each in piece.split(";")]
            kinds = [] if 0 in numbers else kinds
            kinds += [_COLOURS[each] for each in numbers if each in _COLOURS]
        elif piece:
            made.append(f'<tspan class="{" ".join(kinds)}">{escape(piece)}</tspan>' if kinds else escape(piece))
    return "".join(made)


_STYLE = """<style>
.screen{fill:#10181c}
text{font:13px ui-monospace,"JetBrains Mono","SF Mono",Menlo,Consolas,"Liberation Mono",monospace;fill:#d7dfe3;
animation:show .01s both}
@keyframes show{from{opacity:.6}to{opacity:1}}
@media (prefers-reduced-motion:reduce){text{animation:none}}
.red{fill:#f0766a}.green{fill:#7fc97a}.yellow{fill:#e2b84d}.blue{fill:#6fb1e8}.magenta{fill:#c58fe0}.cyan{fill:#5fc7c9}
.bold{font-weight:700}.dim{fill:#8b979d}
</style>"""


if __name__ == "__main__":
    main(sys.argv[1:])
