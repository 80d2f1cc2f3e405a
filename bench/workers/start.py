"""Notes the CPU time that its process has used up to its first line."""

import time

USED_NS = time.process_time_ns()

import marks  # noqa: E402  (the clock is read before anything else)

marks.leave("used", value=USED_NS)
