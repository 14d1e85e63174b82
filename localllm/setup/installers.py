"""The ways to install localllm, as one `Installer` each: how it is updated, and which folder is its own.

uv tool, pipx and pip   packages of an environment, which `update` replaces
a clone                 packages that install.sh made from a clone: its install.sh updates them
checkout                a clone that is installed as editable: git updates it
offline bundle          a folder for each version, and a link to the one in use
container               an image: its tag is changed

PyTorch and the other packages stay as they are, except where the new release requires newer ones. The release that is
replaced is kept as a wheel, so that `--back` needs no network.
Does not know: which other files localllm has (uninstall.py).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError
from localllm.machine.install_kind import InstallKind, bundle_folder, checkout_folder, install_kind, is_bundle
from localllm.setup.completion import SHELLS, installed_path, is_ours
from localllm.setup.environment import install, install_command, installer_command, kept_wheel, version_of
from localllm.setup.releases import (
    Release,
    Source,
    SourceKind,
    UpdateError,
    WheelFacts,
    changes_between,
    find_releases,
    read_wheel,
    source_of,
)
from localllm.setup.service import refuse_servers, restart_services, running_services
from localllm.terminal import confirmed, print_table
from localllm.units import format_bytes
from localllm.version import __version__

PYPI = "https://pypi.org/simple"
MAX_CHANGE_LINES = 60


class Installer:
    """One way to install localllm. This base is an environment of its own with packages (uv tool, pipx)."""

    kind: InstallKind
    is_shared = False  # the person's own packages are in the environment: only the package localllm is removed
    kept_note = ""  # why nothing of it can be removed from inside
    clone: Path | None = None  # the person's folder of sources

    def __init__(self, kind: InstallKind) -> None:
        self.kind = kind
        self.folder = Path(sys.prefix)

    def update(self, options: argparse.Namespace) -> int:
        """Install another release, or print the command where localllm cannot do it. Return the exit code."""
        return _go_back(options) if options.back else self._install(options)

    def _install(self, options: argparse.Namespace) -> int:
        services = running_services() if options.restart else {}
        if not options.check:
            refuse_servers("update", allowed=services)
        source = _source(options)
        chosen, newest = _choose(find_releases(source), options.to)
        self._say_installed()
        print(f"Newest:    {newest.version}, at {source.shown}")
        if chosen.version == __version__:
            print("There is nothing to update.")
            return 0
        facts = read_wheel(chosen.wheel)
        replaced = _tell_changes(chosen, facts)
        if options.check:
            print(f"To install it: localllm update{'' if chosen == newest else f' --to {chosen.version}'}")
            return 0
        if replaced and not options.yes and not _confirmed(f"{', '.join(replaced)} will be downloaded, too. Continue?"):
            return 1
        command, environ = install_command(source, chosen.version, is_complete=facts is not None and not replaced)
        undo = " To undo: localllm update --back" if install(command, environ) else ""
        print(f"localllm {chosen.version} is installed.{undo}")
        _refresh_completions()
        restart_services(services.values())
        return 0

    def _say_installed(self) -> None:
        print(f"Installed: {__version__} ({self.kind}, {self.clone or sys.prefix})")


class Pip(Installer):
    """An environment that the person made, with packages of theirs."""

    is_shared = True


class Clone(Installer):
    """An environment that install.sh made from a clone."""

    def __init__(self, kind: InstallKind, sources: Path) -> None:
        super().__init__(kind)
        self._sources = sources

    def _install(self, options: argparse.Namespace) -> int:
        if options.source:
            return super()._install(options)
        self._say_installed()
        print(f"It was installed from the clone {self._sources}:")
        print(f"  {_pull(self._sources)} && sh {shlex.quote(f'{self._sources}/install.sh')} --yes")
        if not (self._sources / "install.sh").is_file():
            print("That folder is gone: clone the repository again, and run its install.sh.")
        return 0


class Container(Installer):
    """An image of a container engine."""

    kept_note = "a container: docker compose down, and docker image rm; its volume holds what is listed here"

    def _install(self, options: argparse.Namespace) -> int:
        """Print how to change the image's tag. With --check: look for the newest release."""
        self._say_installed()
        tag = _version_to_name(options)
        print(f"A container is updated by its image. Set the image's tag to {tag}-cpu or {tag}-cu130, then:")
        print_table(
            [
                ("  compose", "docker compose pull && docker compose up -d"),
                ("  Kubernetes", "kubectl apply -k FOLDER-OF-YOUR-OVERLAY"),
            ]
        )
        return 0


