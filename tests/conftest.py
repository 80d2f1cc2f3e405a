"""Fixtures for every test."""

from __future__ import annotations

import contextlib
import gc
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from holdfast import signals
from holdfast.testing.etcd_server import EtcdServer
from tests import support

# How long an example takes to make or to try says something about the machine, and nothing about what is tested.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_configure() -> None:
    """Signals mean here, and in every process that a test starts, what they mean at a terminal. Whoever started us may
    ignore some, as nohup does with SIGHUP and a shell with SIGINT and SIGQUIT for what it runs in the background."""
    usual = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler, signal.SIGQUIT: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, handler)


@pytest.fixture
def mailbox(tmp_path: Path) -> Iterator[support.Mailbox]:
    box = support.Mailbox(tmp_path / "mailbox")
    yield box
    box.close()


@pytest.fixture
def no_descriptor_leak() -> Iterator[None]:
    """The test leaves as many open descriptors as it found. The process's inbox, made when first asked for, stays. A
    thread that was told to end may take a moment to close its own."""
    signals.inbox()
    gc.collect()
    before = support.open_descriptors()
    yield
    gc.collect()
    with contextlib.suppress(AssertionError):
        support.wait_until(lambda: len(support.open_descriptors()) <= len(before), "no descriptor too many", 10)
    leaked = {fd: what for fd, what in support.open_descriptors().items() if before.get(fd) != what}
    assert len(support.open_descriptors()) <= len(before), f"descriptors left open: {leaked}"


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdServer]:
    """An etcd for all tests that ask for one; each uses keys of its own."""
    with EtcdServer() as server:
        yield server
