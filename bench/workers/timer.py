"""Arms a file timer as a training script does, overruns it, and is killed. The mark's number is the deadline in
nanoseconds of the real-time clock, in which the request states it."""

import json
import os
import signal
import time

import marks

signal.alarm(60)
deadline = time.time() + 0.5 + time.monotonic_ns() % 100_000_000 / 1e9
request = {"version": 1, "pid": os.getpid(), "scope_id": "step", "expiration_time": deadline, "signal": 9}
with open(os.environ["TORCHELASTIC_TIMER_FILE"], "w") as pipe:
    pipe.write(json.dumps(request) + "\n")
marks.leave("armed", value=int(deadline * 1e9))
while True:
    signal.pause()
