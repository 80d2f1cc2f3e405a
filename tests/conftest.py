"""Fixtures for every test."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from holdfast import signals
from holdfast.rendezvous.etcd_server import EtcdServer
from tests import support
from tests.certificates import Certificates, make_certificates

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
    sys.dont_write_bytecode = False


def pytest_collection_finish() -> None:
    """Until then byte code is kept, whatever the environment says: each process of xdist imports all files of tests,
    and would compile all of them each time, which takes longer than everything else at its start."""
    sys.dont_write_bytecode = sys.flags.dont_write_bytecode == 1


@pytest.fixture(autouse=True)
def own_log_lines() -> Iterator[None]:
    """A command that runs in this process lets the logger speak on stderr. The next test does not expect that."""
    logger = logging.getLogger("holdfast")
    handlers, level = [*logger.handlers], logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Without settings of the caller; those that a test makes, or a command in this process, end with the test."""
    before = dict(os.environ)
    for name in [name for name in before if support.is_setting(name)]:
        del os.environ[name]
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


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


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """For all tests; none changes the files."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secured_etcd(certificates: Certificates) -> Iterator[EtcdServer]:
    """It wants a certificate of clients, too."""
    files = (f"--cert-file={certificates.server_pem}", f"--key-file={certificates.server_key}")
    with EtcdServer(options=[*files, "--client-cert-auth", f"--trusted-ca-file={certificates.ca_pem}"]) as server:
        yield server


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A control group (either version) with little memory."""
    name = f"holdfast-{uuid.uuid4().hex[:8]}"
    first, second = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    is_first = (first / "memory.limit_in_bytes").exists()
    group = (first if is_first else second) / name
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if is_first else "memory.max")).write_text(str(200 << 20))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group for memory can be made here: {error}")
    with contextlib.suppress(OSError):
        (group / ("memory.swappiness" if is_first else "memory.swap.max")).write_text("0")
    yield group
    support.wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "all are gone")
    group.rmdir()
