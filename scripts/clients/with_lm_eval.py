"""EleutherAI's lm-evaluation-harness: `local-completions`, with the server's own tokenizer and two tiny tasks.

From a terminal, with the key in OPENAI_API_KEY and as auth_token if the server has one:

    lm-eval run --model local-completions --include_path scripts/clients/lm_eval_task --tasks demo_likelier \
        --model_args model=demo base_url=http://127.0.0.1:8000/v1/completions tokenizer_backend=remote
"""

import os
from pathlib import Path

from checking import KEY, MODEL, URL, refused, run

os.environ["OPENAI_API_KEY"] = KEY
folder = Path(__file__).parent / "lm_eval_task"
os.chdir(folder)  # the tasks' data paths are relative to this folder

from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from requests import HTTPError  # noqa: E402

tasks = TaskManager(include_path=str(folder), include_defaults=False)
server = {
    "model": MODEL,
    "base_url": f"{URL}/completions",
    "tokenizer_backend": "remote",
    "auth_token": KEY,
    "max_retries": 1,
}


def result(task: str, metric: str, **settings: object) -> float:
    asked = {**server, **settings}
    results = simple_evaluate("local-completions", asked, tasks=[task], task_manager=tasks, bootstrap_iters=0)
    return results["results"][task][f"{metric},none"]


def chat() -> None:
    assert result("demo_written", "exact_match") == 1.0


def errors() -> None:
    with refused(HTTPError, saying="404"):
        result("demo_written", "exact_match", model="nobody-has-this")


def scores() -> None:
    assert result("demo_likelier", "acc") == 1.0
    assert result("demo_likelier", "acc", batch_size=4, num_concurrent=2) == 1.0


if __name__ == "__main__":
    run(globals())
