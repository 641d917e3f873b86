"""What attacks declare to report is what they report, in the units and directions of the paper."""

import numpy as np
import pytest

from robustmetric.attacks import COSINE, DISTANCE, PERCENT, Unit, attack

# Name, arrow, unit, and the ERS terms of 0 and of 1.
DECLARED: dict[str, list[tuple[str, str, Unit, tuple[float, float] | None]]] = {
    "CA+": [("CA+", "↑", PERCENT, (0, 2))],
    "CA-": [("CA-", "↓", PERCENT, (100, 99))],
    "CA+(w=5)": [("CA+(w=5)", "↑", PERCENT, (0, 2))],
    "QA+": [("QA+", "↑", PERCENT, (0, 2))],
    "QA-": [("QA-", "↓", PERCENT, (100, 99))],
    "QA-(m=2)": [("QA-(m=2)", "↓", PERCENT, (100, 99))],
    "TMA": [("TMA", "↓", COSINE, (100, 0))],
    "ES": [("ES:D", "↓", DISTANCE, (100, 50)), ("ES:R", "↑", PERCENT, (0, 1))],
    "LTM": [("LTM", "↑", PERCENT, (0, 1))],
    "GTM": [("GTM", "↑", PERCENT, (0, 1))],
    "GTT": [("GTT", "↑", PERCENT, (0, 1))],
    "SP-QA+": [("SP-QA+", "↑", PERCENT, None), ("SP-QA+:keep", "", PERCENT, None)],
    "SP-QA-(m=2)": [("SP-QA-(m=2)", "↓", PERCENT, None), ("SP-QA-(m=2):keep", "", PERCENT, None)],
}


@pytest.mark.parametrize("name", DECLARED)
def test_the_columns_of_an_attack(name: str) -> None:
    columns = attack(name).columns
    for column, (called, arrow, unit, terms) in zip(columns, DECLARED[name], strict=True):
        assert (column.name, column.arrow, column.unit) == (called, arrow, unit)
        if terms is None:
            assert column.term is None
        else:
            assert column.term is not None
            assert (column.term(0.0), column.term(1.0)) == terms
            assert column.term(np.array([0.0, 1.0])).tolist() == [*terms]
