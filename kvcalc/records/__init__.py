"""Records: the answers of commands as flat mappings, with one declaration per key."""

from typing import Any, TypeAlias

# One row of a command whose record has no class yet. report/keys.yaml describes each key.
Record: TypeAlias = dict[str, Any]
# A parsed file, such as config.json.
JsonObject: TypeAlias = dict[str, Any]
# Values of options by name.
Settings: TypeAlias = dict[str, Any]
