"""Text as LaTeX."""

from __future__ import annotations

import re

import pytest

from robustmetric.experiments.published import published
from robustmetric.report.latex import escaped, spelled


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("N/A[R]", r"N/A{[}$\mathcal{R}${]}"),
        ("ACT[S]", r"ACT{[}$\mathcal{S}${]}"),
        ("HM[R,M]", r"HM{[}$\mathcal{R},\mathcal{M}${]}"),
        ("HM[S,LGA]", r"HM{[}$\mathcal{S},g_\mathsf{LGA}${]}"),
        ("HM[S,LGA(u=2.2)]", r"HM{[}$\mathcal{S},g_\mathsf{LGA}${]} ($u{=}2.2$)"),
        ("HM[S,g1/2]", r"HM{[}$\mathcal{S},g_\mathsf{1/2}${]}"),
        ("HM[S,g2]", r"HM{[}$\mathcal{S},g_\mathsf{2}${]}"),
        ("HM[S,0]", r"HM{[}$\mathcal{S},0${]}"),
        ("HM[S,-γ/2]", r"HM{[}$\mathcal{S},-\gamma/2${]}"),
        ("HM[S,gB(M)]", r"HM{[}$\mathcal{S},g_\mathsf{B}(\mathcal{M})${]}"),
        ("HM[S,LGA]&ICS(γ=0.2)", r"HM{[}$\mathcal{S},g_\mathsf{LGA}${]}\&ICS($\gamma{=}0.2$)"),
        # What is not the paper's is shown as it is.
        ("HM[a_b.py:Mine,LGA]", r"HM{[}a\_b.py:Mine,LGA{]}"),
        ("HM[S,gB(x.py:D)]", r"HM{[}S,gB(x.py:D){]}"),
        ("HM[S,LGA]&ICS(μ=1)", r"HM{[}S,LGA{]}\&ICS(μ=1)"),
        ("HM[S,LGA(u=$x)]", r"HM{[}S,LGA(u=\$x){]}"),
    ],
)
def test_defenses_are_spelled_as_in_the_paper(name: str, wanted: str) -> None:
    assert spelled(name) == wanted


def test_every_published_defense_is_spelled_with_its_letters() -> None:
    for row in published():
        assert r"$\mathcal{" in spelled(row.defense), row.defense


HOSTILE = [
    r"\input{/etc/passwd}",
    r"\end{tabular}\end{table*}",
    "a}b{c",
    "50 % & # _ $ ^ ~ \\",
    "$x$",
    "[2em] *",
    "a\nb\\\\c\x1b[2J",
    "``|<>\"''",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_can_say_anything_in_latex(text: str) -> None:
    found = escaped(text)
    # Take away what the escapes are made of: nothing that means something may be left.
    rest = re.sub(r"\\[&%$#_{}]|\\text[a-z]+\{\}|\{[\[\]*]\}", "", found)
    assert not re.search(r"[\\&%$#_{}\[\]*~^\n\x00-\x1f]", rest)
    assert spelled(text) == found
