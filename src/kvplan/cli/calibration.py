"""The calibration file: what moving costs on one machine, measured. Its schema, its fit, reading and writing.

Seconds of one batch are modelled as ``post_s + descriptors * descriptor_s + bytes / bytes_per_s``. The three constants
come from least squares over measured batches, each weighted by its own duration, so that small batches count as much
as large ones, and none of them is negative. ``docs/operations.md`` documents the file.

>>> cost = fit([Sample(run, n, 2e-5 + n * 1e-6 + run * n / 1e10) for run in (256, 65536) for n in (1, 1000)])
>>> round(cost.post_s * 1e6), round(cost.descriptor_s * 1e9), round(cost.bytes_per_s / 1e8)
(20, 1000, 100)
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING, Annotated

import msgspec
import numpy as np
from msgspec import Meta, Struct

from kvplan.errors import DescriptionError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

SCHEMA = 1
NO_LIMIT = 1e15
"""Bytes a second where the bytes' share of the time was too small to be seen."""

Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]


class Sample(Struct, frozen=True):
    """One measured batch."""

    run_bytes: int
    """Length of each run."""
    num_runs: int
    seconds: NotNegative
    """Median over the rounds."""


class Cost(Struct, frozen=True, kw_only=True):
    """What moving costs, and the measurements that say so."""

    post_s: NotNegative
    """Seconds that a batch takes whatever is in it."""
    descriptor_s: NotNegative
    """Seconds that each descriptor (or each run of a scatter) adds."""
    bytes_per_s: Positive
    origin: str = ""
    """Between what it was measured, for a person."""
    samples: tuple[Sample, ...] = ()

    def seconds(self, num_bytes: int, num_descriptors: int) -> float:
        """Return what the model says about one batch."""
        return self.post_s + num_descriptors * self.descriptor_s + num_bytes / self.bytes_per_s


class Machine(Struct, frozen=True, kw_only=True):
    """Where it was measured."""

    host: str = ""
    platform: str = ""
    cores: int = 0
    python: str = ""


class Calibration(Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: Annotated[int, Meta(ge=1)] = SCHEMA
    made_at: str = ""
    """UTC, ISO 8601."""
    kvplan: str = ""
    """Version that measured."""
    machine: Machine = Machine()
    transports: dict[str, Cost] = msgspec.field(default_factory=dict)
    """By the transport's name."""
    scatter: Cost | None = None
    """Local copies out of the staging area."""


def fit(samples: Sequence[Sample], origin: str = "") -> Cost:
    """Return the cost that fits the samples best. At least one sample."""
    seconds = np.array([sample.seconds for sample in samples])
    weight = 1.0 / np.maximum(seconds, 1e-9)
    columns = np.array([(1.0, sample.num_runs, float(sample.num_runs) * sample.run_bytes) for sample in samples])
    scale = columns.max(axis=0)
    matrix, wanted = columns / scale * weight[:, None], seconds * weight
    best, least = np.zeros(3), np.inf
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found, *_ = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)
            residual = float(np.square(matrix[:, chosen] @ found - wanted).sum())
            if (found >= 0).all() and residual < least:
                least, best = residual, np.zeros(3)
                best[list(chosen)] = found
    post_s, descriptor_s, byte_s = (best / scale).tolist()
    return Cost(
        post_s=post_s,
        descriptor_s=descriptor_s,
        bytes_per_s=1 / byte_s if byte_s > 1 / NO_LIMIT else NO_LIMIT,
        origin=origin,
        samples=tuple(samples),
    )


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file. Raises ``DescriptionError`` when that is not possible."""
    text = msgspec.json.format(msgspec.json.encode(calibration), indent=1)
    try:
        path.write_bytes(text + b"\n")
    except OSError as error:
        raise DescriptionError(f"{path} cannot be written: {error.strerror}", file=str(path)) from None


def measured_transport(path: Path) -> str:
    """Return the transport that a file is about, NIXL if it is about several. Raises ``DescriptionError``."""
    found = read_calibration(path).transports
    if not found:
        raise DescriptionError(f"{path} is about no transport", file=str(path), field="transports")
    return "nixl" if "nixl" in found else next(iter(found))


def read_calibration(path: Path) -> Calibration:
    """Return what a file says. Raises ``DescriptionError`` with the field that is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Calibration, strict=True)
    except OSError as error:
        raise DescriptionError(f"{path} cannot be read: {error.strerror}", file=str(path)) from None
    except msgspec.MsgspecError as error:
        raise DescriptionError(f"{path} is no calibration file: {error}", file=str(path)) from None
    if found.schema != SCHEMA:
        raise DescriptionError(f"{path} has schema {found.schema}; this kvplan reads {SCHEMA}", file=str(path))
    return found
