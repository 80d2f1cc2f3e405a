"""TLS as users set it up: a certificate, its key, and the authority to believe. Every backend, and the transfer of
snapshots, refuses the same files in the same words.

Certificates live for days where runs live for weeks, so `ReloadingTls` looks at the files before each connection and
reads those that were replaced. Files that cannot be used are refused at the start. Later, when a renewal may be half
done, the files that were read before stay in force until all new ones can be used.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import threading

from holdfast.errors import UserError


class ReloadingTls:
    """For any number of connections, from any thread."""

    def __init__(self, cert: str = "", key: str = "", ca: str = "", *, is_server: bool = False) -> None:
        if is_server and not cert:
            raise UserError("TLS needs a certificate (tls_cert), not only a key or an authority")
        self._is_server = is_server
        # The process may change its directory later. Errors of the first attempt name the files as the user did.
        self._files = [os.path.abspath(path) if path else "" for path in (cert, key, ca)]
        self._lock = threading.Lock()
        self._stamps = [_stamp(path) for path in self._files]
        self._made = self._make(cert, key, ca)

    def context(self) -> ssl.SSLContext:
        """For the next connection."""
        with self._lock:
            stamps = [_stamp(path) for path in self._files]
            if stamps != self._stamps:
                with contextlib.suppress(UserError):
                    self._made = self._make(*self._files)
                    self._stamps = stamps
            return self._made

    def _make(self, cert: str, key: str, ca: str) -> ssl.SSLContext:
        """A client believes `ca`, or else the authorities that this host trusts anyway. A server with `ca` demands
        certificates that it has signed, and one without demands none."""
        purpose = ssl.Purpose.CLIENT_AUTH if self._is_server else ssl.Purpose.SERVER_AUTH
        file = f"authority {ca}"
        try:
            context = ssl.create_default_context(purpose, cafile=ca or None)
            if self._is_server:
                context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
            file = f"certificate {cert} with {key}" if key else f"certificate {cert}"
            if self._is_server or cert:
                # An answer to a question for a passphrase, which would otherwise be asked on the terminal.
                context.load_cert_chain(cert, key or None, password="")
            return context
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
            if isinstance(error, ssl.SSLError) and error.reason is None:
                # OpenSSL says no more than that its reader of such files has failed.
                reason = "there is no certificate in it, or no key for it, or the key has a passphrase"
            raise UserError(f"the TLS {file} cannot be used: {reason}") from None


def _stamp(path: str) -> tuple[int, int, int] | None:
    """Changes when the file does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
