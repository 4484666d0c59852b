"""Command lines and environments of servers, against lines written out by hand."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest

from trace_jax.serving import command, machine
from trace_jax.serving.command import ServerSpec, SpecError

SPEC = ServerSpec(Path("/models/m"), 30000, Path("/sg/bin/python"))


def test_the_plainest_server():
    assert " ".join(command.arguments(SPEC)) == (
        "/sg/bin/python -m sglang.launch_server --model-path /models/m --host 127.0.0.1 --port 30000 --tp-size 1 "
        "--log-level-http warning"
    )


def test_a_server_on_two_gpus_that_shares_them_with_the_trainer():
    spec = dataclasses.replace(
        SPEC,
        tensor_parallel=2,
        devices=(4, 5),
        memory_fraction=0.4,
        context_length=352,
        dtype="bfloat16",
        seed=3,
        release_memory=True,
        extra=("--schedule-policy", "lpm"),
    )
    assert " ".join(command.arguments(spec)[5:]) == (
        "--host 127.0.0.1 --port 30000 --tp-size 2 --log-level-http warning --context-length 360 "
        "--mem-fraction-static 0.4 --dtype bfloat16 --random-seed 3 --enable-memory-saver --schedule-policy lpm"
    )
    environment = command.environment(spec, {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"})
    assert environment == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }


def test_a_server_on_the_cpu():
    spec = dataclasses.replace(SPEC, cpu=True, context_length=128, seed=0, release_memory=True, devices=(0,))
    assert " ".join(command.arguments(spec)[5:]) == (
        "--host 127.0.0.1 --port 30000 --tp-size 1 --log-level-http warning --context-length 136 --dtype float32 "
        "--random-seed 0 --device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--max-total-tokens 32768 --max-running-requests 64 --disable-overlap-schedule --sleep-on-idle"
    )
    environment = command.environment(spec, {"PYTHONPATH": "/mine", "PYTHONHOME": "/py", "HOME": "/root"})
    assert environment == {
        "HOME": "/root",
        "PYTHONPATH": str(command.SHIM),
        "SGLANG_USE_CPU_ENGINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        "SGLANG_TIMEOUT_KEEP_ALIVE": "3600",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
    }
    assert (command.SHIM / "sitecustomize.py").is_file() and (command.SHIM / "sgl_kernel.py").is_file()


def test_devices_that_nobody_chose_are_left_alone():
    kept = command.environment(SPEC, {"CUDA_VISIBLE_DEVICES": "7"})
    assert kept["CUDA_VISIBLE_DEVICES"] == "7"
    assert "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN" not in kept


def test_what_was_inherited_does_not_change_the_log_probs():
    assert (
        command.environment(SPEC, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"})["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "false"
    )


@pytest.mark.parametrize(
    "host, expected",
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("node7", "http://node7:1")],
)
def test_url(host, expected):
    assert command.url(dataclasses.replace(SPEC, host=host, port=1)) == expected


def test_devices_of_each_server():
    assert command.share_devices((), 2, 2) == [(0, 1), (2, 3)]
    assert command.share_devices((6, 4, 5), 3, 1) == [(6,), (4,), (5,)]
    assert command.share_devices((0, 0), 2, 1) == [(0,), (0,)]
    with pytest.raises(SpecError, match="3 devices are listed, but 2 servers of tensor parallel size 2 take 4"):
        command.share_devices((0, 1, 2), 2, 2)


def test_what_cannot_work_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert command.check_model(tmp_path) is tmp_path
    with pytest.raises(SpecError, match="model folder .* holds no config.json; give"):
        command.check_model(tmp_path / "none")
    good = dataclasses.replace(SPEC, python=Path(sys.executable))
    assert command.validate(good) is good
    for changes, message in (
        ({"python": tmp_path / "none"}, "server Python .* is no program; give"),
        ({"python": tmp_path}, "server Python .* is no program; give"),
        ({"port": 65536}, "port 65536 is not in 1 to 65535"),
        ({"tensor_parallel": 0}, "tensor parallel size 0 must be at least 1"),
        ({"tensor_parallel": 2, "cpu": True}, "tensor parallel size 2 must be 1 on a CPU"),
        ({"tensor_parallel": 2, "devices": (1, 1)}, "devices 1,1 are not 2 different ones"),
        ({"memory_fraction": 1.0}, "memory fraction 1.0 must be between 0 and 1"),
        ({"context_length": 1}, "context length 1 must be at least 2"),
    ):
        with pytest.raises(SpecError, match=message):
            command.validate(dataclasses.replace(good, **changes))


def test_a_tpu_is_known_by_vendor_and_device(tmp_path):
    def card(name: str, vendor: str, device: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "device").write_text(f"{device}\n")

    assert not machine.has_tpu(tmp_path) and not machine.has_tpu(tmp_path / "none")
    (tmp_path / "odd").mkdir()
    card("network", "0x1ae0", "0x0042")  # Google's virtual network card
    card("gpu", "0x10de", "0x0062")  # the device id of a TPU, another vendor
    assert not machine.has_tpu(tmp_path)
    card("tpu", "0x1ae0", "0x0062")
    assert machine.has_tpu(tmp_path)
