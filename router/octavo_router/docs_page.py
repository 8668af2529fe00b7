"""The OpenAPI document as one HTML page, made on the server.

It has no scripts and asks for nothing from elsewhere, so it works without the internet and under any policy.
"""

from __future__ import annotations

import json
from html import escape
from typing import Any

HEADERS = {
    "content-type": "text/html; charset=utf-8",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'",
}

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1a1a1a; }
h2 { margin-top: 2.5rem; border-top: 1px solid #ccc; padding-top: 1rem; }
code, h2, h3 { font-family: ui-monospace, monospace; }
table { border-collapse: collapse; } td, th { text-align: left; vertical-align: top; padding: .15rem 1.5rem .15rem 0; }
.method { color: #06c; }
"""

Json = dict[str, Any]


def render(document: Json) -> str:
    """The page."""
    info = document["info"]
    operations = [
        _operation(path, method, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    schemas = [_schema(name, schema) for name, schema in document["components"]["schemas"].items()]
    return "\n".join(
        [
            f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{escape(info["title"])} API</title>',
            f"<style>{_STYLE}</style></head><body>",
            f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} "
            'For programs: <a href="openapi.json">openapi.json</a>.</p>',
            *operations,
            "<h2>Schemas</h2>",
            *schemas,
            "</body></html>",
        ]
    )


def _operation(path: str, method: str, operation: Json) -> str:
    lines = [
        f'<h2 id="{escape(operation["operationId"])}"><span class="method">{method.upper()}</span> {escape(path)}</h2>',
        f"<p>{escape(operation['summary'])}</p>",
    ]
    if "requestBody" in operation:
        (content,) = operation["requestBody"]["content"].values()
        lines.append(f"<p>Body: {_type(content['schema'])}</p>")
    lines.append("<table><tr><th>status</th><th>meaning</th><th>content</th></tr>")
    for status, response in operation["responses"].items():
        contents = "<br>".join(
            f"{escape(media_type)}: {_type(content['schema'])}"
            for media_type, content in response.get("content", {}).items()
        )
        lines.append(f"<tr><td>{status}</td><td>{escape(response['description'])}</td><td>{contents}</td></tr>")
    return "\n".join([*lines, "</table>"])


def _schema(name: str, schema: Json) -> str:
    lines = [f'<h3 id="schema-{escape(name)}">{escape(name)}</h3>']
    if description := schema.get("description"):
        lines.append(f"<p>{escape(description)}</p>")
    required = schema.get("required", ())
    lines.append("<table>")
    for field, kind in schema.get("properties", {}).items():
        note = "required" if field in required else ""
        lines.append(f"<tr><td><code>{escape(field)}</code></td><td>{_type(kind)}</td><td>{note}</td></tr>")
    return "\n".join([*lines, "</table>"])


def _type(schema: Json) -> str:
    """What a schema allows, in a few words."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"])
    if "const" in schema:
        return f"<code>{escape(json.dumps(schema['const']))}</code>"
    if "enum" in schema:
        values = " or ".join(f"<code>{escape(json.dumps(value))}</code>" for value in schema["enum"])
        return f"{values}. {escape(schema['description'])}" if "description" in schema else values
    kind = schema.get("type", "anything")
    if kind == "array":
        return f"array of {_type(schema.get('items', {}))}"
    text = escape(kind if isinstance(kind, str) else " or ".join(kind))
    return f"{text}. {escape(schema['description'])}" if "description" in schema else text
