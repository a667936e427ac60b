"""The OpenAPI document as one page for people: no script, nothing fetched from elsewhere."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.rest.openapi import document

CONTENT_SECURITY_POLICY = b"default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.45 ui-monospace, monospace; }
code { background: var(--soft); padding: 0 .25em; border-radius: 3px; overflow-wrap: anywhere; }
section { border-top: 1px solid var(--line); padding: .4rem 0 1rem; }
table { border-collapse: collapse; width: 100%; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .6rem .25rem 0; text-align: left; vertical-align: top; }
h3 code { font-size: 15px; }
.verb { display: inline-block; min-width: 4.2em; font-weight: 700; }
.soft { opacity: .7; }
nav ul { list-style: none; padding: 0; }
nav li { display: flex; gap: .7rem; flex-wrap: wrap; }
.text { white-space: pre-line; }
"""


@functools.cache
def page() -> bytes:
    """The page, UTF-8."""
    return "".join(_page(document())).encode()


def _page(doc: Mapping[str, Any]) -> Iterator[str]:
    title = html.escape(doc["info"]["title"])
    yield f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} API</title>'
    yield f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head><body>'
    yield f'<h1>{title} API</h1>{_text(doc["info"]["description"])}<p><a href="openapi.json">openapi.json</a></p>'
    operations = [
        (verb.upper(), path, operation) for path, item in doc["paths"].items() for verb, operation in item.items()
    ]
    yield "<nav>"
    for tag in doc["tags"]:
        yield f"<h2>{html.escape(tag['name'])}</h2><ul>"
        for verb, path, operation in operations:
            if tag["name"] in operation["tags"]:
                yield (
                    f'<li><span class="verb">{verb}</span><a href="#{operation["operationId"]}">{html.escape(path)}</a>'
                    f'<span class="soft">{html.escape(operation["summary"])}</span></li>'
                )
        yield "</ul>"
    yield "</nav><main>"
    for tag in doc["tags"]:
        yield f"<h2>{html.escape(tag['name'])}</h2>{_text(tag['description'])}"
        for verb, path, operation in operations:
            if tag["name"] in operation["tags"]:
                yield from _operation(verb, path, operation)
    yield "<h2>Schemas</h2>"
    for name, schema in doc["components"]["schemas"].items():
        yield f'<section id="schema-{html.escape(name)}"><h3><code>{html.escape(name)}</code></h3>'
        yield f"{_text(schema.get('description', ''))}{_schema(schema)}</section>"
    yield "</main></body></html>"


def _operation(verb: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<section id="{operation["operationId"]}"><h3><span class="verb">{verb}</span>'
    yield f"<code>{html.escape(path)}</code></h3>{_text(operation.get('description') or operation['summary'])}"
    if parameters := operation.get("parameters"):
        yield "<h4>Parameters</h4><table>"
        for parameter in parameters:
            where = parameter["in"] + (", required" if parameter.get("required") else "")
            yield _row(parameter["name"], f"{_type(parameter['schema'])} <span class=soft>{where}</span>", parameter)
        yield "</table>"
    if body := operation.get("requestBody"):
        for media, content in body["content"].items():
            yield f"<h4>Body <code>{html.escape(media)}</code></h4>{_schema(content['schema'])}"
    for status, response in operation["responses"].items():
        if "$ref" in response:
            continue
        yield f"<h4>{status}</h4>{_text(response['description'])}"
        for media, content in response["content"].items():
            yield f"<p><code>{html.escape(media)}</code>: {_type(content['schema'])}</p>"
    yield "</section>"


def _schema(schema: Mapping[str, Any]) -> str:
    """An object's fields, or what else it is."""
    if not schema.get("properties"):
        return f"<p>{_type(schema)}</p>"
    needed = schema.get("required", ())
    rows = (
        _row(name, _type(inner) + (" <span class=soft>always</span>" if name in needed else ""), inner)
        for name, inner in schema["properties"].items()
    )
    return f"<table>{''.join(rows)}</table>"


def _row(name: str, kind: str, described: Mapping[str, Any]) -> str:
    text = _text(described.get("description", ""))
    return f"<tr><td><code>{html.escape(name)}</code></td><td>{kind}</td><td>{text}</td></tr>"


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a few words, as HTML."""
    if reference := schema.get("$ref"):
        name = html.escape(reference.rpartition("/")[2])
        return f'<a href="#schema-{name}">{name}</a>'
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return " or ".join(_type(inner) for inner in schema[key])
    if "enum" in schema:
        return " | ".join(f"<code>{html.escape(str(value))}</code>" for value in schema["enum"])
    kinds = schema.get("type", "anything")
    kind = " or ".join(kinds) if isinstance(kinds, list) else kinds
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and schema.get("properties"):
        inner = ", ".join(f"<code>{html.escape(name)}</code>: {_type(s)}" for name, s in schema["properties"].items())
        return "{ " + inner + " }"
    return html.escape(kind + (f" ({schema['format']})" if "format" in schema else ""))


def _text(text: str) -> str:
    """Text with ``code`` between backticks, as HTML."""
    if not text:
        return ""
    marked = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))
    return f'<div class="text">{marked}</div>'
