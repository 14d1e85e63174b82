"""Everything that can go wrong, as one tree. Each error says what happened, why (with numbers), what to do next.

    LocalLLMError
    ├── ConfigError                 a flag, a setting or a file of settings is wrong
    │   ├── PortInUse               the address is taken
    │   └── UnsupportedOption       known to the field, not to this version: refused, never ignored
    ├── ModelError
    │   ├── ModelNotFound           no such path, cache entry or served name
    │   ├── UnsupportedModel        we can read it but not run it
    │   ├── CorruptModel            we cannot read it: truncated, wrong dtype, missing tensor
    │   └── HubError                the hub did not give what was asked
    │       ├── HubUnreachable      no connection, no answer in time, or "not now"
    │       ├── HubOffline          we were told not to ask it
    │       ├── AccessDenied        gated or private, and the token (or its absence) does not open it
    │       └── DownloadCancelled   somebody stopped it; what was fetched is kept
    ├── DiskFull                    the disk cannot hold what is to be written
    ├── DoesNotFit                  the plan needs more memory than the machine has
    ├── RequestError                this request is wrong; the next one may be right
    │   ├── InvalidParameter        a field's value or type
    │   └── ContextTooLong          prompt (plus asked output) is longer than the model's context here
    └── EngineError                 the engine's own trouble
        ├── QueueFull               too many requests wait
        ├── EngineStopped           shutting down, or not started
        ├── EngineCrashed           the engine's thread ended by itself, through a mistake of ours
        ├── StepFailed              the step that held this request raised
        │   └── DeviceLost          so badly that the device is gone for this process
        └── KVCacheExhausted        a lone request outgrew the whole pool

Only two places turn an error into words: `cli.py` (three lines and an exit code) and `web/errors.py` (an API's
error body, or a page). The raiser need not care which.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalLLMError(Exception):
    """`what` in one sentence, `why` with numbers, `hint` as the next command or setting to try.

    `status`, `code` and `type` are how an HTTP API would say it, `exit_code` how a shell would.
    """

    status = 500
    code: str | None = "internal_error"
    type = "server_error"
    exit_code = 1

    def __init__(self, what: str, why: str = "", hint: str = "", *, param: str | None = None) -> None:
        super().__init__(what)
        self.what, self.why, self.hint, self.param = what, why, hint, param

    def __str__(self) -> str:
        return " ".join(part for part in (self.what, self.why) if part)


class ConfigError(LocalLLMError):
    """A flag, an environment variable or a line of the config file cannot be honoured."""

    status, code, type, exit_code = 400, "invalid_config", "invalid_request_error", 2


class PortInUse(ConfigError):
    """Another process listens on the address; we never hop to another port, saved clients would break."""

    code, exit_code = "port_in_use", 6


class UnsupportedOption(ConfigError):
    """The field knows this option and this version does not honour it."""

    code = "unsupported_option"


class ModelError(LocalLLMError):
    """Something about a checkpoint."""

    status, code, type = 500, "model_error", "server_error"


class ModelNotFound(ModelError):
    """Neither a path, nor in the Hugging Face cache, nor served here."""

    status, code, type, exit_code = 404, "model_not_found", "invalid_request_error", 5


class UnsupportedModel(ModelError):
    """The checkpoint is readable and asks for something we do not run."""

    code, exit_code = "model_unsupported", 1


class CorruptModel(ModelError):
    """The checkpoint's files contradict themselves or end too early."""

    code, exit_code = "model_corrupt", 5


class HubError(ModelError):
    """The hub did not give what was asked of it."""

    status, code, exit_code = 502, "hub_error", 5


class HubUnreachable(HubError):
    """No connection to the hub, no answer in time, or the answer that it cannot answer now."""

    status, code = 503, "hub_unreachable"


class HubOffline(HubError):
    """Something is not on this machine, and --offline or HF_HUB_OFFLINE forbids to fetch it."""

    status, code = 409, "hub_offline"


class AccessDenied(HubError):
    """The repository is gated or private, and what we sent as a token does not open it."""

    status, code, type = 403, "hub_access_denied", "invalid_request_error"


class DownloadCancelled(HubError):
    """A download was stopped on request. What it had fetched stays, and the next attempt goes on from there."""

    status, code, exit_code = 409, "download_cancelled", 130


class DiskFull(LocalLLMError):
    """The disk cannot hold what is to be written to it."""

    status, code, exit_code = 507, "disk_full", 5


class DoesNotFit(LocalLLMError):
    """The plan needs more memory than the hardware has."""

    status, code, exit_code = 503, "model_does_not_fit", 4
    plan: Any = None  # models.fit.MemoryPlan: what it would take
    options: Sequence[Any] = ()  # models.fit.FitOption: flags under which it would fit


class RequestError(LocalLLMError):
    """The request cannot be served as asked."""

    status, type = 400, "invalid_request_error"
    code: str | None = None


class InvalidParameter(RequestError):
    """A field has a value or a type that we do not accept; `param` names it."""

    code = "invalid_value"


class ContextTooLong(RequestError):
    """The prompt, or prompt plus the tokens asked for, exceeds the context served here."""

    code = "context_length_exceeded"


class EngineError(LocalLLMError):
    """The engine could not do what it normally does."""

    status, code = 503, "engine_error"
    retry_after_s = 2


class QueueFull(EngineError):
    """More requests wait than `max_num_queued_reqs` allows."""

    status, code, type = 503, "queue_full", "overloaded_error"


class EngineStopped(EngineError):
    """The engine is not running (any more)."""

    code = "engine_stopped"


class EngineCrashed(EngineError):
    """The engine's thread ended by itself: it could not recover from an error. The model is loaded again."""

    code = "engine_crashed"


class StepFailed(EngineError):
    """The step that carried this request raised; the engine restarted without it."""

    status, code = 500, "step_failed"


class DeviceLost(StepFailed):
    """A GPU error that sticks: every later call of this process fails too. Streams end and the process with them."""

    status, code, exit_code = 503, "device_lost", 7


class KVCacheExhausted(EngineError):
    """A request that runs alone needs another block and the pool has none."""

    status, code = 500, "kv_cache_exhausted"
