"""Records of `fit`: one configuration, the waste of allocators, cells of a matrix, and steps."""

from typing import Annotated, NotRequired, TypedDict

from kvcalc.records.figures import FloatOrNull, IntOrNull, TextOrNull
from kvcalc.records.size import HostWeightsRecord, ShardedRecord


class FitMemoryRecord(ShardedRecord):
    """Keys of a `fit` record about the deployment and the memory of one GPU.

    All bytes are of one GPU, in the pipeline stage that fits the smallest number of sequences. "The
    request" is the number of sequences that must fit, at the requested length. "The range" is the
    range of KV cache budgets in which 90% of published engine starts are: `budget` names the end
    (low, middle or high) that decides what fits. `share_bytes` is for weights and KV cache, and in
    most engines also for activations and overhead. `shortage_bytes` is what is missing even without
    a KV cache; 0 if nothing is. `weight_bytes` includes `language_weight_bytes` and
    `extra_weight_bytes`. After a key's meaning comes the heading of its table column.
    """

    engine: Annotated[str, "engine whose rules apply", "engine"]
    dtype: Annotated[str, "format of the weights", "weights in"]
    fits: Annotated[bool, "whether the request fits", "fits"]
    weights_fit: Annotated[bool, "whether the weights fit"]
    memory_bytes: Annotated[int, "memory of one GPU"]
    server: NotRequired[Annotated[str, "server in a deployment file; absent without one"]]
    gpu_memory_utilization: Annotated[
        float, "share of the memory that the engine uses", "utilization"
    ]
    utilization_of: Annotated[str, "total or free memory"]
    share_bytes: Annotated[int, "memory that the engine uses"]
    weight_bytes: Annotated[int, "weights of one GPU", "weights/GPU"]
    language_weight_bytes: Annotated[int, "weights of the language model"]
    extra_weight_bytes: Annotated[int, "other weights that the engine loads"]
    host_weight_bytes: NotRequired[
        Annotated[int, "in CPU memory, by llama.cpp, or a table of n-grams by vLLM"]
    ]
    mtp_weight_bytes: Annotated[
        IntOrNull, "bytes of multi-token-prediction layers; null if they are not loaded"
    ]
    draft_weight_bytes: Annotated[IntOrNull, "weights of the draft; null without a draft"]
    activation_bytes: Annotated[int, "activations of the largest pass", "activations/GPU"]
    overhead_bytes: Annotated[
        int, "libraries, CUDA graphs and buffers of the engine", "overhead/GPU"
    ]
    kv_budget_bytes: Annotated[int, "KV cache budget, the middle of the range", "KV cache/GPU"]
    kv_budget_low_bytes: Annotated[
        IntOrNull,
        "low end of the range of 90% of published starts; null without a range",
        "KV cache/GPU low",
    ]
    kv_budget_high_bytes: Annotated[
        IntOrNull, "high end of the range; null without a range", "KV cache/GPU high"
    ]
    budget: Annotated[str, "the end of the range that the answers use"]
    shortage_bytes: Annotated[int, "missing memory of one GPU"]
    advice: Annotated[
        TextOrNull, "missing memory, and changes that were tried; null if the request fits"
    ]


class LoggedCacheRecord(TypedDict):
    """Predicted parts of the KV cache of one GPU that an engine's log gives separately.

    "Windows" are layers with a sliding window, and "recurrent states" are of layers such as Mamba.
    A record lacks a key if the engine does not log this part. llama.cpp can keep layers in CPU
    memory: `host_cache_bytes` is their KV cache, which is not part of the GPU's.
    """

    window_cache_bytes: NotRequired[
        Annotated[int, "bytes of windows, if the engine logs them separately"]
    ]
    state_bytes: NotRequired[
        Annotated[int, "bytes of recurrent states, if the engine logs them separately"]
    ]
    host_cache_bytes: NotRequired[
        Annotated[int, "bytes of llama.cpp layers in CPU memory; only if there are such layers"]
    ]


