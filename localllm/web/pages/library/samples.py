"""Invented samples of the Models page's views, for `/dev/patterns` and the template tests."""

from __future__ import annotations

from dataclasses import replace

from localllm.web.pages.frame import views
from localllm.web.pages.frame.views import stacked
from localllm.web.pages.library import downloads as d
from localllm.web.pages.library import fit_checks as f
from localllm.web.pages.library import installed_models as i
from localllm.web.pages.library import state as s
from localllm.web.pages.library import views as v
from localllm.web.pages.library.downloads import VERBS
from localllm.web.pages.library.installed_models import KEEP, LOAD, PIN, SLEEP, STOP, UNLOAD


def samples(shell: views.Shell) -> list[views.View]:
    tabs, sad = (
        s.LibraryTabs("installed", 2),
        views.ErrorNotice("The hub cannot be reached.", "Refused.", "Try later."),
    )
    fit = f.FitVerdict("fits", "Fits", "5.0 GiB weights + 3.4 GiB KV cache = 8.4 GiB of 11.5 GiB free", "", "5.0 GiB")
    option = ("--quantization int4", "8,000 tokens", "1.0", "weights in int4")
    bar = stacked([("Weights", "weights", 5.0, "5.0 GiB"), ("Unused", "free", 3.0, "3.0 GiB")])
    weights = ("weights", ("5.0 GiB", "13 GiB"))
    row, table = (
        _rows()[0],
        f.FitTable(
            bar,
            ("cuda:0 RTX 4090", "CPU"),
            (weights,),
            ("The cache is bounded.",),
            (option,),
            ("rank 0 cuda:0 RTX 4090", "rank 1 cuda:1 RTX 4090"),
            (weights,),
        ),
    )
    question = v.DeleteQuestion("Qwen/Qwen3-8B-AWQ", "5.7 GiB", "~/.cache/huggingface/hub")
    files = (f.FileRow("model.safetensors", "5.7 GiB"), f.FileRow("config.json", "1 KiB"))
    facts = (views.Fact("Architecture", "Qwen3ForCausalLM"), views.Fact("License", "apache-2.0"))
    variants = (v.Variant("Q4_K_M", "/", "5.0 GiB", True), v.Variant("Q8_0", "/", "8.7 GiB", False))
    elsewhere = (v.RemoteModelRow("Qwen3-32B", "/?model=Qwen3-32B", ("on workstation", "32,768 tokens of context")),)
    return [
        tabs,
        s.LibraryTabs("none", 0),
        _installed(),
        _picks(),
        _picks(offline=True),
        s.Picks(is_pending=True),
        s.Picks((), "Runs on the CPU: 2 cores, 1.2 GiB of memory free", "--offline"),
        fit,
        f.FitVerdict("shorter", "Fits with a shorter context", "12 GiB", "With --kv-cache-dtype fp8: context 40,960."),
        f.FitVerdict("unknown", "Gated", "No token was sent.", terms_url="/"),
        _results(),
        v.SearchResults("nothing", ()),
        _downloads(),
        d.DownloadsView((), (), 10**11, "~/.cache"),
        f.LoadOptions(
            "Qwen3-8B",
            (
                f.LoadOption("max_model_len", "Context, tokens", "8192", high=40960),
                f.LoadOption("kv_cache_dtype", "KV cache", "int8", f.KV_TYPES),
            ),
            f.LoadEstimate(fit, bar),
            is_loaded=True,
        ),
        f.LoadEstimate(fit, bar),
        question,
        v.DeleteQuestion("Qwen3-8B", "", "", views.ErrorNotice("Qwen3-8B is loaded.", "", "Unload it first.")),
        v.ReadingPage(shell, tabs, "org/model", "/library/model/org/model"),
        s.LibraryNotice(),
        s.LibraryNotice("big is loaded.", chat_url="/"),
        v.LibraryPage(shell, tabs, _installed(), _picks(), s.LibraryNotice("demo is deleted, 12 MiB freed.")),
        v.LibraryPage(shell, tabs, _installed(), None, s.LibraryNotice(error=sad), elsewhere=elsewhere),
        v.LibraryPage(shell, tabs, _installed(), None, path="/models/x", path_error=sad),
        v.DiscoverPage(shell, tabs, "", "", "huggingface.co"),
        v.DiscoverPage(shell, tabs, "qwen3", "gguf", "huggingface.co", _results()),
        v.DiscoverPage(shell, tabs, "qwen3", "", "huggingface.co", None, sad, "/"),
        v.DiscoverPage(shell, tabs, "qwen3", "", "huggingface.co", offline=sad),
        v.DownloadsPage(shell, tabs, _downloads(), s.LibraryNotice("Cancelled.")),
        v.AbsentPage(shell, tabs, "org/absent", sad),
        v.DeletePage(shell, tabs, question),
        v.ModelPage(shell, tabs, "Qwen3-8B-AWQ", row, facts, files, fit, table),
        v.ModelPage(shell, tabs, "Qwen/Qwen3-8B-GGUF", None, facts, files, fit, table, variants, "5.0 GiB"),
        v.ModelPage(shell, tabs, "org/odd", None, (), (), f.FitVerdict("no", "Does not fit", "27 GiB"), error=sad),
        v.ModelPage(shell, tabs, "Qwen/Qwen3-8B", None, facts, (), fit, offline="--offline"),
    ]


