"""What moving bytes costs on a carrier, in numbers that a decision can be made on. Measures nothing, decides nothing.

Seconds of one batch are ``post_s + descriptors * descriptor_s + bytes / bytes_per_s``; the same form describes a local
scatter, whose descriptors are its runs. Where the numbers come from, later ones overriding earlier ones:

1. ``DEFAULTS``: measured on one machine, good to a factor of two or so elsewhere.
2. A calibration file, as ``kvplan bench --output FILE`` writes it: measured on this one.
3. Single values that an operator sets.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvplan.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kind of moving costs."""

    post_s: float
    """Seconds that a batch takes whatever is in it."""
    descriptor_s: float
    """Seconds that each descriptor, or each run of a scatter, adds."""
    bytes_per_s: float

    def seconds(self, num_bytes: float, num_descriptors: float) -> float:
        """Return the seconds of one batch.

        >>> round(Cost(50e-6, 3e-6, 1e10).seconds(1e7, 100) * 1e6)
        1350
        """
        return self.post_s + num_descriptors * self.descriptor_s + num_bytes / self.bytes_per_s

    def shares(self, num_bytes: NDArray[np.int64], num_descriptors: NDArray[np.int64] | int) -> NDArray[np.float64]:
        """Return the seconds that each of many parts adds to a batch."""
        return np.asarray(num_descriptors * self.descriptor_s + num_bytes / self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class CostModel:
    """Reading over one transport, and scattering what has been read."""

    read: Cost
    scatter: Cost

    @property
    def long_run_bytes(self) -> float:
        """Length from which a run gains nothing from staging, even if reading it so costs no descriptor at all."""
        return max(0.0, (self.read.descriptor_s - self.scatter.descriptor_s) * self.scatter.bytes_per_s)

    @property
    def gap_bytes(self) -> float:
        """Length of a gap that takes as long to read as one more descriptor."""
        return self.read.descriptor_s * self.read.bytes_per_s


SCATTER = Cost(post_s=60e-6, descriptor_s=0.06e-6, bytes_per_s=6e9)
"""`kvplan.transport.local.copy_runs` from a hot area into cold blocks, one core of a two-core EPYC machine."""

DEFAULTS: Mapping[str, Cost] = {
    "nixl": Cost(post_s=60e-6, descriptor_s=2.6e-6, bytes_per_s=5e9),
    "cma": Cost(post_s=100e-6, descriptor_s=1.2e-6, bytes_per_s=4.5e9),
}
"""By transport; the same machine, both ends on it, memory on small pages and out of cache."""

UNKNOWN = DEFAULTS["nixl"]
"""For transports that nobody has measured."""


def cost_model(
    transport: str,
    *,
    file: str = "",
    descriptor_s: float = 0.0,
    bytes_per_s: float = 0.0,
    scatter_run_s: float = 0.0,
    scatter_bytes_per_s: float = 0.0,
) -> CostModel:
    """Return the model for a transport. Values of 0 are not overridden. Raises ``DescriptionError`` for a bad file.

    >>> cost_model("nixl", descriptor_s=1e-6).read
    Cost(post_s=6e-05, descriptor_s=1e-06, bytes_per_s=5000000000.0)
    """
    read, scatter = DEFAULTS.get(transport, UNKNOWN), SCATTER
    if file:
        read, scatter = _calibrated(Path(file), transport, read, scatter)
    return CostModel(
        _overridden(read, descriptor_s, bytes_per_s), _overridden(scatter, scatter_run_s, scatter_bytes_per_s)
    )


def _overridden(cost: Cost, descriptor_s: float, bytes_per_s: float) -> Cost:
    return replace(cost, descriptor_s=descriptor_s or cost.descriptor_s, bytes_per_s=bytes_per_s or cost.bytes_per_s)


def _calibrated(file: Path, transport: str, read: Cost, scatter: Cost) -> tuple[Cost, Cost]:
    """Return what a calibration file says of reading and of scattering, or else what was known."""
    try:
        found = json.loads(file.read_bytes())
    except OSError as error:
        raise DescriptionError(f"calibration file {file} cannot be read: {error.strerror}", file=str(file)) from None
    except ValueError as error:
        raise DescriptionError(f"calibration file {file} is not JSON: {error}", file=str(file)) from None
    if not isinstance(found, dict) or found.get("schema") != 1:
        raise DescriptionError(
            f"{file} is no calibration file of schema 1; kvplan bench --output writes one", file=str(file)
        )
    transports = found.get("transports") or {}
    if not isinstance(transports, dict):
        raise DescriptionError(f"{file}: transports is not a mapping", file=str(file), field="transports")
    return (
        _cost(file, f"transports.{transport}", transports.get(transport), read),
        _cost(file, "scatter", found.get("scatter"), scatter),
    )


def _cost(file: Path, field: str, body: object, known: Cost) -> Cost:
    if body is None:
        return known
    if not isinstance(body, dict):
        raise DescriptionError(f"{file}: {field} is not a mapping", file=str(file), field=field)
    values = [body.get(name) for name in ("post_s", "descriptor_s", "bytes_per_s")]
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) != 3 or not all(math.isfinite(x) and x >= 0 for x in numbers) or numbers[2] == 0:
        raise DescriptionError(
            f"{file}: post_s, descriptor_s and bytes_per_s of {field} are {values}; three numbers, the last above 0",
            file=str(file),
            field=field,
        )
    return Cost(*numbers)
