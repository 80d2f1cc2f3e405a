"""Parts of the bootstrap that few workers need: compiled scripts, and interpreters before 3.11. Run by its path."""

import marshal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any


def compiled_code(content: bytes, magic: bytes) -> "Any":
    if content[:4] != magic:
        raise RuntimeError("Bad magic number in .pyc file")
    try:
        code = marshal.loads(content[16:])
    except (EOFError, ValueError, TypeError):
        code = None
    if not isinstance(code, type(compiled_code.__code__)):
        raise RuntimeError("Bad code object in .pyc file")
    return code


def hide_frames_from_hook(users_part: "Callable[[TracebackType | None], TracebackType | None]") -> None:
    """Give the hook that is called next only the program's part of the traceback."""
    hook = getattr(sys, "excepthook", sys.__excepthook__)

    def see_users_part(kind: "type[BaseException]", exc: BaseException, tb: "TracebackType | None") -> None:
        sys.excepthook = hook
        sys.last_traceback = tb = users_part(tb)
        hook(kind, BaseException.with_traceback(exc, tb), tb)

    sys.excepthook = see_users_part
