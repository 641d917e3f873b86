"""The paper's tables and figures as data: which cells they are made of, and what was published for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import yaml

from robustmetric.experiments.cells import Cell, Samplers, Task
from robustmetric.experiments.published import FOLDER, Published, published
from robustmetric.registry import lookup
from robustmetric.usercode import without_folder

Kind = Literal["scores", "pairs", "samplers", "curves"]
"""How an experiment is shown: all columns, R@1 and ERS of source × destination, Table 1, or a figure."""


@dataclass(frozen=True)
class Row:
    """A row of a table, or a point of a figure's line.

    `data`, `defense` and `steps` are those of the published row; `tasks` are its cells, one a seed;
    `published` is what the paper has for it, None where it has nothing.

    >>> experiment("table7").rows[1].defense
    'HM[S,LGA(u=2.2)]'
    """

    data: str
    defense: str
    steps: int | None
    tasks: tuple[Task, ...]
    published: Published | None = None

    @property
    def cost(self) -> int:
        """The training cost of a step: η + 1."""
        return (self.steps or 0) + 1


@dataclass(frozen=True)
class Experiment:
    """A table or a figure: its `name` (table6), `kind`, `title`, its `rows` and the `data` sets of them."""

    name: str
    kind: Kind
    title: str
    rows: tuple[Row, ...]
    data: tuple[str, ...] = field(default=())

    @property
    def heading(self) -> str:
        """The name as the paper writes it.

        >>> experiment("figure6").heading
        'Figure 6'
        """
        return self.name.capitalize().replace("Table", "Table ").replace("Figure", "Figure ")

    @property
    def tasks(self) -> list[Task]:
        """All different cells, in their order."""
        return list(dict.fromkeys(task for row in self.rows for task in row.tasks))


def experiment_names() -> list[str]:
    """Return the names of all tables and figures, in the paper's order.

    >>> experiment_names()[:3], len(experiment_names())
    (['table1', 'table2', 'table3'], 15)
    """
    return list(_written())


def experiment(name: str, data: Sequence[str] = (), seeds: Sequence[int] = (0,)) -> Experiment:
    """Return the table or figure of a `name`, on the paper's data sets or on others.

    With `data`, the rows of those sets alone; a set that the paper has no rows for takes those of another.
    `seeds` are those of each cell's trainings.

    >>> [row.defense for row in experiment("table6", ["digits"]).rows][:3]
    ['N/A[R]', 'EST[R]', 'ACT[R]']
    >>> experiment("table12")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown table or figure 'table12' (did you mean 'table2'?); known: figure1, ...
    """
    about = lookup("table or figure", name, _written())
    kind: Kind = about.get("kind", "scores")
    if kind == "samplers":
        sets = tuple(data) or tuple(about["data"])
        rows = [Row(without_folder(s), "", None, tuple(Samplers(s, seed) for seed in seeds)) for s in sets]
        return Experiment(name, kind, about["title"], tuple(rows), tuple(map(without_folder, sets)))
    own = list(_published_rows(name, about))
    sets = tuple(data) or tuple(dict.fromkeys(row.data for row in own))
    rows = [row for wanted in sets for row in _rows_on(wanted, own, seeds)]
    return Experiment(name, kind, about["title"], tuple(rows), tuple(map(without_folder, sets)))


def all_cells(data: Sequence[str] = (), seeds: Sequence[int] = (0,)) -> list[Task]:
    """Return the cells of all tables and figures, each once.

    >>> len([task for task in all_cells() if isinstance(task, Cell)])
    92
    """
    found = [task for name in experiment_names() for task in experiment(name, data, seeds).tasks]
    return list(dict.fromkeys(found))


def _rows_on(data: str, own: Sequence[Published], seeds: Sequence[int]) -> Iterator[Row]:
    """Lay out the rows of a data set: its own, or those of the first set that the paper has."""
    model = data if any(row.data == data for row in own) else own[0].data
    for row in own:
        if row.data == model:
            cells = tuple(Cell.of(data, row.defense, row.steps, seed) for seed in seeds)
            known = row if data == model else _elsewhere(cells[0])
            yield Row(without_folder(data), row.defense, row.steps, cells, known)


def _elsewhere(cell: Cell) -> Published | None:
    """Find what was published of a training in another place than the tables."""
    for row in published():
        if row.table == 0 and Cell.of(row.data, row.defense, row.steps, cell.seed) == cell:
            return row
    return None


def _published_rows(name: str, about: Mapping[str, Any]) -> Iterator[Published]:
    if "lines" in about:
        for defense, table in about["lines"].items():
            # A table may have a row twice, in two of its parts.
            points = {row.steps: row for row in _rows_of(table) if row.defense == defense and row.steps}
            yield from (points[steps] for steps in sorted(filter(None, points)))
    else:
        yield from _rows_of(about.get("rows", int(name.removeprefix("table"))))


def _rows_of(table: int) -> list[Published]:
    return [row for row in published() if row.table == table]


@cache
def _written() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load((FOLDER / "paper.yaml").read_text(encoding="utf-8"))
    return found
