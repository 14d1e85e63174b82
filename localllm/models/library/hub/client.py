"""The connection to the hub: huggingface_hub's session, headers and token, with our timeouts and errors.

The hub's address, offline mode and timeout are read from the environment at each call (HF_ENDPOINT, HF_HUB_OFFLINE,
HF_HUB_DOWNLOAD_TIMEOUT, HF_TOKEN), so a test or a page need not restart the process. The library is imported at the
first call, so `localllm list` does not pay for it. It uses requests below 1.0 and httpx from 1.0 on; only `get` knows
the difference. The token is stored where `hf auth login` stores it, and sent only to the hub. Asking the hub is
forbidden by --offline, the config file, or a variable of the library.
Does not know: which files of a repository are wanted, how a token is typed in.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from localllm.config.settings import Settings
from localllm.errors import AccessDenied, DiskFull, HubError, HubOffline, HubUnreachable, LocalLLMError, ModelNotFound
from localllm.units import format_bytes

log = logging.getLogger(__name__)
T = TypeVar("T")

DEFAULT_ENDPOINT = "https://huggingface.co"
TRIES = 5
"""Most attempts without progress; each received byte resets the count."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
"""Longest wait between two attempts. Waits double each time, or follow the hub's Retry-After."""
LARGEST_ANSWER = 32 * 1024**2
"""Largest accepted answer in bytes. The file list of a repository with 100,000 files has 20 MiB."""
_BUSY = {408, 429, 500, 502, 503, 504}


def endpoint() -> str:
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def offline_variable() -> str:
    """Return the variable that forbids requests to the hub, read as the library does; empty: none is set."""
    name = next((each for each in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(each)), "")
    return name if os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") else ""


def is_offline() -> bool:
    return bool(offline_variable())


def timeout_s() -> float:
    """Return how long to wait for the hub before another attempt."""
    try:
        return float(os.environ.get("HF_HUB_DOWNLOAD_TIMEOUT") or 10)
    except ValueError:
        return 10.0


def library() -> Any:
    """Return huggingface_hub with its telemetry, progress bars and retry messages turned off."""
    import huggingface_hub
    from huggingface_hub import constants

    constants.HF_HUB_DISABLE_TELEMETRY = True
    if "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        utilities().disable_progress_bars()
    if not os.environ.get("HF_HUB_VERBOSITY") and not os.environ.get("HF_DEBUG"):
        utilities().logging.set_verbosity_error()
    return huggingface_hub


def utilities() -> Any:
    """Return the library's documented helpers, whose types it does not export."""
    import huggingface_hub.utils

    return huggingface_hub.utils


def token() -> str | None:
    """Return the token: HF_TOKEN, else the one stored by `localllm login` or `hf auth login`."""
    found: str | None = library().get_token()
    return found


def api() -> Any:
    return library().HfApi(endpoint=endpoint(), library_name="localllm")


def headers() -> dict[str, str]:
    library()
    found: dict[str, str] = utilities().build_hf_headers(library_name="localllm")
    return found


@dataclass(frozen=True, slots=True)
class HubResponse:
    """An open response of the hub. `pieces` yields bytes as they arrive."""

    status: int
    headers: Mapping[str, str]
    pieces: Iterator[bytes]


@contextmanager
def get(url: str, *, extra: Mapping[str, str] | None = None, params: Any = None) -> Iterator[HubResponse]:
    """GET a URL, following redirects. Raises the library's own exceptions, which `translated` and `retry` handle."""
    session = utilities().get_session()
    asked = {**headers(), "accept-encoding": "identity", **(extra or {})}
    if callable(getattr(session, "stream", None)):  # httpx; requests has a setting of that name
        opened = session.stream("GET", url, headers=asked, params=params, timeout=timeout_s(), follow_redirects=True)
    else:
        opened = session.get(url, headers=asked, params=params, timeout=timeout_s(), stream=True)
    with opened as response:
        utilities().hf_raise_for_status(response)
        pieces = response.iter_bytes() if hasattr(response, "iter_bytes") else _arriving(response.raw)
        yield HubResponse(response.status_code, response.headers, pieces)


def _arriving(raw: Any) -> Iterator[bytes]:
    """Yield bytes as they arrive: requests waits for full chunks, and drops the last one of a broken answer."""
    troubles: Any = import_module("urllib3.exceptions")  # comes with requests only
    try:
        while piece := raw.read1(2**16):
            yield piece
    except troubles.ReadTimeoutError as error:
        raise TimeoutError(str(error)) from error
    except troubles.HTTPError as error:
        raise ConnectionError(str(error)) from error


def read_body(answer: HubResponse, most_bytes: int) -> bytes:
    """Return the whole body. Raises `HubError` if it is longer than `most_bytes`."""
    pieces, count = [], 0
    for piece in answer.pieces:
        pieces.append(piece)
        count += len(piece)
        if count > most_bytes:
            raise HubError(
                f"The answer of {endpoint()} is too large.",
                f"An answer or a small file may have at most {format_bytes(most_bytes)}.",
                "Check HF_ENDPOINT, and the repository.",
            )
    return b"".join(pieces)


