"""`localllm update`: install another release into this environment, or print the command where localllm cannot do it.

PyTorch and the other packages stay as they are, except where the new release requires newer ones. The release that is
replaced is kept as a wheel, so that `--back` needs no network. Nothing calls this but the person who types it.
Does not know: where releases are found (releases.py), how localllm was installed (machine/install_kind.py).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from localllm.config.flags import add_debug_flag
from localllm.errors import ConfigError
from localllm.machine.install_kind import InstallKind, bundle_folder, checkout_folder, install_kind, is_bundle, uv
from localllm.machine.running_servers import running_servers
from localllm.setup.completion import SHELLS, installed_path, is_ours
from localllm.setup.installed_wheel import keep_wheel, kept_wheel
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
from localllm.setup.service import Systemd
from localllm.setup.units import SERVICE
from localllm.terminal import confirmed, print_table
from localllm.units import format_bytes
from localllm.version import __version__

PYPI = "https://pypi.org/simple"
USED = "It uses the files of this environment."
MAX_CHANGE_LINES = 60


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
    """Run the verb. Raises `ConfigError` for options that exclude each other and while a server runs."""
    given = [flag for flag, is_set in (("--check", options.check), ("--to", options.to), ("--back", options.back))
             if is_set]  # fmt: skip
    if len(given) > 1:
        raise ConfigError(f"{given[0]} and {given[1]} exclude each other.", hint=f"localllm update {given[0]}")
    kind = install_kind()
    if kind is InstallKind.CHECKOUT:
        return _update_checkout(options)
    if kind is InstallKind.BUNDLE:
        return _update_bundle(options)
    if options.back:
        return _go_back(options)
    clone = _clone_of_receipt()
    if clone is not None and not options.source:
        _say_installed(kind)
        print(f"It was installed from the clone {clone}:")
        print(f"  {_pull(clone)} && sh {shlex.quote(f'{clone}/install.sh')} --yes")
        if not (clone / "install.sh").is_file():
            print("That folder is gone: clone the repository again, and run its install.sh.")
        return 0
    if kind is InstallKind.CONTAINER:
        return _update_container(options)
    return _update_environment(options, kind)


# An environment with pip or uv ---------------------------------------------------------------------------------------


def _update_environment(options: argparse.Namespace, kind: InstallKind) -> int:
    services = running_services() if options.restart else {}
    if not options.check:
        refuse_servers("update", allowed=services)
    source = _source(options)
    chosen, newest = _choose(find_releases(source), options.to)
    _say_installed(kind)
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
    command, environ = _command(source, chosen.version, is_complete=facts is not None and not replaced)
    undo = " To undo: localllm update --back" if _run_undoable(command, environ) else ""
    print(f"localllm {chosen.version} is installed.{undo}")
    _refresh_completions()
    _restart_services(services.values())
    return 0


def _go_back(options: argparse.Namespace) -> int:
    """Install the release that the last update replaced, from the wheel that was kept."""
    wheel = kept_wheel()
    if wheel is None:
        why = "Only a release that `localllm update` replaced is kept."
        raise UpdateError("There is no earlier release to go back to.", why, "localllm update --to VERSION")
    services = running_services() if options.restart else {}
    refuse_servers("update", allowed=services)
    _run_undoable([*_installer(), "--no-deps", "--no-index", str(wheel)], {})
    release = wheel.name.split("-")[1]
    print(f"localllm {release} is installed again, instead of {__version__}.")
    _put_chats_back(release)
    _refresh_completions()
    _restart_services(services.values())
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
    torch = "" if any(_name(each) == "torch" for each in replaced) else f"; PyTorch {_version_of('torch')} stays"
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


def _name(requirement: str) -> str:
    return re.split(r"[<>=!~ ]", requirement, maxsplit=1)[0]


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def _command(source: Source, wanted: str, *, is_complete: bool) -> tuple[list[str], dict[str, str]]:
    """Return the command that installs a release, and its variables. is_complete: all other packages are installed."""
    command = [*_installer(), f"localllm=={wanted}", *(["--no-deps"] if is_complete else _same_build())]
    if source.kind is SourceKind.INDEX:  # in the environment: the address may have a password
        return command, dict.fromkeys(("UV_DEFAULT_INDEX", "PIP_INDEX_URL"), source.address)
    command += ["--find-links", source.address]
    if is_complete or (Path(source.address) / "wheelhouse.txt").is_file():
        command += ["--no-index"]
    return command, {}


def _installer() -> list[str]:
    """Return the command that installs packages into this environment: pip's if it has pip, else uv's."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    found = shutil.which(shlex.split(uv())[0])
    if found is None:
        why = f"{sys.prefix} has no pip, and uv is not in PATH."
        raise UpdateError("There is no program to install packages with.", why, "sh install.sh")
    return [found, "pip", "install", "--python", sys.prefix, "--compile-bytecode"]


def _same_build() -> list[str]:
    """Return uv's option that takes a newer PyTorch from the index of the installed build."""
    build = re.search(r"\+(cpu|cu\d+)$", _version_of("torch"))
    is_uv = importlib.util.find_spec("pip") is None
    return ["--torch-backend", build[1]] if build and is_uv else []


