"""Where arrays live: a mesh of three axes and the rules that map logical axis names of parameters to them.

Rows of a batch are split over `data` and `fsdp`; parameters and optimiser state over `fsdp` (their embed axis) and
`tensor` (heads, mlp, vocabulary). `data` holds copies of the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trace_jax.train.state import TrainState

AXES = ("data", "fsdp", "tensor")
RULES: Mapping[str, str | None] = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "head_dim": None,
    "mlp": "tensor",
    "layers": None,
}
_ROWS = PartitionSpec(("data", "fsdp"))


def make_mesh(*, data: int, fsdp: int, tensor: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes `AXES` in Auto mode.

    Args:
      data, fsdp, tensor: sizes, >= 1; one of them may be -1 and takes what the others leave.
      devices: all of the job's devices by default.
    Raises ValueError if the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = [data, fsdp, tensor]
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh: sizes {dict(zip(AXES, sizes, strict=True))} must be >= 1, at most one of them -1")
    if -1 in sizes:
        sizes[sizes.index(-1)] = max(1, len(devices) // math.prod(size for size in sizes if size != -1))
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh: {'x'.join(map(str, sizes))} (data x fsdp x tensor) needs {math.prod(sizes)} devices, "
            f"there are {len(devices)}; set one size to -1"
        )
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def param_shardings(mesh: Mesh, params: Any, axes: Any) -> Any:
    """A NamedSharding for each parameter.

    An axis stays whole where its size is no multiple of the mesh axis (two kv heads on four devices), and where an
    earlier axis of the same parameter already uses that mesh axis.

    Args:
      params: arrays or ShapeDtypeStructs.
      axes: the same tree with PartitionSpecs (or tuples) of logical names, e.g. `models.decoder.param_axes(cfg)`.
    Raises ValueError for a logical name that `RULES` does not know.
    """
    flat, tree = jax.tree.flatten(params)
    names = tree.flatten_up_to(axes)
    return tree.unflatten([NamedSharding(mesh, _spec(mesh, p.shape, n)) for p, n in zip(flat, names, strict=True)])


def _spec(mesh: Mesh, shape: tuple[int, ...], names: Sequence[str | None]) -> PartitionSpec:
    spec: list[str | None] = []
    for size, name in zip(shape, [*names, *[None] * (len(shape) - len(names))], strict=True):
        if name is not None and name not in RULES:
            raise ValueError(f"sharding: logical axis {name!r} is unknown; add it to RULES ({', '.join(RULES)})")
        axis = None if name is None else RULES[name]
        fits = axis is not None and axis not in spec and size % mesh.shape[axis] == 0
        spec.append(axis if fits else None)
    return PartitionSpec(*spec)


def state_shardings(mesh: Mesh, optimizer: optax.GradientTransformation, params: Any, axes: Any) -> TrainState:
    """A TrainState of NamedShardings: moments like their parameters, counters on every device."""
    whole = NamedSharding(mesh, PartitionSpec())
    shardings = param_shardings(mesh, params, axes)
    moments = optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        jax.eval_shape(optimizer.init, params),
        shardings,
        transform_non_params=lambda _: whole,
    )
    return TrainState(params=shardings, opt_state=moments, step=whole)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over `data` and `fsdp`."""
    return NamedSharding(mesh, _ROWS)


def put_rows(mesh: Mesh, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """Host arrays [B, ...] onto the mesh, split by rows.

    Raises ValueError if B is not a multiple of data * fsdp.
    """
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    for name, value in rows.items():
        if value.shape[0] % parts:
            raise ValueError(
                f"sharding: {name} has {value.shape[0]} rows, not a multiple of data x fsdp = {parts}; "
                "change the rows per batch"
            )
    return jax.device_put(dict(rows), row_sharding(mesh))
