"""Checks of whether scores can be trusted: each compares what was measured with what must hold."""

# In the order in which records list them.
from robustmetric.evaluation.checks import network, attacked, data, thorough  # noqa: I001
from robustmetric.evaluation.checks.base import CHECKS, Check, Findings, Status, Verdict, check, run_check

__all__ = [
    "CHECKS",
    "Check",
    "Findings",
    "Status",
    "Verdict",
    "attacked",
    "check",
    "data",
    "network",
    "run_check",
    "thorough",
]
