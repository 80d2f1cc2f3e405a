"""How a worker failed and how a run ended, as every node is told. Data only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Stands for the exception of workers that did not end but hung.
HANG = "hang"


@dataclass(frozen=True, slots=True)
class Failure:
    """What the policy and the final report need to know of a worker that failed.

    `exception` is the class name of the exception, or empty. `text` is the line that says what happened.
    `is_consequence`: it looks like the result of another failure (a connection closed by a peer).
    """

    node: str = ""
    rank: int = -1
    exitcode: int = 1
    exception: str = ""
    text: str = ""
    is_consequence: bool = False


class End(StrEnum):
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CLOSED = "CLOSED"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended, the same on every node. `cause` is the failure that it ended of, if one did."""

    end: End
    reason: str
    cause: Failure | None = None
