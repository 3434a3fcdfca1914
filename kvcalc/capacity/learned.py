"""What a start-up log taught of a machine: bytes by which an engine's real terms differ from its rules."""

from pathlib import Path

import msgspec

from kvcalc.capacity.memory_terms import Terms
from kvcalc.errors import UserError
from kvcalc.layers.ranks import Parallelism
from kvcalc.library.files import MOST_YAML, read_text
from kvcalc.library.yaml_text import parse_yaml

BEYOND = "beyond the rules, as logged"
MOST = 1 << 50


class Learned(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one GPU. weights_beyond_bytes: logged − by the rules; it holds for the same model, formats and split.

    beside_beyond_bytes: likewise of all that stands beside weights and cache. others_bytes: what other processes held.
    """

    engine: str
    gpu: str
    memory_bytes: int
    model: str
    parameters: int
    weights_in: str
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    version: str = ""
    weights_beyond_bytes: int = 0
    beside_beyond_bytes: int = 0
    others_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("memory_bytes", "weights_beyond_bytes", "beside_beyond_bytes", "others_bytes"):
            if abs(getattr(self, name)) > MOST:
                raise UserError(f"{name} {getattr(self, name)!r} are no bytes of a GPU")

    def applied(self, terms: Terms, parameters: int, weights_in: str, ranks: Parallelism) -> Terms:
        """The terms of an engine with what was logged beyond them; never below 0.

        A model is the logged one if it has as many parameters, whatever its file is called.
        """
        split = (self.tensor_parallel_size, self.pipeline_parallel_size)
        same = (self.parameters, self.weights_in, *split) == (parameters, weights_in, ranks.tp, ranks.pp)
        language = max(0, terms.language + (self.weights_beyond_bytes if same else 0))
        beside = terms.activation + sum(terms.overhead.values())
        beyond = max(-beside, self.beside_beyond_bytes)
        return terms._replace(language=language, overhead=terms.overhead | ({BEYOND: beyond} if beyond else {}))

    def text(self) -> str:
        """The file that `read_learned` reads."""
        lines = [f"{name}: {_written(getattr(self, name))}" for name in self.__struct_fields__]
        return "\n".join(["# What one start-up taught: bytes of one GPU, logged less those by the rules.", *lines, ""])


def _written(value: object) -> str:
    quoted = str(value).replace("'", "''")
    return f"'{quoted}'" if isinstance(value, str) else quoted


def read_learned(path: str, what: str = "") -> Learned:
    """What `diagnose --save` kept. Raises UserError naming the file for anything else."""
    data, _ = parse_yaml(read_text(Path(path), MOST_YAML), path)
    try:
        return msgspec.convert(data, Learned)
    except msgspec.ValidationError as error:
        raise UserError(f"is not what diagnose --save writes: {error}", path) from None
