from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from robustmetric.errors import UserError, fraction
from robustmetric.registry import Registry, lookup, parse_spec, registry, unknown
from robustmetric.usercode import file_of, without_folder

KNOWN = {"resnet18": 18, "resnet50": 50, "C2F2": 2, "nothing": 0}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("resnet19", " (did you mean 'resnet18'?)"),
        ("RESNET50", " (did you mean 'resnet50'?)"),
        ("c2f3", " (did you mean 'C2F2'?)"),
        ("noting", " (did you mean 'nothing'?)"),
        ("vgg", ""),
        ("", ""),
    ],
)
def test_unknown_names_the_value_the_nearest_and_all_in_order(name: str, hint: str) -> None:
    told = f"unknown model {name!r}{hint}; known: C2F2, nothing, resnet18, resnet50"
    assert unknown("model", name, KNOWN) == told
    with pytest.raises(ValueError, match=re.escape(told)):
        lookup("model", name, KNOWN)


@dataclass(frozen=True, kw_only=True)
class Part:
    size: int = 1
    on: bool = False
    rate: float = 0.5
    protocol: str = "strict"


def registry_of(expects: type | None = None, **parts: Callable[..., Any]) -> Registry[Any]:
    made: Registry[Any] = Registry("part", expects)
    for name, factory in parts.items():
        made.register(name)(factory)
    return made


PARTS = registry_of(Part, part=Part)
PARTS.register("Part+", on=True)(Part)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("part", Part()),
        ("part()", Part()),
        ("part( )", Part()),
        ("part(size=3)", Part(size=3)),
        ("part(size=-3)", Part(size=-3)),
        ("part (  size = 3 ,rate=1e-3)", Part(size=3, rate=0.001)),
        ("part(on=True)", Part(on=True)),
        ("part(protocol='x')", Part(protocol="x")),
        ("Part+", Part(on=True)),
        ("Part+(size=2)", Part(size=2, on=True)),
    ],
)
def test_make_makes_a_part_from_its_text(text: str, wanted: Part) -> None:
    assert PARTS.make(text) == wanted


def test_make_adds_the_options_that_come_as_arguments() -> None:
    assert PARTS.make("part(size=3)", rate=0.25) == Part(size=3, rate=0.25)
    assert PARTS.make("part", size=3, on=True) == Part(size=3, on=True)


def test_make_does_not_run_what_stands_in_the_brackets() -> None:
    with pytest.raises(ValueError, match="must be option=value"):
        PARTS.make("part(size=__import__('os').getpid())")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prt", r"^unknown part 'prt' \(did you mean 'part'\?\); known: Part\+, part$"),
        ("prt(size=2)", r"^unknown part 'prt' \(did you mean 'part'\?\); known: Part\+, part$"),
        ("part(size=2", r"^part 'part\(size=2' has no closing bracket; write NAME\(option=value, \.\.\.\)$"),
        ("part(", r"^part 'part\(' has no closing bracket; write"),
        (
            "part(2)",
            r"^part 'part\(2\)': options must be option=value, .* write NAME\(option",
        ),
        ("part(size=)", "must be option=value"),
        ("part(size=two)", "must be option=value"),
        ("part(**{})", "must be option=value"),
        ("part(size=2)(on=True)", "must be option=value"),
        (
            "part(sise=2)",
            r"^part 'part' got an unexpected keyword argument 'sise'; its options: size, on, rate, protocol$",
        ),
    ],
)
def test_make_refuses_in_words_that_help(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PARTS.make(text)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", 8 / 255),
        (" 8 / 255 ", 8 / 255),
        (".5/.25", 2.0),
        ("1.", 1.0),
        ("2.5E-3/255", 2.5e-3 / 255),
    ],
)
def test_fraction_reads_a_number_or_two(text: str, value: float) -> None:
    found = fraction(text)
    assert isinstance(found, float)
    assert found == value


@pytest.mark.parametrize(
    "value",
    ["8/0", "8/0.0", "8/255/3", "1.2.3/4", "/255", "8/", "", " ", "-1", "-8/255", "much", "8 255", "nan",
     "inf", "1e", "e5", "1e-", "1e0.5", "1 e5", "1e--5", "1/1e-400", "1e400", 0.1, 1, None, True, [0.1]],
)  # fmt: skip
def test_fraction_gives_back_what_it_cannot_read(value: object) -> None:
    assert fraction(value) is value


def test_what_is_offered_goes_to_parts_that_have_such_an_option() -> None:
    parts = registry_of(part=Part, none=lambda: 0)
    assert parts.make("part", {"size": 3, "colour": 1}) == Part(size=3)
    assert parts.make("part(size=2)", {"size": 3}) == Part(size=2)
    assert parts.make("none", {"size": 3}) == 0


def test_options_may_hold_commas_in_brackets_and_quotes() -> None:
    whole = registry_of(dict=lambda **options: options).make(
        "dict(a={'x': 1, 'y': 2}, b='one, two', c=(1, 2))"
    )
    assert whole == {"a": {"x": 1, "y": 2}, "b": "one, two", "c": (1, 2)}


