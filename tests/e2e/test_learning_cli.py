"""A preload that learns, as a user has it: a restart and the next start find what workers import late."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import support
from tests.e2e.command import Holdfast
from tests.promises import promise, proves

# What is installed. `base` is what --preload names.
PACKAGES = {
    "base/__init__.py": "",
    "base/late.py": "import dependency\ntry:\n    import base.nothing\nexcept ImportError:\n    pass\n",
    "base/threads.py": "from threading import *\nThread(target=Event().wait, daemon=True).start()\n",
    "base/raises.py": "import os\nif 'RANK' not in os.environ:\n    raise ValueError('no rank')\n",
    "base/exits.py": "import os\nif 'RANK' not in os.environ:\n    os._exit(9)\n",
    "base/nothing.py": "raise ImportError('not here')\n",
    "dependency.py": "",
    "lazy.py": "",
}
# In its first life it imports, reports progress, and fails once the file is there.
SCRIPT = """
import os, sys, time
names = "base.late", "dependency", "lazy", "own", "base.threads", "base.raises"
print([name for name in names if name in sys.modules], flush=True)
import base
def train():
    import base.late, base.threads, base.raises, base.exits, lazy, own
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and len(sys.argv) > 1:
        import holdfast
        holdfast.progress(1)
        while not os.path.exists("learned"):
            time.sleep(0.05)
        os._exit(3)
train()
"""


@pytest.fixture
def site(holdfast: Holdfast) -> dict[str, str]:
    place = holdfast.temporary / "site-packages"
    for name, source in PACKAGES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(source)
    holdfast.script("", "own.py")
    holdfast.script(SCRIPT)
    return {"PYTHONPATH": str(place), "XDG_RUNTIME_DIR": ""}


LEARNED = "preloaded what the workers import besides base in"
UNFIT = (
    "base.threads is left out of what is preloaded: base.threads starts threads when it is imported",
    "base.raises is left out of what is preloaded: it cannot be imported: ValueError: no rank",
    "base.exits is left out of what is preloaded: the process that imports base.exits ended with exit code 9",
)


@promise("""workers.preload-learns: While workers run, the modules that they import besides those of `--preload` are
    imported for the next ones: a restart and the next start find them. A module that is not fit for that is named once
    and left out. `--preload-only` learns nothing.""")
@pytest.mark.parametrize(
    ("preload", "learned"), [("base", ["base.late", "dependency"]), ("auto", ["base.late", "dependency", "lazy"])]
)
def test_a_restart_and_the_next_start_find_what_was_learned(
    holdfast: Holdfast, site: dict[str, str], preload: str, learned: list[str]
) -> None:
    options = ("--standalone", "--max-restarts=1", f"--preload={preload}")
    running = holdfast.start(*options, "job.py", "fail", env=site)
    support.wait_until(lambda: LEARNED in running.so_far().err, "the template has learned")
    (holdfast.directory / "learned").touch()
    run = running.wait()
    assert run.out == f"[]\n{learned}\n", run
    for line in UNFIT:
        assert run.err.count(line) == 1, run
    assert "base.nothing" not in run.err
    again = holdfast.run("--standalone", f"--preload={preload}", "job.py", env=site)
    assert again.out == f"{learned}\n", again
    assert not any(line in again.err for line in UNFIT)
    [file] = Path(holdfast.directory / "cache/holdfast/learned").iterdir()
    file.chmod(0o644)
    ignored = holdfast.run("--standalone", f"--preload={preload}", "job.py", env=site)
    assert ignored.out == "[]\n"


@proves("workers.preload-learns")
def test_preload_only_learns_nothing(holdfast: Holdfast, site: dict[str, str]) -> None:
    options = ("--standalone", "--preload=base", "--preload-only")
    for _ in range(2):
        run = holdfast.run(*options, "job.py", env=site)
        assert run.out == "[]\n"
        assert LEARNED not in run.err
    assert not (holdfast.directory / "cache").exists()


@proves("workers.preload-learns")
def test_what_a_kept_template_learns(holdfast: Holdfast, site: dict[str, str]) -> None:
    """Between two runs, when nobody waits."""
    from tests.e2e.test_kept import Kept

    kept = Kept(holdfast)
    kept.env.update(site)
    options = ("--standalone", "--preload=base", "--preload-keep=10m")
    assert kept.run(*options, "job.py").out == "[]\n"
    second = kept.run(*options, "job.py")
    assert second.out == "['base.late', 'dependency']\n"
    assert "base was preloaded by an earlier run" in second.err
    kept.warm("--stop")
    support.wait_until(lambda: not support.marked(holdfast.mark), "what was kept has ended")
