"""Names of the types of data whose keys are not fixed in code."""

from typing import Any, TypeAlias

# One row of a command's answer. report/keys.yaml describes each key, and a test checks it.
Record: TypeAlias = dict[str, Any]
# A parsed file, such as config.json.
JsonObject: TypeAlias = dict[str, Any]
# Values of options by name.
Settings: TypeAlias = dict[str, Any]
