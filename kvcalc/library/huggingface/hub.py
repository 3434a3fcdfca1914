"""Read configs from the Hugging Face Hub with its client: cache, `HF_TOKEN`, `HF_ENDPOINT`,
offline.

The client's timeouts apply (`HF_HUB_ETAG_TIMEOUT`, `HF_HUB_DOWNLOAD_TIMEOUT`, in seconds). Its
retries end after three times the timeout.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.huggingface.reader import read_config
from kvcalc.model.model import Model

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}", re.ASCII)
PATIENCE = 3  # times the client's timeout
_REVISION = re.compile(r"[\w][\w.\-/]{0,99}", re.ASCII)


def load_from_hub(name: str, changes: list[str] | None = None) -> Model:
    """Return the model of the config.json under `org/name` or `org/name@revision` on the Hub.

    Raises:
        UserError: The extra is not installed, or the Hub has no such file, refuses it, or cannot
            be reached.
    """
    repo, separator, revision = name.partition("@")
    if (
        not _NAME.fullmatch(repo)
        or (separator and not _REVISION.fullmatch(revision))
        or ".." in name
    ):
        raise UserError(
            f"{name!r} is not a name on the Hub",
            hint="Write hf:org/name or hf:org/name@revision",
        )
    model = read_config(_download(repo, revision), changes)
    return msgspec.structs.replace(
        model, name=repo.rpartition("/")[2].lower(), huggingface_id=repo
    )


def _download(repo: str, revision: str) -> Path:
    """Return the file in the client's cache; download it if it is missing or outdated."""
    try:
        from huggingface_hub import errors as hub
    except ImportError:
        raise UserError(
            f"reading {repo} from the Hub needs the extra `hub`",
            hint="pip install 'kvcalc[hub]'",
        ) from None
    label = f"{repo} at {revision}" if revision else repo
    try:
        return _fetch(repo, revision or None)
    except hub.GatedRepoError:
        raise UserError(
            f"{label} is gated on the Hub", hint="Ask for access there and set HF_TOKEN"
        ) from None
    except hub.RepositoryNotFoundError:
        raise UserError(
            f"the Hub has no public model {label}",
            hint="Check the name; a private one needs HF_TOKEN",
        ) from None
    except hub.RevisionNotFoundError:
        raise UserError(f"the Hub has no revision {revision!r} of {repo}") from None
    except (hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled) as error:
        raise _unreachable(label, error) from None
    except hub.EntryNotFoundError:
        raise UserError(f"{label} has no config.json on the Hub") from None
    except hub.HfHubHTTPError as error:
        raise UserError(
            f"the Hub does not hand out {label}: {_reason(error)}",
            hint="Check the name and HF_TOKEN",
        ) from None
    except Exception as error:  # the client does not wrap errors of its HTTP library
        raise _unreachable(label, error) from None


def _fetch(repo: str, revision: str | None) -> Path:
    """Check once that the file exists, then let the client download it.

    Without the check, the client retries for minutes if the Hub is down.
    """
    from huggingface_hub import (
        constants,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )
    from huggingface_hub.utils.tqdm import disable_progress_bars

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    disable_progress_bars()
    if constants.HF_HUB_OFFLINE:
        return Path(
            hf_hub_download(repo, "config.json", revision=revision, local_files_only=True)
        )
    try:
        get_hf_file_metadata(
            hf_hub_url(repo, "config.json", revision=revision),
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
        )
    except Exception:
        cached = try_to_load_from_cache(repo, "config.json", revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        raise
    patience = PATIENCE * max(constants.HF_HUB_ETAG_TIMEOUT, constants.HF_HUB_DOWNLOAD_TIMEOUT)
    return Path(
        _within(patience, lambda: hf_hub_download(repo, "config.json", revision=revision))
    )


def _within(seconds: float, call: Callable[[], str]) -> str:
    """Return the result of `call`. Raises its error, or TimeoutError after the given seconds."""
    done: list[str | BaseException] = []

    def run() -> None:
        try:
            done.append(call())
        except BaseException as error:
            done.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not done:
        raise TimeoutError(f"no whole answer within {seconds:g} s")
    if isinstance(done[0], BaseException):
        raise done[0]
    return done[0]


def _unreachable(label: str, error: Exception) -> UserError:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return UserError(
            f"{label} is not in the Hub client's cache",
            hint="HF_HUB_OFFLINE is set: unset it to fetch the file",
        )
    return UserError(
        f"{label} cannot be read from the Hub: {_reason(error)}",
        hint="Is the network up, and HF_ENDPOINT right?",
    )


def _reason(error: BaseException) -> str:
    """Return the innermost cause and the first line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__
