"""`kvcalc mcp`: commands as tools of the Model Context Protocol, over stdin and stdout."""

import asyncio
from typing import TYPE_CHECKING, Any, get_args

from kvcalc import __version__
from kvcalc.cli.commands import COMMANDS, function_of
from kvcalc.cli.help import meaning
from kvcalc.errors import UserError
from kvcalc.question.options import Parameter, arguments_for, check_known, parameters_in
from kvcalc.records import JsonObject
from kvcalc.records.figures import JSON_TYPES
from kvcalc.report.export import schema_of_command

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server
    from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult

TOOLS = ("size", "fit", "plan", "latency", "compare", "diagnose")


def run() -> None:
    """Serve kvcalc's commands to AI assistants (Model Context Protocol) until stdin closes.

    Requests arrive on stdin, answers go to stdout.

    Raises:
        UserError: The MCP Python SDK is not installed.
    """
    try:
        from mcp.server.stdio import stdio_server
    except ImportError:
        raise UserError(
            "the package mcp is not installed", "Run `pip install 'kvcalc[mcp]'`"
        ) from None

    async def serve() -> None:
        server = make_server()
        async with stdio_server() as (requests, answers):
            await server.run(requests, answers, server.create_initialization_options())

    asyncio.run(serve())


def make_server() -> "Server":
    """Return a Model Context Protocol (MCP) server whose tools are six commands of kvcalc.

    They are size, fit, plan, latency, compare and diagnose.
    """
    from mcp.server.lowlevel import Server
    from mcp.types import CallToolResult, ListToolsResult, TextContent, Tool

    async def list_tools(_: Any, __: Any) -> "ListToolsResult":
        return ListToolsResult(
            tools=[
                Tool(
                    name=name,
                    description=COMMANDS[name],
                    input_schema=input_schema(name),
                    output_schema=output_schema(name),
                )
                for name in TOOLS
            ]
        )

    async def call_tool(_: Any, request: "CallToolRequestParams") -> "CallToolResult":
        try:
            answer = call(request.name, request.arguments or {})
        except UserError as error:
            return CallToolResult(
                content=[TextContent(type="text", text=str(error))], is_error=True
            )
        return CallToolResult(
            content=[TextContent(type="text", text=repr(answer))],
            structured_content={"records": answer.records(), "exit_status": answer._status},
        )

    return Server(
        "kvcalc", version=__version__, on_list_tools=list_tools, on_call_tool=call_tool
    )


def call(command: str, values: JsonObject) -> Any:
    """Run a command for an MCP tool call, and return its `Answer` (records and exit status).

    Args:
        command: Name of the command, such as "fit".
        values: Values of its options and arguments, by name.

    Raises:
        UserError: A name is unknown or a value is invalid.
    """
    check_known([command], TOOLS)
    function = function_of(command)
    check_known(values, [p.name for p in parameters_in(function)])
    return function(**arguments_for(function, values))


def input_schema(command: str) -> JsonObject:
    """Return the JSON Schema of a command's arguments and options, without hidden options.

    An MCP client reads from it which arguments the tool takes.

    Args:
        command: Name of the command, such as "fit".
    """
    parameters = parameters_in(function_of(command))
    return {
        "type": "object",
        "properties": {p.name: _option_schema(p) for p in parameters if not p.option.is_hidden},
        "required": [p.name for p in parameters if p.is_required],
        "additionalProperties": False,
    }


def _option_schema(parameter: Parameter) -> JsonObject:
    """Return the JSON Schema of an option. A text option also takes numbers and lists."""
    schema: JsonObject = {"description": meaning(parameter)}
    if parameter.is_list:
        return schema | {"type": "array", "items": {"type": "string"}}
    if parameter.is_text:
        return schema | {"type": ["string", "number", "array"]}
    kind = (get_args(parameter.type) or (parameter.type,))[0]  # of a number, or of None
    schema["type"] = "string" if kind is str else JSON_TYPES[kind]
    if parameter.option.choices:
        schema["enum"] = list(parameter.option.choices)
    return schema


def output_schema(command: str) -> JsonObject:
    """Return the JSON Schema of the result of a command's MCP tool: records and exit status.

    Args:
        command: Name of the command, such as "fit".
    """
    schema = schema_of_command(command)
    return {
        "type": "object",
        "properties": {"records": schema["anyOf"][-1], "exit_status": {"type": "integer"}},
        "required": ["records"],
        "$defs": schema["$defs"],
    }
