"""Read a config.json with typed look-ups, and evaluate the formulas of model types.

Each look-up records its key and names it in errors. Two kinds of functions take a `Config`: a rule
returns one value, such as a number of heads; a `Reader` returns the parts of the current layer.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvcalc.errors import UserError
from kvcalc.library.files import MAX_DEPTH, MAX_JSON_BYTES, TOO_DEEP, read_text
from kvcalc.records import JsonObject

MAX_ITEMS = 10_000
MAX_SIZE = 10**8  # larger widths, counts and vocabularies are errors in the file
Kind = TypeVar("Kind")


class Config:
    """The keys of a config.json together with the defaults of its model type.

    A missing key has transformers' default for the type; an explicit null counts as null. Layers
    are built one after another, and the current layer is the one that is being built. If a value is
    a list with one entry per layer, most methods return the entry of the current layer.

    Attributes:
        file: The content of the file, or of its text part.
        file_name: Name of the file in error messages.
        defaults: Key → value, for keys that the file leaves out.
        aliases: Key → its other spellings.
        layer: Index of the current layer.
        layers: Number of layers of the model.
        layer_type: Type of the current layer, such as `full_attention`.
        outer: The content of the whole file; `file` itself if the file has no text part.
        read: Keys of the file that were looked up, so that unread keys can be reported.
        inside: Key of a nested mapping → its inner keys that were looked up.
        defaulted: Key → value, for values that came from the defaults.
        steps: Name → value that was computed from several keys. Formulas use it like a key.
    """

    def __init__(
        self,
        data: JsonObject,
        file_name: str,
        defaults: JsonObject | None = None,
        aliases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        self.file = data
        self.file_name = file_name
        self.defaults = defaults or {}
        self.aliases = aliases or {}
        self.layer = 0
        self.layers = 0
        self.layer_type = "full_attention"
        self.outer = data
        self.read: set[str] = set()
        self.inside: dict[str, set[str]] = {}
        self.defaulted: JsonObject = {}
        self.steps: JsonObject = {}
        self._layer_keys: dict[int, JsonObject] = {}
        for index, keys in self.table("per_layer_config").items():
            is_index = index.isascii() and index.isdigit() and len(index) <= 6
            if not is_index or not isinstance(keys, dict) or keys.get("skip"):
                text = f"{show(index)} should be a layer's number, with a mapping without skip"
                raise self.fail("per_layer_config", text)
            self._layer_keys[int(index)] = keys

    def fail(self, key: str, text: str, hint: str = "") -> UserError:
        """Return, without raising it, a UserError about one key of the file.

        Args:
            key: The key.
            text: The problem.
            hint: What the user can do.
        """
        return UserError(f"{key}: {text}", hint, self.file_name)

    def raw(self, key: str) -> Any:
        """Return the unchecked value of a key, with all layers if the value is a list.

        A key may have several spellings, such as `n_head` for `num_attention_heads`. If the file
        has none of them, the result is the default, or None without a default. A spelling with a
        value has priority over a spelling with null.

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
        """
        names = (key, *self.aliases.get(key, ()))
        layer_keys = self._layer_keys.get(self.layer, {}) if self.layers else {}
        for source in (layer_keys, self.file):
            spellings = [name for name in names if name in source]
            for name in spellings:
                self.read.add(name)
                if source[name] is not None:
                    return source[name]
            if spellings:
                return None
        if key in self.defaults:
            self.defaulted[key] = self.defaults[key]
        return self.defaults.get(key)

    def in_file(self, key: str) -> bool:
        """Return whether the file itself has a value other than null for a key, in any spelling.

        Defaults of the model type do not count.

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
        """
        return any(
            self.file.get(name) is not None for name in (key, *self.aliases.get(key, ()))
        )

    def has(self, *keys: str) -> bool:
        """Return whether at least one of these keys has a value in the file or in the defaults.

        null is no value.

        Args:
            keys: Keys of config.json. The file may spell them differently, such as `n_head` for
                `num_attention_heads`.
        """
        return any(self.raw(key) is not None for key in keys)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the unchecked value of a key for the current layer.

        If the value is a list with one entry per layer, the result is the entry of the layer that
        is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            default: Result if the key is missing or null.
        """
        value = self.raw(key)
        if isinstance(value, list) and self.layer < self.layers == len(value):
            value = value[self.layer]
        return default if value is None else value

    def size(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        """Return the whole number under a key for the current layer.

        If the value is a list with one entry per layer, the result is the entry of the layer that
        is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            default: Result if the key is missing or null.
            minimum: Smallest allowed number.

        Raises:
            UserError: The value is not a whole number of at least `minimum`, or is missing and has
                no default.
        """
        value = self.get(key, default)
        if value is None:
            raise self.fail(key, "is missing")
        return self.checked_size(key, value, minimum)

    def checked_size(self, key: str, value: Any, minimum: int = 1) -> int:
        """Return a value of the file as an int, after a check.

        Args:
            key: Key of the value, for the error message.
            value: The value.
            minimum: Smallest allowed number.

        Raises:
            UserError: The value is not a whole number of at least `minimum`.
        """
        if isinstance(value, float) and value.is_integer() and abs(value) < MAX_SIZE:
            value = int(value)
        if type(value) is not int:
            raise self.fail(key, f"should be a whole number, not {show(value)}")
        if not minimum <= value <= MAX_SIZE:
            raise self.fail(key, f"{show(value)} is outside {minimum} to {MAX_SIZE:,}")
        return value

    def _check(self, key: str, value: Any, kind: type[Kind], text: str) -> Kind:
        if not isinstance(value, kind):
            raise self.fail(key, f"should be {text}, not {show(value)}")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean under a key for the current layer.

        If the value is a list with one entry per layer, the result is the entry of the layer that
        is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            default: Result if the key is missing or null.

        Raises:
            UserError: The value is not a boolean.
        """
        return self._check(key, self.get(key, default), bool, "true or false")

    def number(self, key: str, default: float | None = None) -> float:
        """Return the positive number under a key for the current layer.

        If the value is a list with one entry per layer, the result is the entry of the layer that
        is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            default: Result if the key is missing or null.

        Raises:
            UserError: The value is not a positive number, or is missing and has no default.
        """
        value = self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self.fail(key, f"should be a positive number, not {show(value)}")
        return float(value)

    def word(self, key: str, default: str = "") -> str:
        """Return the text under a key for the current layer.

        If the value is a list with one entry per layer, the result is the entry of the layer that
        is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            default: Result if the key is missing or null.

        Raises:
            UserError: The value is not a text.
        """
        return self._check(key, self.get(key, default), str, "a text")

    def items(self, key: str, max_items: int = MAX_ITEMS) -> list[Any] | None:
        """Return the complete list under a key, with the entries of all layers.

        The result is None if the key is missing or null.

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
            max_items: Maximum number of entries. A longer list is an error.

        Raises:
            UserError: The value is not a list, or is too long.
        """
        value: list[Any] | None = self.raw(key)
        if value is not None and len(self._check(key, value, list, "a list")) > max_items:
            raise self.fail(key, f"has {len(value):,} entries; the limit is {max_items:,}")
        return value

    def sizes(self, key: str) -> list[int]:
        """Return the list of whole numbers under a key; empty if the key is missing or null.

        Numbers are −1 or more. A text such as `4, 5` is accepted as a list.

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.

        Raises:
            UserError: The value is not such a list.
        """
        text = self.raw(key)
        if isinstance(text, str) and re.fullmatch(r"[\d, ]+", text):
            return [int(word) for word in re.findall(r"\d+", text)]
        sizes = self.items(key) or []
        for size in sizes:
            if type(size) is not int or not -1 <= size <= MAX_SIZE:
                raise self.fail(key, f"contains {show(size)}, which is not a whole number")
        return sizes

    def table(self, key: str) -> JsonObject:
        """Return the mapping under a key for the current layer; {} if the key is missing or null.

        If the value is a list with one mapping per layer, the result is the mapping of the layer
        that is being built (attribute `layer`).

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.

        Raises:
            UserError: The value is not a mapping.
        """
        value = self.get(key)
        return {} if value is None else self._check(key, value, dict, "a mapping")

    def nested(self, key: str) -> "Config":
        """Return the mapping under a key as a `Config` of its own, for access to its inner keys.

        The result has the same current layer (attribute `layer`), which is the layer that is being
        built. If the key is missing, the result has only the defaults of this mapping.

        Args:
            key: The key. The file may spell it differently, such as `n_head` for
                `num_attention_heads`.
        """
        defaults = self.defaults.get(key)
        file_name = f"{self.file_name}: {key}"
        inner = Config(
            self.table(key), file_name, defaults if isinstance(defaults, dict) else {}
        )
        inner.layer = self.layer
        inner.layers = self.layers
        inner.layer_type = self.layer_type
        inner.read = self.inside.setdefault(key, inner.read)
        return inner


def show(value: Any) -> str:
    """Return a value of config.json as a short text for an error message.

    A list or mapping gives its length, such as `a list of 48`. Other values are written out, cut
    to 40 characters.

    Args:
        value: The value, of any JSON type.
    """
    if isinstance(value, list | dict):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value):,}"
    text = repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:39] + "…"


Field = Any  # a formula of keys, a rule, or a literal
Parts = tuple[Any, ...]  # mixers and FFNs of a layer
Reader = Callable[[Config], Parts]
RULES: dict[str, Callable[["Config"], Any]] = {}  # by name, as formulas call them
_LITERALS = frozenset({"head", "full", "none", "rms", "layer", "layer_no_bias"})
_OF_LAYER = {"layer_index": "layer", "layer_count": "layers", "layer_type": "layer_type"}
# Nodes of a formula, and Python's functions for them.
_NODES = """
    Add add  Sub sub  Mult mul  FloorDiv floordiv  Mod mod
    Eq eq  NotEq ne  Lt lt  LtE le  Gt gt  GtE ge
"""
_OPERATORS = {
    getattr(ast, node): getattr(operator, name)
    for node, name in re.findall(r"(\w+) (\w+)", _NODES)
}


def value_of(field: Field, c: Config) -> Any:
    """Return the value of one field of a model type's table entry, for the current layer.

    A field is a rule, a formula or another literal. A rule is a function of the `Config`, which is
    called. A literal is returned unchanged. A formula is a text that is evaluated: a Python
    expression whose names are keys of the file.

    - `layer_index`, `layer_count` and `layer_type` describe the current layer.
    - `a | b` is b if a is missing.
    - Keys in arithmetic must be whole numbers from 1 up, and from 0 up before a `|`.
    - If the first factor of a product is 0, the other factors are not evaluated.
    - A condition must be true, false, 0, 1 or missing.
    - `len(a)` is the length of a list, and `has(a)` whether a has a value.
    - `in_file(a)` is whether the file itself gives a.
    - `a.b` is the key b of the mapping a, `a[0]` the first item of a list.

    Examples: `n_inner | 4 * hidden_size`; `hidden_size, 2 * head_dim` for the two sides of a
    matrix; `layer_index in full_attn_idxs`.

    Args:
        field: Rule, formula or literal.
        c: The config.json and its current layer.

    Raises:
        UserError: A key in a formula has a value of another type or size than the formula needs.
    """
    if callable(field):
        return field(c)
    if isinstance(field, dict):
        return field_values(field, c)
    if not isinstance(field, str) or field in _LITERALS:
        return field
    if field.isidentifier():
        return c.get(field)
    try:
        return _evaluate(_parse(field), c)
    except (TypeError, ZeroDivisionError):
        raise c.fail(field, "is not a number in this file") from None


_text = cache(ast.unparse)


@cache
def _parse(formula: str) -> ast.expr:
    return ast.parse(formula, mode="eval").body


def _evaluate(node: ast.expr, c: Config) -> Any:
    """Return the value of a formula or of a part of it."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute() | ast.Subscript() | ast.Call():
            return _read(node, c)
        case ast.Tuple(elts=sizes):
            return tuple(_number(size, c) for size in sizes)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _is_true(test, c) else orelse, c)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(size))):
            return -size
        case ast.UnaryOp(operand=operand):
            return not _is_true(operand, c)
        case ast.BoolOp(op=op, values=values):
            conditions = (_is_true(value, c) for value in values)
            return all(conditions) if isinstance(op, ast.And) else any(conditions)
        case ast.Compare(left=left, ops=[ast.In()], comparators=[list_name]):
            inner, key = _locate(list_name, c)
            return _evaluate(left, c) in inner.sizes(key)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            side = _evaluate if isinstance(op, ast.Eq | ast.NotEq) else _number
            return _OPERATORS[type(op)](side(left, c), side(right, c))
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            value = _evaluate(left, c)
            return _evaluate(right, c) if value is None else value
        case ast.BinOp(left=left, op=op, right=right):
            size = _number(left, c)
            if size == 0 and isinstance(op, ast.Mult):
                return 0
            return _OPERATORS[type(op)](size, _number(right, c))
    raise TypeError


