"""What is in the cache, what a name means to `remove`, and how many bytes that frees."""

from pathlib import Path

import pytest

from localllm.errors import ConfigError, ModelNotFound
from localllm.models.library.catalog import hub_cache_dir, list_models, resolve_model
from localllm.models.library.hub.cache import (
    incomplete_repositories,
    remove,
    remove_target,
    repository_folder,
    to_remove,
)
from localllm.models.library.hub.plan import plan_download
from localllm.models.library.hub.pull import pull
from tests.hub.conftest import make_checkpoint
from tests.hub.local_hub import LocalHub


def fetch(hub: LocalHub, name: str, folder: Path, revision: str = "main") -> Path:
    hub.add_repo(name.partition(":")[0], folder, revision=revision)
    return pull(plan_download(name, revision))


def take_away(name: str) -> int:
    target = to_remove(name)
    freed = remove_target(target).freed_bytes
    assert freed == target.size_bytes
    return freed


def blob_bytes(repo_id: str) -> int:
    return sum(path.stat().st_size for path in (repository_folder(repo_id) / "blobs").iterdir())


@pytest.fixture
def ggufs(tmp_path: Path) -> Path:
    folder = tmp_path / "gguf"
    folder.mkdir()
    names = ("t-Q4_K_M.gguf", "t-Q8_0-00001-of-00002.gguf", "t-Q8_0-00002-of-00002.gguf")
    for number, name in enumerate(names):
        (folder / name).write_bytes(b"GGUF" * (1000 + number))
    return folder


def test_removing_frees_what_the_repository_held(hub: LocalHub, checkpoint: Path) -> None:
    fetch(hub, "org/name", checkpoint)
    held = blob_bytes("org/name")
    assert take_away("org/name") == held > 300_000
    assert not repository_folder("org/name").exists()
    assert {path.name for path in hub_cache_dir().rglob("*") if path.is_file()} <= {"CACHEDIR.TAG"}
    with pytest.raises(ModelNotFound):
        resolve_model("org/name")


def test_one_quantisation_goes_and_the_others_stay(hub: LocalHub, ggufs: Path) -> None:
    fetch(hub, "org/t:Q4_K_M", ggufs)
    fetch(hub, "org/t:Q8_0", ggufs)
    assert take_away("org/t:Q8_0") == 4 * (1001 + 1002)
    assert [model.name for model in list_models() if model.source == "cache"] == ["org/t:Q4_K_M"]
    assert take_away("org/t:Q4_K_M") == 4000
    assert not repository_folder("org/t").exists(), "nothing is left of it"


def test_a_file_that_another_revision_uses_stays(hub: LocalHub, tmp_path: Path) -> None:
    old, new = make_checkpoint(tmp_path / "old"), make_checkpoint(tmp_path / "new")
    (new / "config.json").write_text('{"another": "config"}')
    fetch(hub, "org/name", old, "v1")
    snapshot = fetch(hub, "org/name", new)
    target = to_remove("org/name@v1")
    freed = remove_target(target).freed_bytes
    assert freed == (old / "config.json").stat().st_size
    assert resolve_model("org/name").path == snapshot
    assert (snapshot / "model.safetensors").read_bytes() == (new / "model.safetensors").read_bytes()
    with pytest.raises(ModelNotFound):
        resolve_model("org/name@v1")


def test_a_download_that_was_cut_is_listed_and_can_be_removed(hub: LocalHub) -> None:
    partial = repository_folder("org/half") / "blobs" / "abc.incomplete"
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 5000)
    assert incomplete_repositories() == {"org/half": 5000}
    assert take_away("org/half") == 5000
    assert incomplete_repositories() == {}


def test_only_what_lies_in_the_cache_is_deleted(hub: LocalHub, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "mine")
    other = Path.home() / ".lmstudio/models/a/b/c-Q8_0.gguf"
    other.parent.mkdir(parents=True)
    other.write_bytes(b"GGUF")
    for name in ("demo", str(folder), "lmstudio:a/b/c-Q8_0"):
        with pytest.raises(ConfigError, match="localllm deletes only models that it downloaded"):
            to_remove(name)
    for name in ("org/absent", "absent"):
        with pytest.raises(ModelNotFound):
            to_remove(name)
    assert other.exists()


def test_a_repository_that_is_not_there_cannot_be_removed(hub: LocalHub) -> None:
    with pytest.raises(ModelNotFound):
        remove("org/absent")


@pytest.mark.parametrize("name", ["/etc/passwd", "/dev/null", "~", ".", "/nowhere", "../../etc"])
def test_a_path_is_not_deleted_and_not_looked_at(name: str) -> None:
    with pytest.raises(ConfigError, match="is a path"):
        to_remove(name)
