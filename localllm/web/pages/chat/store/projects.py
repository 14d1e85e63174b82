"""Projects: a name, the settings with which a new chat starts, and the files that the model reads in every chat.

A chat is in one project at most. Does not know: how a file is read, what the model does with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

from localllm.errors import RequestError
from localllm.web.pages.chat.store import search
from localllm.web.pages.chat.store.records import Chat, Project, ProjectFile, ProjectFolder
from localllm.web.pages.chat.store.tables import Tables, as_json, new_id

MAX_PROJECTS = 100
HOLDS_FOLDERS = "//folder"
"""The owner of the chats that hold the files of folders: a name that no key may have, so no list shows them."""
NUM_CHATS = "(SELECT count(*) FROM chat WHERE project_id = project.id AND chat.deletion IS NULL AND NOT archived)"


class ProjectNotFound(RequestError):
    """The project does not exist, or was deleted."""

    status, code = 404, "project_not_found"


class TooManyProjects(RequestError):
    """The owner has as many projects as are allowed."""

    code = "too_many_projects"


class Projects(Tables):
    """The operations on projects and their files."""

    def projects(self, owner: str) -> list[Project]:
        """Return an owner's projects by name."""
        rows = self._db.execute(
            f"SELECT id, name, settings, {NUM_CHATS} FROM project WHERE owner = ? AND deletion IS NULL "
            "ORDER BY name COLLATE NOCASE, number",
            (owner,),
        )
        return [_project(row) for row in rows]

    def project(self, owner: str, project_id: str) -> Project:
        """Return a project. Raises `ProjectNotFound`."""
        row = self._db.execute(
            f"SELECT id, name, settings, {NUM_CHATS} FROM project WHERE id = ? AND owner = ? AND deletion IS NULL",
            (project_id, owner),
        ).fetchone()
        if row is None:
            what = "This project is not on the server."
            raise ProjectNotFound(what, "It was deleted, or it never existed.", "Open the list of projects.")
        return _project(row)

    def add_project(self, owner: str, name: str) -> Project:
        """Create a project. Raises `TooManyProjects`."""
        if len(self.projects(owner)) >= MAX_PROJECTS:
            why = f"At most {MAX_PROJECTS} are allowed."
            raise TooManyProjects("There are too many projects.", why, "Delete one that is no longer needed.")
        project_id = new_id()
        self._db.execute("INSERT INTO project (id, owner, name) VALUES (?, ?, ?)", (project_id, owner, name))
        return self.project(owner, project_id)

    def change_project(self, owner: str, project_id: str, name: str, settings: Mapping[str, str]) -> None:
        """Change a project's name and settings. Its chats keep the settings that they have."""
        self.project(owner, project_id)
        self._db.execute(
            "UPDATE project SET name = ?, settings = ? WHERE id = ?", (name, as_json(settings), project_id)
        )

    def chats_of_project(self, owner: str, project_id: str, limit: int) -> list[Chat]:
        """Return a project's chats, without archived ones."""
        return search.list_chats(self._db, owner, limit, project_id=project_id)

    def delete_project(self, owner: str, project_id: str, *, with_chats: bool) -> tuple[str, list[str]]:
        """Delete a project, and its chats if asked; return the id with which `undo` restores all, and the ids of the
        deleted chats. Chats that stay are in no project.
        """
        self.project(owner, project_id)
        doomed = "project_id = ? AND owner = ? AND deletion IS NULL"
        with self._whole():
            deletion, chats = self._new_deletion(), list[str]()
            self._db.execute("UPDATE project SET deletion = ? WHERE id = ?", (deletion, project_id))
            if with_chats:
                rows = self._db.execute(f"SELECT id FROM chat WHERE {doomed}", (project_id, owner))
                chats = [row[0] for row in rows]
                self._db.execute(f"UPDATE chat SET deletion = ? WHERE {doomed}", (deletion, project_id, owner))
        return deletion, chats

    def project_files(self, project_id: str | None) -> list[ProjectFile]:
        """Return the files of a project, in the order in which they were added."""
        rows = self._db.execute(
            "SELECT project_file.id, project_file.name, text FROM project_file "
            "JOIN project ON project.id = project_id AND deletion IS NULL WHERE project_id = ? "
            "ORDER BY project_file.number",
            (project_id,),
        )
        return [ProjectFile(*row) for row in rows]

    def add_file(self, owner: str, project_id: str, name: str, text: str) -> None:
        """Add a file to a project, or replace the one of this name."""
        self.project(owner, project_id)
        with self._whole():
            self._db.execute("DELETE FROM project_file WHERE project_id = ? AND name = ?", (project_id, name))
            self._db.execute(
                "INSERT INTO project_file (id, project_id, name, text) VALUES (?, ?, ?, ?)",
                (new_id(), project_id, name, text),
            )

    def remove_file(self, owner: str, project_id: str, file_id: str) -> None:
        self.project(owner, project_id)
        self._db.execute("DELETE FROM project_file WHERE id = ? AND project_id = ?", (file_id, project_id))

    def folder(self, project_id: str | None) -> ProjectFolder | None:
        """Return the folder that a project's chats search; None if there is none."""
        row = self._db.execute(
            "SELECT project_id, path, chat_id FROM project_folder JOIN project ON project.id = project_id "
            "AND deletion IS NULL WHERE project_id = ?",
            (project_id,),
        ).fetchone()
        return ProjectFolder(*row) if row is not None else None

    def set_folder(self, owner: str, project_id: str, path: str) -> None:
        """Have the chats of a project search a folder instead of the one before; an empty path ends that. What was
        kept of the files of the one before is deleted.
        """
        self.project(owner, project_id)
        with self._whole():
            self._db.execute("DELETE FROM project_folder WHERE project_id = ?", (project_id,))
            if path:
                chat_id = new_id()
                holder = (chat_id, HOLDS_FOLDERS, path, time.time())
                self._db.execute("INSERT INTO chat (id, owner, title, updated_s) VALUES (?, ?, ?, ?)", holder)
                self._db.execute("INSERT INTO project_folder VALUES (?, ?, ?)", (project_id, path, chat_id))


def _project(row: tuple[str, str, str, int]) -> Project:
    project_id, name, settings, num_chats = row
    return Project(project_id, name, json.loads(settings), num_chats)
