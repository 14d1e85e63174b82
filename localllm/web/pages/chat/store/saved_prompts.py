"""The library of prompts: named texts for the composer, and settings for a chat; and the notes for every chat.

Does not know: placeholders, how a prompt is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from localllm.errors import RequestError
from localllm.web.pages.chat.store.records import SavedPrompt, UserMemory
from localllm.web.pages.chat.store.tables import Tables, as_json, new_id

MAX_PROMPTS = 500


class PromptNotFound(RequestError):
    """The prompt does not exist, or was deleted."""

    status, code = 404, "prompt_not_found"


class PromptExists(RequestError):
    """Another prompt has this name."""

    status, code = 409, "prompt_exists"


class TooManyPrompts(RequestError):
    """The owner has as many prompts as are allowed."""

    code = "too_many_prompts"


class SavedPrompts(Tables):
    """The operations on prompts and on the memory."""

    def memory(self, owner: str) -> UserMemory:
        """Return an owner's notes; off and empty at first."""
        row = self._db.execute("SELECT is_on, text FROM memory WHERE owner = ?", (owner,)).fetchone()
        return UserMemory(bool(row[0]), row[1]) if row is not None else UserMemory()

    def set_memory(self, owner: str, memory: UserMemory) -> None:
        self._db.execute("INSERT OR REPLACE INTO memory VALUES (?, ?, ?)", (owner, memory.is_on, memory.text))

    def prompts(self, owner: str) -> list[SavedPrompt]:
        """Return an owner's prompts by name."""
        rows = self._db.execute(
            "SELECT id, name, text, settings FROM prompt WHERE owner = ? AND deletion IS NULL "
            "ORDER BY name COLLATE NOCASE, number",
            (owner,),
        )
        return [_prompt(row) for row in rows]

    def prompt(self, owner: str, prompt_id: str) -> SavedPrompt:
        """Return a prompt. Raises `PromptNotFound`."""
        row = self._db.execute(
            "SELECT id, name, text, settings FROM prompt WHERE id = ? AND owner = ? AND deletion IS NULL",
            (prompt_id, owner),
        ).fetchone()
        if row is None:
            what = "This prompt is not on the server."
            raise PromptNotFound(what, "It was deleted, or it never existed.", "Open the list of prompts.")
        return _prompt(row)

    def add_prompt(self, owner: str, name: str, text: str, settings: Mapping[str, str]) -> SavedPrompt:
        """Add a prompt. Raises `PromptExists`, `TooManyPrompts`."""
        self._require_free_name(owner, name, "")
        self._require_room(owner, 1)
        return self._insert(owner, name, text, settings)

    def change_prompt(self, owner: str, prompt_id: str, name: str, text: str, settings: Mapping[str, str]) -> None:
        """Replace the contents of a prompt. Raises `PromptNotFound`, `PromptExists`."""
        self.prompt(owner, prompt_id)
        self._require_free_name(owner, name, prompt_id)
        self._db.execute(
            "UPDATE prompt SET name = ?, text = ?, settings = ? WHERE id = ?",
            (name, text, as_json(settings), prompt_id),
        )

    def add_prompts(self, owner: str, prompts: Sequence[SavedPrompt]) -> int:
        """Add prompts from a file; return how many. One whose name is in use gets a number behind it, one that is
        already there word for word is left out. Raises `TooManyPrompts`.
        """
        known = {(each.name, each.text, as_json(each.settings)) for each in self.prompts(owner)}
        new = [each for each in prompts if (each.name, each.text, as_json(each.settings)) not in known]
        self._require_room(owner, len(new))
        with self._whole():
            names = {each.name for each in self.prompts(owner)}
            for each in new:
                name, number = each.name, 1
                while name in names:
                    number += 1
                    name = f"{each.name} ({number})"
                names.add(name)
                self._insert(owner, name, each.text, each.settings)
        return len(new)

    def delete_prompt(self, owner: str, prompt_id: str) -> str:
        """Delete a prompt; return the id with which `undo` restores it."""
        self.prompt(owner, prompt_id)
        with self._whole():
            deletion = self._new_deletion()
            self._db.execute("UPDATE prompt SET deletion = ? WHERE id = ?", (deletion, prompt_id))
        return deletion

    # Presets: prompts with settings, by name --------------------------------------------------------------------------

    def presets(self, owner: str) -> dict[str, dict[str, str]]:
        """Return the settings of the prompts that have some, by name."""
        return {each.name: dict(each.settings) for each in self.prompts(owner) if each.settings}

    def save_preset(self, owner: str, name: str, settings: Mapping[str, str]) -> None:
        """Save settings under a name. A prompt of that name keeps its text."""
        found = next((each for each in self.prompts(owner) if each.name == name), None)
        if found is None:
            self.add_prompt(owner, name, "", settings)
        else:
            self.change_prompt(owner, found.id, name, found.text, settings)

    def remove_preset(self, owner: str, name: str) -> None:
        """Remove the settings of this name: a prompt with a text keeps the text, one without is deleted. Raises
        `PromptNotFound`.
        """
        found = next((each for each in self.prompts(owner) if each.name == name), None)
        if found is not None and found.text:
            self.change_prompt(owner, found.id, name, found.text, {})
        else:
            self.delete_prompt(owner, found.id if found is not None else "")

    def _insert(self, owner: str, name: str, text: str, settings: Mapping[str, str]) -> SavedPrompt:
        prompt_id = new_id()
        row = (prompt_id, owner, name, text, as_json(settings))
        self._db.execute("INSERT INTO prompt (id, owner, name, text, settings) VALUES (?, ?, ?, ?, ?)", row)
        return self.prompt(owner, prompt_id)

    def _require_free_name(self, owner: str, name: str, prompt_id: str) -> None:
        if any(each.name == name and each.id != prompt_id for each in self.prompts(owner)):
            raise PromptExists(f"There is a prompt called {name!r} already.", hint="Choose another name.")

    def _require_room(self, owner: str, count: int) -> None:
        there = len(self.prompts(owner))
        if there + count > MAX_PROMPTS:
            why = f"There are {there}, {count} more were sent; at most {MAX_PROMPTS} are allowed."
            raise TooManyPrompts("There are too many prompts.", why, "Delete some that are no longer needed.")


def _prompt(row: tuple[str, str, str, str]) -> SavedPrompt:
    prompt_id, name, text, settings = row
    return SavedPrompt(prompt_id, name, text, json.loads(settings))
