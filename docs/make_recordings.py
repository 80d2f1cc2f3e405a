"""Makes docs/recordings/*.svg: what commands print on a terminal, from real runs, at the speed at which they print it.

    python docs/make_recordings.py [NAME ...]

Each command runs in a pty. Directories, the host and pids are replaced, as the pages do. The pictures need no script:
lines appear by an animation of CSS, and all are there at once for readers who want no motion.
"""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "recordings"
COLUMNS = 108
PORT = 29473
TWO_NODES = (
    "holdfast run --nnodes 1:2 --nproc-per-node 2 --rdzv-backend tcp --rdzv-endpoint "
    f"127.0.0.1:{PORT} --rdzv-id job7 --max-restarts 3 examples/slow_rank.py 400"
)
_SGR = re.compile(r"\x1b\[([\d;]*)m")
_OTHER_CODES = re.compile(r"\x1b(?:\[[\d;?]*[A-Za-ln-z]|\][^\x07]*\x07|[=>])")
_COLOURS = {31: "red", 32: "green", 33: "yellow", 34: "blue", 35: "magenta", 36: "cyan", 1: "bold", 2: "dim"}

Line = tuple[float, str]
"""When it was printed, in seconds from the start, and the line with its colours."""


def main(names: Sequence[str]) -> None:
    makers = {"demo": demo, "hang": hang, "lost-node": lost_node, "status": status}
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
    with background(TWO_NODES) as second:
        time.sleep(0.5)
        lines = recorded(TWO_NODES, {12.0: lambda: second.kill(), 20.0: lambda: None}, until_s=20)
    return "A node is lost, and the others go on", lines


def status() -> tuple[str, list[Line]]:
    with background(TWO_NODES), background(TWO_NODES):
        time.sleep(12)
        return "holdfast status", recorded("holdfast status job7")


# --- running --------------------------------------------------------------------------------------------------------


def words(command: str) -> list[str]:
    return [sys.executable, "-m", "holdfast", *shlex.split(command)[1:]]


@contextlib.contextmanager
def background(command: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(words(command), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def recorded(command: str, acts: dict[float, object] | None = None, until_s: float = 60) -> list[Line]:
    """The lines of a command, which is ended after `until_s`. `acts` are called at their times."""
    ours, theirs = pty.openpty()
    with tempfile.TemporaryDirectory() as scratch:
        size = f"stty rows 40 cols {COLUMNS} < /dev/stdin; exec {shlex.join(words(command))}"
        env = {**os.environ, "TERM": "xterm-256color", "TMPDIR": scratch}
        process = subprocess.Popen(["sh", "-c", size], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        lines, rest, began, due = [(0.0, f"$ {command}")], b"", time.monotonic(), dict(acts or {})
        while True:
            now_s = time.monotonic() - began
            for at_s in [each for each in due if each <= now_s]:
                due.pop(at_s)()  # type: ignore[operator]
            if now_s > until_s:
                process.send_signal(signal.SIGTERM)
                until_s = float("inf")
            if not select.select([ours], [], [], 0.05)[0]:
                continue
            try:
                data = os.read(ours, 65536)
            except OSError:  # The other end is closed.
                break
            *whole, rest = (rest + data).split(b"\n")
            lines += [(time.monotonic() - began, each.decode(errors="replace").rstrip("\r")) for each in whole]
            if acts and until_s == float("inf"):
                break
        process.wait()
        os.close(ours)
    return lines


# --- drawing --------------------------------------------------------------------------------------------------------


def neutral(lines: Sequence[Line]) -> list[Line]:
    """Without this machine's directories, host and pids."""
    host, known = socket.gethostname(), {}
    text = " ".join(line for _, line in lines)
    for number in re.findall(r"\d+", " ".join(re.findall(r"(?:pids? |AGENT|-)(\d{3,}(?:, \d+)*)", text))):
        known.setdefault(number, str(4101 + len(known)))
    found = []
    for at_s, line in lines:
        line = line.replace(str(ROOT), "~/holdfast").replace(host, "node1")
        line = re.sub(r"\S*/torchelastic_\w+/\w+/", "/tmp/holdfast/job7/", line)
        found.append((at_s, re.sub(r"\b\d{3,}\b", lambda each: known.get(each[0], each[0]), line)))
    return found


def drawn(title: str, lines: Sequence[Line]) -> str:
    rows = [(at_s, row) for at_s, line in lines for row in wrapped(_OTHER_CODES.sub("", line))]
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


def wrapped(line: str) -> Iterator[str]:
    """Cut at the width of the screen; codes take no room."""
    room, row = COLUMNS, ""
    for piece in re.split(r"(\x1b\[[\d;]*m)", line):
        while piece and not piece.startswith("\x1b") and len(piece) > room:
            yield row + piece[:room]
            piece, room, row = piece[room:], COLUMNS, ""
        row, room = row + piece, room - (0 if piece.startswith("\x1b") else len(piece))
    yield row


def spans(row: str) -> str:
    made, kinds = [], []
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
@keyframes show{from{opacity:0}to{opacity:1}}
@media (prefers-reduced-motion:reduce){text{animation:none}}
.red{fill:#f0766a}.green{fill:#7fc97a}.yellow{fill:#e2b84d}.blue{fill:#6fb1e8}.magenta{fill:#c58fe0}.cyan{fill:#5fc7c9}
.bold{font-weight:700}.dim{fill:#8b979d}
</style>"""


if __name__ == "__main__":
    main(sys.argv[1:])