def _rows() -> tuple[i.ModelRow, ...]:
    facts = ("5.7 GiB", "safetensors", "awq 4 bits", "context 40,960", "Hugging Face cache", "read today")
    phases = (views.LoadPhase("Read the weights", False, 0.4, "2.3 of 5.7 GiB"),)
    failed = views.ErrorNotice("It does not fit.", "27.5 GiB needed, 22.1 GiB free.", "Try another.")
    return (
        i.ModelRow("Qwen3-8B-AWQ", "/", "ready", facts, (UNLOAD, SLEEP, PIN), "loaded", pinned=True),
        i.ModelRow("Qwen3-0.6B", "/", "loading", facts, (STOP,), "loading", phases=phases, fraction=0.5),
        i.ModelRow("Qwen3-4B", "/", "unloading", facts, (KEEP,), "unloading, 12 requests to finish"),
        i.ModelRow("big", "/", "failed", facts, (LOAD,), "failed", error=failed),
        i.ModelRow("HuggingFaceTB/SmolLM2-135M-Instruct", "/", "unloaded", facts, (LOAD,), "not loaded", False, "/"),
    )


def _installed() -> i.InstalledList:
    return i.InstalledList(_rows(), 12 * 2**30, 220 * 2**30)


def _picks(*, offline: bool = False) -> s.Picks:
    card = s.PickCard(
        "Qwen/Qwen3-8B-GGUF:Q4_K_M",
        "/",
        "Qwen3 8B",
        "All-round.",
        "4.7 GiB, 8.2 B parameters",
        "5.5 GiB at 4,096 tokens (9.0 GiB at its longest, 33,408)",
        "11 to 24 tokens/s",
        "apache-2.0",
    )
    speech = replace(
        card, name="openai/whisper-base", title="Whisper base", memory="277 MiB on the CPU",
        speed="about 22 times real time; 5 s of dictation about 0.7 s",
    )  # fmt: skip
    return s.Picks((card,) * 3, "Runs on RTX 4090: 22.9 GiB free", "--offline" if offline else "", speech=(speech,))


def _results() -> v.SearchResults:
    facts = ("8.2 B parameters", "1,203,441 downloads", "812 likes", "apache-2.0")
    found = v.SearchResult("Qwen/Qwen3-8B-GGUF", "/", "/library/fit?model=x", "gguf", facts)
    gated = v.SearchResult("google/gemma-3-4b-it", "/", "/library/fit?model=y", "safetensors", facts, True, True)
    return v.SearchResults("qwen", (found, gated))


def _downloads() -> d.DownloadsView:
    files = (f.FileRow("model-00001-of-00002.safetensors", "1.2 GiB of 4.6 GiB", 0.26),)
    line, why = "3.1 GiB of 15.2 GiB · 112 MiB/s · 1 min 50 s left · 3 of 9 files", views.ErrorNotice("Gated.")
    running = d.DownloadCard("1", "Qwen/Qwen3-8B", "/", "running", 0.2, line, files, VERBS["running"])
    failed = d.DownloadCard("2", "org/closed", "/", "failed", 0.0, "0 B of 5.7 GiB", files, VERBS["failed"], why, "/")
    done = d.DownloadCard("3", "org/done", "/", "done", 1.0, "5.7 GiB", files, VERBS["done"])
    return d.DownloadsView((running, failed, done), (d.PartialDownload("org/cut", "1.2 GiB"),), 10**11, "~/.cache")
