"""A small Hugging Face hub on this machine, for the real client: repositories are folders.

It speaks what huggingface_hub needs: the search, a repository's files with sizes and hashes, HEAD and GET of a file
with ranges, ETags and X-Repo-Commit; large files are answered by a redirect to a second server, the "CDN", which must
never see a token. Every request is written down with the bytes that were sent for it. `Trouble` makes a file misbehave.

    with LocalHub() as hub:
        hub.add_repo("org/name", folder)
        environ = hub.environ(tmp_path)        # HF_ENDPOINT, HF_HOME, ... for this process or another

Does not know: localllm.
"""

import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_BYTES = 64 * 1024
"""From here on, and for weights always, a file is kept as a large one: sha256 for an ETag, and on the CDN."""
_PIECE = 16 * 1024


@dataclass
class Trouble:
    """What is wrong with a file. `times`: how often, then it behaves."""

    cut_after: int | None = None  # close the connection after so many bytes of an answer
    stall_after: int | None = None  # say nothing more after so many bytes, until the hub is told to go on
    status: int | None = None  # answer with this
    retry_after: int | None = None  # and say so
    ignore_ranges: bool = False
    wrong_bytes: bool = False  # right length, other content
    times: int = 1


@dataclass(frozen=True)
class Sent:
    """One request and what came of it."""

    method: str
    path: str
    status: int
    num_bytes: int  # of the body, really written
    range: str
    authorization: str
    on_cdn: bool


@dataclass
class _File:
    path: Path
    size: int
    sha256: str
    git_sha1: str

    @property
    def is_large(self) -> bool:
        return self.size >= LARGE_BYTES or self.path.suffix in (".safetensors", ".gguf")

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_large else self.git_sha1


@dataclass
class Repo:
    """A repository. `commits` by branch, tag or hash."""

    repo_id: str
    gated: bool = False
    private: bool = False
    license: str = "apache-2.0"
    downloads: int = 100
    allowed: set[str] = field(default_factory=set)  # users who may read it if it is gated or private
    commits: dict[str, dict[str, _File]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, revision: str) -> str | None:
        return self.refs.get(revision) or (revision if revision in self.commits else None)


class LocalHub:
    """Serves from `with` to the end of it."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, str] = {}  # by token
        self.sent: list[Sent] = []
        self.troubles: dict[str, Trouble] = {}  # by file name, or "api"
        self.go_on = threading.Event()
        self.stalled = threading.Event()  # set when an answer has stalled
        self._lock = threading.Lock()
        self._api, self._cdn = (self._server(on_cdn) for on_cdn in (False, True))

    def __enter__(self) -> Self:
        for server in (self._api, self._cdn):
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.go_on.set()
        for server in (self._api, self._cdn):
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._api.server_address[1]}"

    @property
    def cdn_url(self) -> str:
        return f"http://127.0.0.1:{self._cdn.server_address[1]}"

    def environ(self, home: Path) -> dict[str, str]:
        """What points huggingface_hub here and keeps it away from this user's own cache and token."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DOWNLOAD_TIMEOUT": "5",
            "HF_HUB_ETAG_TIMEOUT": "5",
            "NO_PROXY": "127.0.0.1",
        }

    def add_repo(
        self,
        repo_id: str,
        folder: Path,
        *,
        revision: str = "main",
        gated: bool = False,
        private: bool = False,
        **facts: Any,
    ) -> Repo:
        """Serve a folder's files; again for the same name and revision: a new commit."""
        repo = self.repos.setdefault(repo_id, Repo(repo_id))
        repo.gated, repo.private = gated, private
        for name, value in facts.items():
            assert hasattr(repo, name), name
            setattr(repo, name, value)
        files = {str(path.relative_to(folder)): _file(path) for path in sorted(folder.rglob("*")) if path.is_file()}
        listing = json.dumps({name: file.sha256 for name, file in files.items()})
        commit = hashlib.sha1(f"{repo_id}{listing}".encode()).hexdigest()
        repo.commits[commit] = files
        repo.refs[revision] = commit
        return repo

    def bytes_sent(self, name: str) -> int:
        """Body bytes that left for a file, by its name or its hash on the CDN, ranged looks included."""
        hashes = {
            file.sha256
            for repo in self.repos.values()
            for c in repo.commits.values()
            for n, file in c.items()
            if n == name
        }
        with self._lock:
            return sum(
                each.num_bytes for each in self.sent
                if each.path.endswith(f"/{name}") or each.path.rpartition("/")[2] in hashes
            )  # fmt: skip

    def _server(self, on_cdn: bool) -> ThreadingHTTPServer:
        class Handler(_Handler):
            pass

        Handler.hub, Handler.on_cdn = self, on_cdn
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        return server

    def note(self, sent: Sent) -> None:
        with self._lock:
            self.sent.append(sent)

    def trouble(self, name: str) -> Trouble | None:
        """The file's trouble, if it is not over."""
        with self._lock:
            trouble = self.troubles.get(name)
            if trouble is None or trouble.times == 0:
                return None
            trouble.times -= 1
            return trouble


