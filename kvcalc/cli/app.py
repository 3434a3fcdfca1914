"""The entry point: registers commands, and turns every error that a user can cause into one line and exit status 2."""

import gc
import os
import sys

from kvcalc.cli.commands import COMMANDS, Done, build
from kvcalc.errors import UserError, printable

INTERRUPTED = 130


def main() -> None:
    """Run the command line and exit: 0 done, 1 the answer is no, 2 the request is wrong, 130 interrupted."""
    gc.set_threshold(100_000)  # start-up makes many classes and no garbage; looking for it costs 5 % of a short run
    code = _guarded(sys.argv[1:])
    try:
        sys.stdout.flush()
    except OSError as error:
        code = max(code, _lost(error))
    sys.exit(code)


def _guarded(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    try:
        if done := _completed(words) or _helped(words):
            return done.status
        if "--deployments" in words:
            from kvcalc.cli.compare_deployments import spread

            words = spread(words)
        if len(words) > 2:
            from kvcalc.cli.overwriting import check_outputs

            check_outputs(words)
        result = build(words[0] if words else "")(words, standalone_mode=False)
    except UserError as error:
        return _fail(str(error))
    except SystemExit as error:  # of rich and typer, which so end where the reader of standard output has gone
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return _lost(error.__context__)
    except OSError as error:
        return _lost(error)
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        if not hasattr(error, "format_message"):
            raise
        from kvcalc.cli.unknown import said_of

        return _fail(said_of(error, words[0] if words else ""))
    if isinstance(result, Done):
        return result.status
    return _interrupted() if result == INTERRUPTED else int(result or 0)  # typer's Exit, which it makes of Ctrl-C too


def _helped(words: list[str]) -> Done | None:
    """Help where it is asked for, or where nothing is; None where there is a command to run."""
    own = words[: words.index("--")] if "--" in words else words
    if words and not {"-h", "--help"} & {*own}:
        return None
    if words and words[0] not in COMMANDS and not words[0].startswith("-"):
        return None
    from kvcalc.cli.help import first_steps, help_of

    sys.stdout.write(help_of(words[0] if words[0] in COMMANDS else "") if words else first_steps())
    return Done(0)


def _completed(words: list[str]) -> Done | None:
    """What completion in a shell asks for; None where nothing does."""
    wanted = words[0] if words else ""
    if not os.environ.get("_KVCALC_COMPLETE") and wanted not in ("--install-completion", "--show-completion"):
        return None
    from kvcalc.cli import completion

    if instruction := os.environ.get(completion.VARIABLE):
        return Done(completion.answer(instruction))
    return Done((completion.show if wanted == "--show-completion" else completion.install)(*words[1:2]))


def _interrupted() -> int:
    _say("interrupted")
    return INTERRUPTED


def _lost(error: OSError) -> int:
    """Standard output cannot be written: 0 where its reader, say `head`, has seen enough. What is left of it is dropped."""
    if error.filename is None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(error, BrokenPipeError):
        return 0
    return _fail(f"{printable(error.filename or 'standard output')}: {(error.strerror or 'cannot be used').lower()}")


def _fail(text: str) -> int:
    _say(text)
    return 2


def _say(text: str) -> None:
    from kvcalc.cli.common import remark

    remark(f"kvcalc: {text}")
