"""Read models from the Hugging Face Hub, ModelScope, Ollama's registry and URLs of GGUF files.

Only configs and the headers of weight files are fetched, with the Hub's client. Its cache, proxies,
timeouts (`HF_HUB_ETAG_TIMEOUT`, `HF_HUB_DOWNLOAD_TIMEOUT`, in seconds), `HF_TOKEN`, `HF_ENDPOINT`
and `HF_HUB_OFFLINE` apply. Retries end after three times the timeout.

Sources of addresses: `hf_hub_url` of the Hub's client, modelscope/hub/constants.py, and
server/download.go of Ollama.
"""

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvcalc.errors import UserError, list_few
from kvcalc.library.gguf_model import read_gguf
from kvcalc.library.huggingface.reader import read_config
from kvcalc.library.safetensors_header import (
    MAX_INDEX,
    MissingFileError,
    read_from,
    with_file_bytes,
)
from kvcalc.model.model import Model

_NAME = re.compile(
    r"(?:(hf|ms):)?([A-Za-z0-9][\w.\-]{0,95}/[A-Za-z0-9][\w.\-]{0,95})"
    r"(?:@(\w[\w.\-/]{0,99}))?(?::([\w.\-]{1,60}))?",
    re.ASCII,
)
_OLLAMA_NAME = re.compile(r"ollama:(\w[\w.\-]*/)?((\w[\w.\-]*)(?::(\w[\w.\-]*))?)", re.ASCII)
_HUB_ADDRESS = re.compile(r"https?://(www\.)?(huggingface\.co|hf\.co)/")
CONFIG = "config.json"


class ModelHost(NamedTuple):
    """A server from which models are downloaded.

    Attributes:
        name: Printed name of the server, such as `ModelScope`.
        setting: Name of the environment variable that may contain the server's address.
        default: Address if the variable is not set; '' if it comes from elsewhere, such as from the
            Hub's own client.
    """

    name: str
    setting: str
    default: str = ""

    @property
    def address(self) -> str:
        """Return the server's address with `https://`, without a slash at the end."""
        value = (os.environ.get(self.setting) or self.default).rstrip("/")
        return value if "://" in value else f"https://{value}"


HUB = ModelHost("the Hub", "HF_ENDPOINT")
MODELSCOPE = ModelHost("ModelScope", "MODELSCOPE_DOMAIN", "www.modelscope.cn")
OLLAMA = ModelHost("Ollama's registry", "KVCALC_OLLAMA_REGISTRY", "registry.ollama.ai")


class _Layer(msgspec.Struct):
    mediaType: str
    digest: str


class _Manifest(msgspec.Struct):
    layers: list[_Layer]


class _Sibling(msgspec.Struct):
    rfilename: str


class _Listing(msgspec.Struct):
    siblings: list[_Sibling]


def load_remote(name: str, changes: list[str] | None) -> Model:
    """Return a model that is not on this machine. Only its config and file headers are downloaded.

    Args:
        name: `org/name`, `hf:org/name@revision` or `org/name:Q4_K_M` on the Hugging Face Hub,
            `ms:org/name` on ModelScope, `ollama:name:tag`, or the address of a .gguf file.
        changes: The `KEY=VALUE` changes of `--set`; None for none. Only changes that settle unclear
            keys in a config.json of an unknown type are applied, and removed from this list.

    Raises:
        UserError: The name is invalid, or the server does not provide the model.
    """
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    label = name.removeprefix("hf:")
    host = MODELSCOPE if name.startswith("ms:") else HUB
    try:
        if "://" in name:
            host = ModelHost(name.split("/")[2], "the address")
            model = _load_address(name)
        elif name.startswith("ollama:"):
            host = OLLAMA
            model = _load_ollama(name)
        else:
            match = _NAME.fullmatch(name)
            if not match or ".." in name:
                hint = "Write hf:org/name or hf:org/name@revision"
                raise UserError(f"{label!r} is not a name on the Hub", hint)
            _, repo, revision, tag = match.groups()
            if not tag:
                model = _load_config(repo, revision, host, changes)
                return replace(model, name=repo.rpartition("/")[2].lower(), huggingface_id=repo)
            model = _load_gguf_of_tag(repo, revision, tag)
        return replace(model, file=name)
    except MissingFileError as error:
        hint = "A GGUF file is org/name:Q4_K_M" if host is HUB else ""
        raise UserError(f"{label} has no {error.what} on {host.name}", hint) from None
    except UserError:
        raise
    except Exception as error:
        raise _problem(label, host, error) from None


