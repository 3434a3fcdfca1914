"""Where a deployment's bytes lie: what every rank holds whole, what waits in the host's memory, and how weights get in."""

from typing import NamedTuple

from kvcalc.gpu.spec import Gpu
from kvcalc.layers.cache import CacheEntry
from kvcalc.layers.formats import Formats
from kvcalc.layers.ranks import Parallelism
from kvcalc.model.memory import weight_bytes
from kvcalc.model.precision import Precision
from kvcalc.model.spec import Model

GIB = 1 << 30


class Replicas(NamedTuple):
    """What more than one of a group of GPUs holds. weights: bytes of one GPU by the weight's name, most first.

    cache: (role, units, GPUs that hold the same unit) of every kind of row that stands on more than one.
    """

    weights: dict[str, int]
    cache: list[tuple[str, int, int]]


def replicas(model: Model, formats: Formats, ranks: Parallelism) -> Replicas:
    """Of one pipeline stage's group of tp GPUs; decode-context parallelism spreads a row's copies over tokens again."""
    key = "replicas", formats, ranks
    if key not in model.known:
        model.known[key] = _replicas(model, formats, ranks) if ranks.tp > 1 else Replicas({}, [])
    found: Replicas = model.known[key]
    return found


def _replicas(model: Model, formats: Formats, ranks: Parallelism) -> Replicas:
    held: dict[str, int] = {}
    for name, weight, count in model.walk():
        here = weight.local(ranks)
        if here.elements * ranks.tp >= 2 * weight.elements and not weight.expert:  # a padded vocabulary is less
            short = name.rpartition(".")[2]
            held[short] = held.get(short, 0) + count * formats.weight_bytes(name, here)
    entries = dict.fromkeys(
        _unit(e) for layer in model.kinds.values() if not layer.shares_cache for e in layer.entries if not e.lent
    )
    copies = [(role, heads, ranks.share(heads) * ranks.tp // heads // spread) for role, heads, spread in _spread(entries, ranks)]
    return Replicas(dict(sorted(held.items(), key=lambda item: -item[1])), [c for c in copies if c[2] > 1])


def _unit(entry: CacheEntry) -> tuple[str, int, bool]:
    return entry.role, entry.heads, bool(entry.grows and not entry.limit)


def _spread(entries: dict[tuple[str, int, bool], None], ranks: Parallelism) -> list[tuple[str, int, int]]:
    return [(role, heads, ranks.dcp if whole else 1) for role, heads, whole in entries]


class Loading(NamedTuple):
    """Seconds of the weights on their way in: disk to host, each byte once; host to GPU, all GPUs at once over their own links.

    None where a rate is not known. least: the slower of the two, for a load that overlaps them.
    """

    checkpoint_bytes: int
    disk_s: float | None
    link_s: float | None

    @property
    def least(self) -> float | None:
        known = [s for s in (self.disk_s, self.link_s) if s is not None]
        return max(known, default=None)


def loading(model: Model, precision: Precision, gpu: Gpu, held: int, disk_bytes_per_s: int) -> Loading:
    """Of a model of which one GPU holds `held` bytes; disk_bytes_per_s 0 is not known."""
    checkpoint = weight_bytes(model, precision)
    disk = checkpoint / disk_bytes_per_s if disk_bytes_per_s else None
    return Loading(checkpoint, disk, held / gpu.host_link_bytes_per_s if gpu.host_link_bytes_per_s else None)


def offloaded(held: int, gib: float) -> int:
    """Of `held` bytes of weights, those that vLLM's --cpu-offload-gb leaves in the host's memory; it counts in GiB."""
    return min(held, round(gib * GIB))
