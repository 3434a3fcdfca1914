"""`python -m kvcalc` and the installed `kvcalc`: the process around the command line, made ready before anything is imported.

Standard output that cannot be written is never exit status 0, standard error that cannot is passed over; what a terminal's
encoding lacks is written out. Ctrl-C is one line and exit status 130, also while modules are being imported.
"""

import codecs
import contextlib
import io
import os
import sys

TYPE_CHECKING = False  # typing alone takes as long as the rest of the start
if TYPE_CHECKING:
    from typing import Any

INTERRUPTED = ("interrupted", 130)
TOO_LITTLE = ("there is not enough memory for this", 2)
# Address space with less of which OpenBLAS ends the process by itself, or crashes it, as soon as it has to work.
LEAST_BYTES = {"numpy": 160 << 20, "matplotlib": 208 << 20}
MARKS = {
    "×": "x", "·": "*", "÷": "/", "−": "-", "–": "-", "—": "-", "…": "...", "→": "->", "≤": "<=", "≥": ">=", "≈": "~", "∞": "inf",
    "µ": "u", "μ": "u", "Σ": "sum ", "√": "sqrt ", "²": "^2", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "§": "section ",
    "●": "o", "○": "o", "■": "#", "□": "#", "▲": "^", "△": "^", "◆": "+", "◇": "+", "│": "|", "─": "-", "└": "+",
}  # fmt: skip


def main() -> None:
    """Run the command line and exit with its status, or with 130 upon Ctrl-C."""
    interrupts: list[int] = []
    try:
        _catch_interrupts(interrupts)
        _prepare_streams()
        _prepare_settings()
        from kvcalc.cli.app import main as run

        run()
    except SystemExit as ended:
        _ignore_interrupts()
        if ended.code == INTERRUPTED[1]:
            os._exit(INTERRUPTED[1])  # Python ends by the signal, not by this status, where it came below `exec` of a text
        raise
    except MemoryError:
        _leave(*TOO_LITTLE)
    except BaseException as error:
        if interrupts or isinstance(error, KeyboardInterrupt):
            _leave(*INTERRUPTED)  # whatever a library made of it
        if isinstance(error, ImportError):  # of which NumPy makes a page, with the cause in its last line
            cause = f": {error}".rstrip().splitlines()[-1].removeprefix("Original error was").lstrip(": ")
            _leave(f"a library cannot be loaded: {cause}", 2)
        raise


def _catch_interrupts(seen: list[int]) -> None:
    """Keep in `seen` that Ctrl-C was typed, beside raising KeyboardInterrupt."""
    import signal

    def interrupt(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a parent wants it ignored
        signal.signal(signal.SIGINT, interrupt)
    for name in ("SIGTERM", "SIGHUP"):  # not all systems have both
        if (ending := getattr(signal, name, None)) and signal.getsignal(ending) is signal.SIG_DFL:
            signal.signal(ending, _end)
    sys.unraisablehook = _unraisable


def _end(number: int, frame: object) -> None:
    """End by the signal, as would be without us, and leave no file that was begun."""
    import signal

    _remove_unfinished()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def _prepare_streams() -> None:
    """Nothing that is opened later takes the place of a closed stream; all text can be written to those that are open."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if number == 1 else os.O_RDWR)  # it takes the lowest number that is free
    codecs.register_error("marks", _marks)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="ascii" if _asked_for_ascii() else None, errors="marks")
    else:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 (fails at the first write, as it should)
    raw = io.BufferedWriter(_Forgiving(2, "w", closefd=False))
    encoding = sys.stderr.encoding if sys.stderr else "utf-8"
    sys.stderr = io.TextIOWrapper(raw, encoding, "marks", line_buffering=True)


def _asked_for_ascii() -> bool:
    """Whether LC_ALL=C was said, under which Python writes UTF-8 unless it is told otherwise."""
    told = os.environ.get("PYTHONIOENCODING") or os.environ.get("PYTHONUTF8")
    return os.environ.get("LC_ALL") in ("C", "POSIX") and not told


def _prepare_settings() -> None:
    """What users and libraries may set, and what must not end in a traceback or in lines on stderr that are not ours."""
    import re
    import warnings

    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # they are for whoever works on a program, not for whoever uses it
    for name in ("TERMINAL_WIDTH", "COLUMNS"):  # typer and rich take what stands there for a width
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(name, "80")):
            del os.environ[name]
    os.environ.pop("SOURCE_DATE_EPOCH", None)  # matplotlib fails on what is no number; our pictures bear no date
    if sys.argv[1:2] != ["measure"]:  # no other multiplies large matrices
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # where it may not start a thread, OpenBLAS sends its own process Ctrl-C
    with contextlib.suppress(ImportError):
        import resource

        if (room := resource.getrlimit(resource.RLIMIT_AS)[0]) >= 0:
            sys.meta_path.insert(0, _Room(room))


class _Room:
    """What lets no library be imported that there is no room for."""

    def __init__(self, room: int) -> None:
        self.room = room

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if self.room < LEAST_BYTES.get(name, 0):
            raise MemoryError


class _Forgiving(io.FileIO):
    """A file to which writing never fails: what cannot be written is lost."""

    def write(self, data: "Any") -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def _marks(error: UnicodeError) -> tuple[str, int]:
    """What an encoding lacks: marks in ASCII, other characters as in JSON, so that JSON stays true."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(MARKS.get(c) or _escaped(c) for c in lacking), error.end


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def _unraisable(unraisable: "Any") -> None:
    """Ctrl-C or too little memory in a place that no exception can leave, such as a lock's callback during an import."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt | MemoryError):
        _leave(*(INTERRUPTED if isinstance(unraisable.exc_value, KeyboardInterrupt) else TOO_LITTLE))
    sys.__unraisablehook__(unraisable)


def _ignore_interrupts() -> None:
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _remove_unfinished() -> None:
    for path in getattr(sys.modules.get("kvcalc.library.writing"), "unfinished", ()):
        with contextlib.suppress(OSError):
            path.unlink()


def _leave(text: str, status: int) -> None:
    """One line, and out; what was printed and is held back yet is dropped, and files that were begun are removed."""
    _ignore_interrupts()
    _remove_unfinished()
    print(f"kvcalc: {text}", file=sys.stderr, flush=True)
    os._exit(status)


if __name__ == "__main__":
    main()