class ImageRecord(TypedDict):
    """Keys of a `fit` record about the tokens of an image. Models without a vision tower lack them.

    `images` is the largest number of images or videos that the settings allow in one prompt.
    `image_tokens` is for one image of the size in the engine's image limit, or else of the largest
    size that the model accepts. `frame_tokens` is for one frame of a video of this size. It is null
    unless the model merges several frames into the tokens of one image.
    """

    images: NotRequired[
        Annotated[IntOrNull, "images or videos of a request; null without a limit"]
    ]
    image_tokens: NotRequired[
        Annotated[int, "tokens of the largest image, or of the limit's size"]
    ]
    frame_tokens: NotRequired[
        Annotated[
            IntOrNull, "tokens of a video frame of this size; null if frames share no tokens"
        ]
    ]


class CapacityRecord(LoggedCacheRecord, ImageRecord):
    """Keys of a `fit` record about the sequences and tokens that fit, and settings that would fit.

    Bytes, blocks and tokens "in the pool" are of one GPU; numbers of sequences are of the replica.
    Sequences have `requested_model_len` tokens. The engine setting `max_num_seqs` is the number of
    sequences for which the engine is set up; a higher setting leaves a smaller cache.
    `capacity_sequences` is the number that the cache stores with the requested or default setting.
    The key `max_num_seqs` is the part of them for which the engine could also be set up.
    `greatest_num_seqs` is the largest setting whose sequences all fit. Example: with a default
    setting of 256, these three numbers may be 54, 54 and 56. `low_num_seqs` is the number that fits
    with `kv_budget_low_bytes`.
    `kv_cache_allocated_bytes` is what the engine allocates on one GPU when it starts. "Without a
    limit" means that longer or more sequences need no more cache. After a key's meaning come the
    heading and the format of its table column.
    """

    block_size: Annotated[IntOrNull, "per block; null if the engine has no blocks"]
    page_bytes: Annotated[
        IntOrNull, "bytes of a page of one layer; null if pages differ or there are none"
    ]
    bytes_per_block: Annotated[IntOrNull, "bytes of a block of all layers; null without blocks"]
    num_blocks: Annotated[IntOrNull, "in the pool; null without blocks", "blocks/GPU"]
    blocks_per_request: Annotated[
        IntOrNull, "maximum of one sequence; null without blocks", "blocks/user"
    ]
    kv_tokens: Annotated[int, "in the pool", "tokens/GPU"]
    max_concurrency: Annotated[
        FloatOrNull,
        "vLLM's maximum concurrency per dp rank; sequences of this length in the pool, as a "
        "fraction; null without a limit",
        "concurrency",
        "{:,.2f}",
    ]
    max_num_seqs: Annotated[
        IntOrNull,
        "full-length requests at the same time, on all GPUs; sequences of this length that "
        "fit on the replica; null without a limit",
        "users",
    ]
    max_model_len: Annotated[
        IntOrNull, "maximum length of this number of sequences; null without a limit"
    ]
    requested_model_len: Annotated[int, "requested length", "context"]
    requested_num_seqs: Annotated[int, "requested sequences", "required users"]
    low_num_seqs: Annotated[
        IntOrNull,
        "users at the low end of the range; sequences that fit there; null without a range",
        "at least",
    ]
    unshared_num_seqs: Annotated[
        IntOrNull,
        "users without the shared prefix; sequences that fit; null without a prefix",
        "not shared",
    ]
    longest_context: Annotated[
        IntOrNull,
        "max_model_len, limited by the model's maximum unless a longer one was requested; "
        "null without a limit",
    ]
    capacity_sequences: Annotated[
        int,
        "sequences that the cache stores with this engine setting; a higher setting needs "
        "more other memory",
    ]
    needed_utilization: Annotated[
        FloatOrNull,
        "smallest share that fits the request; null if none does",
        "needed share",
        "{:g}",
    ]
    needed_kv_cache_memory_bytes: Annotated[
        IntOrNull, "smallest cache that fits the request; null if none does"
    ]
    greatest_num_seqs: Annotated[int, "largest max_num_seqs whose sequences all fit"]
    greatest_model_len: Annotated[
        IntOrNull, "maximum length of one sequence; null without a limit"
    ]
    kv_cache_allocated_bytes: Annotated[int, "bytes of the blocks, per rank"]
    max_num_batched_tokens: Annotated[int, "setting of the engine"]


