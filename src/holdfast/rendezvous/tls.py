"""TLS as users set it up: a certificate, its key, and the authority to believe. Every backend refuses the same files
in the same words."""

from __future__ import annotations

import ssl

from holdfast.errors import UserError


def client_context(cert: str, key: str, ca: str) -> ssl.SSLContext:
    """The server must show a certificate of `ca`, or of an authority that this host trusts anyway."""
    context = _context(ssl.Purpose.SERVER_AUTH, ca)
    if cert:
        _load_certificate(context, cert, key)
    return context


def server_context(cert: str, key: str, ca: str) -> ssl.SSLContext:
    """With a CA, clients must show a certificate that it has signed."""
    context = _context(ssl.Purpose.CLIENT_AUTH, ca)
    _load_certificate(context, cert, key)
    context.verify_mode = ssl.CERT_REQUIRED if ca else ssl.CERT_NONE
    return context


def _context(purpose: ssl.Purpose, ca: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(purpose, cafile=ca or None)
    except (OSError, ValueError) as error:
        raise _unusable("authority", ca, error) from None


def _load_certificate(context: ssl.SSLContext, cert: str, key: str) -> None:
    try:
        # An answer to a question for a passphrase, which would otherwise be asked on the terminal.
        context.load_cert_chain(cert, key or None, password="")
    except (OSError, ValueError) as error:
        raise _unusable("certificate", " with ".join(filter(None, (cert, key))), error) from None


def _unusable(what: str, file: str, error: OSError | ValueError) -> UserError:
    if isinstance(error, ssl.SSLError) and error.reason is None:
        # OpenSSL says no more than that its reader of such files has failed.
        reason = "there is no certificate in it, or no key for it, or the key has a passphrase"
    else:
        reason = getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)
    return UserError(f"the TLS {what} {file} cannot be used: {reason}")
