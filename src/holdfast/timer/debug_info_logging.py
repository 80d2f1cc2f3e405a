"""A place to hook in: assign another function here to send expired timers elsewhere than to the log. The file timer
server looks the function up on every turn."""

from holdfast.log import Logger

logger = Logger(__name__)


def log_debug_info_for_expired_timers(run_id: str, expired_timers: dict[int, list[str]]) -> None:
    """Called once a turn, also when nothing has expired, with the expired requests as JSON by pid."""
    if expired_timers:
        logger.info("expired timers of run %s: %s", run_id, expired_timers)