class CacheTransferRecord(TypedDict):
    """Keys of a `fit` record about sending a KV cache over links, and sequences in CPU memory.

    `transfer_…` is for sending one sequence's cache from a prefill GPU to a decode GPU, in bytes
    and seconds of one GPU. `offload_…` is for sequences whose cache is in CPU memory: how many more
    fit there, what one decode step over them reads through the link between CPU and GPU, and the
    time to copy one sequence back. `recompute_s` is the time to compute its cache again instead.
    Records without a CPU cache lack the keys from `offload_num_seqs` on.
    """

    transfer_bytes: Annotated[int, "cache of one sequence, sent to a decode GPU"]
    transfer_s: Annotated[
        FloatOrNull, "time on the link between GPUs; null if the rate is unknown"
    ]
    offload_num_seqs: NotRequired[
        Annotated[int, "more users, in CPU memory; sequences", "in CPU memory"]
    ]
    offload_step_bytes: NotRequired[Annotated[int, "traffic of a step over these sequences"]]
    offload_step_s: NotRequired[
        Annotated[FloatOrNull, "time on the host link; null if the rate is unknown"]
    ]
    offload_tokens: NotRequired[Annotated[int, "tokens that CPU memory stores"]]
    offload_return_s: NotRequired[
        Annotated[FloatOrNull, "time to copy one sequence back; null if the rate is unknown"]
    ]
    recompute_s: NotRequired[
        Annotated[
            FloatOrNull,
            "bound of the time to compute one sequence again; null if the GPU has no bound "
            "for a prompt",
        ]
    ]


class LoadingRecord(HostWeightsRecord):
    """Keys of a `fit` record about loading weights, replicated weights and weights in CPU memory.

    Bytes are of one GPU, but `checkpoint_bytes` are of all files of the model. `startup_bytes` is
    memory that CUDA and the collectives take before the engine measures free memory. `kv_copies` is
    the number of GPUs that store the same KV head. `load_disk_s` reads all files from disk,
    `load_link_s` copies one GPU's weights over its host link; both happen at the same time.
    """

    machine_memory_bytes: Annotated[int, "total memory of one GPU"]
    startup_bytes: Annotated[
        int, "CUDA context and collectives, if the share is of free memory; otherwise 0"
    ]
    replicated_weight_bytes: Annotated[int, "weights that several GPUs store"]
    kv_copies: Annotated[int, "copies of a token's cache"]
    checkpoint_bytes: Annotated[int, "bytes of the files"]
    load_disk_s: Annotated[FloatOrNull, "time to read the files; null if the rate is unknown"]
    load_link_s: Annotated[
        FloatOrNull, "time to copy the weights to the GPUs; null if the rate is unknown"
    ]
    load_s: Annotated[FloatOrNull, "the longer of both times; null if both are unknown"]


class FitRecord(FitMemoryRecord, CapacityRecord, CacheTransferRecord, LoadingRecord):
    """One configuration of `fit`: its memory, and the sequences that fit.

    A configuration is a model on one replica of GPUs with the settings of an engine. `command`
    starts it. `breakpoints` gives the cache bytes of one sequence on one GPU for each range of
    lengths: `fixed_bytes` + `bytes_per_token` · tokens, for tokens from `from_tokens` on. `cause`
    is what stops growing at this length, such as `window`; "" from 0 tokens on. `block_tokens` is
    the tokens of the largest block that still grows.
    """

    command: Annotated[
        TextOrNull, "the engine's command line of the answer; null if the engine has none"
    ]
    kvcalc_command: Annotated[
        TextOrNull, "the same as a `kvcalc fit` command; null if the engine has none"
    ]
    breakpoints: Annotated[
        list[object],
        "from_tokens, fixed_bytes, bytes_per_token, block_tokens and cause of each range of "
        "lengths",
    ]


class FitRow(FitRecord):
    """One row of the table of `fit`: the record of a configuration, and texts for its cells.

    `missing_bytes` is the memory of one GPU that the request lacks. `longest` is the maximum tokens
    of each sequence at which the required number of sequences fits, but at most the model's
    maximum, unless the request exceeds it. Without any limit, it is the text `no limit`. After a
    key's meaning come the heading and the format of its column.
    """

    missing_bytes: Annotated[IntOrNull, "null if the request fits", "missing/GPU"]
    longest: Annotated[
        int | str, "the longest context of the required users", "max context", "text"
    ]


