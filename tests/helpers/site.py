"""The site of the documentation, built as `make docs` builds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).parents[2] / "mkdocs.yml"
BUILD = """
import socket, sys

def refuse(*_):
    raise SystemExit("the build asked for the network")

socket.socket.connect = socket.getaddrinfo = refuse
from mkdocs.__main__ import cli
cli(["build", "--strict", "--quiet", "--config-file", sys.argv[1], "--site-dir", sys.argv[2]])
"""


def build_site(out: Path) -> None:
    """Build it into `out`; a warning, or a request for anything on the network, is an error."""
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", BUILD, CONFIG, out], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
