"""OpenAI's `prediction`: a text that the answer may repeat, such as the file that it edits. The answer does not depend
on it: it is a source of guesses, which are verified (engine/speculation.py).

Does not know: how guesses are verified.
"""

from __future__ import annotations

from dataclasses import replace

import anyio.to_thread

from localllm.engine.request import RequestOptions
from localllm.errors import InvalidParameter
from localllm.serving.served import ServedModel
from localllm.web.api.openai.schema import Prediction


async def with_prediction(options: RequestOptions, prediction: Prediction, model: ServedModel) -> RequestOptions:
    """Return the options with the prediction's tokens, as many as the context has. Raises `InvalidParameter`."""
    text = _text(prediction)
    token_ids = await anyio.to_thread.run_sync(
        lambda: model.tokenizer.encode(text, add_special_tokens=False)[: model.plan.max_model_len]
    )
    return replace(options, prediction_token_ids=tuple(token_ids))


def _text(prediction: Prediction) -> str:
    if prediction.type != "content":
        raise InvalidParameter(
            f"prediction.type {prediction.type!r} is not known.", "It is always content.", param="prediction.type"
        )
    if isinstance(prediction.content, str):
        return prediction.content
    parts = [part.get("text") if part.get("type") == "text" else None for part in prediction.content]
    texts = [text for text in parts if isinstance(text, str)]
    if len(texts) < len(parts):
        raise InvalidParameter(
            "prediction.content has a part that is not text.",
            'A part is {"type": "text", "text": ...}.',
            param="prediction.content",
        )
    return "".join(texts)
