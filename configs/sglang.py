"""The quickstart with its rollouts on SGLang servers: one example for each way to share the GPUs of a machine.

Separate devices: the servers have GPUs of their own, and sample the next step's rollouts while this one trains.

python -m trace_jax.launch_sglang --config=configs/sglang.py:separate --workdir=runs/separate --servers=2 --devices=1,2
python -m trace_jax.main --config=configs/sglang.py:separate --workdir=runs/separate --config.sglang.urls=URLS

Shared devices: trainer and server take turns on one GPU. The server gives its memory back while the policy trains, and
the trainer, which takes memory on demand, keeps only parameters and optimiser while the server samples.

python -m trace_jax.launch_sglang --config=configs/sglang.py:shared --workdir=runs/shared --devices=0 \\
    --memory_fraction=0.6 --release_memory
python -m trace_jax.main --config=configs/sglang.py:shared --workdir=runs/shared --config.sglang.urls=URLS

The first command prints URLS. Both have been run on CPU servers only (there, releasing memory gives nothing back). What
a larger model needs is the same with `config.model.path` and a `config.sglang.weights_folder` on tmpfs.
"""

from configs import quickstart
from trace_jax.config import ConfigError


def get_config(devices: str = "separate"):
    """A locked ConfigDict; `devices` is "separate" or "shared"."""
    if devices not in ("separate", "shared"):
        raise ConfigError(f"configs/sglang.py:{devices} is none of its examples; take :separate or :shared")
    config = quickstart.get_config()
    config.engine = "sglang"
    config.sglang.urls = "http://127.0.0.1:30000"
    if devices == "separate":
        config.devices.update(visible="0", memory_fraction=0.9)
        config.overlap = True
    else:
        config.devices.update(visible="0", on_demand=True)
        config.sglang.release_memory = True
    return config
