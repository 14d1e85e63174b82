"""The cost of a picture before it is sent.

    POST /localllm/v1/media/tokens     {"model"?, "width", "height", "detail"?, "min_pixels"?, "max_pixels"?}

Does not know: how a picture becomes tokens (models/vision).
"""

from __future__ import annotations

import msgspec
from litestar import post
from litestar.response.base import ASGIResponse
from litestar.types import ControllerRouterHandler

from localllm.errors import MediaTooLarge, UnsupportedParameter
from localllm.serving.answers.pictures import SCALED
from localllm.serving.served import ServedModel
from localllm.web.api.exchange import SMALL_BODY_BYTES, ApiRequest, json_response, served_model, struct_body
from localllm.web.api.openapi import OF_MODELS, Operation, RequestBody
from localllm.web.shape import Shape


class PictureBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None  # the last used one if it is missing
    width: int  # in pixels, upright
    height: int
    detail: str | None = None  # auto, low, high or original
    min_pixels: int | None = None
    max_pixels: int | None = None


class PictureCost(Shape):
    tokens: int
    width: int  # of the picture as the model sees it
    height: int
    scaled: bool  # made smaller
    seconds: float | None  # that a new picture is expected to take before the answer begins; null: not known


@post(
    "/localllm/v1/media/tokens",
    status_code=200,
    request_max_body_size=SMALL_BODY_BYTES,
    operation=Operation(
        PictureCost, RequestBody(PictureBody, example={"width": 1920, "height": 1080}), also=OF_MODELS, guide="pictures"
    ),
)
async def media_tokens(request: ApiRequest) -> ASGIResponse:
    """Count the tokens of a picture by its size, without the picture."""
    body = await struct_body(request, PictureBody)
    model = await served_model(request, body.model)
    return json_response(cost_of(model, body))


def cost_of(model: ServedModel, asked: PictureBody) -> PictureCost:
    """Return the tokens of a picture. Raises `UnsupportedParameter` for a model that does not see, and
    `MediaTooLarge`."""
    if model.sight is None:
        raise UnsupportedParameter(f"{model.shown_name} does not see pictures.", "It reads text alone.", param="model")
    width, height = max(asked.width, 1), max(asked.height, 1)
    if width * height > 2.5 * model.sight.most_pixels:
        raise MediaTooLarge(f"The picture has {width} x {height} pixels.", "That is more than is decoded.")
    detail = model.sight.detail(msgspec.structs.asdict(asked), "The picture")
    layout = model.sight.processor.layout(width, height, detail)
    is_scaled = layout.shown[0] * layout.shown[1] < SCALED * width * height
    seconds = model.generator.stats().picture_s(layout.rows)
    return PictureCost(
        tokens=layout.rows, width=layout.shown[0], height=layout.shown[1], scaled=is_scaled, seconds=seconds
    )


def routes() -> list[ControllerRouterHandler]:
    return [media_tokens]