@pytest.mark.parametrize("text", ["part(size=2)", "Part+(on=True)"])
def test_an_option_is_given_once(text: str) -> None:
    with pytest.raises(UserError, match="is given already"):
        PARTS.make(text, size=3)


def test_a_name_is_registered_once() -> None:
    parts = registry_of(part=Part)
    parts.register("part")(Part)  # by the same module again
    with pytest.raises(UserError, match=r"'part' is registered already, by .*Part: choose another"):
        parts.register("part")(dict)


def test_bind_sets_the_options_of_a_function() -> None:
    def spread(values: list[float], *, scale: float = 1.0) -> float:
        return scale * (max(values) - min(values))

    parts = registry_of(spread=spread)
    assert parts.bind("spread")([1.0, 3.0]) == 2.0
    assert parts.bind("spread(scale=2)")([1.0, 3.0]) == 4.0
    with pytest.raises(UserError, match="has no option 'scail'; its options: scale"):
        parts.bind("spread(scail=2)")


OWN = """
from dataclasses import dataclass
from beside import SIZE

@dataclass
class Mine(dict):
    size: int = SIZE

    def __post_init__(self):
        if self.size < 0:
            raise RuntimeError("too small")

made = {"size": 7}
count = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A file of the user's that imports its neighbour."""
    (tmp_path / "beside.py").write_text("SIZE = 5")
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return file


def test_an_object_of_a_file_is_made_with_its_options(own: Path) -> None:
    parts = registry_of(dict)
    assert parts.make(f"{own}:Mine").size == 5
    assert parts.make(f"{own}:Mine(size=2)").size == 2
    assert parts.make(f"{own}:made") == {"size": 7}  # it is one already
    assert type(parts.make(f"{own}:Mine")) is type(parts.make(f"{own}:Mine"))  # the file is imported once


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mein", "unknown name 'Mein' .did you mean 'Mine'"),
        ("count", "'count' of .*own.py is a int; the part must be a class or a function"),
        ("Mine(sise=2)", "unexpected keyword argument 'sise'; its options: size"),
        ("made(size=2)", "is an instance and takes no options"),
        ("Mine(size=2", "no closing bracket"),
    ],
)
def test_an_object_of_a_file_is_refused_in_words_that_help(own: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        registry_of(dict).make(f"{own}:{name}")


def test_a_file_that_fails_shows_its_own_traceback_once(own: Path) -> None:
    own.write_text("import math\n\nmath.sqrt(-1)\n")
    for _ in range(2):  # a failed import is not kept
        with pytest.raises(UserError, match=r"own\.py failed with ValueError") as error:
            registry_of().make(f"{own}:Mine")
        said = str(error.value)
        assert said.count("Traceback") == said.count(", line 3, in <module>") == 1
        assert "registry.py" not in said
        assert "importlib" not in said


def test_a_file_that_was_changed_is_imported_anew(own: Path) -> None:
    before = registry_of().make(f"{own}:Mine").size
    own.write_text(OWN.replace("= SIZE", "= 6"))
    assert (before, registry_of().make(f"{own}:Mine").size) == (5, 6)


def test_there_must_be_a_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.py to take the part from"):
        registry_of().make(f"{tmp_path / 'none.py'}:Mine")


REGISTERS = """
from robustmetric.registry import register

@register("check", "mine")
class Mine:
    pass
"""


def test_copies_of_a_file_register_the_same_part(tmp_path: Path) -> None:
    """As those that runs keep: the last one that was imported counts."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "own.py").write_text(REGISTERS)
        found = registry("check").find(f"{tmp_path / folder / 'own.py'}:Mine")[0]
        assert registry("check")["mine"] is found
    (tmp_path / "a" / "other.py").write_text(REGISTERS)
    with pytest.raises(UserError, match=r"'mine' is registered already, by own\.py:Mine: choose another"):
        registry("check").find(f"{tmp_path / 'a' / 'other.py'}:Mine")


def test_a_class_of_another_kind_is_refused_before_it_is_made(own: Path) -> None:
    with pytest.raises(UserError, match="is the class Mine; it must be derived from Part"):
        registry_of(Part).make(f"{own}:Mine(size=-1)")


@pytest.mark.parametrize("folder", ["mine (1)", "a,b=(2)", "a[1]", "a:b.py:c", "f(x=1)", "ü ö"])
@pytest.mark.parametrize("options", ["", "(k=2)", "(k='y.py:z')", "(k=(1, 2))"])
def test_the_path_of_a_file_may_have_any_letters(folder: str, options: str) -> None:
    whole = f"/runs/{folder}/n.py:net"
    assert file_of(whole + options) == (Path(f"/runs/{folder}/n.py"), "net")
    assert parse_spec("model", whole + options) == (whole, parse_spec("model", f"net{options}")[1])
    assert without_folder(whole + options) == f"n.py:net{options}"
