"""Evaluation: a plan, attacks, their scores, the ERS, checks and the record; certification by noise."""

from robustmetric.evaluation.attack import AttackResult, NetworkView, run_attack
from robustmetric.evaluation.certificate import Bound, Certificate, CertifyPlan, load_certificate
from robustmetric.evaluation.certify import Certification, certify
from robustmetric.evaluation.checks import CHECKS, Verdict
from robustmetric.evaluation.data import Data, Subject
from robustmetric.evaluation.ers import COLUMNS, ERS_ATTACKS, ers, terms
from robustmetric.evaluation.evaluate import Evaluation, evaluate
from robustmetric.evaluation.findings import Findings
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.plan import Plan, Settings
from robustmetric.evaluation.record import Check, Record, load_arrays, load_record
from robustmetric.evaluation.smoothing import Smoothed
from robustmetric.evaluation.threat import Threat
from robustmetric.evaluation.verified import Verification, load_verification
from robustmetric.evaluation.verify import Verifying, verify
from robustmetric.evaluation.verify_pairs import VerifyPlan

__all__ = [
    "CHECKS", "COLUMNS", "ERS_ATTACKS", "AttackResult", "Bound", "Certificate", "Certification",
    "CertifyPlan", "Check", "Data", "Evaluation", "Findings", "Images", "NetworkView", "Plan", "Record",
    "Settings", "Smoothed", "Subject", "Threat", "Verdict", "Verification", "VerifyPlan", "Verifying",
    "certify", "ers", "evaluate", "load_arrays", "load_certificate", "load_record", "load_verification",
    "run_attack", "terms", "verify",
]  # fmt: skip
