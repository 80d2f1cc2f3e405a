"""What warm workers import themselves: workers note it, and the next template imports it (see `template`).

Like `template`, which runs it, this file uses only the standard library.
"""

import os
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MOST_IMPORTS, MOST_BYTES = 4000, 1 << 20  # That a worker notes, and that all note together.
INSTALLED = ("/site-packages/", "/dist-packages/")
# A template that imports while workers run sleeps so many times as long as it computes. Nice would not do: the workers
# would inherit it, and could not undo it.
PAUSE_FACTOR = 2.0


class Imports:
    """Notes in a file which modules a worker looks for, and which module needs them. It finds none itself."""

    def __init__(self, fd: int) -> None:
        self.fd, self.pid, self.left = fd, os.getpid(), MOST_IMPORTS
        self.file = os.fstat(fd).st_ino

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        try:
            if self.left and os.getpid() == self.pid:  # Children of a worker are no workers.
                self.left -= 1
                found = os.fstat(self.fd)
                if found.st_ino == self.file and found.st_size < MOST_BYTES:  # Programs reuse numbers of descriptors.
                    os.write(self.fd, f"{name} {importer(sys._getframe(1))}\n".encode())
        except Exception:
            pass


def importer(frame: "Any") -> str:
    """The name of the module whose code imports another one, found from a frame of the import system."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name != "importlib" and not frame.f_code.co_filename.startswith("<frozen importlib"):
            return str(name)
        frame = frame.f_back
    return ""


class Pauses:
    """Keeps an import from taking a CPU from others: each module that it looks for is an occasion to sleep."""

    def __init__(self) -> None:
        self.used_s = time.process_time()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        time.sleep(PAUSE_FACTOR * max(0.0, time.process_time() - self.used_s))
        self.used_s = time.process_time()


def is_installed(package: str) -> bool:
    """Whether it lies where packages are installed, and not beside the program. Its parent packages need no import."""
    try:
        found = sys.modules["_frozen_importlib_external"].PathFinder.find_spec(package)
        places = found and (found.submodule_search_locations or [found.origin])
        return bool(places) and all(any(part in f"{place}/" for part in INSTALLED) for place in places)
    except Exception:
        return False


def import_all(
    names: "list[str]", is_slow: bool, send: "Callable[..., None]", check_fitness: "Callable[[str], None]"
) -> None:
    """Import those that are installed. A program tries imports that fail, so an ImportError is no news."""
    installed = set(filter(is_installed, {name.partition(".")[0] for name in names}))
    pauses = Pauses()
    if is_slow:
        sys.meta_path.insert(0, pauses)
    try:
        for name in names:
            if name not in sys.modules and name.partition(".")[0] in installed:
                send("importing", name)
                try:
                    __import__(name)
                except ImportError:
                    pass
                except BaseException as error:
                    send("left out", name, f"it cannot be imported: {type(error).__name__}: {error}")
                check_fitness(name)
    finally:
        if pauses in sys.meta_path:
            sys.meta_path.remove(pauses)