def _read(node: ast.expr, c: Config) -> Any:
    """Return the value of a name, an item of a list, or the result of a call in a formula."""
    match node:
        case ast.Name(id=key) if key in c.steps:
            return c.steps[key]
        case ast.Name(id=key):
            value = getattr(c, _OF_LAYER[key]) if key in _OF_LAYER else c.get(key)
            if isinstance(value, list):
                raise c.fail(key, f"has {len(value)} entries for {c.layers} layers")
            return value
        case ast.Attribute():
            inner, key = _locate(node, c)
            return inner.get(key)
        case ast.Subscript(value=list_name, slice=position):
            inner, key = _locate(list_name, c)
            values = inner.items(key)
            index = _number(position, c)
            if values and index >= len(values):
                raise inner.fail(key, f"has {len(values)} entries, and none at {index}")
            return values[index] if values else None
        case ast.Call(func=ast.Name(id="has" | "in_file" as check), args=[name]):
            inner, key = _locate(name, c)
            return getattr(inner, check)(key)
        case ast.Call(func=ast.Name(id="len"), args=[list_name]):
            inner, key = _locate(list_name, c)
            return len(inner.items(key) or ())
        case ast.Call(func=ast.Name(id=rule)):
            return RULES[rule](c)
    raise TypeError


def _locate(node: ast.expr, c: Config) -> tuple[Config, str]:
    """Return the mapping that a name in a formula is in, and its key there: `a.b` is b in a."""
    match node:
        case ast.Name(id=key):
            return c, key
        case ast.Attribute(value=outer_name, attr=key):
            outer, outer_key = _locate(outer_name, c)
            return outer.nested(outer_key), key
    raise TypeError