def _file(path: Path) -> _File:
    content = path.read_bytes()
    blob = b"blob %d\0" % len(content) + content
    return _File(path, len(content), hashlib.sha256(content).hexdigest(), hashlib.sha1(blob).hexdigest())


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    on_cdn: bool
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.body_bytes, self.answered = 0, 0
        path = unquote(urlsplit(self.path).path)
        try:
            if self.on_cdn:
                self._cdn(path)
            elif path.startswith("/api/"):
                self._api(path)
            else:
                self._resolve(path)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            self.hub.note(
                Sent(
                    self.command,
                    path,
                    self.answered,
                    self.body_bytes,
                    self.headers.get("range", ""),
                    self.headers.get("authorization", ""),
                    self.on_cdn,
                )
            )

    # ---- the API -----------------------------------------------------------------------------------------------------

    def _api(self, path: str) -> None:
        trouble = self.hub.trouble("api")
        if trouble is not None and self._is_trouble(trouble):
            return
        if path == "/api/models":
            self._search()
        elif path == "/api/whoami-v2":
            self._whoami()
        elif match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)?)/tree/([^/]+)", path):
            self._tree(match[1], match[2])
        elif match := re.fullmatch(r"/api/models/([^/]+(?:/[^/]+)??)(?:/revision/(.+))?", path):
            self._info(match[1], match[2] or "main")
        else:
            self._refuse(404, "", "no such route")

    def _search(self) -> None:
        query = {name: values[-1] for name, values in parse_qs(urlsplit(self.path).query).items()}
        words, wanted = query.get("search", "").lower(), query.get("filter")
        found = [
            self._facts(repo, repo.refs["main"])
            for repo in sorted(self.hub.repos.values(), key=lambda repo: -repo.downloads)
            if words in repo.repo_id.lower() and not repo.private and "main" in repo.refs
        ]
        self._json(
            [facts for facts in found if wanted is None or wanted in facts["tags"]][: int(query.get("limit", 100))]
        )

    def _whoami(self) -> None:
        user = self._user()
        if user is None:
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        self._json({"name": user, "type": "user", "auth": {"accessToken": {"displayName": "test", "role": "read"}}})

    def _info(self, repo_id: str, revision: str) -> None:
        found = self._find(repo_id, revision, reads_file=False)
        if found is None:
            return
        repo, commit = found
        facts = self._facts(repo, commit)
        facts["siblings"] = [self._sibling(name, file) for name, file in repo.commits[commit].items()]
        self._json(facts)

    def _tree(self, repo_id: str, revision: str) -> None:
        found = self._find(repo_id, revision, reads_file=False)
        if found is not None:
            self._json(
                [
                    {"type": "file", "path": name, "size": file.size, "oid": file.git_sha1, **_lfs("oid", file)}
                    for name, file in found[0].commits[found[1]].items()
                ]
            )

    def _facts(self, repo: Repo, commit: str) -> dict[str, Any]:
        names = repo.commits[commit]
        kinds = [kind for kind in ("safetensors", "gguf") if any(name.endswith(f".{kind}") for name in names)]
        return {
            "_id": "0", "id": repo.repo_id, "modelId": repo.repo_id, "sha": commit, "private": repo.private,
            "gated": "auto" if repo.gated else False, "downloads": repo.downloads, "likes": 3, "disabled": False,
            "lastModified": "2026-01-02T03:04:05.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
            "pipeline_tag": "text-generation", "library_name": "transformers",
            "tags": [*kinds, f"license:{repo.license}"], "cardData": {"license": repo.license},
        }  # fmt: skip

    def _sibling(self, name: str, file: _File) -> dict[str, Any]:
        return {"rfilename": name, "size": file.size, "blobId": file.git_sha1, **_lfs("sha256", file)}

    # ---- files -------------------------------------------------------------------------------------------------------

    def _resolve(self, path: str) -> None:
        match = re.fullmatch(r"/([^/]+(?:/[^/]+)?)/resolve/(.+)", path)
        repo = self.hub.repos.get(match[1]) if match else None
        if match is None or repo is None:
            return self._refuse(401 if self._user() is None else 404, "RepoNotFound", "Repository not found")
        revision, name = self._split(repo, match[2])
        found = self._find(match[1], revision, reads_file=True)
        if found is None:
            return
        file = repo.commits[found[1]].get(name)
        if file is None:
            return self._refuse(404, "EntryNotFound", "Entry not found", {"x-repo-commit": found[1]})
        headers = {"x-repo-commit": found[1], "etag": f'"{file.etag}"', "accept-ranges": "bytes"}
        if file.is_large:
            linked = {"x-linked-size": str(file.size), "x-linked-etag": f'"{file.sha256}"'}
            location = f"{self.hub.cdn_url}/{file.sha256}"
            return self._head(302, {**headers, **linked, "location": location, "content-length": "0"})
        self._send(name, file, headers)

    def _cdn(self, path: str) -> None:
        for repo in self.hub.repos.values():
            for files in repo.commits.values():
                for name, file in files.items():
                    if path == f"/{file.sha256}":
                        return self._send(name, file, {"etag": f'"{file.sha256}"', "accept-ranges": "bytes"})
        self._refuse(404, "", "not on the CDN")

    def _send(self, name: str, file: _File, headers: dict[str, str]) -> None:
        trouble = self.hub.trouble(name) if self.command == "GET" else None
        if trouble is not None and self._is_trouble(trouble):
            return
        content = file.path.read_bytes()
        if trouble is not None and trouble.wrong_bytes:
            content = bytes(byte ^ 1 for byte in content)
        start, end = self._range(len(content), trouble)
        if start >= len(content) > 0:
            return self._refuse(416, "", "range", {"content-range": f"bytes */{len(content)}"})
        partial = (start, end) != (0, len(content)) or (
            "range" in self.headers and not (trouble and trouble.ignore_ranges)
        )
        if partial:
            headers = {**headers, "content-range": f"bytes {start}-{end - 1}/{len(content)}"}
        self._head(206 if partial else 200, {**headers, "content-length": str(end - start)})
        if self.command == "GET":
            self._body(content[start:end], trouble)

    def _range(self, size: int, trouble: Trouble | None) -> tuple[int, int]:
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", ""))
        if match is None or (trouble is not None and trouble.ignore_ranges):
            return 0, size
        return int(match[1]), min(size, int(match[2]) + 1 if match[2] else size)

    def _body(self, content: bytes, trouble: Trouble | None) -> None:
        limits = [limit for limit in (trouble.cut_after, trouble.stall_after) if limit is not None] if trouble else []
        limit = min(limits, default=len(content))
        for start in range(0, min(limit, len(content)), _PIECE):
            piece = content[start : min(start + _PIECE, limit)]
            self.wfile.write(piece)
            self.body_bytes += len(piece)
        if limits and limit < len(content):
            self.wfile.flush()
            if trouble is not None and trouble.stall_after is not None:
                self.hub.stalled.set()
                self.hub.go_on.wait(30)
            self.close_connection = True

    # ---- who may, and refusals ---------------------------------------------------------------------------------------

    def _find(self, repo_id: str, revision: str, *, reads_file: bool) -> tuple[Repo, str] | None:
        """The repository and the commit, or None: refused already."""
        repo, user = self.hub.repos.get(repo_id), self._user()
        if repo is None or (repo.private and user not in repo.allowed):
            self._refuse(401 if user is None else 404, "RepoNotFound", "Repository not found")
        elif repo.gated and reads_file and user not in repo.allowed:
            self._refuse(401 if user is None else 403, "GatedRepo", f"Access to model {repo_id} is restricted.")
        elif repo.commit(revision) is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        else:
            return repo, str(repo.commit(revision))
        return None

    def _split(self, repo: Repo, rest: str) -> tuple[str, str]:
        """'refs/pr/1/config.json' -> the revision, the file."""
        for revision in sorted([*repo.refs, *repo.commits], key=len, reverse=True):
            if rest.startswith(f"{revision}/"):
                return revision, rest[len(revision) + 1 :]
        revision, _, name = rest.partition("/")
        return revision, name

    def _user(self) -> str | None:
        return self.hub.users.get(self.headers.get("authorization", "").removeprefix("Bearer "))

    def _is_trouble(self, trouble: Trouble) -> bool:
        """Answers for the file if its trouble is a status, or silence from the beginning."""
        if trouble.status is not None:
            wait = {} if trouble.retry_after is None else {"retry-after": str(trouble.retry_after)}
            self._refuse(trouble.status, "", "not now", wait)
        elif trouble.stall_after == 0:
            self.hub.stalled.set()
            self.hub.go_on.wait(30)
            self.close_connection = True
        else:
            return False
        return True

    def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        extra = {"x-error-code": code} if code else {}
        self._json({"error": message}, status, {"x-error-message": message, **extra, **(headers or {})})

    def _json(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(content).encode()
        self._head(status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})})
        if self.command == "GET":
            self.wfile.write(body)
            self.body_bytes += len(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.answered = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """The list of requests is the log."""


def _lfs(hash_name: str, file: _File) -> dict[str, Any]:
    return {"lfs": {hash_name: file.sha256, "size": file.size, "pointerSize": 130}} if file.is_large else {}


def wait_until_stalled(hub: LocalHub, seconds: float = 20.0) -> None:
    assert hub.stalled.wait(seconds), "the hub was not asked in time"
    time.sleep(0.05)  # what was sent before is read by now