def _load_config(
    repo: str, revision: str | None, host: ModelHost, changes: list[str] | None
) -> Model:
    from huggingface_hub import errors, hf_hub_download, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils.tqdm import disable_progress_bars

    def read(file: str, start: int, count: int) -> bytes:
        url = f"{host.address}/models/{repo}/resolve/{revision or 'master'}/{file}"
        if host is HUB:
            url = hf_hub_url(repo, file, revision=revision)
        return fetch(url, file, start, count)

    if host is MODELSCOPE:
        with TemporaryDirectory() as folder:
            path = Path(folder, CONFIG)
            path.write_bytes(read(CONFIG, 0, 0))
            return with_file_bytes(read_config(path, changes), read, repo)
    cached = try_to_load_from_cache(repo, CONFIG, revision=revision)
    is_cached = isinstance(cached, str)
    if not is_cached:
        read(CONFIG, 0, 0)  # the client itself retries for minutes if the Hub does not answer
        disable_progress_bars()
        cached = hf_hub_download(repo, CONFIG, revision=revision)
    path = Path(str(cached))
    model = read_config(path, changes)

    def read_first_cached(file: str, start: int, count: int) -> bytes:
        try:
            return read_from(path.parent)(file, start, count)
        except MissingFileError:
            return read(file, start, count)

    try:
        return with_file_bytes(model, read_first_cached, repo)
    except Exception as error:
        if not is_cached or isinstance(error, UserError | errors.HfHubHTTPError):
            raise
        note = f"the config.json in the cache is read, but no header ({_reason(error)})"
        return replace(model, notes=(*model.notes, note))


def _load_gguf_of_tag(repo: str, revision: str | None, tag: str) -> Model:
    """Return the model of the GGUF file in `org/name` whose name ends in the tag, such as
    `Q4_K_M`."""
    from huggingface_hub import constants, hf_hub_url

    folder = Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}", "snapshots")
    cached = _file_of_tag(map(str, folder.glob(f"{revision or '*'}/**/*.gguf")), tag)
    if cached:
        return read_gguf(Path(cached))
    address = f"{constants.ENDPOINT}/api/models/{repo}/revision/{revision or 'main'}"
    listing = msgspec.json.decode(fetch(address, "list of files"), type=_Listing)
    names = [sibling.rfilename for sibling in listing.siblings]
    file = _file_of_tag(names, tag)
    if not file:
        files = [name for name in names if name.endswith(".gguf")]
        raise UserError(f"{repo} has no GGUF file for {tag!r}", f"It has {list_few(files)}")
    return _load_gguf(hf_hub_url(repo, file, revision=revision))


def _file_of_tag(files: Iterable[str], tag: str) -> str:
    """Return the shortest file name that ends in a tag; '' if there is none. Of several splits,
    return the first."""
    ending = re.compile(
        rf"(?!.*mmproj)(.*[-_./])?{re.escape(tag)}(-00001-of-\d{{5}})?\.gguf", re.IGNORECASE
    )
    return min(filter(ending.fullmatch, files), key=len, default="")


def _load_address(address: str) -> Model:
    from huggingface_hub import constants

    url = _HUB_ADDRESS.sub(f"{constants.ENDPOINT}/", address.partition("#")[0])
    if not url.partition("?")[0].lower().endswith(".gguf"):
        raise UserError(
            f"{address} is neither a model's page on the Hub nor a .gguf file",
            "Write org/name for a model on the Hub",
        )
    if url.startswith(f"{constants.ENDPOINT}/"):
        url = url.replace("/blob/", "/resolve/", 1)
    return _load_gguf(url)


def _load_gguf(url: str) -> Model:
    path, mark, query = url.partition("?")
    folder, _, file = path.rpartition("/")

    def read(part: str, start: int, count: int) -> bytes:
        return fetch(f"{folder}/{part}{mark}{query}", part, start, count)

    return read_gguf(Path(file), read)


