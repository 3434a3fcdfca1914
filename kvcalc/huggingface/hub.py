"""Configs from the Hugging Face Hub, through its own client: its cache, `HF_TOKEN`, `HF_ENDPOINT` and offline mode."""

import re
from pathlib import Path

from kvcalc.errors import UserError
from kvcalc.huggingface.reader import read_config
from kvcalc.model import Model

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95}", re.ASCII)
TIMEOUT_S = 10


def load_from_hub(name: str) -> Model:
    """The model whose config.json the Hub has under `org/name`, or `org/name@revision`.

    Raises UserError where the extra is missing, or the Hub has no such file, refuses it, or cannot be reached.
    """
    repo, _, revision = name.partition("@")
    if not _NAME.fullmatch(repo) or ".." in repo or not re.fullmatch(r"[\w.\-/]{0,100}", revision) or ".." in revision:
        raise UserError(f"{name!r} is not a name on the Hub", hint="Write hf:org/name")
    try:
        from huggingface_hub import errors as hub
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise UserError(f"reading {repo} from the Hub needs the extra `hub`", hint="pip install 'kvcalc[hub]'") from None
    try:
        found = hf_hub_download(repo, "config.json", revision=revision or None, etag_timeout=TIMEOUT_S)
    except hub.GatedRepoError:
        raise UserError(f"{repo} is gated on the Hub", hint="Ask for access there and set HF_TOKEN") from None
    except hub.RepositoryNotFoundError:
        raise UserError(f"the Hub has no public model {repo}", hint="Check the name; a private one needs HF_TOKEN") from None
    except (hub.EntryNotFoundError, hub.RevisionNotFoundError):
        raise UserError(f"{repo} on the Hub has no config.json" + (f" at {revision}" if revision else "")) from None
    except Exception as error:  # the client raises its HTTP library's own errors for everything else
        raise UserError(f"{repo} cannot be read from the Hub: {type(error).__name__}: {error}"[:300]) from None
    model = read_config(Path(found))
    import msgspec

    return msgspec.structs.replace(model, name=repo.rpartition("/")[2].lower(), huggingface_id=repo)
