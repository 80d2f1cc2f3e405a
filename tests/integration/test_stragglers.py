"""Ranks that are behind, in real runs: named by status and report, wherever they are."""

from __future__ import annotations

import json
from typing import Any

from tests import support
from tests.nodes import Scene
from tests.promises import promise

# The rate of a worker is compared after 20 s, and the agent looks every 5 s.
DEADLINE_S = 120.0

TRAINER = """
import os, sys, time
import holdfast

rank, step = int(os.environ["RANK"]), 0
while rank != 3 or not os.path.exists(f"{sys.argv[1]}/go"):
    step += 1
    if sys.argv[2] == "progress":
        holdfast.progress(step=step)
    else:
        print("step", step, flush=True)
    time.sleep(0.5 if rank == 3 else 0.05)
sys.exit(3)
"""


def picture_of(scene: Scene) -> dict[str, Any]:
    said = scene.run("status", scene.run_id, "--json").stdout
    found: dict[str, Any] = json.loads(said or '{"stragglers": [], "agents": []}')
    return found


@promise("""steering.status-top-json-report: Status, `top`, their JSON and the report name ranks that are slower than
    the median by more than 1.5 times, over all nodes, without comparing clocks.""")
def test_one_rank_of_two_nodes_is_behind(scene: Scene) -> None:
    """It is compared with those of the other node, too. No option asks for it."""
    script = support.write_script(scene.home / "trainer.py", TRAINER)
    for name in "ab":
        logs = ("--log-dir", str(scene.home / f"logs-{name}"))
        scene.start(name, "2", "--nproc-per-node", "2", *logs, script=script, args=("progress",))
    support.wait_until(lambda: picture_of(scene)["stragglers"], "that a rank is behind", DEADLINE_S)
    picture = picture_of(scene)
    [slow] = picture["stragglers"]
    assert (slow["rank"], slow["unit"], slow["compared"]) == (3, "steps", 4)
    assert slow["per_s"] < slow["median_per_s"] / 1.5
    workers = {each["global_rank"]: each for agent in picture["agents"] for each in agent["workers"]}
    assert workers[3]["rate"]["per_s"] < workers[0]["rate"]["per_s"]
    text = scene.ask("status", scene.run_id)
    assert text.splitlines()[2].startswith("Behind the median of 4 ranks (")
    assert "steps/s): rank 3 (" in text.splitlines()[2]
    (scene.home / "go").touch()
    assert scene.ended() == {"a": 1, "b": 1}
    # The report compares the workers of the node that failed first. Of two the median lies between them.
    for node, name in zip(scene.nodes, "ab", strict=True):
        [path] = scene.home.glob(f"logs-{name}/{scene.run_id}_*/report.json")
        [named] = json.loads(path.read_text())["stragglers"]
        assert (named["rank"], named["compared"]) == (3, 2)
        assert "Behind the median of 2 ranks on " in node.log
