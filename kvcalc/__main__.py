"""Start kvcalc as a process: `python -m kvcalc` and the installed `kvcalc` command.

Nothing heavy is imported at the top, so that Ctrl-C is caught from the first moment.
"""

import codecs
import io
import os
import signal
import sys

INTERRUPTED_STATUS = 130
# ASCII text of each mark; `_` is a blank
_MARKS = (
    "×x ·* ÷/ −- –- —- …... →-> ≤<= ≥>= ≈~ ∞inf µu μu Σsum_ √sqrt_ ²^2 ⌈ceil( ⌉) ⌊floor( ⌋) "
    "§section_ ●o ○o ■# □# ▲^ △^ ◆+ ◇+ │| ─- └+"
)
ASCII_MARKS = {word[0]: word[1:].replace("_", " ") for word in _MARKS.split()}
ASCII_MARKS |= {chr(code): "*" for code in range(0x2800, 0x2900)}  # braille of sketches


def main() -> None:
    """Run the command line. Exit with its status, or with 130 after Ctrl-C."""
    try:
        for name in ("SIGTERM", "SIGHUP"):
            if hasattr(signal, name):  # Windows has no SIGHUP
                # `finally` blocks then run, which remove incomplete files
                signal.signal(
                    getattr(signal, name), lambda number, frame: sys.exit(128 + number)
                )
        _prepare_output()
        _prepare_environment()
        from kvcalc.cli.app import main as run_command_line

        run_command_line()
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("kvcalc: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)


def _prepare_output() -> None:
    """Make stdout and stderr replace characters that their encoding does not have.

    With LC_ALL=C, stdout is ASCII. Python writes UTF-8 in that case by default."""
    codecs.register_error("marks", _replace_unencodable)
    overridden = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    is_ascii = os.environ.get("LC_ALL") in ("C", "POSIX") and not overridden
    for stream, encoding in ((sys.stdout, "ascii" if is_ascii else None), (sys.stderr, None)):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding, errors="marks")


def _prepare_environment() -> None:
    """Silence warnings of libraries, and use one BLAS thread unless layers are measured."""
    import warnings

    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    if sys.argv[1:2] != ["measure"]:  # only `measure` multiplies large matrices
        os.environ["OPENBLAS_NUM_THREADS"] = "1"


def _replace_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return ASCII for known marks, and JSON escapes for other characters, so that printed JSON
    stays valid."""
    import json

    if not isinstance(error, UnicodeEncodeError):
        raise error
    characters = error.object[error.start : error.end]
    return "".join(ASCII_MARKS.get(c) or json.dumps(c)[1:-1] for c in characters), error.end


if __name__ == "__main__":
    main()
