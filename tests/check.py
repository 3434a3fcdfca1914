"""Run all checks: `python tests/check.py`. `python tests/check.py lint` runs the linters and builds the site in seconds.

All checks run, even if one fails. The exit status is 1 if one failed.
"""

import subprocess
import sys
from pathlib import Path

ROOMS = ("kvcalc", "tests", "benchmarks")
LINTERS = (("ruff", "check", *ROOMS), ("ruff", "format", "--check", *ROOMS), ("mypy",))
SITE = (("mkdocs", "build", "--strict", "--quiet"),)
TESTS = (("pytest",),)


def main(words: list[str]) -> int:
    """Run the checks and print which failed."""
    if words not in ([], ["lint"]):
        sys.exit("usage: python tests/check.py [lint]")
    failed = []
    for check in LINTERS + SITE if words else LINTERS + SITE + TESTS:
        print(f"$ {' '.join(check)}", flush=True)
        if subprocess.run([sys.executable, "-m", *check], cwd=Path(__file__).parent.parent, check=False).returncode:
            failed.append(check[0])
    print(f"failed: {', '.join(failed)}" if failed else "all checks pass")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
