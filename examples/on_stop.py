"""Rank 2 fails; the others close their communicators before they are stopped. See docs/stopping.md."""

import os
import time

import holdfast


@holdfast.on_stop
def close() -> None:
    print("communicators are closed", flush=True)


if os.environ["RANK"] == "2":
    time.sleep(1)
    raise ValueError("the data of step 7 is broken")
time.sleep(600)  # As in a collective, for which rank 2 is missing.
