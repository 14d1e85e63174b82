"""https with a certificate of our own, and what is said about one that is of no use."""

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from localllm.cli.server import ServerClient, ServerRefused
from localllm.config.settings import ServerConfig
from localllm.errors import ConfigError
from localllm.machine.running_servers import announced
from localllm.up import url_of
from localllm.web.access.connection import check_certificate, fingerprint
from localllm.web.app import bind
from tests.web.live_server import LiveServer, PacedRunner, fake_model, settings

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl to make a certificate with")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two self-signed certificates and their keys."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
        files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        subprocess.run(["openssl", *words.split(), *files], cwd=folder, check=True, capture_output=True)
    words = "ec -aes256 -passout pass:secret -in one.key -out locked.key"
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "one.pem").read_text() + (folder / "one.key").read_text())
    (folder / "text.pem").write_text("hello")
    return folder


@pytest.mark.parametrize("files", [("one.pem", "one.key"), ("both.pem", None)], ids=["two files", "one file"])
def test_a_verified_client_gets_whole_and_streamed_answers(
    made: Path, tmp_path: Path, files: tuple[str, str | None]
) -> None:
    certificate, key = (str(made / name) if name else None for name in files)
    asked = settings(ssl_certfile=certificate, ssl_keyfile=key)
    trust = ssl.create_default_context(cafile=made / "one.pem")
    with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server, httpx.Client(verify=trust) as client:
        assert server.url.startswith("https://")
        body = {"prompt": "a", "max_tokens": 3, "stream": True}
        assert "[DONE]" in client.post(f"{server.url}/v1/completions", json=body).text
        origin = {"origin": server.url}
        assert client.post(f"{server.url}/tokenize", json={"content": "a"}, headers=origin).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health", verify=ssl.create_default_context())
        with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=5) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert not sock.recv(100).startswith(b"HTTP/1.1 200")
        assert client.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("certificate", "key", "said"),
    [
        ("none.pem", None, "Cannot read .*none.pem"),
        ("one.pem", "none.key", "Cannot read .*none.key"),
        (".", None, "Cannot read"),
        ("one.pem", "two.key", "two.key does not belong to the certificate in .*one.pem"),
        ("one.pem", None, "are not a certificate and an unencrypted key"),
        ("text.pem", "one.key", "are not a certificate and an unencrypted key"),
        ("one.pem", "text.pem", "are not a certificate and an unencrypted key"),
        ("one.pem", "locked.key", "are not a certificate and an unencrypted key"),
    ],
)
def test_files_that_are_of_no_use(made: Path, certificate: str, key: str | None, said: str) -> None:
    config = ServerConfig(ssl_certfile=str(made / certificate), ssl_keyfile=str(made / key) if key else None)
    with pytest.raises(ConfigError, match=said) as caught:
        check_certificate(config)
    assert caught.value.hint


def test_the_address_that_is_announced_is_https(made: Path) -> None:
    config = ServerConfig(port=0, ssl_certfile=str(made / "both.pem"))
    with bind(config) as listener:
        assert url_of(listener, config.scheme).startswith("https://127.0.0.1:")


def test_verbs_trust_exactly_the_certificate_that_a_server_of_the_same_user_published(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    asked = settings(ssl_certfile=str(made / "two.pem"), ssl_keyfile=str(made / "two.key"))
    prints = [fingerprint(ServerConfig(ssl_certfile=str(made / name))) for name in ("one.pem", "two.pem")]
    with LiveServer(fake_model(tmp_path, PacedRunner()), asked) as server:
        client = ServerClient(server.url.replace("127.0.0.1", "localhost"))  # a name that the certificate does not hold
        with announced(server.url, "tiny", prints[1]):
            assert client.ask("GET", "/health")["status"] == "ok"
        with announced(server.url, "tiny", prints[0]), pytest.raises(ServerRefused) as refused:
            client.ask("GET", "/health")
        assert "published another one" in refused.value.why
        with pytest.raises(ServerRefused) as refused:
            client.ask("GET", "/health")
        assert refused.value.what == f"The certificate of {client.url} is not trusted."
        assert "self-signed certificate" in refused.value.why
        assert refused.value.hint.startswith("SSL_CERT_FILE=cert.pem")


def test_https_at_a_plain_server_is_told_as_such(tmp_path: Path) -> None:
    with LiveServer(fake_model(tmp_path, PacedRunner()), settings()) as server:
        with pytest.raises(ServerRefused, match="does not answer in https") as refused:
            ServerClient(server.url.replace("http:", "https:")).ask("GET", "/health")
        assert refused.value.hint == f"--url {server.url}"


def test_the_certificate_of_the_guide_holds_the_names_of_this_machine() -> None:
    guide = (Path(__file__).parents[2] / "docs/guides/lock-the-doors.md").read_text(encoding="utf-8")
    assert "-addext subjectAltName=DNS:box.lan,DNS:localhost,IP:127.0.0.1 " in guide
