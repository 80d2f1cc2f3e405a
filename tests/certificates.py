"""Certificates for tests of TLS, made by `openssl`."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests import support


@dataclass(frozen=True)
class Certificates:
    """An authority, a server's and a client's certificate of it, and another authority with a client's."""

    home: Path

    def __getattr__(self, name: str) -> str:
        return str(self.home / name.replace("_", ".", 1))


def openssl(*args: str, cwd: Path) -> None:
    subprocess.run(["openssl", *args], cwd=cwd, check=True, capture_output=True, timeout=60)


def make_certificates(home: Path) -> Certificates:
    support.need_tools("openssl")
    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for authority in ("ca", "other"):
        about = ("-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem")
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 and later insist on it.
        openssl("req", "-x509", *new_key, "-days", "2", *usage, *about, cwd=home)
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        openssl("req", *new_key, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr", cwd=home)
        (home / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        issuer = ("-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial", "-days", "2")
        files = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", f"{name}.ext")
        openssl("x509", "-req", *files, *issuer, cwd=home)
    return Certificates(home)
