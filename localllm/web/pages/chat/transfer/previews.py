"""Previews: an HTML or SVG block of a stored message, run in a frame that can reach nothing.

A model, or an imported chat, wrote the block, so it is run as hostile code:

- The page shows it in `<iframe sandbox="allow-scripts">`, and the answer itself says `sandbox allow-scripts`, so the
  same holds if its address is opened without the frame. Its origin is opaque: it has no cookies and no storage, and it
  can neither read the page around it nor send requests as the user. It opens no windows, forms, dialogs or downloads,
  and cannot navigate the page.
- `default-src 'none'` forbids all requests. Scripts, styles, images, fonts and media are inline or data. The page's own
  policy lets its frames show this server alone, so the frame cannot leave for another site and take data along.
  `Connection-Allowlist: ()` closes WebRTC, which no older policy covers.
- The route takes ids and the digest of a block, and answers only with what is stored in a chat of the caller: a link
  cannot carry HTML into it.

What remains: a browser that does not know Connection-Allowlist lets a script send packets by WebRTC. They can carry
what is in the block and what is typed into it, and nothing else of the page. A script that never ends keeps its process
busy until the preview is closed. A block may look like anything, so its frame is under a bar that says Preview.
Does not know: the markup of a code block (markdown/render.py), the button (messages.js).
"""

from __future__ import annotations

import asyncio
from typing import Any

from litestar import Request, get
from litestar.response import Response

from localllm.web.pages.chat.markdown.render import preview_page
from localllm.web.pages.chat.state import chat_state
from localllm.web.pages.chat.store.records import ChatNotFound
from localllm.web.pages.chat.thread.handlers import requested_message

POLICY = (
    "sandbox allow-scripts; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; media-src data: blob:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'self'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "Connection-Allowlist": "()",
    "X-DNS-Prefetch-Control": "off",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@get("/c/{conversation_id:str}/m/{message_id:str}/preview/{digest:str}")
async def preview(request: Request[Any, Any, Any]) -> Response[str]:
    """Return the page of one block. Raises `ChatNotFound`."""
    _, message = await requested_message(request)
    text = chat_state(request).replies.current(message).text
    found = await asyncio.to_thread(preview_page, text, request.path_params["digest"])
    if found is None:
        raise ChatNotFound("This block is not in the message.", "The message was changed.", "Reload the page.")
    return Response(found, media_type="text/html", headers=HEADERS)


HANDLERS = (preview,)
