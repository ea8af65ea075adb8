"""Runbooks as pages, so that an alert at night leads to one even without a wiki."""

from __future__ import annotations

import re
from functools import cache
from typing import Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from markdown_it import MarkdownIt
from markupsafe import Markup

from kvlens.dashboard import shipped
from kvlens.dashboard.api.deps import ServicesDep
from kvlens.dashboard.web.templating import render

router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
INDEX: Final = "README"
_PAGE_LINK: Final = re.compile(r"(?:\.md)?\]\((\w+)\.md\)")
_OTHER_LINK: Final = re.compile(r"\[([^\]]*)\]\((?!https?://|/)[^)]*\)")


@router.get("/runbooks")
def index(services: ServicesDep, request: Request) -> Response:
    """All runbooks."""
    return runbook(services, request, INDEX)


@router.get("/runbooks/{kind}")
def runbook(services: ServicesDep, request: Request, kind: str) -> Response:
    """The page of one kind of incident; ``.md`` may follow, as in the source tree."""
    page = pages().get(kind.removesuffix(".md"))
    if page is None:
        return render(services, request, "missing.html", status=404, what="runbook", ident=kind)
    title, body = page
    return render(services, request, "runbook.html", page="incidents", title=title, body=body)


@cache
def pages() -> dict[str, tuple[str, Markup]]:
    """Title and HTML of each runbook, by kind of incident."""
    return {kind: _page(text) for kind, text in shipped.runbook_pages().items()}


def _page(text: str) -> tuple[str, Markup]:
    heading, _, rest = text.partition("\n")
    linked = _PAGE_LINK.sub(r"](/runbooks/\1)", rest)
    # Links into the rest of the source tree lead nowhere here: their words stay.
    linked = _OTHER_LINK.sub(r"\1", linked)
    title = heading.lstrip("# ")
    # Markup, since the files are ours and HTML within them is not let through.
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(linked)
    caption = Markup('<table><caption class="visually-hidden">{}</caption>').format(title)
    named = html.replace("<table>", caption).replace("<th>", '<th scope="col">')
    return title, Markup(named)
