"""The honest run that is attacked: `python -m tests.attacks.honest PORT PID TOKEN_FILE IS_CHANGING`.

It says "formed" when its round has begun, goes on until a line comes in, and then says in JSON how it went. While it
runs, newcomers join it and leave, one after another, as they must be served during an attack, too; or it forms round
after round.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

from holdfast.rendezvous.client.handshake import TurnedAway
from holdfast.rendezvous.membership import model, protocol
from tests import support
from tests.attacks.harness import HONEST, LEASE_S, HonestRun, Peer, facts


def newcomer(port: int, token: bytes | None) -> None:
    """It stands by, and goes. As an agent does, it tries again if there are too many connections."""
    ends = time.monotonic() + LEASE_S
    while True:
        try:
            with Peer(port, name="newcomer", token=token) as peer:
                peer.send(protocol.Join(facts("newcomer"), HONEST))
                said = peer.until(model.StandBy, model.Refused, model.Expelled)
                assert isinstance(said, model.StandBy), f"a newcomer was told {said}"
                peer.send(protocol.Left())
                return
        except (OSError, TurnedAway) as error:
            is_passing = isinstance(error, OSError) or "too many connections" in str(error)
            if not is_passing or time.monotonic() > ends:
                raise
        time.sleep(0.05)


def main(port: int, pid: int, token_file: str, is_changing: bool) -> None:
    token = Path(token_file).read_bytes().strip() if token_file else None
    watch = support.Stopwatch(pid)
    report: dict[str, Any] = {"problem": "", "longest_s": 0.0, "checks": 0, "newcomers": 0, "rounds": 0}
    try:
        with HonestRun(port, token_file) as run:
            print("formed", flush=True)
            while not select.select([sys.stdin], [], [], 0.05)[0]:
                with watch.measured():
                    run.check()
                    if is_changing:
                        run.form()
                    elif report["checks"] % 5 == 0:
                        newcomer(port, token)
                        report["newcomers"] += 1
                report["longest_s"] = watch.longest_s
                report["checks"] += 1
            report["rounds"] = run.places[0].round
            run.finish()
    except Exception as error:
        report["problem"] = f"{type(error).__name__}: {error}"
    print(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "1")
