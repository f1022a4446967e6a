"""Every error that kvplan raises lives here; no behaviour does.

The tree::

    KVPlanError
    +-- LayoutError (ValueError)            a declaration contradicts itself
    |   +-- AliasError                      two coordinates lie at the same bytes
    |   +-- BoundsError                     bytes lie outside the block or the region
    +-- PlanError (ValueError)              two declarations do not meet
    |   +-- UncoveredError                  a destination coordinate has no source
    |   +-- FormatMismatchError             the two sides store an atom differently
    |   +-- MissingLayerError               a layer or component is on one side only
    +-- BindError (ValueError)              block tables do not fit the layouts
    +-- DescriptionError (ValueError)       an engine description or request file is wrong
    +-- CompatibilityError (ValueError)     two engines must not exchange cache
    +-- UnsupportedError (ValueError)       kvplan does not recognise what it was given
    +-- WireError (ValueError)              bytes from a peer that are not a message of ours
    |   +-- ProtocolVersionError
    |   +-- LimitError
    +-- TransportError (OSError)            bytes could not be moved
    |   +-- PeerGoneError
    |   +-- NotRegisteredError
    |   +-- DescriptorError (ValueError)    a batch or memory range contradicts itself
    +-- SessionError (RuntimeError)         a request, lease or peer is in the wrong state
    |   +-- IllegalTransitionError
    |   +-- RefusedError
    |   +-- OverloadedError
    |   +-- UnavailableError                a live engine cannot be asked
    +-- EngineError (RuntimeError)          an engine that kvplan started did not do its job
"""

from __future__ import annotations

from dataclasses import dataclass


class KVPlanError(Exception):
    """Base of every error that kvplan raises on purpose."""


class LayoutError(KVPlanError, ValueError):
    """A declaration contradicts itself."""


class AliasError(LayoutError):
    """Two coordinates of one block lie at the same bytes."""


class BoundsError(LayoutError):
    """Declared bytes lie outside their block or their registered region."""


class PlanError(KVPlanError, ValueError):
    """Two declarations do not meet."""


class UncoveredError(PlanError):
    """A coordinate that the destination holds is held by no source rank.

    ``axis`` is None when each axis has holders, but no single rank holds the combination.
    """

    def __init__(
        self,
        message: str,
        *,
        layer: str = "",
        component: str = "",
        axis: str | None = None,
        interval: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.component = component
        self.axis = axis
        self.interval = interval


class FormatMismatchError(PlanError):
    """The two sides store one atom in different formats; formats are never converted."""

    def __init__(
        self, message: str, *, layer: str = "", component: str = "", source: str = "", destination: str = ""
    ) -> None:
        super().__init__(message)
        self.layer = layer
        self.component = component
        self.source = source
        self.destination = destination


class MissingLayerError(PlanError):
    """A layer or component that must be moved exists on one side only."""

    def __init__(self, message: str, *, layer: str = "", component: str = "") -> None:
        super().__init__(message)
        self.layer = layer
        self.component = component


class BindError(KVPlanError, ValueError):
    """Block tables do not fit the layouts that a plan was made for."""


class DescriptionError(KVPlanError, ValueError):
    """An engine description or a request file is wrong."""

    def __init__(self, message: str, *, field: str = "", file: str = "", line: int = 0) -> None:
        super().__init__(message)
        self.field = field
        self.file = file
        self.line = line


@dataclass(frozen=True, slots=True)
class Mismatch:
    """One field that stops an exchange."""

    field: str
    ours: str
    theirs: str
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: ours {self.ours}, theirs {self.theirs}"
        return f"{text} ({self.advice})" if self.advice else text


class CompatibilityError(KVPlanError, ValueError):
    """Two engines must not exchange cache; every differing field is named."""

    def __init__(self, mismatches: tuple[Mismatch, ...]) -> None:
        super().__init__("; ".join(map(str, mismatches)))
        self.mismatches = mismatches


class UnsupportedError(KVPlanError, ValueError):
    """An engine, version or layout that kvplan does not recognise."""


class WireError(KVPlanError, ValueError):
    """Bytes from a peer that are not a message of ours."""


class ProtocolVersionError(WireError):
    """The peer speaks a protocol version that we do not."""


class LimitError(WireError):
    """A length, count or size from a peer exceeds what we accept."""


class TransportError(KVPlanError, OSError):
    """Bytes could not be moved."""

    def __init__(self, message: str, *, peer: str = "") -> None:
        super().__init__(message)
        self.peer = peer


class PeerGoneError(TransportError):
    """The peer's process no longer answers."""


class NotRegisteredError(TransportError):
    """An address range is not inside one registered range."""


class DescriptorError(TransportError, ValueError):
    """A batch, a device or a memory range contradicts itself: lengths, zero bytes, overflow, overlap."""


class SessionError(KVPlanError, RuntimeError):
    """A request, lease or peer is in the wrong state for what was asked."""


class IllegalTransitionError(SessionError):
    """An event that the state machine does not allow in its present state."""


class RefusedError(SessionError):
    """The peer refused, and said why."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class OverloadedError(SessionError):
    """A bounded queue is full; the caller may try again or give up."""


class UnavailableError(SessionError):
    """A live engine cannot be asked: nobody listens, the keys differ, it is not ready, or it does not answer."""

    def __init__(self, message: str, *, address: str = "", why: str = "") -> None:
        super().__init__(message)
        self.address = address
        self.why = why


class EngineError(KVPlanError, RuntimeError):
    """An engine that kvplan started ended, did not serve in time, or answered with an error."""

    def __init__(self, message: str, *, engine: str = "") -> None:
        super().__init__(message)
        self.engine = engine
