"""Robustness: the attacks run, their scores, the Empirical Robustness Score, its checks and its record."""

from robustmetric.evaluation.checks import CHECKS
from robustmetric.evaluation.ers import COLUMNS, ERS_ATTACKS, ers, terms
from robustmetric.evaluation.record import Check, Record, load_arrays, load_record
from robustmetric.evaluation.run import Evaluation, evaluate
from robustmetric.evaluation.scene import Images, Outcome, Scene, run_attack

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
