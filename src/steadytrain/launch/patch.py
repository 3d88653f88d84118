"""Patches: tables of the user's own, merged over what a launcher renders.

The rule is that of Kubernetes' strategic merge, without its list of types. A table is merged key by key, and a key whose
value is null goes. Lists whose entries all have a name (volumeMounts: a mountPath) are merged entry by entry; an entry
with ``$patch: delete`` goes. Any other value, lists included, takes the place of the one before.
See "Update API Objects in Place Using kubectl patch" in the documentation of Kubernetes.

>>> pod = {"containers": [{"name": "ranks", "image": "a"}], "dnsPolicy": "Default"}
>>> merge_patch(pod, {"containers": [{"name": "ranks", "tty": True}, {"name": "proxy"}], "dnsPolicy": None})
{'containers': [{'name': 'ranks', 'image': 'a', 'tty': True}, {'name': 'proxy'}]}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadytrain.errors import InputError

_DELETE = {"$patch": "delete"}


def merge_patch(
    rendered: Mapping[str, Any], patch: Mapping[str, Any], *, own: Sequence[str] = (), where: str = "patch"
) -> dict[str, Any]:
    """Merge a patch over what was rendered; neither is changed.

    Args:
        own: what the patch may not change, by its keys and names with spaces between: ``spec containers ranks args``.
        where: the name of the patch, for messages.

    Raises:
        InputError: it changes one of these; the message names it.
    """
    merged = _merged(rendered, patch)
    for path in own:
        if _value_at(merged, path.split()) != _value_at(rendered, path.split()):
            raise InputError(
                f"{where} changes {path.replace(' ', '.')}, by which the ranks are started or find each other: leave it"
                " out"
            )
    assert isinstance(merged, dict)
    return merged


def _merged(rendered: Any, patch: Any) -> Any:
    if isinstance(patch, Mapping):
        merged = dict(rendered) if isinstance(rendered, Mapping) else {}
        for key, value in patch.items():
            merged[key] = _merged(merged.get(key), value)
        return {key: value for key, value in merged.items() if value is not None or key not in patch}
    if isinstance(patch, list | tuple):
        before = rendered if isinstance(rendered, list | tuple) else []
        if all(_name_of(entry) for entry in (*before, *patch)):
            entries = {_name_of(entry): entry for entry in before}
            for entry in patch:
                entries[_name_of(entry)] = _merged(entries.get(_name_of(entry)), entry)
            return [entry for entry in entries.values() if not entry.items() >= _DELETE.items()]
        return [_merged(None, entry) for entry in patch]
    return patch


def _name_of(entry: object) -> str:
    """Return by what an entry of a list is told from the others; empty where it has no name."""
    return str(entry.get("mountPath") or entry.get("name") or "") if isinstance(entry, Mapping) else ""


def _value_at(tree: Any, path: Sequence[str]) -> Any:
    for word in path:
        if isinstance(tree, list | tuple):
            tree = next((entry for entry in tree if _name_of(entry) == word), None)
        else:
            tree = tree.get(word) if isinstance(tree, Mapping) else None
    return tree
