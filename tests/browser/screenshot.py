"""Pictures of a report for the README: the top of the page, and what ES did.

    python -m tests.browser.screenshot runs/demo/report.html docs/images

writes report.png and gallery.png; `make screenshot` does it with the demo's report.
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, sync_playwright

from tests.helpers.browser import launch, opened

WIDTH, HEIGHT, AROUND = 1280, 1600, 8
MOST = 300_000  # bytes of a picture


def main() -> None:
    """Read the page and the folder from the command line, and write the pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, help="the report")
    parser.add_argument("folder", type=Path, help="where the pictures go")
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = launch(playwright)
        with opened(browser, given.page.resolve().as_uri(), (WIDTH, HEIGHT)) as page:
            shoot(page, given.folder)
        browser.close()


def shoot(page: Page, folder: Path) -> None:
    """Write a page as far as its table of scores, and its first cards of ES, one of each network."""
    folder.mkdir(parents=True, exist_ok=True)
    x, y, width, height = box(page, "#scores .scroll")
    write(clip(page, 0, 0, WIDTH, y + height + AROUND), folder / "report.png")
    page.select_option("#by-attack", "ES")
    page.evaluate("document.querySelectorAll('.shot:not([hidden])').forEach((e, k) => { e.hidden = k > 1; })")
    x, y, width, height = box(page, "#shots")
    cards = clip(page, x - AROUND, y - AROUND, width + 2 * AROUND, height + 2 * AROUND)
    write(cards, folder / "gallery.png")


def box(page: Page, what: str) -> tuple[float, float, float, float]:
    """Return where an element begins on a page, and its width and height."""
    found = page.eval_on_selector(
        what,
        "(e) => { const b = e.getBoundingClientRect(); return [b.x, b.y + scrollY, b.width, b.height]; }",
    )
    return found[0], found[1], found[2], found[3]


def clip(page: Page, x: float, y: float, width: float, height: float) -> bytes:
    """Return a part of a page."""
    return page.screenshot(clip={"x": x, "y": y, "width": width, "height": height}, full_page=True)


def write(content: bytes, file: Path) -> None:
    """Write a screenshot in 256 colours, none of them more than a few levels off."""
    with Image.open(io.BytesIO(content)) as image:
        few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(file, optimize=True)
    size = file.stat().st_size
    assert size < MOST, f"{file} has {size} bytes"
    print(f"{file}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
