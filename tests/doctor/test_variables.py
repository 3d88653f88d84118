"""Variables of the environment: those that matter, and no secrets."""

from __future__ import annotations

from steadytrain.doctor.variables import variables


def test_what_changes_speed_is_kept_in_order() -> None:
    told = variables({"PATH": "/bin", "OMP_NUM_THREADS": "1", "LD_PRELOAD": "", "CUDA_VISIBLE_DEVICES": ""})
    assert list(told.items()) == [("CUDA_VISIBLE_DEVICES", ""), ("LD_PRELOAD", ""), ("OMP_NUM_THREADS", "1")]


def test_no_secret_gets_into_a_document() -> None:
    secrets = ("HF_TOKEN", "NVIDIA_API_KEY", "STEADYTRAIN_SECRET", "TORCH_PASSWORD", "CUDA_CREDENTIALS")
    assert variables(dict.fromkeys(secrets, "x")) == {}
