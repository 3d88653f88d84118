"""The server's interface as an OpenAPI 3.1 document, from which clients are generated, and as a page to read.

It says nothing of the model, and so needs no token.
"""

from __future__ import annotations

from typing import Any

from steadytrain import __version__
from steadytrain.export.payload import KEYS

_BASE64 = "An image's file in base64, or as a data: address; an address to fetch, where the server allows it."
_PROBABILITY = {"type": "number", "minimum": 0, "maximum": 1}
_IMAGE: dict[str, Any] = {"type": "string", "description": _BASE64}
_ERRORS = {
    "400": "No image, no JSON, a broken form, an unknown option or a value out of range.",
    "401": "No token, or a wrong one.",
    "403": "An address to fetch that is not allowed; another host than this machine, or a page of another site.",
    "408": "The request was too slow.",
    "413": "Too many bytes, images or pixels.",
    "415": "A content-encoding other than gzip.",
    "422": "No image could be decoded or fetched; each has its error.",
    "429": "The queue is full: come again after Retry-After seconds.",
    "500": "The network failed, or its output is no number.",
    "503": "The model is being loaded, the server is stopping, or it is too busy.",
}
_SCHEMAS: dict[str, Any] = {
    "Request": {
        "type": "object",
        "properties": {
            "image": {"type": ["string", "array"], "items": _IMAGE, "description": _BASE64},
            "images": {"type": ["array", "string"], "items": _IMAGE},
            "url": {"type": ["string", "array"], "items": {"type": "string"}, "description": "An address to fetch."},
            "urls": {"type": ["array", "string"], "items": {"type": "string"}},
            "top": {"$ref": "#/components/schemas/Top"},
            "threshold": {"$ref": "#/components/schemas/Threshold"},
        },
        "additionalProperties": False,
        "example": {"image": "R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7", "top": 3},
    },
    "Top": {"type": "integer", "minimum": 1, "description": "Classes to answer at most, the likeliest first."},
    "Threshold": {
        "type": "number",
        "minimum": 0,
        "exclusiveMaximum": 1,
        "description": "Least probability of a label, where images have several; 0.5 by default.",
    },
    "Answer": {
        "type": "object",
        "required": ["model", "version", "images"],
        "properties": {
            "model": {"type": "string"},
            "version": {"type": "string", "description": "The first 12 digits of the sha256 of the model's file."},
            "images": {"type": "array", "items": {"$ref": "#/components/schemas/Image"}},
            "error": {"type": "string", "description": "Where no image could be used: what is wrong with the first."},
        },
    },
    "Image": {
        "type": "object",
        "required": ["image", "classes", "error"],
        "properties": {
            "image": {"type": "string", "description": "The file's name, or its place in the request."},
            "classes": {
                "type": "array",
                "items": {
                    "type": "object",
                    "required": ["class", "probability"],
                    "properties": {"class": {"type": "string"}, "probability": _PROBABILITY},
                },
            },
            "error": {"type": ["string", "null"], "description": "Why this image has no answer."},
        },
    },
    "Error": {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}},
    "Model": {
        "type": "object",
        "required": ["name", "version", "num_classes", "classes", "size"],
        "properties": {
            "name": {"type": "string"},
            "version": {"type": "string"},
            "licence": {"type": ["string", "null"]},
            "num_classes": {"type": "integer"},
            "classes": {"type": "array", "items": {"type": "string"}},
            "multi_label": {"type": "boolean"},
            "size": {"type": "integer", "description": "Side of the square that the network sees, in pixels."},
            "max_batch": {"type": ["integer", "null"]},
        },
    },
    "Status": {
        "type": "object",
        "required": ["status"],
        "properties": {"status": {"enum": ["alive", "starting", "ready", "stopping"]}},
    },
}


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _reply(text: str, schema: str) -> dict[str, Any]:
    return {"description": text, "content": _content(schema)}


_FOREIGN = {"403": _reply("Another host than this machine, or a page of another site.", "Error")}


def _get(summary: str, name: str, schema: str, *, more: dict[str, Any] | None = None) -> dict[str, Any]:
    responses = {"200": _reply(summary, schema), **_FOREIGN, **(more or {})}
    return {"get": {"operationId": name, "summary": summary, "responses": responses}}


def _predict() -> dict[str, Any]:
    files = {
        "type": "object",
        "properties": {"image": {"type": "array", "items": {"type": "string", "format": "binary"}}},
        "additionalProperties": {"type": "string", "format": "binary"},
    }
    parameters = [
        {"name": name, "in": "query", "schema": {"$ref": f"#/components/schemas/{name.capitalize()}"}}
        for name in KEYS[2:]
    ]
    binary = {"schema": {"type": "string", "format": "binary"}}
    return {
        "operationId": "predict",
        "summary": "Predict the likeliest classes of one or several images.",
        "description": "The bytes say what the body is, whatever its content type.",
        "parameters": parameters,
        "requestBody": {
            "required": True,
            "content": {
                "application/octet-stream": binary,
                "image/*": binary,
                "multipart/form-data": {"schema": files},
                **_content("Request"),
            },
        },
        "responses": {
            "200": _reply("The classes of each image; one that cannot be used has an error.", "Answer"),
            **{status: _reply(text, "Error") for status, text in _ERRORS.items() if status != "422"},
            "422": _reply(_ERRORS["422"], "Answer"),
        },
    }


def description_of_api(*, has_token: bool) -> dict[str, Any]:
    """Return the OpenAPI document; ``has_token``: clients need one for all that is of the model."""
    busy = {"503": _reply("The model is not ready.", "Error")}
    text = {"description": "Figures for Prometheus.", "content": {"text/plain": {"schema": {"type": "string"}}}}
    metrics = {
        "operationId": "metrics",
        "summary": "Return figures for Prometheus.",
        "responses": {"200": text, **_FOREIGN},
    }
    paths: dict[str, Any] = {
        "/predict": {
            "post": _predict(),
            "put": _predict() | {"operationId": "predict_put", "summary": "The same, for clients such as curl -T."},
        },
        "/model": _get("Describe the model: its classes, size and version.", "model", "Model", more=busy),
        "/health": _get("Answer while the process lives.", "health", "Status"),
        "/ready": _get(
            "Answer 200 when images can be sent.", "ready", "Status", more={"503": _reply("It is not ready.", "Status")}
        ),
        "/metrics": {"get": metrics},
    }
    document = {
        "openapi": "3.1.0",
        "info": {"title": "steadytrain", "version": __version__, "description": "Classify images."},
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }
    if has_token:
        for path in ("/predict", "/model", "/metrics"):
            for operation in paths[path].values():
                operation["security"] = [{"token": []}]
                operation["responses"]["401"] = _reply(_ERRORS["401"], "Error")
        document["components"] = {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        }
    return document


def page_of_api() -> dict[str, Any]:
    """Return what the page of the interface shows: rows of paths, fields and statuses."""
    operations = [
        (method.upper(), path, operation)
        for path, methods in description_of_api(has_token=False)["paths"].items()
        for method, operation in methods.items()
    ]
    properties = _SCHEMAS["Request"]["properties"]
    names = {"images": "Several images: a list of these.", "urls": "Several addresses."}
    fields = []
    for name, schema in properties.items():
        known = _SCHEMAS[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        fields.append((name, known.get("description") or names[name]))
    return {
        "operations": [(method, path, operation["summary"]) for method, path, operation in operations],
        "fields": fields,
        "statuses": list(_ERRORS.items()),
    }
