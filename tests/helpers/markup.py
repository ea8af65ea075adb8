"""A page as a reader finds things on it: by headings, links and cells, not by its source."""

from __future__ import annotations

from bs4 import BeautifulSoup, Tag


class Page:
    """One HTML page, or a part of it."""

    def __init__(self, markup: str | Tag) -> None:
        self.tag = BeautifulSoup(markup, "html.parser") if isinstance(markup, str) else markup

    def __contains__(self, text: str) -> bool:
        return text in self.text

    @property
    def text(self) -> str:
        """All that can be read, blanks run together."""
        return " ".join(self.tag.get_text(" ").split())

    def all(self, selector: str) -> list[Tag]:
        return list(self.tag.select(selector))

    def one(self, selector: str) -> Tag:
        (found,) = self.tag.select(selector)
        return found

    def texts(self, selector: str) -> list[str]:
        return [" ".join(tag.get_text(" ").split()) for tag in self.all(selector)]

    def links(self, start: str) -> list[str]:
        """Addresses that begin so, in their order."""
        return [str(tag["href"]) for tag in self.all(f'a[href^="{start}"]')]

    def link(self, text: str) -> str:
        """Address of the one link that reads ``text``."""
        (found,) = {str(tag["href"]) for tag in self.all("a[href]") if tag.get_text() == text}
        return found

    def section(self, heading: str) -> Page:
        """The section under this heading."""
        (found,) = [tag for tag in self.all("h1, h2, h3") if tag.get_text().strip() == heading]
        section = found.find_parent("section")
        assert isinstance(section, Tag)
        return Page(section)

    def headings(self) -> list[str]:
        return self.texts("h1, h2, h3")

    def row(self, heading: str) -> list[Tag]:
        """Cells of the table row with this heading."""
        (found,) = [tag for tag in self.all("tr > th[scope=row]") if tag.get_text() == heading]
        return list(found.find_next_siblings("td"))
