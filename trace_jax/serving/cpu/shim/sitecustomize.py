"""Makes torchvision's wheel, which is built for CUDA, importable beside a torch for CPUs.

Python runs a module of this name at its start when its folder is on PYTHONPATH. torchvision registers shape functions
for operators of its native library; without CUDA that library does not load and the operators do not exist. So their
signatures are declared to torch just before torchvision is imported. Nothing calls them: images are not served here.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(MetaPathFinder):
    """Finds no module; it only notices the first look for torchvision."""

    def find_spec(self, fullname, path=None, target=None):
        if fullname == "torchvision":
            sys.meta_path.remove(self)  # before torch is imported, which may look for torchvision too
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(f"torchvision::{operator}", _SIGNATURE)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
