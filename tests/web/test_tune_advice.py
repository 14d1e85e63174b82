"""What the wizard's result page advises, from made-up runs: apply what is clearly better, else keep what runs."""

import re
from dataclasses import replace

import pytest

from localllm.tuning.goals import goal_of
from localllm.tuning.search import Axis, Space
from localllm.tuning.space import with_values
from localllm.tuning.words import settings_in_words, soak_in_words
from localllm.web.pages.frame.render import render
from localllm.web.pages.tune import views
from localllm.web.pages.tune.samples import job
from localllm.web.pages.tune.wizard import Job


def ended(**changes: object) -> Job:
    made = job()
    assert made.result is not None
    made.stage, made.result = "ended", replace(made.result, **changes)  # type: ignore[arg-type]
    return made


def kept(**changes: object) -> Job:
    made = ended(gain=0.0, is_clear=False)
    assert made.result is not None
    made.result = replace(made.result, **{"pick": made.result.start, **changes})  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize(
    ("made", "title", "advice", "said"),
    [
        (ended(), "Recommended settings", "apply", "+31% over what runs now"),
        (kept(noise=0.12), "No setting is clearly better. What runs now is as good.", "keep", "differ by 12%"),
        (ended(gain=0.005, is_clear=False), "Recommended settings", "apply", "as fast as what runs now, context 8,192"),
        (ended(gain=None, is_clear=False), "It was not compared", "keep", "not compared with what runs now"),
        (kept(gain=None), "Better settings failed the soak test.", "keep", "better settings failed the soak test"),
    ],
)
def test_the_advice_follows_the_evidence(made: Job, title: str, advice: str, said: str) -> None:
    found = views.recommendation(made)
    assert found is not None
    assert title in found.title
    assert found.advice == advice
    assert said in found.gain


def test_settings_have_heads_and_words() -> None:
    table = views.trials(job())
    assert [head for head, _ in table.heads] == ["Requests at a time", "Tokens per step", "KV cache type"]
    assert table.heads[1][1] == "--max-num-batched-tokens …"
    assert {len(row.settings) for row in table.rows} == {3}
    page = render(table)
    assert '<td class="number" data-label="Tokens per step">512</td>' in page
    assert settings_in_words({"max_num_seqs": 64, "kv_cache_memory_bytes": None, "enforce_eager": True}) == (
        "64 requests at a time, KV cache size automatic, CUDA graphs off"
    )
    soak = job().result.soak  # type: ignore[union-attr]
    assert soak is not None
    assert "61 answered, 12 cancelled on purpose" in soak_in_words(soak)


def test_the_plot_explains_only_the_colours_that_it_has() -> None:
    for made, words in ((ended(), "best for the goal"), (kept(), "what runs now")):
        plot = views.plot(made)
        kinds = {point.kind for point in plot.points}
        assert dict(plot.legend)["pick"] == words
        assert [kind for kind, _ in plot.legend] == [kind for kind in ("pick", "pareto", "other") if kind in kinds]
        assert set(re.findall(r"swatch--(\w+)", render(plot))) == kinds


def test_the_context_that_tuning_asks_for_never_contradicts_the_model() -> None:
    chat = goal_of("chat")
    assert views.context_note(chat, 40_960) == (
        "If empty, at least 8,192, or 95% of the longest context that fits here if that is less. "
        "The model supports at most 40,960."
    )
    assert views.context_note(chat, 2048) == (
        "If empty, at least 95% of the longest context that fits here. The model supports at most 2,048."
    )
    assert views.context_note(goal_of("long-context"), 2048) == "The model supports at most 2,048."


def test_a_search_starts_from_the_profile_in_use() -> None:
    space = Space((Axis("max_num_seqs", (16, 64)), Axis("kv_cache_memory_bytes", (None, 100, 300))))
    wider = with_values(space, {"max_num_seqs": 32, "kv_cache_memory_bytes": 200, "enforce_eager": True})
    assert [axis.values for axis in wider.axes] == [(16, 32, 64), (None, 100, 200, 300)]
    assert with_values(space, {"max_num_seqs": 64}) == space
