"""What the parts of a record have in common as JSON."""

from __future__ import annotations

import math
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _null(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_null)]
"""A figure; null where there is none, for JSON has neither NaN nor infinity."""


def _without_example(schema: dict[str, Any]) -> None:
    schema["description"] = schema["description"].partition("\n\n>>>")[0]


class Part(BaseModel):
    """A part of a record: values that do not change, and no others than those that are named."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra=_without_example)
