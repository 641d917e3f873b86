"""How well `robustmetric reproduce` foretells what cells cost: the estimate against the time taken.

Takes some cells of each kind on scikit-learn's digits, at a scale of seconds. Run with no other work.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from robustmetric.experiments.cells import Cell, Job, Scale
from robustmetric.experiments.estimate import estimate
from robustmetric.experiments.work import make

CELLS = [
    Cell("digits", "N/A[R]"),
    Cell("digits", "EST[R]", 8),
    Cell("digits", "ACT[R]", 2),
    Cell("digits", "ACT[S]", 32),
    Cell("digits", "HM[R,M]", 8),
    Cell("digits", "HM[S,-γ/2]", 8),
    Cell("digits", "HM[S,LGA]", 8),
    Cell("digits", "HM[S,LGA]&ICS", 32),
]


def main() -> None:
    """Print the estimate, the time taken and their ratio, for each cell and for all."""
    scale = Scale(epochs=8, queries=256)
    make(Job(CELLS[0], Scale(epochs=1, queries=8, steps=1), Path(tempfile.mkdtemp())), lambda _: None)
    costs = estimate(CELLS, scale)
    whole = [0.0, 0.0]
    print(f"{'':24} {'foretold':>16} {'taken':>16}  ratio")
    with tempfile.TemporaryDirectory() as folder:
        for number, cell in enumerate(CELLS):
            begun = time.perf_counter()
            outcome = make(Job(cell, scale, Path(folder, str(number))), lambda _: None)
            took = time.perf_counter() - begun
            spent = dict((outcome and outcome.seconds) or {})
            cost = costs[cell]
            print(
                f"{cell.label:24} {cost.train:7.1f} +{cost.evaluate:6.1f} s "
                f"{spent.get('train', 0):7.1f} +{spent.get('evaluate', 0):6.1f} s  {cost.total / took:.2f}"
                f"{'  (collapsed)' if outcome and outcome.record is None else ''}"
            )
            if outcome and outcome.record is not None:
                whole = [whole[0] + cost.total, whole[1] + took]
    foretold, taken = whole
    print(f"all others: {foretold:.0f} s foretold, {taken:.0f} s taken: {foretold / taken:.2f}")


if __name__ == "__main__":
    main()
