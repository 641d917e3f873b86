"""How the docstrings become the API reference."""

from __future__ import annotations

import ast
import re
from typing import Any

from griffe import (
    Alias,
    Attribute,
    Docstring,
    ExprCall,
    ExprKeyword,
    Extension,
    GriffeLoader,
    Module,
    Object,
)

EXAMPLE = re.compile(r"^ *>>> .*(?:\n *\S.*)*", re.MULTILINE)


class Docstrings(Extension):
    """Show examples as code, and the fields of pydantic's models with what their descriptions say."""

    def on_instance(self, *, obj: Object, **_: Any) -> None:
        """Put the examples of a docstring into blocks of code."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **_: Any) -> None:
        """Give a field its description as docstring, and its default as value."""
        if not isinstance(attr.value, ExprCall) or str(attr.value.function) != "Field":
            return
        options = {a.name: a.value for a in attr.value.arguments if isinstance(a, ExprKeyword)}
        defaults = [a for a in attr.value.arguments if not isinstance(a, ExprKeyword)]
        if "description" in options:
            told = ast.literal_eval(str(options["description"]))
            told = told[:1].upper() + told[1:] if told[:1].isascii() else told  # ε stays
            attr.docstring = Docstring(f"{told}.", parent=attr)
        attr.value = defaults[0] if defaults and str(defaults[0]) != "..." else options.get("default")

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **_: Any) -> None:
        """Take a public name such as `evaluate` for the function, not for the module of the same name."""
        loader.resolve_aliases()
        for package in (pkg, *pkg.modules.values()):
            for name in map(str, package.exports or ()):
                found = package.members[name]
                module = found.final_target if isinstance(found, Alias) else found
                if isinstance(module, Module) and name in module.members:
                    package.members[name] = Alias(name, module.members[name], parent=package)
