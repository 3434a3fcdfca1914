"""What llama.cpp keeps on the GPU and what in the host's memory: whole layers, experts, the token table.

Rules as of `src/llama-model.cpp` (load_tensors: `dev_input`, `dev_layer`, `dev_output`), `src/llama-arch.cpp` (which tensors
are the input's) and `common/arg.cpp`, autumn 2026.
"""

from kvcalc.capacity.memory_terms import Start, Terms, stated
from kvcalc.errors import UserError
from kvcalc.layers.ffn import Dense, Moe
from kvcalc.layers.part import Part
from kvcalc.layers.weights import Weight, WeightKind
from kvcalc.model.spec import Model

PAD = 256  # cells: every cache is a multiple


def compute_buffer(start: Start) -> int:
    """The graph reserved for T = ubatch tokens, all of which give logits: the larger of its end and of a layer, in fp32.

    Logits and what they are made from, 4 · T · (V + D); or what stands at a layer's FFN, and attention's mask, 2 · T bytes a
    cell. Not counted: a second mask of layers with windows, or one beside the logits; recurrent layers; attention without
    flash attention.
    llama-context.cpp: graph_reserve(n_tokens, n_seqs, n_tokens). Llama-3.1-8B's log says 258.50 MiB for 512 tokens.
    """
    model = start.model
    logits = 4 * start.tokens * (model.vocab_size + model.hidden_size) if start.last else 0
    attends = any(entry.grows for layer in model.kinds.values() for entry in layer.entries)
    mask = 2 * start.tokens * -(-start.context // PAD) * PAD if attends else 0
    inner = max((_inner(part, model.hidden_size) for layer in model.kinds.values() for part in layer.parts), default=0)
    return max(logits, 4 * start.tokens * (inner + 4 * model.hidden_size) + mask)


def _inner(part: Part, width: int) -> int:
    """Elements of a token in an FFN, beside four rows of the residual's width: gate, up and their product, of every expert
    that it uses; and the experts' outputs, where the place of gate and up does not hold them."""
    if isinstance(part, Dense):
        return part.intermediate_size * (2 + part.gated)
    if not isinstance(part, Moe):
        return 0
    outputs, used = part.moe_latent_size or width, part.num_experts_per_tok
    inner = part.moe_intermediate_size
    return used * (inner * (2 + part.gated) + (outputs if outputs > inner * (1 + part.gated) else 0))


def host_layers(model: Model, gpu_layers: int) -> int:
    """Layers whose weights and cache the host keeps: the first L + 1 − ngl, since the head counts as the last. −1: none.

    Raises UserError where no layer would be left, or prediction layers would have to be counted.
    """
    if gpu_layers < 0 or gpu_layers > model.layers:
        return 0
    if gpu_layers < 2:
        raise UserError(f"n-gpu-layers {gpu_layers} leaves no layer of {model.name} on the GPU", hint="The head is the first")
    if model.mtp:
        raise UserError(f"{model.name} has prediction layers: which layers n-gpu-layers {gpu_layers} takes is not modelled")
    return model.layers + 1 - gpu_layers


def host_weights(start: Start) -> int:
    """Bytes of one GPU's weights that the host keeps instead; a SoC has one memory for both.

    The tables that the input is looked up in, unless one is the head too, of which the GPU has a copy; the layers that
    `host_layers` counts; the routed experts of the first `cpu_experts` layers.
    """
    if start.gpu.per == "SoC":
        return 0
    model, first = start.model, host_layers(start.model, start.gpu_layers)
    kept = {w.name: w for w in model.outer_weights if w.name not in model.lent and start.stage == 0 and _of_input(model, w)}
    total = sum(_bytes(start, name, w) for name, w in kept.items())
    for number, kind in enumerate(model.order[: max(first, start.cpu_experts)]):
        mine = (w for w in model.layer_weights(kind) if number < first or w.expert)
        total += sum(_bytes(start, f"{kind}.{w.name}", w) for w in mine)
    return total


def _of_input(model: Model, weight: Weight) -> bool:
    tied = weight.name == "embedding" and all(w.name != "lm_head" for w in model.outer_weights)
    return (weight.kind is WeightKind.TABLE and not tied) or weight.name == "embedding_norm"


def _bytes(start: Start, name: str, weight: Weight) -> int:
    return start.formats.weight_bytes(name, weight.local(start.ranks))


def check_placement(start: Start) -> None:
    """Raises UserError where layers or experts in the host's memory are not modelled."""
    model = start.model
    if start.gpu_layers < 0 and not start.cpu_experts:
        return
    if start.ranks.gpus > start.ranks.dp:
        raise UserError("llama.cpp's layers or experts in the host's memory beside several GPUs are not modelled")
    if start.gpu.per == "SoC":
        raise UserError(f"{start.gpu.name} has one memory: layers or experts on the CPU leave no more of it")
    if any(model.shared_weights(kind) for kind in model.kinds):
        raise UserError(f"{model.name} shares blocks of weights: on which side they lie is not modelled")
    if start.cpu_experts and not any(w.expert for kind in model.kinds for w in model.layer_weights(kind)):
        raise UserError(f"{model.name} has no experts to keep in the host's memory")


def terms(start: Start, end: str) -> Terms:
    """The stated terms, without what the host keeps. Raises UserError as `check_placement`.

    GPUs that share the layers have no collectives: each copies its output to the next
    (ggml-cuda.cu: ggml_backend_cuda_cpy_tensor_async).
    """
    check_placement(start)
    found, host = stated(start, end, graphs=False), host_weights(start)
    if start.ranks.tp == 1:
        overhead, startup = dict(found.overhead), dict(found.startup)
        overhead.pop("collectives", None)
        startup.pop("collectives", None)
        found = found._replace(overhead=overhead, startup=startup)
    return found._replace(language=found.language - host, host=host)


def grown(start: Start, found: Terms) -> Terms:
    """Terms with at least the compute buffer of a context."""
    return found._replace(activation=max(found.activation, compute_buffer(start)))
