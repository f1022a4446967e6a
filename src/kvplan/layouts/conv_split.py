"""Convolution state, split into its sub-projections: byte sizes of one rank's page. No coordinates.

The names are those of vLLM 0.32 (``ssm_conv_transfer_utils.py``); the sizes are read off the declarations of
``mamba1``, ``mamba2`` and ``gdn``, so the two cannot disagree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvplan.errors import UnsupportedError
from kvplan.layouts.formats import ITEM_BYTES

if TYPE_CHECKING:
    from kvplan.layouts.page import Page, Part


@dataclass(frozen=True, slots=True)
class MambaConvSplitInfo:
    """Sub-projection sizes of one rank's convolution state. All figures are this rank's, already divided by TP."""

    conv_rows: int
    """Inputs that the convolution remembers: kernel size minus one."""
    local_proj_dims: tuple[int, ...]
    """Channels per sub-projection: (x) for Mamba1, (x, B, C) for Mamba2, (q, k, v) for gated delta nets."""
    conv_dtype_size: int
    """Bytes per element of the convolution state."""
    ssm_sizes: tuple[int, int]
    """(bytes of the convolution state, bytes of the recurrent state)."""

    @property
    def local_conv_dim(self) -> int:
        """Channels of all sub-projections."""
        return sum(self.local_proj_dims)

    @property
    def proj_bytes(self) -> tuple[int, ...]:
        """Bytes per sub-projection."""
        return tuple(dim * self.conv_rows * self.conv_dtype_size for dim in self.local_proj_dims)

    @property
    def local_conv_offsets(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each sub-projection in the page, channels outermost (the DS layout)."""
        ends = [sum(self.proj_bytes[: i + 1]) for i in range(len(self.proj_bytes))]
        return [(end - size, size) for end, size in zip(ends, self.proj_bytes, strict=True)]

    @classmethod
    def of_page(cls, page: Page) -> MambaConvSplitInfo:
        """Return the sizes of one layer's state page, as ``Mamba2Spec.pages`` and its like return it."""
        conv = [part for part in page.parts if part.component.startswith("conv.")]
        state = [part for part in page.parts if part.component == "ssm"]
        if not conv or len(state) != 1:
            raise UnsupportedError(f"page holds {[part.component for part in page.parts]}; expected conv.* and ssm")
        rows = _length(conv[0], "width")
        size = ITEM_BYTES[conv[0].format]
        dims = tuple(_length(part, "channel") for part in conv)
        ssm_bytes = state[0].atom_bytes * math.prod(map(len, state[0].axes))
        return cls(rows, dims, size, (sum(dims) * rows * size, ssm_bytes))


def _length(part: Part, name: str) -> int:
    return next(len(axis) for axis in part.axes if axis.name == name)
