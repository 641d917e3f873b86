"""Files to try a reader on: whole ones that are damaged, and others that are made up in its language."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

from hypothesis import strategies as st

from robustmetric.training.recipe import Recipe
from tests.fuzz.readers import Reader

HUGE = ("9" * 30, "1" * 5000, "1e999", "-1", "0", "0x7fffffffffffffff", str(2**31), str(2**63), "nan", "-inf")
DEEP = 100_000  # levels of nesting, more than any parser's own stack holds

TOKENS = [
    *(text.encode() for text in HUGE),
    *(b"\0", b"\x1b[2J", b"\xff\xff\xff\xff", b"\0" * 8, b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\r", b"\n\n"),
    *(
        b'"',
        b"'",
        b",",
        b";",
        b"\t",
        b":",
        b": ",
        b"{",
        b"}",
        b"[",
        b"]",
        b"&a ",
        b"*a",
        b"!!",
        b"<<: ",
        b"%",
    ),
    *(b"null", b"true", b"{}", b"[]", b'""', b"=1+1", b"../../x", b"[/red]", "\u202e".encode(), b"\xf0\x9f"),
    *(b"[" * DEEP, b'{"a":' * DEEP, b"(" * 1000, b"a" * 200_000, b"- " * 2000),
]

YAML = [
    *("null", "~", "true", "[]", "{}", "''", "1_000", "0b1", "0o7", "1:2:3", ".inf", ".nan", "2001-13-45"),
    *("2001-01-01", "2001-01-01T99:00:00Z", "!!binary x", "!!binary ====", "!!set {a}", "!!omap [a: 1]"),
    *("!!python/object:os.system x", "!!python/name:os.system", "!!int x", "!!float x", "!!timestamp x"),
    *("&a [*a]", "&a {x: *a}", "*a", "[&b 1, *b]", "|\n  a\n  b", ">\n  a", "? a", "@", "`", "%TAG", "\\"),
    *('"\\x1b[2J"', '"\\ud800"', '"\\0"', "{a: {b: {c: 1}}}", "[[[[1]]]]", "x.py:y", "8/255", "1/0", *HUGE),
]

ALIASES = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@st.composite
def damaged(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Return a whole file with one to four things done to it."""
    content = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        end = draw(st.integers(begin, min(len(content), begin + draw(st.sampled_from([1, 8, 64, 4096])))))
        before, part, after = content[:begin], content[begin:end], content[end:]
        match draw(st.sampled_from(["flip", "write", "cut", "end", "insert", "repeat", "move", "number"])):
            case "flip" if after:
                content = before + part + bytes([after[0] ^ (1 << draw(st.integers(0, 7)))]) + after[1:]
            case "write":
                content = before + draw(st.binary(min_size=len(part), max_size=len(part))) + after
            case "cut":
                content = before + after
            case "end":
                content = before
            case "insert":
                content = before + draw(st.sampled_from(TOKENS) | st.binary(max_size=8)) + part + after
            case "repeat":
                content = before + part * draw(st.sampled_from([2, 3, 64])) + after
            case "move":
                content = before + after + part
            case "number":
                numbers = list(re.finditer(rb"\d+", content))
                if numbers:
                    found = draw(st.sampled_from(numbers))
                    other = draw(st.sampled_from(HUGE)).encode()
                    content = content[: found.start()] + other + content[found.end() :]
    return content


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Return a table with columns that are known and others, and cells of all kinds."""
    known = ["path", "label", "split", "is_query", "is_gallery", "x_1", "y_1", "x_2", "y_2", "camera"]
    names = st.sampled_from([*known, "step", "loss", "", "Path", "spilt", "=1+1"])
    header = draw(st.lists(names, max_size=12))
    usual = ["1.png", "2.png", "3.png", "a", "b", "train", "test", "val", "1", "0", "true", "", *HUGE]
    cell = st.sampled_from(usual) | st.text(max_size=5)
    rows = draw(st.lists(st.lists(cell, min_size=len(header), max_size=len(header)), max_size=6))
    delimiter, end = draw(st.sampled_from(",;\t")), draw(st.sampled_from(["\n", "\r\n", "\r"]))
    lines = [delimiter.join(row) + end for row in (header, *rows)]
    return "".join(lines).encode(errors="surrogatepass")


@st.composite
def recipes(draw: st.DrawFn) -> bytes:
    """Return entries with keys of recipes and values of all of YAML's kinds."""
    key = st.sampled_from([*Recipe.model_fields, "<<", "1", "null", "? [a]", "&a a", "*a"])
    value = st.sampled_from(YAML) | st.text(max_size=8)
    entries = draw(st.lists(st.tuples(key, value), max_size=5))
    head = draw(
        st.sampled_from(["", "", "", "---\n", "%YAML 9.9\n---\n", "- 1\n", ALIASES, "a: &a {b: 1}\n"])
    )
    return (head + "".join(f"{k}: {v}\n" for k, v in entries)).encode(errors="surrogatepass")


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**400, ""])
)


@st.composite
def trees(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Return a JSON file with one to three values replaced by anything, or by nothing."""
    made_up = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | _maps(inner), max_leaves=6)
    wholes = [json.loads(seed) for seed in seeds if seed]
    tree = [copy.deepcopy(draw(st.sampled_from(wholes)))]
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(_places(tree)))
        if isinstance(holder, dict) and draw(st.integers(0, 3)) == 0:
            del holder[key]
        else:
            holder[key] = draw(made_up)
    return json.dumps(tree[0]).encode()


def _maps(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(
        st.sampled_from(["value", "name", "file", "x"]) | st.text(max_size=3), inner, max_size=3
    )


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every list or dict with each key in it."""
    found = []
    pairs = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, value in pairs:
        found += [(tree, key), *_places(value)]
    return found


def files_for(reader: Reader) -> st.SearchStrategy[bytes]:
    """Return the files to try a reader on."""
    kinds = [damaged(reader.seeds), damaged(reader.seeds), st.sampled_from(TOKENS), st.binary(max_size=40)]
    if reader.grammar == "json":
        kinds += [trees(reader.seeds)] * 3
    elif reader.grammar == "csv":
        kinds += [tables()] * 3
    elif reader.grammar == "yaml":
        kinds += [recipes()] * 3
        if reader.name == "set":
            kinds += [st.sampled_from(YAML).map(lambda value: f"dim={value}".encode())] * 2
    return st.one_of(kinds)