def get_json(path: str, params: Any = None, *, about: str) -> Any:
    """Return a JSON answer of the API. about: the subject, for error messages."""

    def once() -> Any:
        with get(endpoint() + path, params=params) as answer:
            return json.loads(read_body(answer, LARGEST_ANSWER))

    with translated(about):
        return retry(once)


# Retries ------------------------------------------------------------------------------------------------------------


def retry(call: Callable[[], T], *, stop: threading.Event | None = None, tries: int = 3) -> T:
    """Call `call()`, and retry when the hub is busy or the connection fails. Raises the last attempt's error."""
    for attempt in range(1, tries):
        try:
            return call()
        except Exception as error:
            if not is_transient(error):
                raise
            wait_before_retry(attempt, error, stop)
    return call()


def wait_before_retry(attempt: int, error: BaseException, stop: threading.Event | None = None) -> None:
    """Wait before the next attempt: longer each time, or as long as the hub says. Ends early when `stop` is set."""
    seconds = wait_s(attempt, error)
    log.info("hub retry attempt=%d wait=%.1fs reason=%s", attempt, seconds, plain_reason(error))
    if stop is None:
        time.sleep(seconds)
    else:
        stop.wait(seconds)


def wait_s(attempt: int, error: BaseException) -> float:
    response = getattr(error, "response", None)
    said = response.headers.get("retry-after", "") if response is not None else ""
    seconds = float(said) if re.fullmatch(r"\d+", said) else FIRST_WAIT_S * 2 ** (attempt - 1)
    return min(seconds, LONGEST_WAIT_S)


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may help: after a connection failure, a timeout or a busy hub, but not after a refusal."""
    status = status_of(error)
    if status is not None:
        return status in _BUSY
    return isinstance(error, network_errors()) and getattr(error, "errno", None) not in _DISK_ERRNOS


def network_errors() -> tuple[type[BaseException], ...]:
    """Return the exception types of the library's HTTP package: the base classes of its own error, and OSError."""
    from huggingface_hub.errors import HfHubHTTPError

    own = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ in ("HTTPError", "RequestException")]
    return (*own, OSError)


