"""The options of `fit` with their checks: what an engine supports, and the files that they name."""

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec

from kvcalc.capacity.engine_flags import limits_as_json
from kvcalc.capacity.engines import ENGINES
from kvcalc.capacity.engines.engine import Engine
from kvcalc.capacity.memory_budget import LogCorrections, read_learned
from kvcalc.errors import UserError
from kvcalc.library.load import load_model
from kvcalc.model.model import Model
from kvcalc.question.fit_question import STATE_DTYPES, FitQuestion
from kvcalc.question.options import read_questions, spelled
from kvcalc.records import Settings
from kvcalc.storage.formats import canonical
from kvcalc.timing.deployment import TimedDeployment

DEFAULTS = FitQuestion()
Count = Annotated[int, msgspec.Meta(ge=0)]


class ItemLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The maximum number of images or videos in a prompt, and their size.

    vLLM reserves memory for images or videos of this size. A size of 0 means the largest size that
    the model accepts. Source: vLLM, config/multimodal.py (ImageDummyOptions, VideoDummyOptions).

    Attributes:
        count: Maximum images or videos in one prompt.
        width: Width of each image or video frame in pixels.
        height: Height of each image or video frame in pixels.
        num_frames: Frames of each video.
    """

    count: Count
    width: Count = 0
    height: Count = 0
    num_frames: Count = 0


ItemLimits = dict[Literal["image", "video", "audio"], Count | ItemLimit]


class FitOptions(FitQuestion, frozen=True):
    """The options of `fit`: a `FitQuestion` whose named files are loaded.

    All other fields are in `FitQuestion`, such as `engine` and `max_model_len`.

    Attributes:
        draft: Draft model for speculative decoding; None without one.
        from_log: Corrections from an engine's start-up log; None without a log.
        typed_flags: (kvcalc's name of a flag, value) of those flags of an engine's command line
            that printed commands repeat unchanged. Other options count their memory.
    """

    draft: Model | None = None  # type: ignore[assignment]
    from_log: LogCorrections | None = None  # type: ignore[assignment]
    typed_flags: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.state_dtype not in ("", *STATE_DTYPES):
            raise UserError(
                f"unknown state dtype {self.mamba_ssm_cache_dtype!r}",
                f"Known: {', '.join(STATE_DTYPES)}",
            )
        if self.from_log and self.from_log.engine != self.engine:
            raise UserError(
                f"that log is {self.from_log.engine}'s, not {self.engine}'s",
                f"--engine {self.from_log.engine}",
            )
        if self.cpu_offload_gb and self.weight_bytes is not None:
            raise UserError(
                "weight-bytes are the bytes on the GPU, so cpu-offload-gb cannot reduce them",
                "Give only one of them",
            )
        if self.cpu_offload_gb and self.engine == "llama.cpp":
            raise UserError(
                "llama.cpp has no cpu-offload-gb",
                "`kvcalc fit` takes --n-gpu-layers N; times with it are not predicted",
            )
        if self.n_gpu_layers >= 0 and self.kv_offloading_bytes:
            raise UserError("kv-offloading-bytes and n-gpu-layers together are not modelled")
        _ = self.item_limits
        self._check_engine()
        self.rules.release(self.engine_version)

    def _check_engine(self) -> None:
        """Raise UserError for an option that the engine does not have."""
        rules = self.rules
        for name in (name for engine in ENGINES.values() for name in engine.takes):
            if name not in rules.takes and getattr(self, name) != getattr(DEFAULTS, name):
                engines = [engine.name for engine in ENGINES.values() if name in engine.takes]
                raise UserError(
                    f"engine {self.engine} does not model {spelled(name)}",
                    f"Engines that do: {', '.join(engines)}",
                )
        for dtype in filter(None, (self.cache_type_k, self.cache_type_v)):
            if canonical(dtype) not in (rules.dtypes or ()):
                raise UserError(
                    f"{rules.name} has no cache dtype {dtype!r}",
                    f"It has: {', '.join(rules.dtypes or ())}",
                )

    def cache_label(self, used: str) -> str:
        """Return the data type of the KV cache as text for a record, such as "fp8".

        If llama.cpp stores keys and values in two data types, return both: "q8_0 + q4_0".

        Args:
            used: Data type of the cache. It counts for keys or values for which the options state
                none.
        """
        dtypes = (canonical(t) or used for t in (self.cache_type_k, self.cache_type_v))
        return " + ".join(dict.fromkeys(dtypes))

    @property
    def rules(self) -> Engine:
        """Return the requested engine's rules: cache layout, defaults and memory.

        The object describes how the engine works, not its settings in this request.
        """
        return ENGINES[self.engine]

    @property
    def estimate(self) -> str:
        """Return which estimate of the KV cache budget the answer uses: "low", "middle" or "high".

        "low" is the cautious one. This is the option `budget`. Without the option, it is "low" if
        `require` is set, otherwise "middle". It is always "middle" for an engine whose memory is
        not given as a range.
        """
        estimate = self.budget or ("low" if self.require else "middle")
        return estimate if self.rules.has_memory_range else "middle"

    @property
    def requested_num_seqs(self) -> int:
        """Return the number of concurrent sequences of the whole replica that must fit.

        This is `users`, otherwise `max_num_seqs`, otherwise 1, and at least `require`.
        """
        return max(self.users or self.max_num_seqs or 1, self.require)

    def longest_sequence(self, model: Model) -> int:
        """Return the tokens of the longest sequence: `max_model_len`, else the model's maximum.

        If neither is known, the result is 4096.

        Args:
            model: The model.
        """
        return self.max_model_len or model.max_context or 4096

    @property
    def has_given_cache(self) -> bool:
        """Return whether the options state the size of the KV cache, in bytes or in blocks.

        The engine then does not check whether the weights leave room for this cache.
        """
        return bool(self.kv_cache_memory_bytes or self.num_gpu_blocks_override)

    @property
    def item_limits(self) -> dict[str, ItemLimit]:
        """Return the limits on items in a prompt, by modality: "image" or "video".

        A modality without a limit in `limit_mm_per_prompt` is left out.
        """
        return read_item_limits(self.limit_mm_per_prompt)

    @property
    def max_images(self) -> int | None:
        """Return the maximum number of images or videos in a prompt: the larger of both limits.

        None means that the options state no limit. 0 means that prompts have neither images nor
        videos.
        """
        return max((limit.count for limit in self.item_limits.values()), default=None)

    @property
    def image_size(self) -> tuple[int, int]:
        """Return the pixels (width, height) of the images for which the engine reserves memory.

        (0, 0) means the largest image that the model accepts.
        """
        limit = self.item_limits.get("image", ItemLimit(0))
        return limit.width, limit.height

    @property
    def state_dtype(self) -> str:
        """Return the data type of recurrent states that the options request, by kvcalc's name.

        "" means that the engine chooses the data type (`mamba_ssm_cache_dtype` is "auto" or "").
        """
        dtype = canonical(self.mamba_ssm_cache_dtype)
        return "" if dtype == "auto" else dtype


def read_fit_options(values: Settings) -> list[FitOptions]:
    """Return the options of `fit` from typed values. Lists give one result per combination.

    Files that the values name, such as a draft model, are loaded. Example: `{"users": [1, 2],
    "max_model_len": "4k"}` gives two results.

    Args:
        values: Value of each option, by option name. A value is a text, a Python value, or
            a list of either.
    """
    files: dict[str, Callable[[str], Any]] = {"draft": load_model, "from_log": read_learned}
    loaded = {"typed_flags": values.get("typed_flags", ())}
    for name, load in files.items():
        value = values.get(name) or None
        loaded[name] = load(value) if isinstance(value, str) else value
    if loaded["from_log"] and values.get("engine") is None:
        values = {**values, "engine": loaded["from_log"].engine}
    return [
        FitOptions(**msgspec.structs.asdict(question) | loaded)
        for question in read_questions(FitQuestion, values)
    ]


def options_for(deployment: TimedDeployment, **options: Any) -> FitOptions:
    """Return options of `fit` with the deployment's engine and engine version.

    Args:
        deployment: The deployment that names the engine.
        options: Further options of `fit`, by option name.

    Raises:
        UserError: The engine's version is unknown or an option is wrong.
    """
    return FitOptions(
        engine=deployment.engine, engine_version=deployment.engine_version, **options
    )


def read_item_limits(text: str) -> dict[str, ItemLimit]:
    """Parse `--limit-mm-per-prompt` into the limits on images and videos, by modality.

    Limits on audio are ignored.

    Examples: `{"image": 2, "video": {"count": 0}}` and `image=2,video=0` give the same limits.

    Args:
        text: The option in the words of the user; "" for no limits.

    Raises:
        UserError: The text has another form.
    """
    if not text.strip():
        return {}
    try:
        limits = msgspec.json.decode(limits_as_json(text), type=ItemLimits)
    except msgspec.MsgspecError as error:
        raise UserError(
            f"limit-mm-per-prompt {text!r} is not a limit: {error}",
            'Give one like image=2 or {"image": 2}',
        ) from None
    return {
        name: ItemLimit(limit) if isinstance(limit, int) else limit
        for name, limit in limits.items()
        if name != "audio"
    }
