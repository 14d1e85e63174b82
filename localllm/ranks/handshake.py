"""The handshake of a rank on another machine: the key of its group, then the versions and the checkpoint.

Both ends show with HMAC over the other's nonce that they have the key, before any record is read or written. Then the
rank introduces itself, and differences are refused by name: other versions may compute other numbers, or hang in a
collective. What follows is neither encrypted nor signed, so the network between the machines has to be trusted.
Does not know: who starts ranks, models.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from localllm.errors import ConfigError, LocalLLMError, ModelNotFound
from localllm.ranks.channel import Channel
from localllm.ranks.wire import BadRecord, Kind, Record, decode, encode

NONCE = 32
"""Bytes of a nonce and of a digest."""
HEADER_BYTES = 1 << 16
"""Bytes at the beginning of a file of weights that are compared: names, shapes and types of its tensors."""
COMPARED = "*.json", "*.safetensors", "*.gguf", "*.model"


class NotAdmitted(Exception):
    """A connection without the key of this group, or one that broke off."""


class Introduction(msgspec.Struct, frozen=True):
    """A rank's description of itself."""

    rank: int
    pid: int
    node: str  # name of its machine
    versions: dict[str, str]


def own_versions() -> dict[str, str]:
    """Return the versions that all ranks of a group must share. Nothing is imported for it."""
    found = {"Python": f"{sys.version_info.major}.{sys.version_info.minor}"}
    for package in ("localllm", "torch", "triton"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def difference(node: str, theirs: dict[str, str]) -> LocalLLMError | None:
    """Return the error for a machine whose versions differ from this one's, or None."""
    ours = own_versions()
    differing = [f"{name} {ours[name]} here, {theirs.get(name, 'none')} on {node}" for name in ours]
    differing = [text for text, name in zip(differing, ours, strict=True) if theirs.get(name) != ours[name]]
    if not differing:
        return None
    hint = "Install the same versions on every machine."
    return ConfigError("The versions of the ranks' machines differ.", f"{'; '.join(differing)}.", hint, param="nodes")


def challenge(end: socket.socket, key: bytes) -> None:
    """Check, as the server, that the other end has the key, and show it that this end has it. Raises `NotAdmitted`."""
    nonce = secrets.token_bytes(NONCE)
    end.sendall(nonce)
    answer = _read(end, 2 * NONCE)
    theirs, digest = answer[:NONCE], answer[NONCE:]
    if not hmac.compare_digest(digest, _digest(key, b"rank", nonce, theirs)):
        raise NotAdmitted("the key is another one")
    end.sendall(_digest(key, b"server", theirs, nonce))


def answer_challenge(end: socket.socket, key: bytes) -> None:
    """Do the rank's part of `challenge`. Raises `NotAdmitted`."""
    theirs, nonce = _read(end, NONCE), secrets.token_bytes(NONCE)
    end.sendall(nonce + _digest(key, b"rank", theirs, nonce))
    if not hmac.compare_digest(_read(end, NONCE), _digest(key, b"server", nonce, theirs)):
        raise NotAdmitted("the server has another key")


def admit(end: socket.socket, key: bytes) -> tuple[Channel, Introduction]:
    """Return the channel to a rank that has the key, and its introduction. Raises `NotAdmitted`."""
    challenge(end, key)
    channel = Channel(end)
    record = _next(channel)
    try:
        return channel, decode(record.payload, Introduction)
    except BadRecord as error:
        raise NotAdmitted(str(error)) from error


def introduce(end: socket.socket, key: bytes, rank: int, pid: int, node: str) -> Channel:
    """Return the channel to the server, which has admitted this rank. Raises `NotAdmitted` with the server's reason."""
    answer_challenge(end, key)
    channel = Channel(end)
    channel.send(Kind.JOIN, 0, encode(Introduction(rank, pid, node, own_versions())))
    refusal = decode(_next(channel).payload, str)
    if refusal:
        raise NotAdmitted(refusal)
    return channel


def _next(channel: Channel) -> Record:
    try:
        record = next(channel.records(), None)
    except BadRecord as error:
        raise NotAdmitted(str(error)) from error
    if record is None or record.kind is not Kind.JOIN:
        raise NotAdmitted("the connection was closed")
    return record


def _digest(key: bytes, role: bytes, one: bytes, other: bytes) -> bytes:
    return hmac.digest(key, role + one + other, "sha256")


def _read(end: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        try:
            more = end.recv(size - len(data))
        except OSError as error:
            raise NotAdmitted(f"{error}") from error
        if not more:
            raise NotAdmitted("the connection was closed")
        data += more
    return data


def checkpoint_fingerprint(path: Path) -> dict[str, str]:
    """Return a digest of each file of a checkpoint, by its name: of its size and its beginning. Times and folders may
    differ between machines. Raises `ModelNotFound`."""
    files = [path] if path.is_file() else sorted(file for form in COMPARED for file in path.glob(form))
    if not files:
        raise ModelNotFound(f"There is no checkpoint {path}.", hint="localllm pull downloads models.")
    digests = {}
    for file in files:
        with file.open("rb") as opened:
            beginning = opened.read(HEADER_BYTES)
        digests[file.name] = hashlib.blake2b(b"%d:" % file.stat().st_size + beginning, digest_size=16).hexdigest()
    return digests
