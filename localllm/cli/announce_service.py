"""The state of a starting server for `systemctl status`, as sd_notify messages: the phase of the load, ready, stopping.

Without systemd nothing is sent. Does not know: how a message travels (machine/systemd.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from localllm.machine.systemd import notify

if TYPE_CHECKING:
    from localllm.config.settings import Settings
    from localllm.machine.hardware import Hardware
    from localllm.serving.phases import Phase
    from localllm.up import Ready


class ServiceAnnouncer:
    """Output for systemd: READY=1 once the model is served, STATUS=loading ... before."""

    def __init__(self) -> None:
        self._told = ""

    def starting(self, settings: Settings) -> None:
        self._tell(f"starting {settings.engine.model}")

    def found(self, hardware: Hardware) -> None:
        """The log has the hardware."""

    def phase(self, phase: Phase) -> None:
        share = "" if phase.fraction is None or phase.done else f" {phase.fraction:.0%}"
        self._tell(f"loading: {phase.name}{share}")

    def ready(self, ready: Ready) -> None:
        notify("READY=1", f"STATUS=serving {ready.name} at {ready.url}")

    def stopping(self, num_requests: int) -> None:
        notify("STOPPING=1", f"STATUS=stopping: {num_requests} running requests")

    def close(self) -> None:
        """Nothing to undo."""

    def _tell(self, status: str) -> None:
        """Send a status that differs from the last one: a load reports its progress many times per percent."""
        if status != self._told:
            self._told = status
            notify(f"STATUS={status}")
