"""The certificate of the server: looked at before anything is loaded, so that what is wrong with it is said at once.

uvicorn reads the same files again and speaks TLS. Does not know: sockets.
"""

from __future__ import annotations

import ssl

from localllm.config import ServerConfig
from localllm.errors import ConfigError


def check_certificate(config: ServerConfig) -> None:
    """Raises `ConfigError` for files that are missing, unreadable, no PEM, encrypted, or of two different keys."""
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
        # A password, if only an empty one: without it OpenSSL would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, config.ssl_keyfile, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            what = f"The key in {key} does not belong to the certificate in {certificate}."
            raise ConfigError(what, "", _flag("ssl_keyfile"), param="ssl_keyfile") from error
        what = f"{certificate} and {key} are no certificate with an unencrypted key in PEM."
        why = f"OpenSSL says {error.reason}." if error.reason else f"{error}."
        raise ConfigError(what, why, _flag("ssl_keyfile"), param="ssl_keyfile") from error


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')} FILE.pem"
