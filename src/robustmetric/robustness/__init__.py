"""Robustness: the attacks run, their scores, the Empirical Robustness Score, its checks and its record."""

from robustmetric.robustness.checks import CHECKS
from robustmetric.robustness.ers import COLUMNS, ERS_ATTACKS, ers, terms
from robustmetric.robustness.record import Check, Record, load_arrays, load_record
from robustmetric.robustness.run import Evaluation, evaluate
from robustmetric.robustness.scene import Images, Outcome, Scene, run_attack

__all__ = [
    "CHECKS",
    "COLUMNS",
    "ERS_ATTACKS",
    "Check",
    "Evaluation",
    "Images",
    "Outcome",
    "Record",
    "Scene",
    "ers",
    "evaluate",
    "load_arrays",
    "load_record",
    "run_attack",
    "terms",
]
