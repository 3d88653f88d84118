"""``steady serve``."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_text, status
from steadytrain.cli.evaluate import (
    AbstainAt,
    AcceptLicence,
    ModelName,
    PriorFlag,
    Size,
    WeightsFlag,
    restore_weights,
    with_input,
)
from steadytrain.cli.options import DeviceFlag, WhichFlag, refuse_flags
from steadytrain.cli.train import require_licence
from steadytrain.config import Model
from steadytrain.errors import InputError
from steadytrain.format import count, rate

if TYPE_CHECKING:
    from steadytrain.export.serve import ServeSettings, Service
    from steadytrain.training import Trained

HOST, PORT, IMAGE = "127.0.0.1", 8000, "steady-serve:latest"
_LIBRARIES = {"prometheus_client": "prometheus-client", "python_multipart": "python-multipart"}


def serve(
    place: WeightsFlag,
    /,
    *,
    host: str = HOST,
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = PORT,
    max_batch: int | None = None,
    max_wait_ms: float = 5.0,
    threads: Annotated[int | None, Parameter(name=("--threads", "-j"))] = None,
    max_queue: int = 256,
    max_images: int = 64,
    max_bytes: int = 32 * 2**20,
    max_pixels: int = 25_000_000,
    timeout_seconds: float = 30.0,
    grace_seconds: float = 20.0,
    token: str | None = None,
    allow_url: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    allow_private: bool = False,
    allow_origin: Annotated[tuple[str, ...], Parameter(consume_multiple=False)] = (),
    json_log: bool = False,
    abstain_at: AbstainAt = None,
    prior: PriorFlag = None,
    weights: WhichFlag = "best",
    model: ModelName = None,
    classes: Path | None = None,
    size: Size = None,
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = None,
    device: DeviceFlag = "auto",
    accept_licence: AcceptLicence = False,
    write: Path | None = None,
    image: str = IMAGE,
) -> None:
    """Answer HTTP requests for predictions: POST /predict, a page to drop pictures on, health and metrics.

    Images of many requests are computed as one batch. If the queue is full, it answers 429 with Retry-After. SIGTERM or
    Ctrl-C stops it after it has answered the requests in progress; a second one stops it at once.

    Args:
        host: Address to listen on; 0.0.0.0: all of this machine's.
        port: Port to listen on; 0: any that is free.
        max_batch: Largest batch (default: 32, or fewer if that is faster).
        max_wait_ms: Longest time that a decoded image waits for others that are being received, in milliseconds.
        threads: Threads that decode (default: one for each core).
        max_queue: Images that may wait for the network.
        max_images: Images in one request.
        max_bytes: Bytes of one request.
        max_pixels: Pixels of an image, by its header; larger ones are not decoded.
        timeout_seconds: Time limit for a client to send its request, for its answer, and for the client to read it.
        grace_seconds: Time to answer the requests in progress when the server stops.
        token: Token that clients must send, as Authorization: Bearer TOKEN (default: the variable STEADYTRAIN_TOKEN).
        allow_url: Allow requests to name images by address, below this one; may be given several times.
        allow_private: Allow private addresses, too.
        allow_origin: Let web pages of this origin use the server (CORS), such as http://localhost:3000; * for all; may
            be given several times.
        json_log: Write a line of JSON for each request on standard error.
        classes: A card (.json) or a text file with the name of each output on a line, for weights without names.
        precision: Number format (default: as in the run, else fp32).
        write: Write a Dockerfile, a Kubernetes manifest, the model and a wheel of steadytrain into this folder instead.
        image: Name of the container's image in these.

    Examples:
        steady serve runs/a
        steady serve model.onnx --host 0.0.0.0 --port 8080 --max-batch 16
        steady serve runs/a --allow-url https://images.example.com/photos
        steady serve runs/a --write container/ --image registry.example.com/cats:1
    """
    if missing := [name for module, name in _LIBRARIES.items() if find_spec(module) is None]:
        raise InputError(f"steady serve needs {' and '.join(missing)}: pip install 'steadytrain[serve]'")
    from steadytrain.data.loader import default_threads
    from steadytrain.export.http_server import listen
    from steadytrain.export.http_server import serve as serve_model
    from steadytrain.export.serve import ServeSettings
    from steadytrain.training.inference.trained import find_pretrained

    settings = ServeSettings(
        threads=default_threads(pin=True) if threads is None else threads,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_images=max_images,
        max_bytes=max_bytes,
        max_pixels=max_pixels,
        timeout_seconds=timeout_seconds,
        grace_seconds=grace_seconds,
        token=os.environ.get("STEADYTRAIN_TOKEN") or None if token is None else token,
        allow_urls=allow_url,
        allow_private=allow_private,
        allow_origins=tuple(origin.rstrip("/").lower() for origin in allow_origin),
        json_log=json_log,
        abstain_at=abstain_at,
    )
    pretrained = find_pretrained(place)
    if pretrained is not None:  # asked here: the model is loaded on another thread
        require_licence(Model(pretrained.name, pretrained=True), accepted=accept_licence)

    def load() -> Trained:
        trained = restore_weights(
            place, weights, model, device, prior, accepted=True, precision=precision, classes=classes
        )
        return with_input(trained, size, None)[0]

    if not re.fullmatch(r"[A-Za-z0-9_.:/@-]+", image):
        raise InputError(f"--image is {image!r}; it must be the name of an image, such as {IMAGE}")
    if write is None:
        refuse_flags("{} names the image of a container: add --write FOLDER, or drop it", image=image != IMAGE)
    else:
        from steadytrain.export.containers import write as write_files

        if pretrained is not None:
            raise InputError(f"{place} is a model's name: export it to a file first, and name that (steady export)")
        if classes is not None:
            raise InputError("--classes names a file that the container has not: export the model with it first")
        if prior not in (None, "training", "uniform"):
            raise InputError("--prior names a file that the container has not: export the model with it first")
        own = "{} is not for a container, whose server listens on 0.0.0.0:8000: drop it, and map that (docker run -p)"
        refuse_flags(own, host=host != HOST, port=port != PORT)
        flags = {"--model": model, "--size": size, "--precision": precision, "--threads": threads, "--prior": prior}
        flags |= {"--device": None if device == "auto" else device}
        words = _flags(settings, flags)
        for path in write_files(write, load().path, image=image, words=words, grace_seconds=grace_seconds):
            print(path)
        note(f"build the image: docker build -t {shlex.quote(image)} {shlex.quote(str(write))}")
        return
    with listen(host, port) as listener:
        address = f"[{host}]" if ":" in host else host
        url = f"http://{address}:{listener.getsockname()[1]}/"
        if not settings.token and host not in ("127.0.0.1", "localhost", "::1"):
            note(f"anyone who reaches {host} can use this server: set STEADYTRAIN_TOKEN, or keep it behind a proxy")
        note(f"loading {place}; {url}ready answers 503 until it can be used")

        def announce(service: Service) -> None:
            print_text(url)
            note(ready_line(service))

        with status("loading, and measuring batches"):
            num_cut = serve_model(load, settings, listener, on_ready=announce)
    late = f"{count(num_cut, 'request')} had no answer after --grace-seconds {grace_seconds:g}"
    note(f"stopped: {late if num_cut else 'pending requests were answered'}")


def _flags(settings: ServeSettings, more: Mapping[str, object]) -> list[str]:
    """Return the flags that a container's server is started with: all that are not as usual, but for the token."""
    usual = {field.name: field.default for field in fields(settings)}
    words = [word for flag, value in more.items() if value is not None for word in (flag, str(value))]
    for name, value in vars(settings).items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("threads", "token") or value == usual[name]:
            continue
        if name in ("allow_urls", "allow_origins"):
            words += [word for item in value for word in (flag[:-1], item)]
        else:
            words += [flag] if value is True else [flag, str(value)]
    return words


def ready_line(service: Service) -> str:
    """Describe what is served, and how."""
    about, batcher = service.description, service.batcher
    most = batcher.max_batch
    facts = [count(about["num_classes"], "class", "classes"), f"{about['size']} px", about["device"]]
    speed = f"batches of up to {count(most or 1, 'image')} ({rate(batcher.rate)} images/s when it started)"
    threads = count(service.settings.threads, "decoding thread")
    return f"serving {about['name']}, version {about['version']} ({', '.join(facts)}): {speed}, {threads}; Ctrl-C stops"
