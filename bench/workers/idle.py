"""A worker that is there until it is stopped, and notes when it began and when it was told to stop."""

import signal

import marks

signal.alarm(170)
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
marks.leave("ready")
signal.sigwait({signal.SIGTERM})
marks.leave("stopped")
