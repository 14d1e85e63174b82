"""The hub's token on this machine: stored where `hf auth login` stores it, and sent only to the hub.

Does not know: how a token is typed in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import AccessDenied
from localllm.models.library.hub import client


@dataclass(frozen=True, slots=True)
class Account:
    """The hub account of the token."""

    user: str
    token_path: Path
    environment_wins: bool  # HF_TOKEN is set and is used instead of the file


def login(token: str) -> Account:
    """Check the token with the hub, then store it. Raises `AccessDenied` for an unknown token."""
    library = client.library()
    if client.is_offline():
        raise client.offline_error("a login")
    with client.translated("a login"):
        try:
            user = str(client.api().whoami(token=token)["name"])
        except Exception as error:
            if client.status_of(error) in (401, 403):
                raise AccessDenied(
                    "The hub does not accept this token.", f"Asked at {client.endpoint()}.",
                    f"Create one at {client.endpoint()}/settings/tokens; read access is enough.",
                ) from error  # fmt: skip
            raise
        library.login(token=token, add_to_git_credential=False)
    return Account(user, token_path(), bool(os.environ.get("HF_TOKEN")))


def logout() -> bool:
    """Delete the stored token. False: there was none in the file."""
    there = token_path().is_file()
    if there:
        try:
            client.library().logout()
        except OSError:  # the library complains that HF_TOKEN is still set, which the caller reports
            pass
    return there


def token_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_TOKEN_PATH)
