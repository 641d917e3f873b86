"""The page of faults is the list of those that tests try."""

from tests.helpers.faults import PAGE, listed, page


def test_the_page_is_made_of_the_tests() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run python -m tests.helpers.faults"
    assert len(listed()) > 0
