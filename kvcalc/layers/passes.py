"""Helpers with which parts build operators: the batch, formats and parallelism of one pass."""

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any

from msgspec.structs import replace

from kvcalc.arithmetic import Num, Real, array_of, ceil_div, maximum
from kvcalc.layers.batch import Batch, Parallelism, Sequences
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.cost import (
    SOFTMAX_FLOPS,
    AttentionShape,
    CollectiveShape,
    Cost,
    GemmShape,
    Operator,
    Role,
    product_flops,
)
from kvcalc.layers.weights import Formats, Weight, WeightKind

# vector FLOPs per element
PairRule = Callable[[Num, Num], Num]  # a number for new and past tokens of a sequence

NORM_FLOPS = 4
ROPE_FLOPS = 3
ACTIVATION_FLOPS = 8
TOP_K_FLOPS = 2


class Pass:
    """One forward pass on one GPU, with methods that build its operators and count their costs.

    The parts of a layer, such as attention and FFN, call the methods. Most methods return an
    `Operator` with its FLOPs and bytes in one layer.

    Attributes:
        width: Hidden size of the model.
        formats: Storage and compute formats of weights and KV cache.
        ranks: Number of ranks of each kind of parallelism.
        groups: Groups of equal sequences on this data-parallel rank.
        tokens: New tokens of all sequences on this data-parallel rank.
        sequences: Number of sequences on this data-parallel rank.
        element: Bytes of an activation element, such as 2 for bf16.
        mla_form: Form of latent attention (MLA): absorbed, expanded, or auto for the form with
            fewer FLOPs.
        rotates: Whether positions are rotary (RoPE).
        present: 1 normally. If the batch stands for several passes, it is an array in which 0 marks
            passes from which `select` removed all groups. Matrix products read no weights there.
        kind: Name of the kind of layers whose operators are being built, such as `dense`; ''
            outside the layers.
        count: Number of these layers on this GPU.
        writes_cache: False if these layers only read another layer's cache. Their operators then
            count no cache bytes as written.
        role: Group of the next matrix products, such as FFN, by which reports select operators.
    """

    def __init__(
        self,
        width: int,
        batch: Batch,
        formats: Formats,
        ranks: Parallelism,
        mla_form: str = "auto",
        rotates: bool = True,
    ) -> None:
        self.width = width
        self.formats = formats
        self.ranks = ranks
        self.element = formats.element_bytes
        self.mla_form = mla_form
        self.rotates = rotates
        self.present = 1
        groups = []
        for group in batch.groups:
            count = ceil_div(array_of(group.count), ranks.dp)
            groups.append(Sequences(count, array_of(group.new), array_of(group.past)))
        self._set_groups(groups)
        self.enter("", 1)

    def _set_groups(self, groups: Iterable[Sequences]) -> None:
        self.groups = tuple(groups)
        self.tokens = sum(g.count * g.new for g in self.groups)
        self.sequences = sum(g.count for g in self.groups)

    def enter(self, kind: str, count: int, writes_cache: bool = True) -> None:
        """Begin to build the operators of all layers of one kind, or of weights outside the layers.

        The operators that later calls return get this kind as their layer and this count as their
        number of runs. Their costs are for one layer.

        Args:
            kind: Name of the kind of layer; '' outside the layers.
            count: Number of layers of this kind on this GPU; 1 outside the layers.
            writes_cache: False if these layers only read another layer's cache, such as keys and
                values. Their operators then count no cache bytes as written.
        """
        self.kind = kind
        self.count = count
        self.writes_cache = writes_cache
        self.role = Role.OTHER

    def vector_bytes(self, weight: Weight) -> int:
        """Return the bytes on this GPU of a vector weight, such as a norm; 0 for a matrix or table.

        They are the bytes in one layer. The method `gemm` counts the bytes of a matrix.

        Args:
            weight: The complete weight, before it is divided over GPUs.
        """
        if weight.kind is not WeightKind.VECTOR:
            return 0
        return weight.local(self.ranks).elements * self.formats.vector_bytes

    def heads(self, heads: int) -> int:
        """Return how many of a layer's heads are on this GPU: ⌈heads/tp⌉ with tp ranks.

        Args:
            heads: Number of heads in the layer.
        """
        return self.ranks.share(heads)

    def select(self, rule: PairRule) -> "Pass":
        """Return a copy of the pass with only the groups of equal sequences that a rule selects.

        Latent attention uses it to compute some groups absorbed and the others expanded.

        Args:
            rule: Function of the new and past tokens of one sequence in a group. It gives 1 to keep
                the group and 0 to remove it. If the batch stands for several passes, it may give an
                array of 1 and 0. The group then has 0 sequences in the passes with 0.
        """
        groups = []
        selected = copy(self)
        selected.present = 0
        for group in self.groups:
            mask = rule(group.new, group.past)
            if not isinstance(mask, int) and (mask.all() or not mask.any()):
                mask = int(mask.all())  # the same everywhere
            if not isinstance(mask, int) or mask:
                groups.append(Sequences(group.count * mask, group.new, group.past))
                selected.present = maximum(selected.present, mask)
        selected._set_groups(groups)
        return selected

    def pairs(self, visible: PairRule) -> Num:
        """Return the number of pairs, such as (query, key) pairs, of all sequences on this GPU.

        The pairs are for one head in one layer: Σ count · visible(new, past) over the groups
        of equal sequences. The FLOPs of attention are proportional to this number.

        Args:
            visible: Function that gives the number of pairs of one sequence from its new and its
                past tokens.
        """
        return sum(g.count * visible(g.new, g.past) for g in self.groups)

    def attention(
        self,
        entries: Iterable[CacheEntry],
        visible: PairRule,
        heads: int,
        key: int,
        value: int,
        expanded: Num = 0,
        form: str = "",
    ) -> Operator:
        """Return the operator of fused attention in one layer on this GPU.

        The operator reads the cache once, reads the queries and writes the outputs. Its FLOPs are
        the scores and the weighted values of all (query, key) pairs. With decode-context
        parallelism, the GPU also sends queries and partial outputs to the other ranks.

        Args:
            entries: Cache entries that attention reads and writes.
            visible: Function (new tokens, past tokens) → (query, key) pairs of one sequence.
            heads: Query heads on this rank.
            key: Elements of a key of one head.
            value: Elements of a value of one head.
            expanded: Elements of keys and values that expanded latent attention recomputes, for all
                sequences. They are read as activations; 0 for other attention.
            form: Form of latent attention, absorbed or expanded; '' for other attention.
        """
        rows = tuple(entries)
        groups = tuple(
            (g.count, g.new, g.past, g.count * visible(g.new, g.past)) for g in self.groups
        )
        pairs = sum(group_pairs for *_, group_pairs in groups)
        # Ranks with other tokens of the same heads exchange queries and partial outputs.
        spread = self.ranks.dcp
        ends = self.tokens * heads * (key + value) * self.element
        cost = self.cache(rows)._replace(
            flops=product_flops(pairs, heads, key + value),
            vector_flops=SOFTMAX_FLOPS * pairs * heads,
            activation_bytes=ends + expanded * self.element,
            network_bytes=(spread - 1) * ends,
            inter_node_bytes=(spread - self.ranks.near(spread)) * ends,
        )
        kv_heads = heads
        if rows and rows[0].role in ("latent", "rope_key"):
            kv_heads = 0
        elif rows and rows[0].role == "k":
            kv_heads = self.heads(rows[0].heads)
        cached = tuple(dict.fromkeys(self.formats.cache_format(row).name for row in rows))
        return self.operator(
            "attention",
            "attention",
            cost,
            dtype=self.formats.attention_dtype(rows),
            shape=AttentionShape(heads, kv_heads, key, value, cached, groups),
            role=Role.CORE,
            form=form,
        )

    def operator(self, name: str, kind: str, cost: Cost, **fields: Any) -> Operator:
        """Return an operator with a given cost, in the layers that the last call of `enter` named.

        Args:
            name: Name in printed tables.
            kind: gemm, attention, experts, scan, vector or network.
            cost: FLOPs and bytes of one run.
            fields: Further fields of `Operator`, such as `dtype` and `role`.
        """
        return Operator(name, self.kind, self.count, kind, cost, **fields)

    def indexer(
        self, entries: Sequence[CacheEntry], pairs: Num, heads: int, width: int, top: int
    ) -> list[Operator]:
        """Return the two operators of a sparse-attention indexer: scoring and top-k selection.

        The projections of index queries and index keys are separate operators. Over latents, the
        scores are products in fp8 for every format of the cache, as in DeepSeek's own code
        (DeepSeek-V3.2-Exp, inference/model.py, fp8_index), vLLM and SGLang (DeepGEMM,
        fp8_mqa_logits).

        Args:
            entries: All cache entries of the layer. The operators read only the index keys.
            pairs: (query, index key) pairs of one head, of all sequences on this GPU.
            heads: Heads of the indexer.
            width: Elements of an index key.
            top: Number of tokens, blocks or compressed rows that each query selects.
        """
        rows = [entry for entry in entries if entry.role == "index_key"]
        cost = self.cache(rows)._replace(
            flops=product_flops(pairs, heads, width),
            vector_flops=3 * pairs * heads,  # ReLU, weight, sum
            activation_bytes=(self.tokens * heads * width + pairs) * self.element,
        )
        has_latents = any(entry.role == "latent" for entry in entries)
        dtype = "fp8" if has_latents else self.formats.attention_dtype(rows)
        return [
            self.operator("indexer", "attention", cost, dtype=dtype, role=Role.CORE),
            self.vector("top_k", pairs, self.tokens * top, TOP_K_FLOPS * pairs, role=Role.CORE),
        ]

    def eviction(self, scores: CacheEntry, visible: PairRule, heads: int) -> Operator:
        """Return the operator that updates a layer's eviction scores and selects tokens to evict.

        The operator reads the scores of stored tokens and writes the scores of remaining tokens. It
        adds up attention probabilities without reading them from memory.

        Args:
            scores: Cache entry of the scores.
            visible: Function that gives the number of (query, key) pairs of one sequence from its
                new and its past tokens.
            heads: Query heads on this rank.
        """
        units = self.heads(scores.heads)
        scored = self.pairs(lambda new, past: scores.stored_rows(past)) * units
        remaining = self.pairs(lambda new, past: scores.stored_rows(new + past)) * units
        flops = self.pairs(visible) * heads + TOP_K_FLOPS * remaining
        return self.vector("eviction", scored, remaining, flops, role=Role.CORE)

    def gemm(
        self,
        name: str,
        *weights: Weight,
        tokens: Num | None = None,
        fraction: Real = 1,
        experts: Real = 0,
    ) -> Operator:
        """Return the operator of the product x[tokens, inputs] · W, with one or more matrices W.

        Its cost is that of one layer on this GPU. All matrices have one common input, so an engine
        can join them, such as q, k and v. Block-diagonal copies of a matrix have separate inputs.

        Args:
            name: Name in printed tables.
            weights: The share of each matrix that this GPU stores.
            tokens: Rows of x; None for all new tokens of this data-parallel rank.
            fraction: Share of the copies (experts) whose weights are read, because a token uses
                them; 1 for all. Weight bytes are rounded once, halves up.
            experts: Expected number of experts whose weights are read; 0 for other products.
        """
        rows = self.tokens if tokens is None else tokens
        flops: Num = 0
        resident_bytes = 0
        for w in weights:
            flops = flops + product_flops(rows, w.inputs, w.outputs) * (
                1 if w.expert else w.copies
            )
            resident_bytes += self.formats.weight_bytes(self._full(w.name), w)
        first = weights[0]
        blocks = 1 if first.expert else first.copies
        columns = first.inputs * blocks + sum(w.outputs * blocks for w in weights)
        weight_bytes: Num = resident_bytes
        if not isinstance(fraction, int):
            weight_bytes = _round_half_up(resident_bytes * fraction)
        cost = Cost(
            flops=flops,
            weight_bytes=weight_bytes * self.present,
            activation_bytes=rows * columns * self.element,
        )
        shape = _gemm_shape(weights, rows, fraction, resident_bytes)
        stored = self.formats.weight_format(self._full(first.name), first)
        return self.operator(
            name,
            "gemm",
            cost,
            dtype=stored.computes or self.formats.dtype,
            shape=shape._replace(format=stored.name),
            experts=experts,
            role=self.role,
            weights=tuple(w.name for w in weights),
        )

    def format_of(self, weight: Weight) -> str:
        """Return the name of a matrix's storage format, such as `fp8`, in the layers being built.

        These are the layers that the last call of `enter` named. A matrix of the same name can have
        another format in layers of another kind.

        Args:
            weight: The matrix.
        """
        return self.formats.weight_format(self._full(weight.name), weight).name

    def vector(
        self,
        name: str,
        elements_in: Num,
        elements_out: Num,
        flops: Num,
        weight_bytes: Num = 0,
        role: Role = Role.OTHER,
    ) -> Operator:
        """Return the operator of a chain of elementwise operations, such as RoPE, in one layer.

        Args:
            name: Name in printed tables.
            elements_in: Activation elements that this GPU reads, for all new tokens.
            elements_out: Activation elements that this GPU writes, for all new tokens.
            flops: Vector FLOPs, for all new tokens.
            weight_bytes: Bytes of weights that are read, such as norm vectors.
            role: Group to which the operator belongs, by which reports select operators.
        """
        moved = (elements_in + elements_out) * self.element
        cost = Cost(0, flops, weight_bytes, activation_bytes=moved)
        return self.operator(name, "vector", cost, role=role)

    def activation(self, name: str, elements: Num, inputs: int) -> Operator:
        """Return the operator that applies an activation function, or a gate, to each element.

        Args:
            name: Name in printed tables.
            elements: Elements of one array on this GPU, for all new tokens.
            inputs: Number of arrays that are read: 1 without a gate, 2 with a gate. One array is
                written.
        """
        return self.vector(name, inputs * elements, elements, ACTIVATION_FLOPS * elements)

    def cache(self, entries: Iterable[CacheEntry]) -> Cost:
        """Return the cache bytes that one layer reads and writes in the pass, as a `Cost`.

        The bytes are for all sequences on this GPU. Each row that any query may see is read once,
        and the rows of new tokens are written. No rows are written that another layer stores, or if
        `writes_cache` is False. The other fields of the result are 0.

        Args:
            entries: Cache entries of one layer.
        """
        read: Num = 0
        write: Num = 0
        for entry in entries:
            row = self.formats.entry_bytes(entry, self.heads(entry.heads))
            spread = entry.spread(self.ranks)
            for g in self.groups:
                read = read + g.count * ceil_div(entry.read_rows(g.new, g.past), spread) * row
                if not entry.is_stored_by_other_layer:
                    written = ceil_div(entry.written_rows(g.new, g.past), spread)
                    write = write + g.count * written * row
        return Cost(cache_read_bytes=read, cache_write_bytes=write if self.writes_cache else 0)

    def network(self, name: str, sent: Num, away: Num, times: int = 1) -> Operator:
        """Return the operator in which this GPU sends bytes to other GPUs, such as an all-to-all.

        Args:
            name: Name in printed tables.
            sent: Bytes that this GPU sends in one run.
            away: Part of the bytes `sent` that goes to other nodes.
            times: Number of runs per layer, such as 2 for sending tokens to experts and back.
        """
        cost = Cost(network_bytes=sent, inter_node_bytes=away)
        return Operator(name, self.kind, self.count * times, "network", cost)

    def all_reduce(self, width: int) -> list[Operator]:
        """Return the all-reduce of an array [tokens, width] over the tp ranks, as a list.

        The list has one operator, or none if there is only one rank. With n ranks, each rank of a
        ring sends 2(n − 1)/n of the array's bytes, rounded up to whole bytes. The cost is that of
        one all-reduce, as after one layer part.

        Args:
            width: Columns of the array, usually the hidden size. Its rows are the new tokens.
        """
        n = self.ranks.tp
        if n == 1:
            return []
        summed = self.tokens * width * self.element
        near = self.ranks.near(n)
        # a ring for each GPU of the node
        away = ceil_div(2 * (n - 1) * summed, n * near) if near < n else 0
        ring = self.network("all_reduce", ceil_div(2 * (n - 1) * summed, n), away)
        return [replace(ring, shape=CollectiveShape(n, summed, near))]

    def _full(self, name: str) -> str:
        return f"{self.kind}.{name}" if self.kind else name


def _gemm_shape(
    weights: Sequence[Weight], rows: Num, fraction: Real, resident_bytes: int
) -> GemmShape:
    """Return the shape of matrices with a common input, without the format.

    Matrices count together in n. Copies and reached experts also count together, with their own
    tokens.
    """
    first = weights[0]
    columns = sum(w.outputs * (1 if w.expert else w.copies) for w in weights)
    elements = sum(w.inputs * w.outputs * w.copies for w in weights)
    reached = first.copies * fraction if first.expert else 1
    return GemmShape(
        rows / reached if first.expert else rows,
        columns * reached,
        first.inputs,
        resident_bytes / max(1, elements),
    )


def _round_half_up(value: Real) -> Num:
    """Return a number of bytes rounded to whole bytes, halves up."""
    if isinstance(value, float):
        return int(value + 0.5)
    import numpy as np

    return np.floor(value + 0.5)
