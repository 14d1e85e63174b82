"""Filling in the middle, in any dialect: the prompt of a model that was trained for it, and the tokens that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from localllm.engine.params import SamplingParams
from localllm.errors import UnsupportedParameter
from localllm.serving.served import ServedModel
from localllm.text.fill_in import ExtraFile, FillIn, find_fill_in
from localllm.web.api.conversation import require_readable
from localllm.web.api.off_loop import on_thread


def fill_in_of(model: ServedModel, param: str = "suffix") -> FillIn:
    """Return the model's tokens for filling in the middle. Raises `UnsupportedParameter`."""
    found = find_fill_in(model.tokenizer)
    if found is None:
        raise UnsupportedParameter(
            f"{model.shown_name} cannot fill in the middle of a text.",
            "Its vocabulary has no tokens for that, such as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>.",
            "Use a model that was trained for it, such as Qwen2.5-Coder, StarCoder2, Codestral or CodeGemma.",
            param=param,
        )
    return found


def ended(params: SamplingParams, fill_in: FillIn) -> SamplingParams:
    """Return the parameters with the tokens that end an answer: padding, or the beginning of another file."""
    return replace(params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *fill_in.end_ids))))


async def infill_token_ids(
    model: ServedModel,
    fill_in: FillIn,
    before: str,
    behind: str,
    extra: Sequence[ExtraFile] = (),
    room: int | None = None,
) -> list[int]:
    """Return the prompt. room: most tokens of it; None: any number. Raises `ContextTooLong`."""
    size = len(before) + len(behind) + sum(len(file.name) + len(file.text) for file in extra)
    require_readable(size, model)
    return await on_thread(size, lambda: fill_in.prompt(before, behind, extra, room))
