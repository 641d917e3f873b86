"""`python -m robustmetric` is the same as `robustmetric`."""

from robustmetric.cli import run

if __name__ == "__main__":
    run()
