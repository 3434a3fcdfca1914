"""`kvcalc mcp` with the SDK's client, and `kvcalc schema` with records of real commands."""

import asyncio
import json
import subprocess
import sys
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from mcp import Client, StdioServerParameters

import kvcalc
from kvcalc.report.export import schema_of_command

SERVER = StdioServerParameters(command=sys.executable, args=["-m", "kvcalc", "mcp"])


def converse(*calls: tuple[str, dict[str, Any]]) -> tuple[Any, list[Any]]:
    """Return the tools that a started server lists, and its results of the calls."""

    async def talk() -> tuple[Any, list[Any]]:
        async with Client(SERVER) as client:
            listed = await client.list_tools()
            return listed.tools, [await client.call_tool(name, values) for name, values in calls]

    return asyncio.run(talk())


def test_a_client_lists_the_tools_and_gets_the_records_of_the_command() -> None:
    tools, (size, wrong, unknown, fit) = converse(
        ("size", {"models": ["gpt-3-175b"], "context": "1024", "batch_size": [1, 2]}),
        ("size", {"models": ["gpt33"]}),
        ("size", {"models": ["gpt2"], "contxt": 5}),
        ("fit", {"models": ["vllm", "serve", "Qwen/Qwen3-32B", "-tp", "2"], "gpu": "h200"}),
    )
    assert [tool.name for tool in tools] == ["size", "fit", "plan", "latency", "compare", "diagnose"]
    for tool in tools:
        Draft202012Validator.check_schema(tool.input_schema)
        Draft202012Validator.check_schema(tool.output_schema)
    assert [r["kv_cache_bytes"] for r in size.structured_content["records"]] == [4_831_838_208, 9_663_676_416]
    assert "4.5" in size.content[0].text
    assert wrong.is_error and "unknown model 'gpt33'" in wrong.content[0].text
    assert unknown.is_error and "context" in unknown.content[0].text
    assert fit.structured_content["records"][0]["tensor_parallel_size"] == 2
    for tool, result in ((tools[0], size), (tools[1], fit)):
        Draft202012Validator(tool.output_schema).validate(result.structured_content)


def test_types_of_the_input_schema_are_read() -> None:
    """Every type that the schema allows for a text option is read: a text, a number and a list."""
    _, results = converse(*(("size", {"models": ["gpt2"], "context": value}) for value in ("1k", 1024, [1024], ["1k"])))
    assert {r.structured_content["records"][0]["kv_cache_bytes"] for r in results} == {37_748_736}


D = kvcalc.deploy("deepseek-v3.2", "h200", tp=8)
ANSWERS = {
    "size": lambda: D.size(["1k", "4k", "64k"]),
    "fit": lambda: D.fit(max_model_len=["4k", "32k"]),
    "latency": lambda: D.latency(input_len=["100", "3k"]),
    "roofline": lambda: D.roofline("decode"),
    "compare": lambda: D.compare("mha,gqa:8,mqa"),
    "serve": lambda: D.serve(rate=2, num_prompts=20),
    "plan": lambda: kvcalc.plan("llama-3.1-8b", users=8, context="4k", gpu="h100"),
}


@pytest.mark.parametrize("command", ANSWERS)
def test_the_schema_is_valid_for_each_record_and_for_the_array(command: str) -> None:
    validator = Draft202012Validator(schema_of_command(command))
    records = json.loads(json.dumps(ANSWERS[command]().records()))
    validator.validate(records)
    for record in records:
        validator.validate(record)
        assert not validator.is_valid(record | {"no_such_key": 1})


def test_schema_prints_what_json_satisfies() -> None:
    printed = [
        json.loads(subprocess.run([sys.executable, "-m", "kvcalc", *words], capture_output=True, check=True).stdout)
        for words in (["schema", "fit"], ["fit", "llama-3.1-8b", "--gpu", "h100", "--json"])
    ]
    assert not [*Draft202012Validator(printed[0]).iter_errors(printed[1])]