def _number(node: ast.expr, c: Config) -> int:
    """Return the value of a part of a formula. Raises UserError unless it is a whole number."""
    match node:
        case ast.Name(id=key) if key not in _OF_LAYER and key not in c.steps:
            return c.size(key)
        case ast.BinOp(left=ast.Name(id=key), op=ast.BitOr(), right=right):
            return c.size(key, minimum=0) if c.has(key) else _number(right, c)
    value = _evaluate(node, c)
    if type(value) is not int:
        raise c.fail(_text(node), f"should be a whole number, not {show(value)}")
    return value


def _is_true(node: ast.expr, c: Config) -> bool:
    return _condition(_evaluate(node, c), _text(node), c)


def is_true(condition: Field, c: Config) -> bool:
    """Return whether a condition is true for the current layer of a config.json.

    A value that is missing or null counts as false. A rule is a function of the `Config`. A formula
    is a text with keys of the file, such as `layer_index % 2 == 0`.

    Args:
        condition: Rule, formula or literal.
        c: The config.json and its current layer.

    Raises:
        UserError: The value is not true, false, 0, 1 or missing. `use_qk_norm: 7` is refused.
    """
    key = condition if isinstance(condition, str) else "condition"
    return _condition(value_of(condition, c), key, c)


def _condition(value: Any, key: str, c: Config) -> bool:
    """Return the boolean of a condition's value. Raises UserError unless it is true, false, 0, 1 or
    missing."""
    if value not in (None, False, True):
        raise c.fail(key, f"should be true or false, not {show(value)}")
    return bool(value)


