"""Records: the answers of commands as flat mappings, with one declaration per key."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

# A record of any command, for code that reads records without knowing their class.
Record: TypeAlias = Mapping[str, Any]
Records: TypeAlias = Sequence[Record]
# A parsed file, such as config.json.
JsonObject: TypeAlias = dict[str, Any]
# Values of options by name.
Settings: TypeAlias = dict[str, Any]
