"""Text as LaTeX: what stands in a table is shown as it is, and defenses are spelled as in the paper."""

from __future__ import annotations

import re

from robustmetric.text import printable

_SPELLED = {
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    **{letter: f"{{{letter}}}" for letter in "[]*"},  # behind the end of a line they would be its options
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "`": r"\textasciigrave{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "−": "$-$",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≠": r"$\neq$",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "→": r"$\to$",
    "…": r"\ldots{}",
    "†": r"$\dagger$",
    "α": r"$\alpha$",
    "γ": r"$\gamma$",
    "ε": r"$\varepsilon$",
    "η": r"$\eta$",
    "λ": r"$\lambda$",
    "ξ": r"$\xi$",
}
_NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"
_DEFENSE = re.compile(
    r"(N/A|EST|ACT|HM)\[([RMSDH])(?:,([^\[\],&]+(?:\([^()&]*\))?))?\]((?:&ICS(?:\([^()]*\))?)*)"
)
_OPTIONS = re.compile(rf"([γλξu])=({_NUMBER})")
_LETTERS = {"γ": r"\gamma", "λ": r"\lambda", "ξ": r"\xi", "u": "u"}


def escaped(text: str) -> str:
    r"""Return `text` so that LaTeX shows it as it is.

    >>> print(escaped("50 % of R&D_1, η = 8"))
    50 \% of R\&D\_1, $\eta$ = 8
    """
    return "".join(_SPELLED.get(letter, letter) for letter in re.sub(r"\s+", " ", printable(text)))


def spelled(name: str) -> str:
    r"""Return the `name` of a defense as the paper spells it; that of any other is escaped.

    >>> print(spelled("HM[S,LGA]&ICS(λ=0.05)"))
    HM{[}$\mathcal{S},g_\mathsf{LGA}${]}\&ICS($\lambda{=}0.05$)
    >>> print(spelled("HM[S,gB(M,ξ=0.1)]"))
    HM{[}$\mathcal{S},g_\mathsf{B}(\mathcal{M})${]} ($\xi{=}0.1$)
    """
    parts = _DEFENSE.fullmatch(name)
    if parts is None:
        return escaped(name)
    family, source, destination, terms = parts.groups()
    inside, behind = rf"\mathcal{{{source}}}", ""
    if destination is not None:
        found = _destination(destination)
        if found is None:
            return escaped(name)
        inside += f",{found[0]}"
        behind = f" ({found[1]})" if found[1] else ""
    text = f"{family}{{[}}${inside}${{]}}{behind}"
    for term in terms.split("&")[1:]:
        options = term.removeprefix("ICS").strip("()")
        told = _options(options) if options else ""
        if told is None:
            return escaped(name)
        text += rf"\&ICS({told})" if told else r"\&ICS"
    return text


def _destination(text: str) -> tuple[str, str] | None:
    """Spell a destination, and its options, which stand behind the bracket; None for one of another kind."""
    head, _, rest = text.removesuffix(")").partition("(")
    if head == "gB":
        benign, _, rest = rest.partition(",")
        if benign not in tuple("RMSDH"):
            return None
        spelled_out = rf"g_\mathsf{{B}}(\mathcal{{{benign}}})"
    elif head in tuple("RMSDH"):
        spelled_out = rf"\mathcal{{{head}}}"
    elif head in ("LGA", "g2", "g1/2"):
        spelled_out = rf"g_\mathsf{{{head if head == 'LGA' else head[1:]}}}"
    elif re.fullmatch(rf"{_NUMBER}|-?γ(/\d+)?", head):
        spelled_out = head.replace("γ", r"\gamma")
    else:
        return None
    options = _options(rest) if rest else ""
    return None if options is None else (spelled_out, options)


def _options(text: str) -> str | None:
    found = [_OPTIONS.fullmatch(part) for part in text.split(",")]
    parts = [f"${_LETTERS[one[1]]}{{=}}{one[2]}$" for one in found if one is not None]
    return ", ".join(parts) if len(parts) == len(found) else None
