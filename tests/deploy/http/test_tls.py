"""TLS, and keys from files."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from millrace.deploy.config import ServerConfig
from millrace.deploy.http.tls import tls_context
from millrace.deploy.settings.fields import groups_of
from millrace.deploy.settings.sources import resolve, show
from millrace.stages.errors import ConfigError
from tests.deploy.running import RunningServer, head_bytes, read_answer, send


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


@pytest.fixture
def files(authority: trustme.CA, tmp_path: Path) -> tuple[str, str]:
    """A certificate for localhost with its chain, and its key."""
    issued = authority.issue_cert("localhost", key_type=trustme.KeyType.ECDSA)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for blob in issued.cert_chain_pems:
        blob.write_to_path(certificate, append=True)
    issued.private_key_pem.write_to_path(key)
    return str(certificate), str(key)


def encrypted(key: str, password: str) -> str:
    from cryptography.hazmat.primitives import serialization

    private = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    encryption = serialization.BestAvailableEncryption(password.encode())
    locked = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    path = Path(key).with_name("locked.pem")
    path.write_bytes(locked)
    return str(path)


@pytest.mark.slow
def test_https_is_spoken_and_http_is_not(files, authority):
    options = {"ssl_certfile": files[0], "ssl_keyfile": encrypted(files[1], "word"), "ssl_keyfile_password": "word"}
    context = ssl.create_default_context()
    authority.configure_trust(context)
    with RunningServer(server=options | {"header_timeout_s": 1.0}) as server:
        assert server.url.startswith("https://")
        with context.wrap_socket(server.connect(), server_hostname="localhost") as connection:
            body = b'{"prompt": "a", "max_tokens": 9, "stream": true}'
            headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
            send(connection, head_bytes("POST", "/v1/completions", headers) + body)
            assert read_answer(connection).events()[-1] == "[DONE]"
        with server.connect() as connection:
            send(connection, head_bytes("GET", "/health", {}))
            assert not connection.recv(4096).startswith(b"HTTP")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(old)
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            old.wrap_socket(server.connect(), server_hostname="localhost")
        with server.connect() as connection:  # a missing handshake times out, as missing headers do
            connection.settimeout(60.0)
            assert connection.recv(1) == b""
        assert "word" not in server.errors()


def test_the_newest_two_versions_of_tls_are_spoken(files):
    context = tls_context(ServerConfig(ssl_certfile=files[0], ssl_keyfile=files[1]))
    assert context is not None and context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert tls_context(ServerConfig()) is None


def test_what_is_wrong_with_a_certificate_is_said_with_its_file(files, tmp_path, authority):
    certificate, key = files
    other = tmp_path / "other.pem"
    authority.issue_cert("localhost").private_key_pem.write_to_path(other)
    no_pem = tmp_path / "no.pem"
    no_pem.write_text("hello")
    locked = encrypted(key, "word")
    for wrong in (
        {"ssl_certfile": str(tmp_path / "none.pem"), "ssl_keyfile": key},
        {"ssl_certfile": certificate, "ssl_keyfile": str(other)},
        {"ssl_certfile": certificate},
        {"ssl_certfile": str(no_pem), "ssl_keyfile": key},
        {"ssl_certfile": certificate, "ssl_keyfile": locked},
        {"ssl_certfile": certificate, "ssl_keyfile": locked, "ssl_keyfile_password": "wrong-word"},
    ):
        with pytest.raises(ConfigError, match="ssl_certfile") as caught:
            tls_context(ServerConfig(**wrong))
        assert wrong["ssl_certfile"] in str(caught.value) and "wrong-word" not in str(caught.value)
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ServerConfig(ssl_keyfile=key)


def test_a_password_is_never_a_flag_nor_shown(capsys):
    from millrace.deploy.cli.main import main

    assert "ssl_keyfile_password" in [field.name for field in groups_of(ServerConfig)["listening"]]
    with pytest.raises(SystemExit):
        main(["serve", "--ssl-keyfile-password", "word"])
    settings = resolve((ServerConfig,), {}, {"MILLRACE_SSL_KEYFILE_PASSWORD": "word"}, None)
    assert settings["ssl_keyfile_password"].value == "word" and "'word'" not in show(settings)


def test_keys_of_a_file_are_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of the team\nk1\n\n  k2  \n")
    admin = tmp_path / "admin"
    admin.write_text("a1")
    config = ServerConfig(api_key=("k0",), api_key_file=str(file), admin_key_file=str(admin), host="0.0.0.0")
    assert config.api_key == ("k0", "k1", "k2") and config.admin_key == ("a1",)
    admin.write_text("k2")
    with pytest.raises(ConfigError, match="admin_key"):
        ServerConfig(api_key_file=str(file), admin_key_file=str(admin))


@pytest.mark.parametrize("text", [None, "", "# nothing\n", "é\n"])
def test_a_key_file_without_a_key_is_refused(tmp_path, text):
    file = tmp_path / "keys"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match="key"):
        ServerConfig(api_key_file=str(file))
