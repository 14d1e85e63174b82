"""The HTTP side of the server: `app` assembles it, `api/` speaks the API dialects, `pages/` renders the web pages."""
