"""The honest neighbour of an attack: `python -m tests.attacks.honest PORT RUN_ID [TOKEN_FILE]`.

It says "formed" when its round has begun, goes on until a line comes in, and then says in JSON how it went. While it
runs, other short runs begin and end beside it, as a newcomer must be served during an attack, too.
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
from pathlib import Path

from tests.attacks.harness import DEADLINE_S, LightRun


def main(port: int, run_id: str, token_file: str = "") -> None:
    token = Path(token_file).read_bytes().strip() if token_file else None
    run = LightRun(port, run_id, token)
    runs = [run]
    problem = ""
    with contextlib.closing(run):
        try:
            run.form()
            print("formed", flush=True)
            while not select.select([sys.stdin], [], [], 0)[0]:
                run.run_for(0.1)
            other = LightRun(port, f"{run_id} too", token)
            runs.append(other)
            with contextlib.closing(other):
                other.form(DEADLINE_S / 2)
                other.finish(DEADLINE_S / 2)
            run.run_for(0.2)
            run.finish()
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
    report = {
        "problem": problem,
        "disturbed": [each for one in runs for each in one.disturbed],
        "longest_s": max(one.longest_s for one in runs),
        "beats": run.beats,
        "rounds": sorted({place.round for place in run.places.values()}),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
