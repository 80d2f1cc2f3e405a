"""Certificates that are replaced while the process that uses them runs."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.errors import UserError
from holdfast.tls import ReloadingTls
from tests import support
from tests.certificates import Certificates, make_certificates, openssl
from tests.promises import proves

Mine = Callable[[str], list[str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def mine(tmp_path: Path, made: Certificates) -> Mine:
    """Puts the files of an owner and its authority where they are used: certificate, key, authority."""
    paths = [str(tmp_path / f"mine.{name}") for name in ("pem", "key", "ca")]

    def install(owner: str) -> list[str]:
        authority = "other" if owner == "stranger" else "ca"
        for source, target in zip((f"{owner}.pem", f"{owner}.key", f"{authority}.pem"), paths, strict=True):
            shutil.copy(made.home / source, target)
        return paths

    return install


def shake_hands(server: ReloadingTls, client: ReloadingTls) -> None:
    """Both sides must accept each other; raises the client's error."""
    near, far = socket.socketpair()
    for sock in (near, far):
        sock.settimeout(support.DEADLINE_S)

    def serve() -> None:
        try:
            with server.context().wrap_socket(far, server_side=True) as secured:
                secured.sendall(b"ok")
        except OSError:
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.context().wrap_socket(near, server_hostname="127.0.0.1") as secured:
            if secured.recv(2) != b"ok":
                raise ssl.SSLError("the server closed the connection")
    finally:
        near.close()
        thread.join(support.DEADLINE_S)


def by_owner(made: Certificates, owner: str, authority: str, **more: bool) -> ReloadingTls:
    return ReloadingTls(
        *(str(made.home / name) for name in (f"{owner}.pem", f"{owner}.key", f"{authority}.pem")), **more
    )


@pytest.mark.parametrize("is_server", [True, False])
def test_replaced_files_are_used_for_the_next_connection(made: Certificates, mine: Mine, is_server: bool) -> None:
    tls = ReloadingTls(*mine("server"), is_server=is_server)
    for owner, authority in (("server", "ca"), ("stranger", "other"), ("client", "ca")):
        mine(owner)
        peer = by_owner(made, owner, authority, is_server=not is_server)
        shake_hands(*((tls, peer) if is_server else (peer, tls)))


def test_files_that_did_not_change_are_not_read_again(mine: Mine) -> None:
    tls = ReloadingTls(*mine("server"))
    assert tls.context() is tls.context()


@proves("coordinator.certificates-renewed-run", "etcd.renewed-certificates-used-run")
@pytest.mark.parametrize("is_server", [True, False])
@pytest.mark.parametrize("half_done", [0, 1, 2])
def test_a_renewal_that_is_half_done_changes_nothing(
    made: Certificates, mine: Mine, half_done: int, is_server: bool
) -> None:
    files = mine("server")
    tls = ReloadingTls(*files, is_server=is_server)
    before = tls.context()
    for text in ("", "junk", None):
        os.unlink(files[half_done]) if text is None else Path(files[half_done]).write_text(text)
        assert tls.context() is before
    mine("stranger")
    assert tls.context() is not before
    wrong = by_owner(made, "client", "ca", is_server=not is_server)
    with pytest.raises(ssl.SSLError):
        shake_hands(*((tls, wrong) if is_server else (wrong, tls)))


@proves("coordinator.certificates-renewed-run")
def test_a_certificate_whose_key_is_still_the_old_one_is_not_used(made: Certificates, mine: Mine) -> None:
    files = mine("server")
    tls = ReloadingTls(*files, is_server=True)
    before = tls.context()
    shutil.copy(made.client_pem, files[0])
    assert tls.context() is before
    shutil.copy(made.client_key, files[1])
    assert tls.context() is not before


def test_another_directory_does_not_matter_later(
    made: Certificates, mine: Mine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine("server")
    monkeypatch.chdir(tmp_path)
    tls = ReloadingTls("mine.pem", "mine.key", "mine.ca", is_server=True)
    before = tls.context()
    monkeypatch.chdir("/")
    assert tls.context() is before
    mine("stranger")
    assert tls.context() is not before


@proves("coordinator.unreadable-token-unusable")
@pytest.mark.parametrize("is_server", [True, False])
def test_files_that_cannot_be_used_are_refused_at_the_start(
    made: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_server: bool
) -> None:
    """As the user has named them, and a passphrase is not asked for."""
    openssl("ec", "-in", made.client_key, "-aes128", "-passout", "pass:secret", "-out", "locked.key", cwd=tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, text in (("empty", ""), ("junk", "no certificate")):
        (tmp_path / name).write_text(text)
    unreadable = "there is no certificate in it, or no key for it, or the key has a passphrase"
    for files, words in (
        ((made.client_pem, "locked.key", made.ca_pem), r"certificate .*client\.pem with locked\.key cannot be used: "),
        ((made.client_pem, made.client_key, "missing"), "authority missing cannot be used: No such file"),
        ((made.client_pem, made.client_key, "empty"), "authority empty cannot be used: "),
        (("missing",), "certificate missing cannot be used: No such file"),
        (("junk",), f"certificate junk cannot be used: {unreadable}"),
    ):
        with pytest.raises(UserError, match=f"^the TLS {words}"):
            ReloadingTls(*files, is_server=is_server)


def test_a_server_without_a_certificate() -> None:
    for files in ({"key": "k"}, {"ca": "a"}):
        with pytest.raises(UserError, match="TLS needs a certificate"):
            ReloadingTls(**files, is_server=True)
