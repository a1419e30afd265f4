"""The docs page's view of the OpenAPI document: routes with their fields laid out in rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from app.api.parameters import Parameter, compatibility, parameters_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PREFIX = "#/components/schemas/"


def docs_variables(document: Mapping[str, Any]) -> dict[str, Any]:
    """What the page shows of the document.

    Returns:
        `operations`, each with `method`, `path`, `summary`, `anchor`, and rows of its `body`, `answer` and `event`;
        `errors`, `(status, why)`; `error`, its rows; `refused`, the parameters that are known and refused.
    """
    schemas = document["components"]["schemas"]
    operations: list[dict[str, Any]] = []
    errors: dict[int, str] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operations.append(_operation(method, path, operation, schemas))
            errors |= {int(status): response["description"] for status, response in operation["responses"].items()}
    return {
        "description": document["info"]["description"],
        "version": document["info"]["version"],
        "operations": operations,
        "errors": sorted((status, why) for status, why in errors.items() if status != 200),
        "error": list(rows_of(schemas["Error"], schemas)),
        "refused": [entry for entry in compatibility() if "yes" not in (entry.chat, entry.completions)],
    }


def _operation(method: str, path: str, operation: Mapping[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
    content = operation["responses"]["200"]["content"]
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    event = content.get("text/event-stream", {}).get("x-event")
    return {
        "method": method.upper(),
        "path": path,
        "summary": operation["summary"],
        "anchor": operation["operationId"],
        "body": _rows(body, schemas, needed_first=True),
        "answer": _rows(content["application/json"]["schema"], schemas),
        "event": _rows(event, schemas),
    }


def _rows(
    reference: Mapping[str, Any] | None, schemas: Mapping[str, Any], *, needed_first: bool = False
) -> list[Parameter]:
    rows = [] if reference is None else list(rows_of(_resolve(reference, schemas), schemas))
    return sorted(rows, key=lambda row: not (row.required and "." not in row.name)) if needed_first else rows


def rows_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], prefix: str = "") -> Iterator[Parameter]:
    """An object's fields, and those of the objects within it by their path: `choices[].index`."""
    fields = schema.get("properties", {})
    for parameter in parameters_of(schema, schemas):
        path = f"{prefix}{parameter.name}"
        yield Parameter(path, parameter.kind, parameter.default, parameter.description, parameter.required)
        inner, suffix = _inner(fields[parameter.name], schemas)
        if inner is not None:
            yield from rows_of(inner, schemas, f"{path}{suffix}.")


def _inner(field: Mapping[str, Any], schemas: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, str]:
    """The object that a field holds, if it holds one, or the one that its list holds."""
    for kind in field.get("anyOf", [field]):
        found, suffix = kind, ""
        if kind.get("type") == "array" and "x-kind" not in field:
            found, suffix = kind.get("items", {}), "[]"
        found = _resolve(found, schemas)
        if "properties" in found and "x-kind" not in field:
            return found, suffix
    return None, ""


def _resolve(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" not in schema:
        return schema
    resolved: Mapping[str, Any] = schemas[schema["$ref"].removeprefix(_PREFIX)]
    return resolved
