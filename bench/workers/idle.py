"""A worker that is there, says its pid, and does nothing until it is stopped."""

import os
import signal

import marks

signal.alarm(120)
marks.leave("began", os.getpid())
signal.pause()
