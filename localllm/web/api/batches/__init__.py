"""Offline batches in OpenAI's format: files of requests, and batches that answer them at the lowest priority.

    file_store.py   files with their owners and limits, on disk      lines.py    requests and answers, a line each
    records.py      batches on disk, and their states                line_runner.py   answers one line in this process
    worker.py       runs the batches one after another               files.py, batches.py   the endpoints

A line is answered by the same code as a request to its endpoint, which app.py passes in. This folder imports no
dialect.
"""

from __future__ import annotations

from litestar.types import ControllerRouterHandler

from localllm.config.settings import ServerConfig
from localllm.web.api.batches.batches import cancel_batch, create_batch, list_batches, show_batch
from localllm.web.api.batches.files import delete_file, file_content, list_files, show_file, upload_route


def routes(config: ServerConfig) -> list[ControllerRouterHandler]:
    return [
        upload_route(config), list_files, show_file, file_content, delete_file,
        create_batch, list_batches, show_batch, cancel_batch,
    ]  # fmt: skip
