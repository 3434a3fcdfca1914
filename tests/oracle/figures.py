"""Write figures.json: the parameters that transformers counts for each causal-LM type with its class defaults.

The file also has the keys that a config.json must give, because width and depth have no default, and the
bytes of the cache after two prompts. The ordinary tests compare kvcalc with this file; `pytest -m oracle`
compares the cache with transformers.

    python tests/oracle/figures.py [TYPE …]      (needs the extra `oracle`; 15 minutes for all types)
"""

import json
import sys
from pathlib import Path
from typing import Any

from measure import measure
from test_oracle import BF16, MISSING, UNMEASURABLE, UNSUPPORTED, default_config, lengths_of, names

from kvcalc import UserError, cache_size
from kvcalc.library.huggingface import model_from

FILE = Path(__file__).with_name("figures.json")
# How the types call width and depth.
GIVEN = (
    "hidden_size d_model n_embd dim num_hidden_layers num_layers n_layer n_layers decoder_layers num_layers_per_stack num_blocks"
)


def given(config: dict[str, Any]) -> dict[str, Any]:
    """Return width and depth of a config, or of its text part if only the text part has them."""
    found = {key: config[key] for key in GIVEN.split() if key in config}
    text = config.get("text_config")
    return found if found or not isinstance(text, dict) else {"text_config": given(text)}


def keys_of(model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest set of keys from which kvcalc reads the model: width and depth, or all numbers, lists and parts."""
    whole = model_from(config, "config.json", model_type)
    few = given(config) | MISSING.get(model_type, {})
    try:
        model = model_from({"model_type": model_type} | few, "config.json", model_type)
    except UserError:
        model = None
    same = model is not None and (model.kinds, model.order, model.outer_weights) == (
        whole.kinds,
        whole.order,
        whole.outer_weights,
    )
    return few if same else {k: v for k, v in config.items() if isinstance(v, int | list | dict)}


def figures(model_type: str) -> dict[str, Any]:
    """Return the keys, the parameters, and the bytes of the cache by prompt length."""
    config = default_config(model_type)
    model = model_from(config, "config.json", model_type)
    lengths = lengths_of(model, model_type)
    cache = {n: cache_size(model, n, precision=BF16).stored for n in lengths}
    return {"keys": keys_of(model_type, config), "parameters": measure(config, lengths[:1]).parameters, "cache": cache}


def main() -> None:
    asked = sys.argv[1:] or [name for name in names() if name not in UNSUPPORTED | UNMEASURABLE]
    known = json.loads(FILE.read_text(encoding="utf-8")) if sys.argv[1:] else {}
    found = sorted((known | {name: figures(name) for name in asked}).items())
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in found)
    FILE.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
