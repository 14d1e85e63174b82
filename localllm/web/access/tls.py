"""The server's TLS certificate: checked before anything is loaded, so that errors appear at once.

uvicorn reads the same files again and speaks TLS. Does not know: sockets.
"""

from __future__ import annotations

import hashlib
import re
import ssl
from pathlib import Path

from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError


def check_certificate(config: ServerConfig) -> None:
    """Raise `ConfigError` for files that are missing, unreadable, not PEM or encrypted, or if key and certificate do
    not match.
    """
    certificate = config.ssl_certfile
    if certificate is None:
        return
    for name, path in (("ssl_certfile", certificate), ("ssl_keyfile", config.ssl_keyfile)):
        try:
            if path is not None:
                open(path, "rb").close()
        except OSError as error:
            raise ConfigError(f"Cannot read {path}.", f"{error.strerror}.", _flag(name), param=name) from error
    key = config.ssl_keyfile or certificate
    try:
        # An empty password; without one OpenSSL would ask for it at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, config.ssl_keyfile, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"The key in {key} does not belong to the certificate in {certificate}."
            raise ConfigError(what, "", _flag("ssl_keyfile"), param="ssl_keyfile") from error
        what = f"{certificate} and {key} are not a certificate and an unencrypted key in PEM."
        why = f"OpenSSL says {error.reason}." if error.reason else f"{error}."
        raise ConfigError(what, why, _flag("ssl_keyfile"), param="ssl_keyfile") from error


def fingerprint(config: ServerConfig) -> str:
    """Return the SHA-256 of the server's own certificate, the first one of its file; empty without https."""
    if config.ssl_certfile is None:
        return ""
    text = Path(config.ssl_certfile).read_text(encoding="ascii", errors="replace")
    first = re.search("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first[0])).hexdigest() if first else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} FILE.pem"