def when(condition: Field, then: Field, otherwise: Field = None) -> Callable[[Config], Any]:
    """Return a rule that gives one of two values, selected by a condition.

    A rule is a function of the `Config`, the read config.json with its current layer. The condition
    is evaluated anew for each layer. Example: `when("use_bias", 1, 0)` gives 1 in files with
    `"use_bias": true`.

    Args:
        condition: Rule, formula or literal, which must be true or false.
        then: Rule, formula or literal that gives the value if the condition is true.
        otherwise: Rule, formula or literal that gives the value if it is false.
    """
    return lambda c: value_of(then if is_true(condition, c) else otherwise, c)


def field_values(fields: dict[str, Field], c: Config) -> JsonObject:
    """Return the values of several fields of a part (mixer or FFN) of the current layer, by name.

    A field whose value is None is left out, so that the class of the part uses its own default.

    Args:
        fields: Field name → rule (function of the file), formula of the file's keys, or literal.
        c: The config.json and its current layer.
    """
    values = {name: value_of(field, c) for name, field in fields.items()}
    return {name: value for name, value in values.items() if value is not None}


TEXT_KEYS = """
    text_config llm_config language_config thinker_config language_model decoder llm_cfg
    text_cfg language_model_config text_model_config lm_config llm
"""


@cache
def facts() -> dict[str, JsonObject]:
    """Return what is known of each model type of transformers, by name of the type.

    The value of a type is a mapping: defaults of its config class, older spellings of keys, and the
    model type of its text part. kvcalc contains them, so transformers need not be installed.
    """
    path = Path(__file__).parent / "defaults.json"
    table: dict[str, JsonObject] = msgspec.json.decode(path.read_bytes())
    return table


