"""Pages of HTML, read without a browser."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "wbr"}
)


@dataclass
class Element:
    """An element: its tag, its attributes, and what is inside it."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    inside: list[Element | str] = field(default_factory=list)

    @property
    def raw(self) -> str:
        """All text in it, as it stands."""
        return "".join(part if isinstance(part, str) else part.raw for part in self.inside)

    @property
    def text(self) -> str:
        """All text in it, with single spaces."""
        return " ".join(self.raw.split())

    def __getitem__(self, attribute: str) -> str:
        return self.attributes[attribute]

    def every(self) -> Iterator[Element]:
        """Yield it and all that it holds."""
        yield self
        for part in self.inside:
            if isinstance(part, Element):
                yield from part.every()

    def all(self, tag: str | None = None, kind: str | None = None) -> list[Element]:
        """Return the elements in it of a tag and of a class."""
        return [
            one
            for one in self.every()
            if tag in (None, one.tag) and (kind is None or kind in one.attributes.get("class", "").split())
        ]

    def one(self, tag: str | None = None, kind: str | None = None) -> Element:
        """Return the only such element."""
        (found,) = self.all(tag, kind)
        return found

    def by_id(self, name: str) -> Element:
        """Return the element with an id; an id is there once."""
        (found,) = [one for one in self.every() if one.attributes.get("id") == name]
        return found

    def has(self, name: str) -> bool:
        """Say whether there is an element with an id."""
        return any(one.attributes.get("id") == name for one in self.every())

    def rows(self) -> list[list[Element]]:
        """Return the cells of all rows of tables in it."""
        return [[one for one in row.every() if one.tag in ("th", "td")] for row in self.all("tr")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element("")
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        one = Element(tag, {name: value or "" for name, value in attrs})
        assert len(one.attributes) == len(attrs), f"an attribute of {tag} is there twice"
        self.open[-1].inside.append(one)
        if tag not in VOID:
            self.open.append(one)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].inside.append(data)


def parsed(text: str) -> Element:
    """Parse a page; every element must be closed in its turn."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert [one.tag for one in reader.open] == [""], "an element is not closed"
    return reader.root
