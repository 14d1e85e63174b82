"""`localllm keys add NAME | list | remove NAME`: who may use this machine's server.

A running server sees the change at its next request. Does not know: where keys are checked (web/auth.py).
"""

from __future__ import annotations

import argparse
import json

from localllm.cli.tell import print_table
from localllm.errors import ConfigError
from localllm.keys import Key, add_key, keys_path, read_keys, remove_key


def keys(options: argparse.Namespace) -> int:
    if options.action != "list" and not options.name:
        raise ConfigError(f"Which key is to be {options.action}ed?", "", f"localllm keys {options.action} NAME")
    if options.action == "list" and options.name:
        raise ConfigError(f"Unexpected argument {options.name!r}.", "", "localllm keys list")
    return _ACTIONS[options.action](options)


def _add(options: argparse.Namespace) -> int:
    path = keys_path()
    key = add_key(path, options.name, options.scope)
    if options.json:
        print(json.dumps({"name": options.name, "scope": options.scope, "key": key, "path": str(path)}))
        return 0
    print(key)
    print(f"This is the only time it is shown. It may {_RIGHTS[options.scope]}; its hash is in {path}.")
    return 0


def _list(options: argparse.Namespace) -> int:
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
    removed = remove_key(keys_path(), options.name)
    print(json.dumps(_facts(removed)) if options.json else f"{removed.name} opens nothing any more.")
    return 0


def _facts(key: Key) -> dict[str, str]:
    return {"name": key.name, "scope": key.scope, "last": key.last, "created": key.created}


_ACTIONS = {"add": _add, "list": _list, "remove": _remove}
_RIGHTS = {
    "infer": "use the models and read the metrics",
    "admin": "do everything: also load, unload, fetch and delete models",
}
