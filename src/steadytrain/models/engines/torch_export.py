"""PyTorch's own files, ``.pt2``: a program of ``torch.export``, or a package that AOTInductor compiled.

Both are code: torch evaluates expressions that stand in a program, and a package is machine code. Their metadata is in
``extra/`` in the archive, whose members have checksums.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from steadytrain.errors import ModelError
from steadytrain.models.engines.engine import (
    EngineFormat,
    EngineModule,
    Inputs,
    Metadata,
    OpenedModule,
    StoredPrecision,
    any_batch,
    no_device,
)


def write_torch_export(module: nn.Module, inputs: Inputs, path: Path, precision: StoredPrecision = "fp32") -> None:
    """Write a program, which ``torch.export.load`` opens, in the numbers that the network has."""
    program = _program(module, inputs)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # where it stood in whose source file
    torch.export.save(program, str(path))


def write_aot(module: nn.Module, inputs: Inputs, path: Path, precision: StoredPrecision = "fp32") -> None:
    """Write a package that is compiled for this machine's processor or GPU.

    ``torch._inductor.aoti_load_package`` opens it. Compiling needs a C++ compiler, and takes a minute or so.
    """
    from torch._inductor import aoti_compile_and_package

    program = _program(module, inputs)
    with torch.no_grad():
        # Freezing lets it fold batch norms, and lay weights out as the processor's kernels want them.
        aoti_compile_and_package(program, package_path=str(path), inductor_configs={"freezing": True})


def _program(module: nn.Module, inputs: Inputs) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(module, inputs, dynamic_shapes=any_batch(inputs), strict=False)


def _add_metadata(path: Path, metadata: Metadata) -> None:
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        for name, value in metadata.items():
            archive.writestr(f"{root}/extra/{name}", value)


def _read_metadata(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        places = {name.rpartition("/extra/")[2]: name for name in archive.namelist() if "/extra/" in name}
        return {name: archive.read(place).decode() for name, place in places.items()}


def _open(path: Path, device: str, threads: int, precision: StoredPrecision | None) -> OpenedModule:
    """Open a program, or a package, which is for the device that it was compiled for."""
    with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums of its members
        if (name := archive.testzip()) is not None:
            raise ModelError(f"{path} is damaged: the checksum of {name} in it does not match: export it again")
        is_compiled = any("/aotinductor/" in name for name in archive.namelist())
    if is_compiled:
        from torch._inductor import aoti_load_package

        call = compiled = aoti_load_package(str(path))
        where = torch.device(compiled.get_metadata().get("AOTI_DEVICE_KEY", "cpu"))
        if device != "auto" and torch.device(device).type != where.type:
            raise no_device(path, "AOTInductor", device, f"it was compiled for {where.type}: export it there")
    else:
        program = torch.export.load(str(path))
        where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        if where.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, str(where))
        call = program.module(check_guards=False)

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        outputs = call(*(tensor.to(where).contiguous() for tensor in inputs))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    engine = AOTINDUCTOR.engine if is_compiled else TORCH_EXPORT.engine
    return OpenedModule(EngineModule(run), _read_metadata(path), engine, where)


TORCH_EXPORT = EngineFormat(
    engine="torch.export",
    title="torch.export",
    suffix=".pt2",
    precisions=("fp32", "fp16", "bf16"),
    devices=("cpu", "cuda"),
    write=write_torch_export,
    add_metadata=_add_metadata,
    read_metadata=_read_metadata,
    open=_open,
    is_halved_first=True,
)
AOTINDUCTOR = replace(TORCH_EXPORT, engine="aotinductor", title="AOTInductor", write=write_aot)
"""Files of the same ending, which are opened by what is in them."""
