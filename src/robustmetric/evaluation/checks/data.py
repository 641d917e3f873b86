"""Checks of the data: copies, and classes that were trained on."""

from __future__ import annotations

from robustmetric.errors import shorten
from robustmetric.evaluation.checks.base import Findings, Status, Verdict, check


@check("copies", 1)
def _copies(findings: Findings) -> Verdict:
    labels, called = findings.view.gallery.labels, findings.subject.data.called
    copies, shared = findings.fingerprint.copies, findings.fingerprint.shared
    limit = "no copies in the gallery"
    if shared:
        count = len(findings.view.images)
        says = f"{len(shared)} of {count} queries are in the gallery as well, and find themselves: "
        says += shorten([f"{called(a)} = {called(b, gallery=True)}" for a, b in shared])
        status: Status = "warn" if len(shared) <= 0.01 * count else "fail"
        return Verdict(status, len(shared), limit + ", of queries or of each other", says)
    across = sum(bool(labels[a] != labels[b]) for a, b in copies)
    says = f"{len(copies)} images are exact copies of another, {across} of another class"
    if copies:
        apart = findings.view.ranked is not None
        # Those across classes first: they cannot be ranked rightly.
        pairs = sorted(copies, key=lambda pair: bool(labels[pair[0]] == labels[pair[1]]))
        named = [f"{called(b, gallery=apart)} = {called(a, gallery=apart)}" for a, b in pairs]
        says += f": {shorten(named)}"
    return Verdict("warn" if copies else "pass", len(copies), limit, says)


@check("classes", 1)
def _classes(findings: Findings) -> Verdict:
    classes, trained = findings.subject.data.classes, findings.subject.train_classes
    limit = "no class both trained on and tested"
    if classes is None or trained is None:
        return Verdict("not run", 0.0, limit, "what the network was trained on is not known")
    shared = sorted({*classes} & {*trained})
    says = f"{len(shared)} of {len({*classes})} classes were trained on"
    if shared:
        says += ": the scores are of known classes"
    return Verdict("warn" if shared else "pass", len(shared), limit, says)