class Checkout(Installer):
    """A clone that is installed as editable."""

    def __init__(self, kind: InstallKind) -> None:
        super().__init__(kind)
        self.clone = checkout_folder()
        own = self.clone is not None and Path(sys.prefix).resolve() == (self.clone / ".venv").resolve()
        self.is_shared = not own

    def update(self, options: argparse.Namespace) -> int:
        """Print the commands. With --check: fetch from the clone's remote, and tell what is new."""
        root = self.clone
        if options.to or options.back or options.source or root is None:
            what = "A checkout is updated with git, and --check is the only option here."
            raise ConfigError(what, hint=f"git -C {shlex.quote(str(root))} checkout COMMIT")
        self._say_installed()
        if options.check:
            _check_checkout(root)
        print(f"To update:\n  {_pull(root)} && {shlex.quote(f'{root}/scripts/up')}")
        return 0


class Bundle(Installer):
    """An offline bundle: a folder for each version, and a link to the one in use."""

    def __init__(self, kind: InstallKind) -> None:
        super().__init__(kind)
        folder = bundle_folder()
        assert folder is not None, "an offline bundle has a folder"
        self.folder = folder

    def update(self, options: argparse.Namespace) -> int:
        """Start the version that is unpacked beside this one (--back), or print how to get a newer bundle."""
        if options.back:
            refuse_servers("update")
            return _bundle_back(self.folder)
        self._say_installed()
        wanted = _version_to_name(options)
        print("To update, run the file of the new version; this version is kept beside it, for --back:")
        print(f"  sh localllm-{wanted}-linux-x86_64-cpu.run")
        return 0


def installer() -> Installer:
    """Return how the running localllm was installed."""
    kind = install_kind()
    if kind is InstallKind.UV_TOOL and (sources := _clone_of_receipt()) is not None:
        return Clone(kind, sources)
    own = {
        InstallKind.BUNDLE: Bundle,
        InstallKind.CHECKOUT: Checkout,
        InstallKind.CONTAINER: Container,
        InstallKind.PIP: Pip,
    }
    return own.get(kind, Installer)(kind)


def _go_back(options: argparse.Namespace) -> int:
    """Install the release that the last update replaced, from the wheel that was kept."""
    wheel = kept_wheel()
    if wheel is None:
        why = "Only a release that `localllm update` replaced is kept."
        raise UpdateError("There is no earlier release to go back to.", why, "localllm update --to VERSION")
    services = running_services() if options.restart else {}
    refuse_servers("update", allowed=services)
    install([*installer_command(), "--no-deps", "--no-index", str(wheel)], {})
    release = wheel.name.split("-")[1]
    print(f"localllm {release} is installed again, instead of {__version__}.")
    _put_chats_back(release)
    _refresh_completions()
    restart_services(services.values())
    return 0


def _put_chats_back(release: str) -> None:
    """Give an earlier release the chats that it wrote, where it cannot read what a later one made of them."""
    from localllm.web.pages.chat.store.database import chats_path
    from localllm.web.pages.chat.store.file_versions import put_back

    try:
        newer = put_back(chats_path(), release)
    except (OSError, sqlite3.Error) as error:
        print(f"The chats stay as they are ({error}); localllm {release} may not be able to read them.")
        return
    if newer is not None:
        print(f"The chats are those from before the update. What was written since is in {newer}.")


