"""Finding models: the demo, folders, and a Hugging Face cache laid out as huggingface_hub does."""

import json
import shutil
from pathlib import Path

import pytest

from localllm.errors import ConfigError, CorruptModel, ModelError, ModelNotFound, UnsupportedModel
from localllm.models.library import catalog
from localllm.models.library.catalog import (
    adapter_folder,
    copy_model,
    hub_cache_dir,
    is_for_the_hub,
    list_models,
    resolve_model,
)
from localllm.models.library.names import delete_alias

OLD, NEW = "1111111aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "2222222bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb"
WHOLE = ("config.json", "model.safetensors", "tokenizer.json")


class FakeCache:
    def __init__(self, root: Path) -> None:
        self.root = root

    def add(
        self, repo_id: str, *, commit: str = NEW, refs: tuple[str, ...] = ("main",), files: tuple[str, ...] = WHOLE
    ) -> Path:
        """One snapshot: files are links to blobs, refs are files that hold the commit."""
        repository = self.root / f"models--{repo_id.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (repository / "blobs").mkdir(exist_ok=True)
        for name in files:
            blob = repository / "blobs" / f"{abs(hash((repo_id, commit, name))):x}"
            blob.write_text("{}")
            (snapshot / name).symlink_to(Path("../../blobs") / blob.name)
        for ref in refs:
            file = repository / "refs" / ref
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(commit)
        return snapshot


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCache:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    root = tmp_path / "hf" / "hub"
    root.mkdir(parents=True)
    (root / ".locks").mkdir()
    (root / "CACHEDIR.TAG").write_text("")
    (root / "datasets--org--text").mkdir()
    return FakeCache(root)


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo model of our own: what the package ships is tested with the demo."""
    folder = make_folder(tmp_path / "the-demo")
    monkeypatch.setattr(catalog, "demo_path", lambda: folder)
    return folder


def make_folder(path: Path, *files: str) -> Path:
    path.mkdir(parents=True)
    for name in files or WHOLE:
        (path / name).write_text("{}")
    return path


def refusal(name: str, revision: str | None = None) -> ModelError:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, revision)
    return caught.value


def test_demo_is_the_bundled_model(cache: FakeCache, demo: Path) -> None:
    make_folder(Path("demo"))
    found = resolve_model("demo")
    assert (found.name, found.path, found.source) == ("demo", demo, "demo")
    assert resolve_model("./demo").source == "path"


def test_a_missing_demo_says_how_it_is_made(cache: FakeCache, demo: Path) -> None:
    (demo / "config.json").unlink()
    assert "make_demo_model" in refusal("demo").hint
    assert list_models() == []


@pytest.mark.parametrize("spelling", ["{}", "{}/", "{}/../my-model", "../my-model"])
def test_a_folder_is_served_under_its_name(cache: FakeCache, tmp_path: Path, spelling: str) -> None:
    folder = make_folder(tmp_path / "my-model")
    found = resolve_model(spelling.format(folder))
    assert (found.name, found.path, found.source, found.revision) == ("my-model", folder, "path", None)


def test_a_folder_in_reach_needs_no_dot(cache: FakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "org" / "name")
    cache.add("org/name")
    assert resolve_model("org/name").source == "cache"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name").source == "path"
    monkeypatch.chdir(tmp_path / "org" / "name")
    assert resolve_model(".").name == "name"


def test_a_name_of_somebody_else_finds_names_alone(
    cache: FakeCache, demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of files and folders it finds none, and says the same whether they are there or not."""
    monkeypatch.chdir(tmp_path)
    cached = cache.add("org/cached")
    copy_model("org/cached", "mine")
    make_folder(tmp_path / "models" / "mymodel")
    make_folder(tmp_path / "broken", "config.json")
    for name, path in (("demo", demo), ("org/cached", cached), ("cached", cached), ("mine", cached)):
        assert resolve_model(name, paths=False).path == path
    for name in ("models/mymodel", "models/missing", "broken", "missing", "models/../CACHEDIR.TAG", "./broken",
                 str(tmp_path / "broken"), "~/x", "hf/hub/CACHEDIR.TAG", "hf/hub/CACHEDIR.NO"):  # fmt: skip
        with pytest.raises(ModelNotFound):
            resolve_model(name, paths=False)
    make_folder(tmp_path / "org" / "cached")  # a load would take the folder
    for name in ("org/cached", "mine"):
        with pytest.raises(ModelNotFound):
            resolve_model(name, paths=False)


