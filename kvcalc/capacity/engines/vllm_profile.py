"""The peak of vLLM's profile run: one pass of max_num_batched_tokens, then a sample for max_num_seqs dummy requests.

T tokens of a pass, n requests (never more than T), V vocabulary, D hidden size, e bytes of an activation.
"""

from kvcalc.capacity.engines.vllm_compressed_memory import LOGITS_BYTES, attention_peak, compressed_parts, has_indexer
from kvcalc.capacity.engines.vllm_versions import Release, runs_v0, takes_runner_v2
from kvcalc.capacity.engines.vllm_weights import data_centre_blackwell
from kvcalc.capacity.memory_terms import MIB, Start
from kvcalc.layers.attention import Latent
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.model.pipeline import stages
from kvcalc.storage.quantization import family
from kvcalc.units import Num, at_least, maximum, minimum

WAITING = 3.8  # residual streams that stand beside a layer's widest part: fitted on one log of two
SORT, SORT_FEW, KERNEL = 38, 50, 14  # bytes of the sampler per request and entry of the vocabulary
MLA_WORKSPACE = 65536  # tokens (attention/backends/mla/common.py, 0.11)
L2_BYTES = 50 * MIB
DEEP_GEMM = (0, 11, 0), (0, 17, 0)  # the releases from and before which it runs experts
KEPT_WORKSPACE = (0, 14, 0)  # the release from which the experts' stays
MOST_IMAGES = 999  # of a prompt, where no limit is given (config/multimodal.py)


def peak(start: Start, kernels: bool = False, first_start: bool = True) -> tuple[Num, str]:
    """The peak in bytes and the step that reaches it: the workspace of the products beside the greatest of four.

    kernels: FlashInfer's are installed, for releases that use them where they are. first_start: nothing is compiled yet.
    """
    steps = {
        "forward pass": forward(start) + held_images(start),
        "sampler": sample(start, kernels) + held_images(start) + experts_workspace(start) if start.last else 0,
        "vision encoder": encoder(start),
        "compilation": compilation(start) if first_start else 0,
    }
    most: Num = 0
    for size in steps.values():
        most = maximum(most, size)
    reached = (step for step, size in steps.items() if isinstance(most, int) and size == most)
    return workspace(start) + most, next(reached, "")


def workspace(start: Start) -> int:
    """cuBLAS: 32 MiB on Hopper and data-centre Blackwell, 8 MiB elsewhere (torch: CUDABlas.cpp)."""
    return (32 if start.gpu.architecture == "Hopper" or data_centre_blackwell(start) else 8) * MIB


def sample(start: Start, kernels: bool = False) -> Num:
    """Hidden states of T tokens, and the logits of n requests with what sampling makes of them.

    First runner: T·D·e + 2·n·D·e + n·V·b, b = 38 where fp32 logits are sorted (50 from 2 to 127 requests), 14 where kernels
    need no sort (gpu_model_runner.py: _dummy_sampler_run, 0.11). Second runner: T·D·e + n·V·b, b by release.
    """
    rules: Release = start.release
    count: Num
    model, count, element = start.model, start.sequences, start.formats.element_bytes
    states = start.tokens * model.hidden_size * element
    if takes_runner_v2(rules, model, start.formats):
        return states + count * model.vocab_size * rules.sampler_v2
    sorts = rules.sampler == "sort" or (rules.sampler == "flashinfer" and not kernels) or runs_v0(rules, start.gpu, model)
    few = at_least(count, 2) - at_least(count, 128)
    each = SORT + few * (SORT_FEW - SORT) if sorts else KERNEL
    return states + 2 * count * model.hidden_size * element + count * model.vocab_size * each


def forward(start: Start) -> int:
    """T·e·(widest part + 3.8·D), and what latent attention would project: 65,536 · heads/tp · (nope + v) · 2.

    An indexer's logits where those are more (layers/sparse_attn_indexer.py, 0.22). Where tokens are compressed, what stands
    around an attention. Beside it the experts' workspace, where it stays from the first layer on.
    """
    kept, element = experts_workspace(start), start.formats.element_bytes
    if around := attention_peak(start):
        return around + kept
    wide = start.once(widest, start.tokens, _deep_gemm(start), bool(kept))
    parts = [p for layer in start.model.kinds.values() for p in layer.parts if isinstance(p, Latent)]
    spread = (start.ranks.share(p.num_attention_heads) * (p.qk_nope_head_dim + p.v_head_dim) for p in parts)
    latent = 2 * MLA_WORKSPACE * max(spread, default=0)
    if has_indexer(start) and start.release.since >= (0, 22, 0):
        latent = max(latent, LOGITS_BYTES)
    return int(start.tokens * (wide + WAITING * start.model.hidden_size) * element) + latent + kept


def experts_workspace(start: Start) -> int:
    """T·e·rows·(max(2·I, D) + max(I, D)) where it stays from the first layer on, beside the sample too; else 0.

    v1/worker/workspace.py, of experts in 8 or 16 bits from 0.14 on, and of DeepSeek-V4's (not the rows that a prefill of very
    long sequences gathers there). Kernels of 4 bits mostly allocate their own (fused_moe/modular_kernel.py).
    """
    if not start.once(_keeps_workspace, start.release.since < KEPT_WORKSPACE):
        return 0
    return int(start.tokens * start.once(routed, start.tokens, _deep_gemm(start)) * start.formats.element_bytes)


