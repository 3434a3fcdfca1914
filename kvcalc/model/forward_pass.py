"""One forward pass over a batch, as operators.

Weights are read once per pass for any batch size; a shared block is read once for each layer that
runs it. Cache bytes, activation bytes and FLOPs add up over the groups of the batch. Each operator
reads its input and writes its output once; elementwise chains between two matrix products count as
fused. The embedding reads one row per token. The LM head reads its whole matrix, even if it is
tied, and runs for the last position of each sequence, or for all positions on request.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from kvcalc.arithmetic import Num
from kvcalc.errors import UserError
from kvcalc.layers.batch import ONE_GPU, Batch, Parallelism
from kvcalc.layers.cost import Cost, Operator, Role
from kvcalc.layers.part import Sublayer
from kvcalc.layers.passes import NORM_FLOPS, Pass
from kvcalc.layers.weights import WeightKind, matrix
from kvcalc.model.memory import fullest_stage
from kvcalc.model.model import NORM_VECTORS, Model
from kvcalc.model.pipeline import check, stages
from kvcalc.model.precision import PUBLISHED, Precision, formats_of, stored_as

SAMPLING_FLOPS = 5  # vector FLOPs per logit

MLA_FORMS = ("auto", "absorbed", "expanded")


def forward(
    model: Model,
    batch: Batch,
    precision: Precision = PUBLISHED,
    parallelism: Parallelism = ONE_GPU,
    mla_form: str = "auto",
    all_positions: bool = False,
    stage: int | None = None,
) -> tuple[Operator, ...]:
    """Return the operators of one forward pass on one GPU of one pipeline stage, with their costs.

    Equal layers share their operators: `cost` is the cost of one layer, and `count` the number of
    layers. The GPU processes its data-parallel share of every group of the batch. On all stages
    except the last, the last operator sends the hidden states to the next stage.

    Args:
        model: The model.
        batch: All sequences of one replica, over all data-parallel ranks.
        precision: Requested formats of weights, matrix products and KV cache.
        parallelism: Number of ranks of each kind of parallelism.
        mla_form: Form of latent attention (MLA): `auto`, `absorbed` or `expanded`. `auto` uses the
            form with fewer FLOPs for each group of equal sequences.
        all_positions: Whether the LM head runs for every new token, not only for the last token of
            each sequence.
        stage: Index of the pipeline stage, from 0; None for the stage with the most bytes of
            weights and of the cache of one token.

    Raises:
        UserError: The parallelism does not divide the model, or the stage or form is unknown.
    """
    model, p = _begun(model, batch, precision, parallelism, mla_form)
    all_stages = stages(model, parallelism.pp)
    if stage is None:
        selected = fullest_stage(model, p.formats, parallelism, 1, 1)
    elif stage in range(len(all_stages)):
        selected = all_stages[stage]
    else:
        hint = f"Give 0 to {len(all_stages) - 1}, or None for the fullest"
        raise UserError(f"stage {stage!r} is not one of {len(all_stages)}", hint)
    operators = _embedding(model, p) if selected.first else []
    operators += _layers(model, p, selected.counts)
    if selected.last:
        operators += _head(model, p, all_positions)
    else:
        operators += _sends(p, handings(parallelism, [selected.number]))
    return tuple(operators)


def through_layers(
    model: Model,
    batch: Batch,
    precision: Precision,
    parallelism: Parallelism,
    mla_form: str = "auto",
    all_positions: bool = False,
) -> list[Operator]:
    """Return the operators of one forward pass through all pipeline stages, with one GPU's costs.

    The list has the embedding, all layers and the LM head, so its times add up to the latency of
    the pass without the transfers between stages. The field `cost` of an operator is that of one
    run, such as one layer, on one GPU of its stage. `count` is the number of runs in all stages.

    Args:
        model: The model.
        batch: All sequences of one replica, over all data-parallel ranks.
        precision: Requested formats of weights, matrix products and KV cache.
        parallelism: Number of ranks of each kind of parallelism.
        mla_form: Form of latent attention (MLA): `auto`, `absorbed` or `expanded`. `auto` uses the
            form with fewer FLOPs for each group of equal sequences.
        all_positions: Whether the LM head runs for every new token, not only for the last token of
            each sequence.

    Raises:
        UserError: The parallelism does not divide the model.
    """
    model, p = _begun(model, batch, precision, parallelism, mla_form)
    return [
        *_embedding(model, p),
        *_layers(model, p, model.counts),
        *_head(model, p, all_positions),
    ]


def between_stages(
    model: Model,
    batch: Batch,
    precision: Precision,
    parallelism: Parallelism,
    times: tuple[int, int] | None = None,
) -> list[Operator]:
    """Return the operators that send hidden states from pipeline stages to the next stages.

    There is at most one operator for transfers within a node and one for transfers to another node.
    Its `count` is the number of transfers, and its cost is what one GPU sends in one transfer: the
    hidden states of all new tokens on its data-parallel rank. The list is empty without transfers.

    Args:
        model: The model.
        batch: All sequences of one replica, over all data-parallel ranks.
        precision: Requested formats of weights, matrix products and KV cache.
        parallelism: Number of ranks of each kind of parallelism.
        times: Numbers of transfers (within a node, to another node); None for one transfer after
            each stage except the last.
    """
    if times is None:
        times = handings(parallelism, range(parallelism.pp - 1))
    if not any(times):
        return []
    return _sends(_begun(model, batch, precision, parallelism, "auto")[1], times)


def _begun(
    model: Model, batch: Batch, precision: Precision, parallelism: Parallelism, mla_form: str
) -> tuple[Model, Pass]:
    """Return the model with its storage formats, and the `Pass` that collects its operators."""
    check(model, parallelism)
    model = stored_as(model, precision)
    formats = formats_of(model, precision)
    if mla_form not in MLA_FORMS:
        raise UserError(f"unknown MLA form {mla_form!r}", f"Known: {', '.join(MLA_FORMS)}")
    return model, Pass(
        model.hidden_size,
        batch,
        formats,
        parallelism,
        mla_form,
        rotates=not model.position_embeddings,
    )


def _layers(model: Model, p: Pass, counts: Mapping[str, int]) -> list[Operator]:
    operators = []
    for kind, count in counts.items():
        if count:
            operators += _layer(model, p, kind, count)
    return operators


def _sends(p: Pass, times: tuple[int, int]) -> list[Operator]:
    """Return the operators that send hidden states to the next stage, within a node and to another
    node."""
    p.enter("", 1)
    sent = p.tokens * p.width * p.element
    return [
        p.network("send", sent, away, count) for away, count in zip((0, sent), times) if count
    ]


def handings(ranks: Parallelism, stages: Iterable[int]) -> tuple[int, int]:
    """Return how many of some pipeline stages send within their node, and how many to another node.

    A stage sends the hidden states of its last layer to the next stage. Transfers to another node
    use a slower link, so they are timed separately.

    Args:
        ranks: Number of ranks, and of GPUs per node.
        stages: Indices of the sending stages, from 0.
    """
    away = [leaves_node(ranks, stage) for stage in stages]
    return away.count(False), away.count(True)


def leaves_node(ranks: Parallelism, stage: int) -> bool:
    """Return whether a pipeline stage sends hidden states to another node.

    It does if any GPU of the next stage is outside the node of this stage's first GPU. Example:
    with 8 GPUs per node and stages of 4 GPUs, stage 0 sends within its node and stage 1 does not.
    If the number of GPUs per node is 0, all GPUs are on one node, and the result is False.

    Args:
        ranks: Number of ranks, and of GPUs per node.
        stage: Index of the sending stage, from 0.
    """
    first = stage * ranks.stage_gpus
    last = first + 2 * ranks.stage_gpus - 1
    per_node = ranks.per_node
    return bool(per_node) and last // per_node > first // per_node


def total(operators: Iterable[Operator]) -> Cost:
    """Return the FLOPs and bytes on one GPU of some operators together, such as of a forward pass.

    They are the sum of the operators' costs, each multiplied by its number of runs.

    Args:
        operators: Operators with the costs of one GPU, such as the result of `forward`.
    """
    result = Cost()
    for operator in operators:
        result = result + operator.total
    return result


def _layer(model: Model, p: Pass, kind: str, count: int) -> list[Operator]:
    layer = model.kinds[kind]
    p.enter(kind, count, writes_cache=not layer.shares_cache)
    operators = []
    if layer.norm_count and NORM_VECTORS[model.norm]:
        norm = _norm(model, p, "norm", p.tokens)
        operators.append(replace(norm, count=count * layer.norm_count))
    for part in layer.all_parts:
        p.role = part.ROLE
        operators += _with_vectors(p, part, part.operators(p))
    return operators


def _with_vectors(p: Pass, part: Sublayer, operators: list[Operator]) -> list[Operator]:
    """Return the operators of a part; the first elementwise operator also reads norms, sinks and
    convolutions."""
    vector_bytes = sum(p.vector_bytes(w) for w in part.weights(p.width))
    if not vector_bytes:
        return operators
    operators = operators or [p.vector("scale", 0, 0, 0)]
    index = next((n for n, o in enumerate(operators) if o.kind not in ("gemm", "network")), 0)
    cost = operators[index].cost + Cost(weight_bytes=vector_bytes)
    operators[index] = replace(operators[index], cost=cost)
    return operators


LAST_MATRICES = ("embedding_down", "pooler", "score")  # that only the last positions need


def _norm(model: Model, p: Pass, name: str, tokens: Num) -> Operator:
    elements = tokens * p.width
    weights = NORM_VECTORS[model.norm] * p.width * p.formats.vector_bytes
    return p.vector(name, elements, elements, NORM_FLOPS * elements, weights)


def _embedding(model: Model, p: Pass) -> list[Operator]:
    """Return the operator that reads one row of every table per new token."""
    outer = [w.local(p.ranks) for w in model.outer_weights]
    rows = sum(p.formats.row_bytes(w) for w in outer if w.kind is WeightKind.TABLE)
    other_vectors = ("embedding_norm", "final_norm", "lm_head_bias")
    vectors = sum(p.vector_bytes(w) for w in model.outer_weights if w.name not in other_vectors)
    cost = Cost(
        weight_bytes=p.tokens * rows + vectors, activation_bytes=p.tokens * p.width * p.element
    )
    operators = [Operator("embedding", "", 1, "vector", cost)]
    if model.embedding_norm:
        operators.append(_norm(model, p, "embedding_norm", p.tokens))
    for w in outer:
        if w.kind is WeightKind.MATRIX and w.name not in ("lm_head", *LAST_MATRICES):
            operators.append(p.gemm(w.name, w))
    return operators + p.all_reduce(p.width)


def _head(model: Model, p: Pass, all_positions: bool) -> list[Operator]:
    """Return the operators of final norm, LM head and sampling, for the last position of each
    sequence or for all positions.
    """
    p.enter("", 1)
    p.role = Role.HEAD
    rows = p.tokens if all_positions else p.sequences
    outer = {w.name: w.local(p.ranks) for w in model.outer_weights}
    operators = [_norm(model, p, "final_norm", rows)] if "final_norm" in outer else []
    last = [name for name in LAST_MATRICES if name in outer]
    operators += [p.gemm(name, outer[name], tokens=rows) for name in last]
    if not model.lm_head:
        return operators
    head = outer.get("lm_head")
    if not head:  # a tied embedding table [V, D] is the matrix [D, V]
        table = outer["embedding"]
        bias = "lm_head_bias" in outer
        head = matrix("lm_head", table.outputs, table.inputs, bias, shards=table.shards)
    operators.append(p.gemm("lm_head", head, tokens=rows))
    logits = rows * head.outputs
    n = p.ranks.tp
    if n > 1:
        sent = logits * p.element
        away = sent * (n - p.ranks.near(n))
        operators.append(p.network("all_gather_logits", sent * (n - 1), away))
    operators.append(p.vector("sampling", logits, rows, SAMPLING_FLOPS * logits))
    return operators