def _run_undoable(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Run the installer, and keep the release that it replaces instead of an earlier one. Return whether it is kept.

    Raises `UpdateError` if the installer fails; the earlier release is then still kept.
    """
    before, replaced = kept_wheel(), keep_wheel()
    try:
        _run(command, environ)
    except BaseException:
        if replaced is not None:
            replaced.unlink()
        raise
    if before is not None:
        before.unlink()
    return replaced is not None


def _run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run the installer with its output shown. Raises `UpdateError` if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    kept = {name: value for name, value in os.environ.items() if name not in ("UV_PYTHON", "VIRTUAL_ENV")}
    with contextlib.ExitStack() as stack:
        if uv() != "uv":  # made by install.sh, which leaves no cache behind; hard links need the same file system
            root = Path(sys.prefix).parent.parent
            cache = tempfile.TemporaryDirectory(prefix=".cache-", dir=root, ignore_cleanup_errors=True)
            kept["UV_CACHE_DIR"] = stack.enter_context(cache)
        code = subprocess.run(command, env={**kept, **environ}, check=False).returncode
    if code:
        what = f"localllm was not updated: {Path(command[0]).name} ended with exit code {code}."
        raise UpdateError(what, "Its message is above.", "localllm update again; localllm doctor checks the install")


# Servers and completions ---------------------------------------------------------------------------------------------


def refuse_servers(verb: str, allowed: Collection[int] = ()) -> None:
    """Refuse a verb while servers of this user, or the machine's service, run. allowed: processes that may run."""
    services = running_services()
    for server in running_servers():
        if server.pid not in allowed:
            what = f"A server runs: {server.url} ({server.model}), process {server.pid}."
            hint = f"Ctrl-C in its terminal, or: kill {server.pid}"
            service = services.get(server.pid)
            raise ConfigError(what, USED, hint if service is None else _how_to_stop(service, verb))
    for pid, manager in services.items():
        if pid not in allowed:
            raise ConfigError(f"The service runs, process {pid}.", USED, _how_to_stop(manager, verb))


def running_services() -> dict[int, Systemd]:
    """Return the managers whose localllm service runs, by the service's process."""
    found = {}
    for manager in (Systemd(is_system=False), Systemd(is_system=True)):
        if shutil.which("systemctl") and (manager.folder / SERVICE).exists():
            told = re.search(r"MainPID=(\d+)", manager.run("show", SERVICE, "--property=MainPID", must=False))
            if told and told[1] != "0":
                found[int(told[1])] = manager
    return found


def _how_to_stop(manager: Systemd, verb: str) -> str:
    restart = "localllm update --restart, or: " if verb == "update" else ""
    return f"{restart}{'sudo systemctl' if manager.is_system else 'systemctl --user'} stop {SERVICE}"


def _restart_services(services: Iterable[Systemd]) -> None:
    for manager in services:
        manager.run("restart", SERVICE)
        print("The service was restarted.")


def _refresh_completions() -> None:
    """Write the completions of the new release where those of the old one are installed."""
    for shell in SHELLS:
        if is_ours(installed_path(shell)):
            command = [sys.executable, "-m", "localllm", "completion", shell, "--install"]
            subprocess.run(command, capture_output=True, check=False)


# Other kinds of install ----------------------------------------------------------------------------------------------


def _update_checkout(options: argparse.Namespace) -> int:
    """Print the commands. With --check: fetch from the clone's remote, and tell what is new."""
    root = checkout_folder()
    if options.to or options.back or options.source or root is None:
        what = "A checkout is updated with git, and --check is the only option here."
        raise ConfigError(what, hint=f"git -C {shlex.quote(str(root))} checkout COMMIT")
    _say_installed(InstallKind.CHECKOUT)
    if options.check:
        _check_checkout(root)
    print(f"To update:\n  {_pull(root)} && {shlex.quote(f'{root}/scripts/up')}")
    return 0


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


def _update_bundle(options: argparse.Namespace) -> int:
    """Start the version that is unpacked beside this one (--back), or print how to get a newer bundle."""
    folder = bundle_folder()
    assert folder is not None, "an offline bundle has a folder"
    if options.back:
        refuse_servers("update")
        return _bundle_back(folder)
    _say_installed(InstallKind.BUNDLE)
    wanted = _version_to_name(options)
    print("To update, run the file of the new version; this version is kept beside it, for --back:")
    print(f"  sh localllm-{wanted}-linux-x86_64-cpu.run")
    return 0


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


def _update_container(options: argparse.Namespace) -> int:
    """Print how to change the image's tag. With --check: look for the newest release."""
    _say_installed(InstallKind.CONTAINER)
    tag = _version_to_name(options)
    print(f"A container is updated by its image. Set the image's tag to {tag}-cpu or {tag}-cu130, then:")
    print_table(
        [
            ("  compose", "docker compose pull && docker compose up -d"),
            ("  Kubernetes", "kubectl apply -k FOLDER-OF-YOUR-OVERLAY"),
        ]
    )
    return 0


def _say_installed(kind: InstallKind) -> None:
    place = checkout_folder() if kind is InstallKind.CHECKOUT else Path(sys.prefix)
    print(f"Installed: {__version__} ({kind}, {place})")


def _confirmed(question: str) -> bool:
    """Ask at a terminal. Raises `ConfigError` where there is none."""
    if not sys.stdin.isatty():
        raise ConfigError(
            question.replace(" Continue?", ""), "There is no terminal to ask at.", "localllm update --yes"
        )
    return confirmed(question, default=True)
