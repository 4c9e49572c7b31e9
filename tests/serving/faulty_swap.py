"""A worker extension with a fault that was seen elsewhere: fused buffers of the former drafter."""

from typing import Any

import torch

from serving.swap import DrafterSwap


class ForgetsFused(DrafterSwap):
    """The first exchange leaves the new drafter with fused projections that are not its own."""

    def flywheel_exchange(self) -> dict[str, Any]:
        """As the right one, with the fault."""
        fused: Any = self.flywheel_staged["model"].get_submodule("model")  # pyright: ignore[reportAttributeAccessIssue]
        if not self.__dict__.get("was_faulty"):
            self.was_faulty = True
            fused._fused_kv_weight = torch.roll(fused._fused_kv_weight, 1, 0)
        return super().flywheel_exchange()