def routed(start: Start) -> float:
    """Elements per token of the experts' two workspaces, in the stage's widest layer."""
    found = [0.0]
    for kind, count in stages(start.model, start.ranks.pp)[start.stage].counts.items():
        layer = start.model.kinds[kind]
        for part in (*layer.parts, *layer.shared) if count else ():
            weights = {w.name: w.local(start.ranks) for w in part.weights(start.model.hidden_size)}
            if up := weights.get("experts.up"):
                found.append(_workspaces(start, weights, up))
    return max(found)


def _workspaces(start: Start, weights: dict[str, Weight], up: Weight) -> float:
    wide = up.outputs * (2 if "experts.gate" in weights else 1)
    return _rows(start, up) * (max(wide, up.inputs) + max(up.outputs, up.inputs))


def _keeps_workspace(start: Start) -> bool:
    """Whether tokens are compressed, or no experts are stored in less than 8 bits under a release that keeps theirs."""
    if compressed_parts(start) or start.release.since < KEPT_WORKSPACE:
        return bool(compressed_parts(start))
    return not any(w.expert and start.formats.weight_format(name, w).bits < 8 for name, w, _ in start.model.walk())


def widest(start: Start) -> float:
    """Elements per token of the widest part of a layer, inputs and outputs that stand at once, on one rank."""
    model, found, kept = start.model, [0.0], experts_workspace(start) > 0
    for kind, count in stages(model, start.ranks.pp)[start.stage].counts.items():
        layer = model.kinds[kind]
        for part in (*layer.parts, *layer.shared) if count else ():
            weights = {w.name: w.local(start.ranks) for w in part.weights(model.hidden_size)}
            found.append(_width(start, weights, kept))
    return max(found)


def _width(start: Start, weights: dict[str, Weight], kept: bool) -> float:
    """A gated FFN: 3·I, others 2·I; experts: their workspaces unless those are kept; attention: the sum of its projections."""
    if up := weights.get("experts.up"):
        shared = weights.get("shared.up")
        return max(0 if kept else _workspaces(start, weights, up), 3 * shared.outputs if shared else 0)
    if up := weights.get("up"):
        return up.outputs * (3 if "gate" in weights else 2)
    return sum(w.outputs for w in weights.values() if w.kind is WeightKind.MATRIX and not w.rows_in)


def _rows(start: Start, up: Weight) -> float:
    """Rows of a token that the experts' products hold: top-k, and DeepGEMM's padding to 128 rows an expert.

    DeepGEMM runs block-wise fp8 experts on Hopper and data-centre Blackwell from 0.11 to 0.16 (fused_moe/deep_gemm_moe.py);
    then Triton and FlashInfer come before it (fused_moe/oracle/fp8.py, 0.17.1).
    """
    return up.active + up.copies * 127 / start.tokens if _deep_gemm(start) else up.active


def _deep_gemm(start: Start) -> bool:
    """Whether DeepGEMM runs the experts."""
    runs = start.gpu.architecture == "Hopper" or data_centre_blackwell(start)
    return runs and DEEP_GEMM[0] <= start.release.since < DEEP_GEMM[1] and start.once(_experts_in_blocks)


def _experts_in_blocks(start: Start) -> bool:
    """Whether experts are stored in fp8 by blocks of 128."""
    return any(
        w.expert and family(start.formats.weight_format(name, w).name) == "fp8_block128" for name, w, _ in start.model.walk()
    )


def _images(start: Start) -> Num:
    """Of the largest size, in one batch of the encoder: as many as its budget of tokens holds, and n requests may have.

    v1/worker/gpu_model_runner.py: profile_run, 0.8.5; multimodal/encoder_budget.py, 0.28.
    """
    vision = start.model.vision
    if not vision or start.stage or start.images == 0:
        return 0
    asked = start.sequences * (start.images or MOST_IMAGES)
    return maximum(1, minimum(max(start.tokens, vision.tokens) // vision.tokens, asked))


def held_images(start: Start) -> Num:
    """What stays of the encoder's run: its outputs and the pixels."""
    vision, count = start.model.vision, _images(start)
    if not vision:
        return 0
    outputs = vision.tokens * start.model.hidden_size * start.formats.element_bytes
    return count * (outputs + 2 * vision.patches * vision.values)


def encoder(start: Start) -> Num:
    """Pixels, and per patch four streams of the tower's width and two of its MLP's share, in 2 bytes."""
    vision, count = start.model.vision, _images(start)
    if not vision:
        return 0
    ranks = start.ranks.tp if vision.sharded else 1
    return 2 * count * vision.patches * (vision.values + 4 * vision.width + 2 * vision.mlp // ranks)


def compiles(start: Start) -> bool:
    """Whether what a first start compiles takes memory on this stage."""
    return bool(start.release.combo_kernels and not (start.eager or start.stage or start.model.vision))


def compilation(start: Start) -> int:
    """A first start's copy of the token table, a cache's worth of scratch and the pass's input, as torch 2.9 times kernels.

    Inferred from pairs of starts, not read: without a compilation cache, and not where a tower stands beside the model.
    """
    if not compiles(start):
        return 0
    model, element = start.model, start.formats.element_bytes
    table = (model.embedding_size or model.hidden_size) * start.ranks.share(model.vocab_size) * element
    return table + (start.gpu.l2_bytes or L2_BYTES) + start.tokens * model.hidden_size * element
