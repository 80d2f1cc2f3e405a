"""For `make coverage`: processes that holdfast starts without `site` are measured, too.

The spawner, the runner of checks and the process that ends another one with its parent run under `python -I -S`.
Coverage starts with `site`, by a file of its own in site-packages. `make coverage` writes a second such file, which
runs this one in every Python of the environment: it leaves `-S` out of those command lines.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from typing import Any


def with_site(words: Sequence[str]) -> Sequence[str]:
    return [*words[:2], *words[3:]] if list(words[1:3]) == ["-I", "-S"] else words


def install() -> None:
    posix_spawn, popen = os.posix_spawn, subprocess.Popen.__init__

    def spawn(path: str, words: Sequence[str], *rest: Any, **more: Any) -> int:
        return posix_spawn(path, with_site(words), *rest, **more)

    def init(self: subprocess.Popen[Any], args: Any, *rest: Any, **more: Any) -> None:
        popen(self, with_site(args) if isinstance(args, list) else args, *rest, **more)

    os.posix_spawn = spawn  # type: ignore[assignment]
    subprocess.Popen.__init__ = init  # type: ignore[method-assign]


install()