class WasteRecord(TypedDict):
    """Waste of three memory allocators for the request lengths of `fit --lengths`.

    The allocators give each sequence a slot of the maximum length ("contiguous"), a piece of its
    exact size (keys with `external_`), or blocks ("paged"). A wasted token is memory for a token
    that stores none. Shares are parts of 1. `padding_waste` is the share of padding if one batch
    contains all requests, each padded to the longest.

    The `external_` keys come from a simulation. A request is refused if it would fit in all free
    ranges (holes) together, but in no single hole. At these moments, `external_waste` is the mean
    share of memory that is free, and `external_largest_hole` the mean share in the largest hole.
    """

    lengths: Annotated[int, "given or sampled lengths"]
    mean_length: Annotated[float, "tokens"]
    padding_waste: Annotated[float, "padding share of one batch of all lengths"]
    contiguous_waste: Annotated[float, "wasted share of slots of the maximum length"]
    contiguous_waste_tokens: Annotated[int, "wasted tokens of slots of the maximum length"]
    contiguous_num_seqs: Annotated[int, "sequences that fit in such slots"]
    external_waste: Annotated[
        FloatOrNull,
        "free but unusable memory when an exact-size piece does not fit; null if none fits",
    ]
    external_failures: Annotated[
        IntOrNull, "requests refused for this reason; null if none fits"
    ]
    external_requests: Annotated[IntOrNull, "tried requests; null if none fits"]
    external_largest_hole: Annotated[FloatOrNull, "share of the pool; null if none fits"]
    paged_waste: Annotated[float, "wasted share of blocks"]
    paged_waste_tokens: Annotated[int, "wasted tokens of blocks"]
    paged_num_seqs: Annotated[int, "sequences that fit in blocks"]


class MatrixCellRecord(TypedDict):
    """One combination of users and context of `fit --matrix`: whether it fits, and the free memory.

    `context` is the tokens of each user. `headroom_bytes` is the part of one GPU's KV cache that
    stays free with these users; it fits if this is not negative.
    """

    users: Annotated[int, "users of this cell", "users"]
    context: Annotated[int, "per user"]
    headroom_bytes: Annotated[
        int, "free budget with these users; negative if memory is missing"
    ]


class AllocationRecord(TypedDict):
    """One line of a script of `fit --allocations`, with its result in three memory allocators.

    A line requests memory for a sequence, or releases it. All sizes are in tokens, and "free" and
    "wasted" are totals of the memory after the line. The allocators give a sequence a slot of the
    maximum length (`contiguous`), a piece of its exact size at the first free place (`first_fit`),
    or blocks (`paged`). `contiguous`, `first_fit` and `paged` say whether the request succeeds. A
    hole is a free range between sequences.
    """

    line: Annotated[int, "line of the file, or number of the step"]
    request: Annotated[str, "the line", "request"]
    tokens: Annotated[IntOrNull, "requested; null for a release"]
    memory_tokens: Annotated[int, "size of the memory"]
    contiguous: Annotated[
        bool | None,
        "whether a slot of the maximum length is free; null for a release",
        "contiguous",
    ]
    contiguous_free_tokens: Annotated[int, "after the line"]
    contiguous_wasted_tokens: Annotated[int, "reserved, but empty"]
    first_fit: Annotated[
        bool | None, "whether an exact-size piece is free; null for a release", "first fit"
    ]
    first_fit_free_tokens: Annotated[int, "after the line", "tokens free"]
    first_fit_wasted_tokens: Annotated[int, "reserved, but empty", "wasted"]
    paged: Annotated[bool | None, "whether enough pages are free; null for a release", "pages"]
    paged_free_tokens: Annotated[int, "after the line"]
    paged_wasted_tokens: Annotated[int, "reserved, but empty"]
    contiguous_free_slots: Annotated[int, "after the line", "slots free"]
    first_fit_largest_hole: Annotated[int, "after the line", "largest hole"]
    paged_free_blocks: Annotated[int, "after the line", "blocks free"]
    block_table: Annotated[list[object] | None, "blocks of the sequence; null without blocks"]
