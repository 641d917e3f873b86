"""Words of a command line without folders, whatever they are."""

from __future__ import annotations

import pytest

from robustmetric.zoo.private import bare_command

S = "/home/somebody"


@pytest.mark.parametrize(
    ("given", "bare"),
    [
        (["--root", f"{S}/birds/"], ["--root", "birds"]),
        (["--root", "~/birds"], ["--root", "birds"]),
        (["--root", r"C:\Users\somebody\birds"], ["--root", "birds"]),
        (["--root", "/"], ["--root", "."]),
        (["--out", "runs/mine"], ["--out", "mine"]),
        ([f"--out={S}/mine"], ["--out=mine"]),
        (["--set", f"root={S}/birds"], ["--set", "root=birds"]),
        (["--set", "alpha=12.03125/255"], ["--set", "alpha=12.03125/255"]),
        (["--eps", "8/255"], ["--eps", "8/255"]),
        (["--defense", "N/A[S]"], ["--defense", "N/A[S]"]),
        (["--defense=HM[S,-γ/2]"], ["--defense=HM[S,-γ/2]"]),
        (["--defense", f"HM[{S}/b.py:Mine,LGA]"], ["--defense", "HM[b.py:Mine,LGA]"]),
        (["--set", "defense=N/A[R]"], ["--set", "defense=N/A[R]"]),
        (["--model", f"{S}/nets.py:small(k=2)"], ["--model", "nets.py:small(k=2)"]),
        (["--model", f"nets.py:small(file='{S}/x.json')"], ["--model", "nets.py:small(file='x.json')"]),
        (["--model", "timm:hf_hub:a/b"], ["--model", "timm:hf_hub:a/b"]),
        (["-f", f"{S}/kernel.json"], ["-f", "kernel.json"]),
        (["--trust", "--epochs", "8"], ["--trust", "--epochs", "8"]),
    ],
)
def test_words(given: list[str], bare: list[str]) -> None:
    assert bare_command(given) == bare
