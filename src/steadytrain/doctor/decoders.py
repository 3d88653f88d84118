"""What decodes and scales images, asked in a process of its own: a wheel for another processor ends it by a signal."""

from __future__ import annotations

from steadytrain.doctor.child import Answer
from steadytrain.doctor.facts import Decoders

SECONDS = 120.0
"""A second or two, but for a machine that is at its limit."""

# libjpeg-turbo is part of simplejpeg's one file. What it holds can be read off its texts: its version, and the names
# of the variables that switch its vector code off, which are there only where that code is.
QUESTION = """
import re
def turbo():
    from simplejpeg import _jpeg
    with open(_jpeg.__file__, "rb") as file:
        data = file.read()
    version = re.search(rb"libjpeg-turbo version (\\d+(?:\\.\\d+)+)", data)
    return [version and version[1].decode(), b"JSIMD_FORCENONE" in data]
def pillow():
    from PIL import features
    found = {name: bool(features.check(name)) for name in ("jpg", "webp", "avif", "jpg_2000", "zlib_ng")}
    found["turbo"] = features.version("libjpeg_turbo") if features.check("libjpeg_turbo") else "no"
    return found
def resizer():
    from importlib import metadata
    try:
        import cykooz_resizer
    except ModuleNotFoundError:
        return "no"
    return metadata.version("cykooz-resizer")
def parts():
    try:
        from steadytrain import native
    except ModuleNotFoundError:
        return "no"
    return str(native.VERSION) if native.DECODES else "idle"
import warnings
warnings.simplefilter("ignore")
ask("simplejpeg", turbo)
ask("pillow", pillow)
ask("resizer", resizer)
ask("parts", parts)
"""


def decoders(answer: Answer) -> Decoders:
    """The facts about decoders, from the answer to :data:`QUESTION`."""
    if answer.failure is not None:
        return Decoders(simplejpeg_error=answer.failure, pillow_error=answer.failure)
    told, refused = answer.told, answer.told.get("refused", {})
    version, simd = told.get("simplejpeg") or (None, None)
    pillow = told.get("pillow") or {}
    is_native = told.get("parts") not in (None, "no", "idle")
    return Decoders(
        simplejpeg_error=refused.get("simplejpeg"),
        simplejpeg_turbo=version,
        simplejpeg_simd=simd,
        pillow_error=refused.get("pillow"),
        pillow_turbo=pillow.get("turbo"),
        pillow_zlib_ng=pillow.get("zlib_ng"),
        pillow_webp=pillow.get("webp"),
        pillow_avif=pillow.get("avif"),
        pillow_jpeg2000=pillow.get("jpg_2000"),
        resizer=told.get("resizer"),
        resizer_error=refused.get("resizer"),
        jpeg="native" if is_native else "simplejpeg" if told.get("simplejpeg") else None,
        parts=told.get("parts"),
        parts_error=refused.get("parts"),
    )
