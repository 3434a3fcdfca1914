"""Read the vision tower that a config.json describes next to its language model.

`vision.yaml` has the formulas of each shape of tower, and the default values of each model type.
"""

from functools import cache
from pathlib import Path

from kvcalc.errors import join_words
from kvcalc.library import presets
from kvcalc.library.files import parse_yaml
from kvcalc.library.huggingface.config import Config, value_of
from kvcalc.model.model import Vision
from kvcalc.records import JsonObject

# Parts of a file next to its language model, and their keys.
_OTHER_PARTS = {
    "vision tower": """
        vision_config vision_cfg visual vision_tower mm_vision_tower vision_tower_cfg
        vision_tower_config vision_model_config vision_backbone_config vision_encoder_config
        vit_config image_config img_processor vision_backbone embd_layer
    """,
    "audio tower": """
        audio_config audio_cfg audio_encoder_config audio_model_config audio_processor
        mm_audio_tower audio_tower speech_config sound_config acoustic_tokenizer_config
        whisper_config
    """,
    "talker": "talker_config",
    "vocoder": "code2wav_config token2wav_config tts_config vocoder_config",
}
_TOWERS_WITHOUT_KEY = {"molmo"}  # types that have a vision tower, but no key for it


def tower(
    data: JsonObject, file_name: str, width: int
) -> tuple[Vision | None, tuple[str, ...]]:
    """Return the vision tower that a config.json describes, and sentences for the user about it.

    The tower is None if the file describes none, or one of an unknown shape. The sentences state
    the tower's parameters, and name towers and other parts of the file that are not counted.

    Args:
        data: The content of the whole config.json.
        file_name: Name of the file in error messages.
        width: Hidden size of the language model.

    Raises:
        UserError: The value of a key is invalid.
    """
    thinker = data.get("thinker_config")
    keys = {**thinker, **data} if isinstance(thinker, dict) else data
    model_type = str(data.get("model_type"))[:60]
    parts = [
        part
        for part, names in _OTHER_PARTS.items()
        if any(keys.get(name) not in (None, False, "", {}, []) for name in names.split())
    ]
    if not parts and model_type in _TOWERS_WITHOUT_KEY:
        parts = ["vision tower"]
    section = data.get("vision_config")
    entry = tower_entries().get(model_type)
    if not isinstance(section, dict) or not section or not entry:
        return None, _left_out(parts)

    place = f"{file_name}: vision_config"
    c = Config(section, place, {**entry, "outer": data})
    c.steps["text_width"] = width
    for shape in entry["shapes"].split():
        for name, formula in tower_entries()[shape].items():
            c.steps[name] = value_of(formula, c)
    fields = {name: c.steps[name] for name in Vision.__struct_fields__ if name in c.steps}
    vision = presets.build(fields, Vision, place)
    note = (
        f"its vision tower ({vision.parameters:,} parameters) is not among its parameters: "
        "`fit` adds the part that an engine loads"
    )
    return vision, (note, *_left_out([part for part in parts if part != "vision tower"]))


def _left_out(parts: list[str]) -> tuple[str, ...]:
    """Return a list with a note on parts that are not counted; empty if there are none."""
    if not parts:
        return ()
    return (f"only the language model is counted, without the file's {join_words(parts)}",)


@cache
def tower_entries() -> dict[str, JsonObject]:
    """Return the entries of the table `vision.yaml`, by name.

    There are two kinds of entries. The entry of a model type has defaults for keys of its
    `vision_config`, and under `shapes` the names of the shapes of its vision tower. The entry of a
    shape has a formula for each field of the class `Vision`.
    """
    path = Path(__file__).with_suffix(".yaml")
    entries, _ = parse_yaml(path.read_text(encoding="utf-8"), path.name)
    return {name: entry for names, entry in entries.items() for name in names.split()}
