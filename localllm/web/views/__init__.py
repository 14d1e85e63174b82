"""The data that each template shows: one frozen dataclass per template, in one file per page.

Fields hold plain values in the units of the engine (seconds, bytes, tokens per second); templates print them with
the filters of `web/pages/render.py`. A view knows the name of its template and nothing of HTTP or of the engine.
"""
