"""vLLM: what a model that compresses its tokens (DeepSeek-V4) takes beside its cache: rotary tables, buffers, a pass.

T tokens of a pass, D hidden size, S the streams of the residual (hc_mult · D), e bytes of an element. Source:
models/deepseek_v4/{attention,compressor}.py, nvidia/{model,flashmla}.py and layers/sparse_attn_indexer.py of vLLM 0.22 and 0.31.
"""

from kvcalc.capacity.memory_terms import MIB, Start
from kvcalc.layers.attention import Compressed
from kvcalc.model.pipeline import stages

LOGITS_BYTES = 512 * MIB  # that a pass without a cache keeps free for an indexer (envs.py: VLLM_SPARSE_INDEXER_MAX_LOGITS_MB)
PADDED_HEADS = (64, 128)  # of a rank, that its kernel takes (nvidia/flashmla.py: get_padded_num_q_heads)
ALWAYS_KEPT_TO = (0, 27, 0)  # the last streams, for prediction layers; since then only beside those


def has_indexer(start: Start) -> bool:
    """Whether an indexer chooses among what the model keeps."""
    known = start.model.known
    if "indexer" not in known:
        known["indexer"] = any(e.role == "index_key" for layer in start.model.kinds.values() for e in layer.entries)
    return bool(known["indexer"])


def compressed_parts(start: Start) -> list[Compressed]:
    """The attention of each kind of layer on the stage, where tokens are compressed; empty for another model."""
    key = "compressed parts", start.ranks.pp, start.stage
    if key not in start.model.known:
        held = stages(start.model, start.ranks.pp)[start.stage].counts
        parts = [p for kind, n in held.items() if n for p in start.model.kinds[kind].parts if isinstance(p, Compressed)]
        start.model.known[key] = parts if any(p.compress_ratio for p in parts) else []
    found: list[Compressed] = start.model.known[key]
    return found


def tables(start: Start) -> int:
    """Rotary tables in fp32, one for layers that compress and one for those that do not."""
    parts = {bool(p.compress_ratio): p.qk_rope_head_dim for p in compressed_parts(start)}
    return sum(4 * (start.model.max_context or 0) * width for width in parts.values())


def buffers(start: Start) -> int:
    """Loaded with the model: T·index_topk·4 for the chosen entries, and on the last stage T·S·e that prediction layers read."""
    parts = compressed_parts(start)
    if not parts:
        return 0
    chosen = 4 * max(p.index_topk for p in parts)
    kept = start.last and (start.release.since < ALWAYS_KEPT_TO or "mtp" in start.beside)
    return start.tokens * (chosen + (start.once(streams) * start.formats.element_bytes if kept else 0))


def streams(start: Start) -> int:
    """Elements of a token's residual: what the mixers of the streams read, or the hidden size."""
    widths = (w.inputs for name, w, _ in start.model.walk() if name.endswith("_streams"))
    return max(widths, default=start.model.hidden_size)


def attention_peak(start: Start) -> int:
    """The most that stands around an attention; 0 for another model.

    Streams and the layer's input, the output and queries at padded heads, what the projections gave (compressors' in fp32),
    and either the queries before their padding or an indexer's queries, in fp8 too, with its logits.
    """
    found = [0]
    for p in compressed_parts(start):
        heads, series = start.ranks.share(p.num_attention_heads), 2 if p.overlap else 1
        padded = next(n for n in (*PADDED_HEADS, heads) if n >= heads)
        index = p.index_head_dim if p.index_topk else 0
        scores = 2 * 2 * series * (p.head_dim + index) if p.compress_ratio else 0
        width = start.once(streams) + start.model.hidden_size + 2 * padded * p.head_dim + p.q_lora_rank + p.head_dim + scores
        element = start.formats.element_bytes
        bare = heads * p.head_dim * element * start.tokens
        chosen = p.index_n_heads * index * (element + 1) * start.tokens + (LOGITS_BYTES if index else 0)
        found.append(width * element * start.tokens + max(bare, chosen))
    return max(found)