def _source(options: argparse.Namespace) -> Source:
    """Return the place to look at: --from, LOCALLLM_SOURCE as for install.sh, the place of the install, the index of
    uv or pip, PyPI."""
    given = options.source or os.environ.get("LOCALLLM_SOURCE") or next(_links_of_receipt(), None)
    if given:
        return source_of(given)
    names = ("UV_DEFAULT_INDEX", "UV_INDEX_URL", "PIP_INDEX_URL")
    index = next((os.environ[name] for name in names if os.environ.get(name)), PYPI)
    return Source(index.rstrip("/"), SourceKind.INDEX)


def _receipt() -> dict[str, object]:
    try:
        tool = tomllib.loads((Path(sys.prefix) / "uv-receipt.toml").read_text())["tool"]
        return tool if isinstance(tool, dict) else {}
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return {}


def _links_of_receipt() -> Iterator[str]:
    """Yield the pages and folders of wheels that uv's receipt names and that may have localllm: others are gone, or
    there for PyTorch."""
    options = _receipt().get("options")
    links = options.get("find-links", []) if isinstance(options, dict) else []
    for link in links:
        is_page = link.startswith("http") and not link.rstrip("/").endswith("/torch")
        if is_page or any(Path(link.removeprefix("file://")).glob("localllm-*.whl")):
            yield link


def _clone_of_receipt() -> Path | None:
    """Return the clone that this environment was installed from, by uv's receipt."""
    requirements = _receipt().get("requirements")
    for requirement in requirements if isinstance(requirements, list) else ():
        folder = requirement.get("directory") if isinstance(requirement, dict) else None
        if folder and requirement.get("name") == "localllm":
            return Path(folder)
    return None


def _choose(releases: Sequence[Release], wanted: str | None) -> tuple[Release, Release]:
    """Return the release to install and the newest one. An older release than the installed one must be named."""
    from packaging.version import Version

    newest = releases[-1]
    if wanted is None:
        if Version(newest.version) < Version(__version__):
            return Release(__version__, ""), newest
        return newest, newest
    found = next((release for release in releases if release.version == wanted.removeprefix("v")), None)
    if found is None:
        there = ", ".join(release.version for release in releases[-8:])
        raise UpdateError(
            f"There is no release {wanted}.", f"There are {there}.", f"localllm update --to {newest.version}"
        )
    return found, newest


def _tell_changes(release: Release, facts: WheelFacts | None) -> list[str]:
    """Print changes and sizes. Return the packages that the release needs in a newer version, as requirements."""
    if facts is None:
        size = "an unknown size" if release.size_bytes is None else format_bytes(release.size_bytes)
        print(f"To download: {size}. Its changes cannot be shown: the server does not support ranges.")
        return []
    changes = changes_between(facts.changelog, __version__, release.version)
    print("\n".join(["", *changes[:MAX_CHANGE_LINES], ""]) if changes else "Its changelog names no changes.")
    if len(changes) > MAX_CHANGE_LINES:
        print(f"({len(changes) - MAX_CHANGE_LINES} more lines)")
    replaced = list(_unsatisfied(facts.requirements))
    names = {re.split(r"[<>=!~ ]", each, maxsplit=1)[0] for each in replaced}
    torch = "" if "torch" in names else f"; PyTorch {version_of('torch')} stays"
    more = f", and {', '.join(replaced)}" if replaced else ""
    print(f"To download: {format_bytes(facts.size_bytes)}{more}{torch}.")
    return replaced


def _unsatisfied(requirements: Sequence[str]) -> Iterator[str]:
    """Yield the requirements, without extras, that the installed packages do not meet."""
    from packaging.requirements import Requirement

    for text in requirements:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            met = requirement.specifier.contains(version(requirement.name), prereleases=True)
        except PackageNotFoundError:
            met = False
        if not met:
            yield f"{requirement.name}{requirement.specifier}"


def _refresh_completions() -> None:
    """Write the new release's completions where the old release's are installed."""
    for shell in SHELLS:
        if is_ours(installed_path(shell)):
            command = [sys.executable, "-m", "localllm", "completion", shell, "--install"]
            subprocess.run(command, capture_output=True, check=False)


