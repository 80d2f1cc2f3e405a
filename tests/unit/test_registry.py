"""Backends by name: the built-in ones, and real entry points of distributions on the path."""

from __future__ import annotations

import importlib.metadata
import logging
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import UserError
from holdfast.rendezvous import registry
from holdfast.rendezvous.api import RendezvousHandlerRegistry, RendezvousParameters
from tests.promises import promise, proves

MODULE = """
from holdfast.rendezvous.static import StandaloneRendezvous

calls = []

class Handler(StandaloneRendezvous):
    def __init__(self, params, backend):
        super().__init__(params.run_id)
        self.backend = backend

def offer(backend):
    calls.append(backend)
    # A new function at every call, as a careless plug-in would have it.
    return lambda params: Handler(params, backend)

def first():
    return offer("first")

def second():
    return offer("second")

def broken():
    raise OSError("no such fabric")

def not_a_creator():
    return 42

def static():
    return offer("static")
"""


@pytest.fixture(autouse=True)
def fresh_registry(monkeypatch: pytest.MonkeyPatch) -> RendezvousHandlerRegistry:
    fresh = RendezvousHandlerRegistry()
    monkeypatch.setattr(registry, "rendezvous_handler_registry", fresh)
    monkeypatch.setattr(registry, "_origins", {})
    registry._register_built_in_handlers()
    return fresh


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Put a distribution with these entry points on the path; `MODULE` in them is its module's name."""

    def install(entry_points: str, code: str = MODULE) -> str:
        name = f"plugin_{uuid.uuid4().hex}"
        root = tmp_path / name
        metadata = root / f"{name}-1.0.dist-info"
        metadata.mkdir(parents=True)
        (root / f"{name}.py").write_text(code)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(entry_points.replace("MODULE", name))
        monkeypatch.syspath_prepend(str(root))
        return name

    return install


def parameters(backend: str, **config: Any) -> RendezvousParameters:
    return RendezvousParameters(backend, "localhost:29500", "run", 1, 1, **config)


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(("backend", "config"), [("standalone", {}), ("static", {"rank": 0})])
def test_built_in_backends_are_found_without_a_scan(
    backend: str, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **kw: pytest.fail("scanned"))
    handler = registry.get_rendezvous_handler(parameters(backend, **config))
    assert handler.get_backend() == backend
    assert handler.get_run_id() == "run"
    handler.shutdown()


def test_a_program_may_bring_its_own_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(params: RendezvousParameters) -> Any:
        raise UserError("own static was asked")

    fresh = RendezvousHandlerRegistry()
    fresh.register("static", own)
    monkeypatch.setattr(registry, "rendezvous_handler_registry", fresh)
    registry._register_built_in_handlers()
    with pytest.raises(UserError, match="own static was asked"):
        registry.get_rendezvous_handler(parameters("static"))


@promise("""rendezvous.backends-distributions-found: Backends of other distributions are found. A broken one causes one
    warning.""")
@pytest.mark.parametrize("group", ["torchrun.handlers", "holdfast.handlers"])
def test_entry_points_are_loaded_and_called(
    group: str, install: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    install(f"[{group}]\nfirst = MODULE:first\n")
    handler = registry.get_rendezvous_handler(parameters("first"))
    assert handler.get_backend() == "first"
    assert warnings(caplog) == []


def test_scan_can_be_repeated(install: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    name = install("[holdfast.handlers]\nfirst = MODULE:first\n[torchrun.handlers]\nfirst = MODULE:first\n")
    registry._register_out_of_tree_handlers()
    install("[holdfast.handlers]\nsecond = MODULE:second\n")
    registry._register_out_of_tree_handlers()
    registry._register_out_of_tree_handlers()
    assert warnings(caplog) == []
    assert importlib.import_module(name).calls == ["first"]
    assert registry.get_rendezvous_handler(parameters("first")).get_backend() == "first"
    assert registry.get_rendezvous_handler(parameters("second")).get_backend() == "second"


@proves("rendezvous.backends-distributions-found")
@pytest.mark.parametrize(
    ("entry_point", "text"),
    [
        ("bad = MODULE:broken", "OSError: no such fabric"),
        ("bad = MODULE:missing", "AttributeError"),
        ("bad = nowhere_to_be_found:first", "ModuleNotFoundError"),
        ("bad = MODULE:not_a_creator", "TypeError: .* not 42"),
        ("bad = not a reference", "bad"),
        ("static = MODULE:static", "UserError: .*'static' is taken"),
    ],
)
def test_a_broken_entry_point_is_one_warning(
    entry_point: str, text: str, install: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    install(f"[holdfast.handlers]\n{entry_point}\ngood = MODULE:second\n")
    registry._register_out_of_tree_handlers()
    (warning,) = warnings(caplog)
    message = warning.getMessage()
    assert re.search(text, message)
    assert repr(entry_point.split(" = ")[0]) in message
    assert "holdfast.handlers" in message
    assert warning.exc_info is not None
    assert "good" in registry.rendezvous_handler_registry


def test_two_distributions_with_one_name(install: Callable[[str], str], caplog: pytest.LogCaptureFixture) -> None:
    install("[holdfast.handlers]\nfirst = MODULE:first\n")
    install("[holdfast.handlers]\nfirst = MODULE:first\n")
    registry._register_out_of_tree_handlers()
    (warning,) = warnings(caplog)
    assert "'first' is taken" in warning.getMessage()
    assert registry.get_rendezvous_handler(parameters("first")).get_backend() == "first"


@pytest.mark.parametrize("backend", ["etcd-v4", "nonsense"])
def test_unknown_backends_are_refused_in_one_line(backend: str, install: Callable[[str], str]) -> None:
    install("[holdfast.handlers]\nfirst = MODULE:first\n")
    with pytest.raises(UserError) as caught:
        registry.get_rendezvous_handler(parameters(backend))
    assert str(caught.value) == (
        f"unknown rendezvous backend {backend!r}; available: c10d, etcd, etcd-v3, first, standalone, static, tcp"
    )