def _load_ollama(name: str) -> Model:
    match = _OLLAMA_NAME.fullmatch(name)
    if not match:
        raise UserError(f"{name!r} is not a name of Ollama", "Write ollama:qwen3:8b")
    base = f"{OLLAMA.address}/v2/{match[1] or 'library/'}{match[3]}"
    manifest = fetch(f"{base}/manifests/{match[4] or 'latest'}", "manifest")
    layers = msgspec.json.decode(manifest, type=_Manifest).layers
    kind = "application/vnd.ollama.image.model"
    urls = [f"{base}/blobs/{layer.digest}" for layer in layers if layer.mediaType == kind]
    if len(urls) != 1:
        raise UserError(f"{name} has {len(urls)} GGUF files; one is read")
    return read_gguf(Path(match[2]), lambda file, *span: fetch(urls[0], file, *span))


def fetch(url: str, file: str, start: int = 0, count: int = 0) -> bytes:
    """Return bytes of a file on a server.

    A server that ignores the requested range is refused before it sends the file. The Hub's token
    is sent only to the Hub.

    Args:
        url: Address of the file.
        file: Name of the file in error messages.
        start: Position of the first byte, if `count` is not 0.
        count: Number of bytes; 0 for the whole file.

    Raises:
        MissingFileError: The server has no such file.
        UserError: The server ignores the range, or a whole file is larger than 32 MiB.
        Exception: Errors of the client and of its HTTP library.
    """
    from huggingface_hub import constants, get_session, get_token, hf_raise_for_status

    headers = {"Accept-Encoding": "identity"}
    if (token := get_token()) and url.startswith(f"{constants.ENDPOINT}/"):
        headers["Authorization"] = f"Bearer {token}"
    if count:
        headers["Range"] = f"bytes={start}-{start + count - 1}"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    data = bytearray()
    with get_session().stream("GET", url, headers=headers, timeout=timeout) as response:
        status = response.status_code
        code = response.headers.get("X-Error-Code", "EntryNotFound")
        if status == 404 and code == "EntryNotFound":
            raise MissingFileError(file)
        # without its body, which may have any size
        hf_raise_for_status(
            type(response)(status, headers=response.headers, request=response.request)
        )
        is_range = response.headers.get("Content-Range", "").startswith(f"bytes {start}-")
        if count and not is_range:
            raise UserError(f"the server of {file} ignores ranges, so its header is not read")
        for piece in response.iter_raw():
            data += piece
            if len(data) > (count or MAX_INDEX):
                raise UserError(f"the server sends more of {file} than is read")
    return bytes(data)


def _problem(label: str, host: ModelHost, error: Exception) -> UserError:
    """Return a UserError about a model on a host, for an error of the HTTP client."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        hint = "Ask for access there and set HF_TOKEN"
        return UserError(f"{label} is gated on {host.name}", hint)
    if isinstance(error, errors.RepositoryNotFoundError):
        hint = "Check the name; a private one needs HF_TOKEN"
        return UserError(f"{host.name} has no public model {label}", hint)
    if isinstance(error, errors.RevisionNotFoundError):
        return UserError(f"{host.name} has no revision {label}")
    if isinstance(error, errors.OfflineModeIsEnabled):
        hint = "HF_HUB_OFFLINE is set: unset it to fetch the file"
        return UserError(f"{label} is not in the Hub client's cache", hint)
    if isinstance(error, errors.HfHubHTTPError):
        status = f"{error.response.status_code} {error.response.reason_phrase}"
        hint = "Check the name and HF_TOKEN" if host is HUB else "Check the name"
        return UserError(f"{host.name} does not hand out {label}: {status}", hint)
    if isinstance(error, ValueError):  # also msgspec's errors
        return UserError(f"{host.name} sends no valid answer about {label}: {error}")
    what = f"{label} cannot be read from {host.name}: {_reason(error)}"
    return UserError(what, f"Is the network up, and {host.setting} right?")


def _reason(error: BaseException) -> str:
    """Return the innermost cause and the first line of its message."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}"[:200] if lines else type(error).__name__
