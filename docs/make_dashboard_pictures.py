"""Makes docs/dashboard.png and docs/dashboard-narrow.png from a real job: two nodes, a failure, a restart.

    python docs/make_dashboard_pictures.py

It needs chromium and the packages of the extra `test`. With the fonts Inter and JetBrains Mono (Debian: fonts-inter,
fonts-jetbrains-mono) the pictures look as they do here.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

DOCS = Path(__file__).parent
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
             "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
ENDPOINT = "127.0.0.1:29471"

TRAIN = """
import math, os, random, time
import holdfast

rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
random.seed(rank)
begin = 120 * life
print(f"resumed from the checkpoint of step {begin}" if begin else "a fresh start", flush=True)
for step in range(begin, 10_000):
    time.sleep(0.08 if life == 0 else 0.11)
    holdfast.progress(step)
    if step % 5 == 0:
        loss = 1.9 * math.exp(-step / 180) + 0.6 + random.uniform(-0.02, 0.02)
        print(f"step {step:>5}  loss {loss:.4f}  lr 3.0e-04  {random.uniform(1040, 1090):.0f} samples/s", flush=True)
    if rank == 5 and life == 0 and step == 160:
        raise RuntimeError("NCCL communicator was aborted on rank 5")
    if rank == 11 and life == 1 and step == 260:
        os.kill(os.getpid(), 9)
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        home = Path(directory)
        (home / "train.py").write_text(TRAIN)
        subprocess.run(f"{sys.executable} -m holdfast token > token", shell=True, cwd=home, check=True)
        agents = [start(home, name) for name in ("a", "b")]
        try:
            time.sleep(42)  # The failures come after 13 and 29 seconds.
            text = "".join((home / f"{name}.log").read_text() for name in ("a", "b"))
            found = re.search(r"dashboard: (http://\S+)", text)
            if found is None:
                sys.exit(text)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
                take(browser, found[1], DOCS / "dashboard.png", 1200, 1000, "light", 25)
                take(browser, found[1], DOCS / "dashboard-narrow.png", 360, 780, "dark", 5)
                browser.close()
        finally:
            for agent in agents:
                agent.send_signal(signal.SIGTERM)
            for agent in agents:
                agent.wait()


def start(home: Path, name: str) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "holdfast",
        "run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "8",
        "--rdzv-backend",
        "tcp",
    ]
    command += ["--rdzv-endpoint", ENDPOINT, "--rdzv-id", "llama-7b", "--max-restarts", "3", "--token-file", "token"]
    command += ["--tee", "3", "--log-dir", "logs", "--dashboard", "--dashboard-linger", "0", "train.py"]
    with (home / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=home, stdout=log, stderr=log, env={**os.environ, "TMPDIR": str(home)})


def take(browser: Browser, url: str, path: Path, width: int, height: int, scheme: str, watched_s: float) -> None:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)  # type: ignore[arg-type]
    page = context.new_page()
    page.goto(url)
    page.get_by_text("All 16 workers are running.").wait_for()
    page.locator("#rank").fill("5")
    page.locator("#rank").press("Enter")
    page.locator("#rank").blur()
    page.evaluate("scrollTo(0, 0)")
    time.sleep(watched_s)
    page.screenshot(path=path)
    context.close()


if __name__ == "__main__":
    main()
