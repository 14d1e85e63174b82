"""The server's outside: HTTP in, HTTP out. `app` assembles it, `api/` speaks the dialects, `pages/` draws."""
