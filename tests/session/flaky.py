"""A transport that fails when it is told to, and otherwise is another one. For faults between real processes."""

from __future__ import annotations

from typing import ClassVar

from kvplan.errors import TransportError
from kvplan.transport import Batch, Handle, Progress, State, Transport


class Flaky(Transport):
    """Fails the next posts, polls or disconnects; a batch whose poll fails has really been moved, unknown to anybody.

    While it is holding, whatever has been moved looks as if it were still on its way.
    """

    name: ClassVar[str] = "flaky"

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.name = inner.name  # type: ignore[misc]  # peers compare the carrier's name
        self.failing_posts = 0
        self.failing_polls = 0
        self.failing_disconnects = 0
        self.holding = False
        self._failed: dict[Handle, Progress] = {}

    def register(self, ranges):
        self.inner.register(ranges)

    def metadata(self):
        return self.inner.metadata()

    def connect(self, peer, metadata):
        self.inner.connect(peer, metadata)

    def disconnect(self, peer):
        if self.failing_disconnects:
            self.failing_disconnects -= 1
            raise TransportError("the release failed as the test asked for", peer=peer)
        self.inner.disconnect(peer)

    def post(self, batch: Batch) -> Handle:
        if self.failing_posts:
            self.failing_posts -= 1
            raise TransportError("the post failed as the test asked for", peer=batch.peer)
        return self.inner.post(batch)

    def poll(self, handle: Handle) -> Progress:
        progress = self._failed.get(handle) or self.inner.poll(handle)
        if progress.state is State.DONE and self.holding:
            return Progress(State.PENDING)
        if progress.state is State.DONE and self.failing_polls:
            self.failing_polls -= 1
            progress = self._failed[handle] = Progress(State.FAILED, "the poll failed as the test asked for")
        return progress

    def close(self):
        self.inner.close()
