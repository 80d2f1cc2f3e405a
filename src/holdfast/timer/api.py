"""Only re-exports, for programs that import these names from `timer.api` as they did from torchelastic."""

from holdfast.timer.client import TimerClient as TimerClient
from holdfast.timer.client import TimerRequest as TimerRequest
from holdfast.timer.client import configure as configure
from holdfast.timer.client import expires as expires
from holdfast.timer.server import RequestQueue as RequestQueue
from holdfast.timer.server import TimerServer as TimerServer
