"""The lighthouse's dashboard: a page, live by server-sent events, and what supervisors and scrapers ask for.

`sample` has what it is given, `rate`, `history` and `model` turn that into the page's values (pure), `access` says who
may do what (pure), `server` serves it (aiohttp, extra `[dashboard]`), `page/` is what the browser runs.
"""