def test_home_is_expanded(cache: FakeCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make_folder(tmp_path / "models" / "mine")
    assert resolve_model("~/models/mine").name == "mine"


def test_a_folder_of_the_same_name_that_is_no_model_does_not_hide_the_cache(cache: FakeCache) -> None:
    cache.add("org/thing")
    Path("thing").mkdir()
    assert resolve_model("thing").source == "cache"


def test_a_snapshot_given_by_path_keeps_its_repository_s_name(cache: FakeCache) -> None:
    found = resolve_model(str(cache.add("org/name")))
    assert (found.name, found.revision, found.source) == ("org/name", NEW, "path")


@pytest.mark.parametrize("name", ["./nothing", "/nowhere/at/all", "~/nothing-here", "model.gguf", ""])
def test_a_path_that_is_not_there_is_said_so(cache: FakeCache, name: str) -> None:
    assert isinstance(refusal(name), ModelNotFound)


@pytest.mark.parametrize(
    ("files", "kind", "words"),
    [
        (("README.md",), ModelNotFound, "Found: README.md."),
        (("model.safetensors",), ModelNotFound, "no config.json"),
        (("m-Q4_K_M-00001-of-00002.gguf",), CorruptModel, "m-Q4_K_M-00002-of-00002.gguf"),
        (("adapter_config.json", "adapter_model.safetensors"), UnsupportedModel, "adapter"),
        (("params.json", "consolidated.safetensors"), UnsupportedModel, "vendor's own format"),
        (("config.json", "pytorch_model.bin"), UnsupportedModel, "pickle"),
        (("config.json", "tokenizer.json"), CorruptModel, "no weights"),
    ],
)
def test_what_is_no_checkpoint_is_described(
    cache: FakeCache, tmp_path: Path, files: tuple[str, ...], kind: type[ModelError], words: str
) -> None:
    error = refusal(str(make_folder(tmp_path / "thing", *files)))
    assert type(error) is kind
    assert words in str(error)
    assert error.hint
    cache.add("org/thing", files=files)
    assert type(refusal("org/thing")) is kind
    assert "org/thing" not in [model.name for model in list_models()]


def test_an_empty_folder_and_a_folder_of_folders(cache: FakeCache, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "It is empty" in str(refusal(str(tmp_path / "empty")))
    make_folder(tmp_path / "outer" / "inner")
    assert str(tmp_path / "outer" / "inner") in refusal(str(tmp_path / "outer")).hint


def test_a_single_file_of_a_checkpoint_is_refused_with_a_way_out(cache: FakeCache, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    error = refusal(str(tmp_path / "model.safetensors"))
    assert isinstance(error, UnsupportedModel)
    assert error.hint


def test_missing_shards_are_counted(cache: FakeCache, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "big", "config.json", "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert "1 of 2 weight files are missing, model-00002-of-00002.safetensors" in refusal(str(folder)).why
    (folder / "model.safetensors.index.json").write_text("{")
    assert isinstance(refusal(str(folder)), CorruptModel)


def test_a_link_to_a_blob_that_is_gone_counts_as_missing(cache: FakeCache) -> None:
    snapshot = cache.add("org/name")
    (snapshot / "model.safetensors").resolve().unlink()
    error = refusal("org/name")
    assert isinstance(error, CorruptModel)
    assert error.hint == "localllm pull org/name"


def test_cached_models_have_their_full_and_their_bare_name(cache: FakeCache) -> None:
    snapshot = cache.add("Qwen/Qwen3-0.6B")
    for name in ("Qwen/Qwen3-0.6B", "Qwen3-0.6B"):
        found = resolve_model(name)
        assert (found.name, found.path, found.source, found.revision) == ("Qwen/Qwen3-0.6B", snapshot, "cache", NEW)


def test_a_repository_without_an_owner(cache: FakeCache) -> None:
    cache.add("gpt2")
    assert resolve_model("gpt2").name == "gpt2"


def test_an_ambiguous_bare_name_lists_its_owners(cache: FakeCache) -> None:
    cache.add("a/model")
    cache.add("b/model")
    assert "a/model, b/model" in refusal("model").why


def test_revisions_are_branches_tags_and_commits(cache: FakeCache) -> None:
    old = cache.add("org/name", commit=OLD, refs=("v1", "refs/pr/3"))
    new = cache.add("org/name", commit=NEW)
    assert resolve_model("org/name").path == new
    for revision in ("v1", "refs/pr/3", OLD, OLD[:7]):
        assert resolve_model("org/name", revision).path == old
    error = refusal("org/name", "v2")
    assert error.param == "revision"
    for cached in ("main", "v1", OLD[:12]):
        assert cached in error.why


@pytest.mark.parametrize("revision", ["../../../../etc/hostname", "/etc/hostname", OLD[:4], ""])
def test_a_revision_is_a_name_inside_the_repository(cache: FakeCache, revision: str) -> None:
    cache.add("org/name", commit=OLD, refs=())
    cache.add("org/name", commit=NEW, refs=())
    assert refusal("org/name", revision).param == "revision"


def test_a_snapshot_fetched_by_commit_alone_is_found(cache: FakeCache) -> None:
    assert resolve_model(cache.add("org/name", refs=()) and "org/name").revision == NEW


def test_revision_is_refused_where_it_means_nothing(cache: FakeCache, demo: Path, tmp_path: Path) -> None:
    for name in ("demo", str(make_folder(tmp_path / "mine"))):
        with pytest.raises(ConfigError) as caught:
            resolve_model(name, "main")
        assert caught.value.param == "revision"


def test_an_unknown_name_gets_near_and_available_ones(cache: FakeCache, demo: Path) -> None:
    cache.add("Qwen/Qwen3-0.6B")
    cache.add("meta/other")
    error = refusal("qwen3-0.6")
    assert "Did you mean Qwen/Qwen3-0.6B?" in error.why
    assert "Available: demo, Qwen/Qwen3-0.6B, meta/other" in error.why
    assert str(cache.root) in error.why
    assert (error.status, error.code) == (404, "model_not_found")
    assert refusal("org/else").hint == "localllm pull org/else"
    assert refusal("something").hint == "localllm search something"


def test_without_any_cache_the_error_is_the_same(cache: FakeCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(cache.root / "nowhere"))
    assert isinstance(refusal("org/name"), ModelNotFound)


def test_list_models_is_the_demo_and_whole_cached_checkpoints(cache: FakeCache, demo: Path) -> None:
    cache.add("b/whole")
    cache.add("a/whole")
    cache.add("c/half", files=("config.json",))
    assert [(m.name, m.source) for m in list_models()] == [("demo", "demo"), ("a/whole", "cache"), ("b/whole", "cache")]


@pytest.mark.parametrize(
    ("environ", "want"),
    [
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(environ: dict[str, str], want: str) -> None:
    assert hub_cache_dir(environ) == Path(want).expanduser()


def test_a_second_name_stands_for_the_first_until_it_is_dropped(cache: FakeCache, demo: Path) -> None:
    snapshot = cache.add("org/name")
    for alias in ("mine", "me/my-model:v1.0", "again"):
        made = copy_model("name" if alias == "mine" else "mine", alias)
        assert (made.name, made.path, made.alias_of) == (alias, snapshot, "org/name")
    assert [model.name for model in list_models()] == ["demo", "org/name", "again", "me/my-model:v1.0", "mine"]
    copy_model("demo", "again")
    assert resolve_model("again").path == demo
    delete_alias("again")
    assert isinstance(refusal("again"), ModelNotFound)
    assert resolve_model("mine", NEW[:7]).path == snapshot
    copy_model("demo", "shown")
    with pytest.raises(ConfigError, match="revision"):
        resolve_model("shown", "main")


@pytest.mark.parametrize(
    "name", ["", " ", "a b", "/etc/passwd", "./a", "../a", "~", "a.gguf", "ollama:a", "ä", "a\0b", "-a", "a" * 81, "a/"]
)
def test_what_is_no_second_name(cache: FakeCache, demo: Path, name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a valid second name"):
        copy_model("demo", name)
    assert not (tmp_path / "data").exists()


def test_a_second_name_hides_no_model_and_no_path_gets_one(cache: FakeCache, demo: Path) -> None:
    cache.add("org/name")
    for taken in ("demo", "org/name", "name"):
        with pytest.raises(ConfigError, match="is the name of a model"):
            copy_model("demo", taken)
    with pytest.raises(ConfigError, match="is a path"):
        copy_model(str(make_folder(Path.cwd() / "mine")), "second")
    with pytest.raises(ModelNotFound):
        copy_model("org/absent", "second")


def test_a_second_name_of_what_is_gone_says_so(cache: FakeCache, demo: Path) -> None:
    cache.add("org/name")
    copy_model("org/name", "me/mine")
    shutil.rmtree(cache.root / "models--org--name")
    assert str(refusal("me/mine")).startswith("me/mine is a second name of org/name, which is not on this machine.")
    assert [model.name for model in list_models()] == ["demo"]
    assert not is_for_the_hub("me/mine")


def test_the_layout_here_is_the_library_s(cache: FakeCache) -> None:
    """huggingface_hub reads the fake cache and finds the same snapshot."""
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    snapshot = cache.add("org/name")
    assert try_to_load_from_cache("org/name", "config.json", cache_dir=cache.root) == str(snapshot / "config.json")
    assert [repo.repo_id for repo in scan_cache_dir(cache.root).repos if repo.repo_type == "model"] == ["org/name"]


# GGUF files, and files of other programs ----------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("OLLAMA_MODELS", "LLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def add_file(path: Path, content: str = "GGUF") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


SPLIT = tuple(f"big-Q8_0-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


def test_a_gguf_file_is_a_model(cache: FakeCache, tmp_path: Path) -> None:
    file = add_file(tmp_path / "Tiny-Q4_K_M.gguf")
    found = resolve_model(str(file))
    assert (found.name, found.path, found.source, found.format) == ("Tiny-Q4_K_M", file, "path", "gguf")
    assert resolve_model(str(tmp_path)).path == file, "the only one in its folder"


def test_a_link_to_a_gguf_file_keeps_its_own_name(cache: FakeCache, tmp_path: Path) -> None:
    blob = add_file(tmp_path / "store" / "0123abc")
    (tmp_path / "mine.gguf").symlink_to(blob)
    assert resolve_model(str(tmp_path / "mine.gguf")).path == tmp_path / "mine.gguf"


def test_any_part_of_a_split_gguf_means_the_whole(cache: FakeCache, tmp_path: Path) -> None:
    for name in SPLIT:
        add_file(tmp_path / name)
    for name in SPLIT:
        found = resolve_model(str(tmp_path / name))
        assert (found.name, found.path, len(found.files)) == ("big-Q8_0", tmp_path / SPLIT[0], 3)
    (tmp_path / SPLIT[1]).unlink()
    error = refusal(str(tmp_path / SPLIT[2]))
    assert isinstance(error, CorruptModel)
    assert SPLIT[1] in error.why


def test_a_cached_gguf_repository_offers_its_files(cache: FakeCache) -> None:
    snapshot = cache.add("org/tiny-GGUF", files=("t-Q4_K_M.gguf", "t-Q8_0.gguf", "mmproj-t-F16.gguf", *SPLIT[:2]))
    assert resolve_model("org/tiny-GGUF").name == "org/tiny-GGUF:Q4_K_M", "the one that suits most machines"
    for name in ("org/tiny-GGUF:t-Q8_0", "tiny-GGUF:t-q8_0", "org/tiny-GGUF:t-Q8_0.gguf"):
        found = resolve_model(name)
        assert (found.path, found.source, found.format) == (snapshot / "t-Q8_0.gguf", "cache", "gguf")
    assert "big-Q8_0, t-Q8_0" in refusal("org/tiny-GGUF:Q8_0").why
    assert "It has Q8_0, Q4_K_M" in refusal("org/tiny-GGUF:Q2_K").why
    assert refusal("org/tiny-GGUF:Q2_K").hint == "localllm pull org/tiny-GGUF:Q2_K"
    names = [model.name for model in list_models() if model.source == "cache"]
    assert names == ["org/tiny-GGUF:Q4_K_M", "org/tiny-GGUF:t-Q8_0"]
    assert all(resolve_model(name).name == name for name in names)


def test_a_repository_with_both_formats_loads_safetensors_unless_told(cache: FakeCache) -> None:
    snapshot = cache.add("org/both", files=(*WHOLE, "both-Q8_0.gguf"))
    assert resolve_model("org/both").path == snapshot
    assert resolve_model("org/both:Q8_0").path == snapshot / "both-Q8_0.gguf"
    assert isinstance(refusal("org/both:Q4_0"), ModelNotFound)


def test_a_revision_may_stand_behind_an_at(cache: FakeCache) -> None:
    old = cache.add("org/name", commit=OLD, refs=("v1",))
    cache.add("org/name", commit=NEW)
    assert resolve_model("org/name@v1").path == old
    assert resolve_model(f"name@{OLD[:7]}").path == old


def test_files_of_other_programs_have_names(cache: FakeCache, home: Path) -> None:
    lmstudio = add_file(home / ".lmstudio/models/owner/repo-GGUF/repo-Q4_K_M.gguf")
    llamacpp = add_file(home / ".cache/llama.cpp/ggml-org_tiny.gguf")
    jan = add_file(home / "jan/models/llama3.2-1b/model.gguf")
    expected = {
        "lmstudio:owner/repo-GGUF/repo-Q4_K_M": lmstudio,
        "llamacpp:ggml-org_tiny": llamacpp,
        "jan:llama3.2-1b": jan,
    }
    for name, path in expected.items():
        assert resolve_model(name).path == path
        assert resolve_model(name).source == name.partition(":")[0]
    assert expected.keys() <= {model.name for model in list_models()}


def test_ollama_manifests_lead_to_blobs(cache: FakeCache, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(where: str, digest: str, *more: str) -> None:
        layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}"}]
        layers += [{"mediaType": f"application/vnd.ollama.image.{kind}", "digest": "sha256:ff"} for kind in more]
        add_file(home / "store/manifests" / where, json.dumps({"layers": layers}))
        add_file(home / f"store/blobs/sha256-{digest}")

    monkeypatch.setenv("OLLAMA_MODELS", str(home / "store"))
    add("registry.ollama.ai/library/llama3.2/1b", "aa", "template", "license")
    add("registry.ollama.ai/library/qwen3/latest", "bb")
    add("registry.ollama.ai/someone/tuned/v1", "cc")
    add("registry.ollama.ai/library/with-adapter/latest", "dd", "adapter")
    add("hf.co/org/repo-GGUF/Q4_K_M", "ee")
    add_file(home / "store/manifests/registry.ollama.ai/library/broken/latest", "{")
    add_file(home / "store/manifests/registry.ollama.ai/library/evil/latest", json.dumps(
        {"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:../../../outside"}]}
    ))  # fmt: skip
    listed = {model.name: model.path.name for model in list_models() if model.source == "ollama"}
    assert listed == {
        "ollama:llama3.2:1b": "sha256-aa",
        "ollama:qwen3:latest": "sha256-bb",
        "ollama:someone/tuned:v1": "sha256-cc",
        "ollama:hf.co/org/repo-GGUF:Q4_K_M": "sha256-ee",
    }
    assert resolve_model("ollama:qwen3").path.name == "sha256-bb"
    assert resolve_model("ollama:llama3.2:1b").format == "gguf", "though its name does not end so"
    assert "ollama:qwen3:latest" in refusal("ollama:qwen9").why


@pytest.mark.parametrize(
    ("name", "here", "want"),
    [
        ("org/name", (), True),
        ("org/name:Q4_K_M", (), True),
        ("org/name@v2", WHOLE, True),
        ("org/name", ("config.json", "tokenizer.json"), True),
        ("org/name", WHOLE, False),
        ("org/name", ("config.json", "pytorch_model.bin"), False),
        ("org/name/more", (), False),
        ("name", (), False),
        ("./org/name", (), False),
        ("ollama:org/name", (), False),
        ("weights/x.gguf", (), False),
        ("org/na--me", (), False),
        ("../etc", (), False),
        ("demo", (), False),
    ],
)
def test_what_is_left_to_the_hub(cache: FakeCache, demo: Path, name: str, here: tuple[str, ...], want: bool) -> None:
    if here:
        cache.add("org/name", files=here)
    assert catalog.is_for_the_hub(name) is want


NO_NAMES = ("~nobody-at-all", "~nobody/x", "a" * 300, "/" + "a" * 300, "a\x00b", "/dev/null", "\ud7ff", "a/" * 5000)


@pytest.mark.parametrize("name", NO_NAMES, ids=[f"{i}" for i, _ in enumerate(NO_NAMES)])
def test_names_that_no_disk_can_have_are_names_of_nothing(name: str) -> None:
    """Whoever asks over HTTP may send anything."""
    with pytest.raises(ModelNotFound):
        resolve_model(name)
    assert not adapter_folder(name).is_dir()


BAD_FILES = {
    "model.safetensors.index.json": b"[" * 200_000, "config.json": b"\xff" * 10, "tokenizer.json": b"",
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_FILES)
def test_one_bad_file_takes_no_list_away(cache: FakeCache, demo: Path, name: str) -> None:
    cache.add("org/good")
    snapshot = cache.add("org/bad", files=(*WHOLE, "model.safetensors.index.json"))
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    (snapshot / name).unlink()
    (snapshot / name).write_bytes(BAD_FILES[name])
    assert "org/good" in [model.name for model in list_models()]
    with pytest.raises(ModelNotFound):
        resolve_model("org/absent")


def test_a_bad_reference_takes_no_list_away(cache: FakeCache) -> None:
    cache.add("org/good")
    cache.add("org/bad")
    (cache.root / "models--org--bad" / "refs" / "main").write_bytes(b"\xff" * 100)
    assert "org/good" in [model.name for model in list_models()]


def test_a_repository_that_raises_anything_is_passed_over_and_logged_once(
    cache: FakeCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache.add("org/good")
    cache.add("org/bad")
    check = catalog._check_checkpoint

    def raise_for_bad(folder: Path, name: str) -> None:
        if name == "org/bad":
            raise RuntimeError("what nobody expects")
        check(folder, name)

    monkeypatch.setattr(catalog, "_check_checkpoint", raise_for_bad)
    for _ in range(3):
        assert "org/good" in [model.name for model in list_models()]
    assert caplog.text.count("what nobody expects") == 1
