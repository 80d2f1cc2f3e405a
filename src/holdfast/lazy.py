"""Public names of a package that are imported on first use, so that importing the package costs next to nothing."""

from sys import modules

TYPE_CHECKING = False  # The constant of that name in `typing`, without the import.
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def exports(package: str, homes: "dict[str, str]") -> "tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]":
    """`__all__`, `__getattr__` and `__dir__` of a package, from its modules and the names that each exports."""
    home_of = {name: module for module, names in homes.items() for name in names.split()}

    def resolve(name: str) -> "Any":
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from importlib import import_module

        home = import_module(home_of[name])
        value = home if home_of[name] == f"{package}.{name}" else getattr(home, name)  # It may be a package itself.
        setattr(modules[package], name, value)
        return value

    def names() -> "list[str]":
        return sorted({*vars(modules[package]), *home_of})

    return sorted(home_of), resolve, names
