"""Evaluation: a plan, attacks, their scores, the Empirical Robustness Score, checks and the record."""

from robustmetric.evaluation.checks import CHECKS, Check, Findings, Verdict
from robustmetric.evaluation.ers import COLUMNS, ERS_ATTACKS, ers, terms
from robustmetric.evaluation.evaluate import Evaluation, evaluate
from robustmetric.evaluation.found import Found
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.plan import Plan
from robustmetric.evaluation.record import Record, load_arrays, load_record
from robustmetric.evaluation.scene import Outcome, Scene, run_attack
from robustmetric.evaluation.subject import Origin, Subject

__all__ = [
    "CHECKS",
    "COLUMNS",
    "ERS_ATTACKS",
    "Check",
    "Evaluation",
    "Findings",
    "Found",
    "Images",
    "Origin",
    "Outcome",
    "Plan",
    "Record",
    "Scene",
    "Subject",
    "Verdict",
    "ers",
    "evaluate",
    "load_arrays",
    "load_record",
    "run_attack",
    "terms",
]
