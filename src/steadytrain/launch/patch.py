"""Patches: the user's own tables, merged over what a launcher renders by the rule of Kubernetes' strategic merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadytrain.errors import InputError


def merge_patch(rendered: Any, patch: Any, *, own: Sequence[str] = (), where: str = "patch") -> Any:
    """Merge a patch over what was rendered; neither is changed.

    Tables are merged key by key, and a key whose value is null goes. Lists whose entries all have a mountPath or a name
    are merged entry by entry, and one with ``$patch: delete`` goes. Anything else takes the place of what was there.

    Args:
        own: what the patch may not change (InputError): keys, and names of entries, with spaces between.
        where: the name of the patch, for messages.

    >>> pod = {"containers": [{"name": "ranks", "image": "a"}], "dnsPolicy": "Default"}
    >>> merge_patch(pod, {"containers": [{"name": "ranks", "tty": True}, {"name": "proxy"}], "dnsPolicy": None})
    {'containers': [{'name': 'ranks', 'image': 'a', 'tty': True}, {'name': 'proxy'}]}
    """
    merged = patch
    if isinstance(patch, Mapping):
        merged = dict(rendered) if isinstance(rendered, Mapping) else {}
        merged |= {key: merge_patch(merged.get(key), value) for key, value in patch.items()}
        merged = {key: value for key, value in merged.items() if value is not None or key not in patch}
    elif isinstance(patch, list | tuple):
        before = rendered if isinstance(rendered, list | tuple) else ()
        entries = {_name_of(entry): entry for entry in before} if all(map(_name_of, (*before, *patch))) else {}
        changed = {_name_of(e) or place: merge_patch(entries.get(_name_of(e)), e) for place, e in enumerate(patch)}
        merged = [e for e in (entries | changed).values() if not isinstance(e, Mapping) or e.get("$patch") != "delete"]
    for path in own:
        if _value_at(merged, path.split()) != _value_at(rendered, path.split()):
            raise InputError(f"{where} changes {path.replace(' ', '.')}, by which ranks start: leave that out")
    return merged


def _name_of(entry: object) -> str:
    return str(entry.get("mountPath") or entry.get("name") or "") if isinstance(entry, Mapping) else ""


def _value_at(tree: Any, path: Sequence[str]) -> Any:
    for word in path:
        entries = {_name_of(entry): entry for entry in tree} if isinstance(tree, list) else tree
        tree = entries.get(word) if isinstance(entries, Mapping) else None
    return tree
