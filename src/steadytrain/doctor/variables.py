"""The environment's variables that change speed or results."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FAMILIES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ONEDNN_", "DNNL_", "ATEN_", "JSIMD_", "MALLOC_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_"),
    "STEADYTRAIN_",
)
_NAMES = {
    *("GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH", "TMPDIR", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "PYTHONPATH", "PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONTRACEMALLOC"),
    *("PYTHONOPTIMIZE", "PYTHON_GIL"),
}
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Those that are set, by name; none that could hold a secret.

    >>> variables({"OMP_NUM_THREADS": "4", "HOME": "/tmp", "TORCH_TOKEN": "x"})
    {'OMP_NUM_THREADS': '4'}
    """
    return {
        name: environment[name]
        for name in sorted(environment)
        if (name in _NAMES or name.startswith(_FAMILIES)) and not _SECRET.search(name)
    }