def status_of(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    return None if response is None else int(response.status_code)


# Errors -------------------------------------------------------------------------------------------------------------

_DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def translated(about: str) -> Iterator[None]:
    """Translate exceptions of the library, its HTTP package and the disk. about: the subject, for messages."""
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except LocalLLMError:
        raise
    except HFValidationError as error:
        raise ModelNotFound(
            f"{about!r} is not the name of a repository.", "", "Names look like ORG/NAME.", param="model"
        ) from error
    except (ValueError, RecursionError) as error:  # JSON that is none: a login page of a network, a proxy
        raise HubError(f"{endpoint()} did not answer like a hub.", f"{error}.", "Check HF_ENDPOINT.") from error
    except Exception as error:
        ours = _translate(error, about)
        if ours is None:
            raise
        raise ours from error


def _translate(error: Exception, about: str) -> LocalLLMError | None:
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause = error.__cause__
    if isinstance(error, LocalEntryNotFoundError) and isinstance(cause, Exception):
        return _translate(cause, about)  # "cannot find it locally" hides the network error
    if isinstance(error, OfflineModeIsEnabled):
        return offline_error(about)
    if isinstance(error, GatedRepoError):
        return gated_error(about)
    if isinstance(error, RepositoryNotFoundError):
        return _no_repository(about)
    if isinstance(error, RevisionNotFoundError):
        return ModelNotFound(
            f"{about} has no such revision.",
            "A revision is a branch, a tag or a commit.",
            f"{endpoint()}/{about.partition('@')[0]}/commits/main lists them.",
            param="revision",
        )
    if isinstance(error, EntryNotFoundError):
        return ModelNotFound(f"A file of {about} is not on the hub.", f"{first_line(error)}", param="model")
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS:
        return disk_error(error, about)
    return _network_error(error, about)


def offline_error(about: str, switch: str = "") -> HubOffline:
    """Return the error for a model that is not here. switch: what forbids requests to the hub; empty: find it."""
    switch = switch or offline_variable() or "--offline"
    return HubOffline(
        f"{about} is not on this machine, and downloads are disabled.",
        f"Set: {switch}.",
        f"localllm pull {about}  without {switch}",
        param="model",
    )


def offline_search_error() -> HubOffline:
    switch = offline_variable() or "--offline"
    return HubOffline("Search needs the hub, and requests to it are disabled.", f"Set: {switch}.", f"Unset {switch}.")


def gated_error(about: str) -> AccessDenied:
    repo_id = about.partition("@")[0].partition(":")[0]
    where = f"{endpoint()}/{repo_id}"
    if token() is None:
        return AccessDenied(
            f"{repo_id} is gated, and no token was sent.",
            f"Its owner asks you to accept terms first: {where}",
            f"accept them there, then localllm login, then localllm pull {about}",
            param="model",
        )
    return AccessDenied(
        f"{repo_id} is gated, and your token's account has no access.",
        f"Accept the terms at {where}; some owners approve requests manually, and a fine-grained token needs "
        "'read access to gated repositories'.",
        f"localllm pull {about}  once you have access",
        param="model",
    )


def _no_repository(about: str) -> ModelNotFound:
    repo_id = about.partition("@")[0].partition(":")[0]
    who = "No token was sent" if token() is None else "The account of the token that was sent cannot see it"
    return ModelNotFound(
        f"{repo_id} is not on the hub, or it is private.",
        f"{who} ({endpoint()}).",
        f"localllm search {repo_id.rpartition('/')[2]}"
        + ("; localllm login for a private repository" if token() is None else ""),
        param="model",
    )


def disk_error(error: OSError, about: str) -> LocalLLMError:
    where = error.filename or "the Hugging Face cache"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(
            f"The disk is full: {about} could not be written.",
            f"{error.strerror}: {where}. The downloaded part is kept.",
            "localllm list shows model sizes, localllm rm MODEL deletes one; HF_HOME moves the cache.",
        )
    return HubError(
        f"{about} could not be written.", f"{error.strerror}: {where}.", "HF_HOME names another folder for the cache."
    )


def _network_error(error: Exception, about: str) -> LocalLLMError | None:
    status = status_of(error)
    if status == 429:
        return HubUnreachable(
            f"The hub's rate limit was reached: too many requests ({about}).",
            first_line(error),
            "localllm login raises the limit; or try again in a few minutes.",
        )
    if status == 401:
        return AccessDenied(
            "The hub does not accept the token.", f"Requested {about} at {endpoint()}.", "localllm login"
        )
    if status == 403:
        return AccessDenied(f"The hub denies access to {about}.", first_line(error), "localllm login")
    if status is not None and status in _BUSY:
        return HubUnreachable(
            f"The hub cannot answer now (status {status}).", f"Requested {about} at {endpoint()}.", "Try again later."
        )
    if status is not None:
        return HubError(f"The hub refused {about} with status {status}.", first_line(error), f"{endpoint()}")
    if not isinstance(error, network_errors()):
        return None
    if "timeout" in type(error).__name__.lower():
        return HubUnreachable(
            f"The hub did not answer within {timeout_s():g} s.",
            f"Requested {about} at {endpoint()}, several times.",
            "The same command resumes the download; HF_HUB_DOWNLOAD_TIMEOUT sets a longer timeout.",
        )
    return HubUnreachable(
        f"The hub cannot be reached at {endpoint()}.",
        f"{plain_reason(error)} (requested {about}).",
        "Check the network, HTTPS_PROXY and HF_ENDPOINT; localllm list shows the models on this machine.",
    )


def plain_reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}".rstrip(": ")


def first_line(error: BaseException) -> str:
    """Return the first line: the library's messages go on with advice for its own callers."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


@dataclass(frozen=True, slots=True)
class Account:
    """The hub account of the token."""

    user: str
    token_path: Path
    environment_wins: bool  # HF_TOKEN is set and is used instead of the file


def login(token: str) -> Account:
    """Check the token with the hub, then store it. Raises `AccessDenied` for an unknown token."""
    hub = library()
    if is_offline():
        raise offline_error("a login")
    with translated("a login"):
        try:
            user = str(api().whoami(token=token)["name"])
        except Exception as error:
            if status_of(error) in (401, 403):
                raise AccessDenied(
                    "The hub does not accept this token.", f"Asked at {endpoint()}.",
                    f"Create one at {endpoint()}/settings/tokens; read access is enough.",
                ) from error  # fmt: skip
            raise
        hub.login(token=token, add_to_git_credential=False)
    return Account(user, token_path(), bool(os.environ.get("HF_TOKEN")))


def logout() -> bool:
    """Delete the stored token. False: there was none in the file."""
    there = token_path().is_file()
    if there:
        try:
            library().logout()
        except OSError:  # the library complains that HF_TOKEN is still set, which the caller reports
            pass
    return there


def token_path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_TOKEN_PATH)


def offline_switch(settings: Settings) -> str:
    """Return what switched the hub off, such as `--offline` or `--offline and HF_HUB_OFFLINE`; empty: it is on."""
    own = ""
    if settings.engine.offline:
        own = f"offline in {settings.file}" if settings.source("offline") == "file" else "--offline"
    return " and ".join(filter(None, (own, offline_variable())))


def search_off(switch: str) -> HubOffline:
    """Return the error of a search. switch: as `offline_switch` returns it."""
    host = endpoint().partition("://")[2]
    return HubOffline(
        "Search is off: this server was started offline.", "", f"Start it without {switch} to search {host}."
    )


def require_hub(settings: Settings) -> None:
    """Raise `HubOffline` if the hub may not be asked."""
    if switch := offline_switch(settings):
        raise HubOffline("This needs the hub, and this server was started offline.", "", f"Start it without {switch}.")