def _check_checkout(root: Path) -> None:
    _git(root, "fetch", "--quiet")
    count = int(_git(root, "rev-list", "--count", "HEAD..@{upstream}"))
    print(f"Newest:    {count} commits after this one, on {_git(root, 'rev-parse', '--abbrev-ref', '@{upstream}')}")
    diff = _git(root, "diff", "--unified=0", "HEAD...@{upstream}", "--", "CHANGELOG.md")
    for line in diff.splitlines():
        if line.startswith("+") and not line.startswith("+++"):
            print(f"  {line[1:]}")


def _git(root: Path, *words: str) -> str:
    """Run git in the clone and return its output. Raises `UpdateError` with its message."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=False)
    except OSError as error:
        raise UpdateError("git cannot be run.", f"{error}.", "sudo apt-get install -y git") from error
    if done.returncode:
        why = " ".join(done.stderr.split())
        raise UpdateError(f"git {words[0]} failed in {root}.", why, f"git -C {shlex.quote(str(root))} remote -v")
    return done.stdout.strip()


def _pull(root: Path) -> str:
    return f"git -C {shlex.quote(str(root))} pull"


def _version_to_name(options: argparse.Namespace) -> str:
    """Return the version for a printed command: with --check the newest one, which is looked for and printed."""
    if not options.check:
        return options.to or "VERSION"
    source = _source(options)
    chosen, newest = _choose(find_releases(source), None)
    print(f"Newest:    {newest.version}, at {source.shown}")
    return chosen.version


def _bundle_back(folder: Path) -> int:
    """Let the command start the other version in the folder of versions."""
    others = [each for each in folder.parent.iterdir() if is_bundle(each) and each != folder]
    places = (Path("~/.local/bin").expanduser(), folder.parent.parent / "bin")
    links = [place / "localllm" for place in places if (place / "localllm").is_symlink()]
    link = next((link for link in links if link.readlink().is_relative_to(folder)), None)
    if not others or link is None:
        why = f"{folder.parent} has no other version." if not others else f"No command in PATH starts {folder}."
        raise UpdateError("There is no earlier release to go back to.", why, "localllm update --check")
    other = max(others, key=lambda each: each.stat().st_mtime)
    new = link.with_name(".localllm-new")
    new.unlink(missing_ok=True)
    new.symlink_to(other / link.readlink().relative_to(folder))
    new.replace(link)
    print(f"{link} starts {other.name} again, instead of {folder.name}.")
    _put_chats_back(other.name)
    return 0


def _confirmed(question: str) -> bool:
    """Ask at a terminal. Raises `ConfigError` where there is none."""
    if not sys.stdin.isatty():
        raise ConfigError(
            question.replace(" Continue?", ""), "There is no terminal to ask at.", "localllm update --yes"
        )
    return confirmed(question, default=True)


def update_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--check", action="store_true", help="only look for a newer release, and show what it changes")
    parser.add_argument("--to", metavar="VERSION", help="install this release, newer or older")
    parser.add_argument("--back", action="store_true", help="undo the last update, without a network")
    help = "package index (.../simple), page that links wheels, or folder of wheels; default: that of the install"
    parser.add_argument("--from", dest="source", metavar="ADDRESS", help=help)
    parser.add_argument("--restart", action="store_true", help="restart the service afterwards, instead of refusing")
    parser.add_argument("--yes", "-y", action="store_true", help="do not ask for confirmation")
    add_debug_flag(parser)


def update(options: argparse.Namespace) -> int:
    """Install another release into this environment, or print the command where localllm cannot do it.
    Raises `ConfigError` for options that exclude each other and while a server runs."""
    given = [flag for flag, is_set in (("--check", options.check), ("--to", options.to), ("--back", options.back))
             if is_set]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other.", hint=f"localllm update {given[0]}")
    return installer().update(options)
