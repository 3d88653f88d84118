"""The server's interface as an OpenAPI 3.1 document, from which clients are generated, and as a page to read."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from steadytrain import __version__

_FILE = Path(__file__).parent / "texts" / "openapi.yaml"
_IMAGES, _URLS = "Several images: a list of these.", "Several addresses."


@cache
def description_of_api(*, has_token: bool) -> dict[str, Any]:
    """Return the OpenAPI document; ``has_token``: clients need one for all that is of the model."""
    document: dict[str, Any] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    document["info"]["version"] = __version__
    if has_token:
        paths = document["paths"]
        refusal = paths["/predict"]["post"]["responses"]["401"]
        for path in ("/predict", "/model", "/example", "/metrics"):
            for operation in paths[path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = refusal
        document["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return document


def page_of_api() -> dict[str, Any]:
    """Return what the page of the interface shows: rows of paths, fields and statuses."""
    document = description_of_api(has_token=False)
    schemas, fields = document["components"]["schemas"], []
    for name, schema in schemas["Request"]["properties"].items():
        known = schemas[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        fields.append((name, known.get("description") or {"images": _IMAGES, "urls": _URLS}[name]))
    responses = document["paths"]["/predict"]["post"]["responses"]
    return {
        "operations": [
            (method.upper(), path, operation["summary"])
            for path, methods in document["paths"].items()
            for method, operation in methods.items()
        ],
        "fields": fields,
        "example": json.dumps(schemas["Request"]["example"]),
        "statuses": [(status, response["description"]) for status, response in responses.items() if status != "200"],
    }
