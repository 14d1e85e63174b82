"""`localllm keys add NAME | list | remove NAME`: manage the API keys of this machine's server.

A running server reads changes at its next request. Does not know: where keys are checked (web/access/auth.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.config.flags import add_json
from localllm.errors import ConfigError
from localllm.terminal import print_table

if TYPE_CHECKING:
    from localllm.web.access.keys import Key


def keys_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("add", "list", "remove"), nargs="?", default="list", help="without it: list")
    parser.add_argument("name", nargs="?", metavar="NAME", help="the key's name, as the access log shows it")
    help = "infer: use models and read metrics; admin: also load, unload, download and delete models"
    parser.add_argument("--scope", choices=("infer", "admin"), default="infer", help=help)
    parser.add_argument("--delete-chats", action="store_true", help="with remove: also delete the key's chats")
    add_json(parser)


def keys(options: argparse.Namespace) -> int:
    if options.action != "list" and not options.name:
        raise ConfigError(f"keys {options.action} needs a NAME.", "", f"localllm keys {options.action} NAME")
    if options.delete_chats and options.action != "remove":
        raise ConfigError("--delete-chats needs remove.", "", "localllm keys remove NAME --delete-chats")
    if options.action == "list" and options.name:
        raise ConfigError(f"Unexpected argument {options.name!r}.", "", "localllm keys list")
    return _ACTIONS[options.action](options)


def _add(options: argparse.Namespace) -> int:
    from localllm.web.access.keys import add_key, keys_path

    path = keys_path()
    key = add_key(path, options.name, options.scope)
    if options.json:
        print(json.dumps({"name": options.name, "scope": options.scope, "key": key, "path": str(path)}))
        return 0
    print(key)
    print(f"This key is shown only once. It may {_RIGHTS[options.scope]}. Its hash is stored in {path}.")
    return 0


def _list(options: argparse.Namespace) -> int:
    from localllm.web.access.keys import keys_path, read_keys

    path = keys_path()
    found = read_keys(path)
    if options.json:
        print(json.dumps([_facts(key) for key in found], indent=2))
    elif found:
        rows = [(key.name, key.scope, f"…{key.last}", key.created) for key in found]
        print_table([("NAME", "SCOPE", "KEY", "CREATED"), *rows])
    else:
        print(f"There is no key in {path}.")
    return 0


def _remove(options: argparse.Namespace) -> int:
    """Remove the key before counting its chats, so that no further chat is added meanwhile."""
    from localllm.web.access.keys import keys_path, read_keys, remove_key
    from localllm.web.pages.chat.store import Chats
    from localllm.web.pages.chat.store.database import beside_a_server, chats_path

    removed = remove_key(keys_path(), options.name)
    if not options.json:
        print(f"The key {removed.name} is removed.")
    left = [key for key in read_keys(keys_path()) if key.scope == "infer"]
    sharing = [key.name for key in left if key.owner == removed.owner]
    path, num_chats = chats_path(), 0
    if removed.scope == "infer":  # admins see the chats of the machine, which belong to no key
        with beside_a_server(path) as db:
            if db is not None:
                num_chats = Chats(db).count(removed.owner)
                if options.delete_chats and not sharing:
                    Chats(db).wipe(removed.owner)
    deleted = options.delete_chats and not sharing
    if options.json:
        print(json.dumps({**_facts(removed), "id": removed.owner, "chats": num_chats, "chats_deleted": deleted}))
    elif num_chats:
        print(_fate(removed, num_chats, path, sharing, deleted=deleted))
    return 0


def _fate(removed: Key, num_chats: int, path: Path, sharing: list[str], *, deleted: bool) -> str:
    """Say what happens to the chats of a removed key."""
    its = "Its 1 chat" if num_chats == 1 else f"Its {num_chats} chats"
    if sharing:
        return f"{its} can still be read with the key {' or '.join(sharing)}."
    if deleted:
        return f"{its} {'is' if num_chats == 1 else 'are'} deleted."
    return (
        f"{its} can no longer be read with any key. To read them with another key, add this line to that key in\n"
        f'{path.with_name("keys.toml")}: id = "{removed.owner}". --delete-chats deletes a key together with its chats.'
    )


def _facts(key: Key) -> dict[str, str]:
    return {"name": key.name, "scope": key.scope, "last": key.last, "created": key.created}


_ACTIONS = {"add": _add, "list": _list, "remove": _remove}
_RIGHTS = {
    "infer": "use the models and read the metrics",
    "admin": "do everything: also load, unload, download and delete models",
}