def read_json(path: Path) -> JsonObject:
    """Return the content of a JSON file, which must be a mapping.

    NaN and Infinity are allowed, because transformers writes them.

    Args:
        path: The file, such as a config.json.

    Raises:
        UserError: The file is not a JSON mapping, repeats a key or nests too deeply.
    """
    file_name = str(path)
    too_deep = UserError(TOO_DEEP, where=file_name)

    def mapping(pairs: list[tuple[str, Any]]) -> JsonObject:
        keys = [key for key, _ in pairs]
        if len(set(keys)) < len(keys):
            repeated = next(key for key in keys if keys.count(key) > 1)
            raise UserError(f"key {repeated[:60]!r} occurs twice", where=file_name)
        return dict(pairs)

    try:
        data = json.loads(read_text(path, MAX_JSON_BYTES), object_pairs_hook=mapping)
    except RecursionError:  # the depth of the parser depends on Python's version
        raise too_deep from None
    except ValueError as error:
        raise UserError(f"is not JSON: {error}", where=file_name) from None
    if not isinstance(data, dict):
        raise UserError("contains no mapping of keys to values", where=file_name)
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        values = [value for x in level for value in (x.values() if isinstance(x, dict) else x)]
        level = [value for value in values if isinstance(value, dict | list)]
    if level:
        raise too_deep
    return data


def text_part(data: JsonObject, file_name: str) -> JsonObject:
    """Return the part of a config.json that describes the language model.

    It is the mapping under `text_config` or a similar key, otherwise the whole content. The mapping
    also gets `tie_word_embeddings` from the enclosing content.

    Args:
        data: The content of the whole config.json.
        file_name: Name of the file in error messages.

    Raises:
        UserError: Such mappings are nested too deeply.
    """
    key = "tie_word_embeddings"
    inner = data
    for _ in range(4):
        part = next(
            (inner[k] for k in TEXT_KEYS.split() if isinstance(inner.get(k), dict)), None
        )
        if part is None or "num_hidden_layers" in inner:
            return inner
        outer_type = inner.get("model_type")
        inner = ({key: inner[key]} if key in inner else {}) | part
        if not isinstance(inner.get("model_type"), str) and isinstance(outer_type, str):
            inner["model_type"] = facts().get(outer_type, {}).get("text", outer_type)
    raise UserError("nests one text_config in another too deeply", where=file_name)


def defaults_of(model_type: str, outer: JsonObject, inner: JsonObject) -> Any:
    """Return the defaults of transformers' config class for keys that a config.json leaves out.

    The result maps a key to its default value. If the type is the text part of a multimodal type,
    the multimodal type decides the default of `tie_word_embeddings`.

    Args:
        model_type: Model type of the text part.
        outer: The content of the whole config.json.
        inner: The text part of this content, or the whole content if it has none.
    """
    defaults = facts().get(model_type, {}).get("defaults", {})
    outer_facts = facts().get(str(outer.get("model_type")), {}) if outer is not inner else {}
    if outer_facts.get("text") == model_type:
        defaults = defaults | outer_facts.get("part", {})
    is_older = str(outer.get("transformers_version")).startswith("4")
    if "tied" in outer_facts and not is_older:  # transformers 4 asks the text part's class
        defaults = defaults | {"tie_word_embeddings": outer_facts["tied"]}
    return defaults
