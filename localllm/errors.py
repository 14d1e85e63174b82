"""The tree of localllm's errors. Each error says what happened, why (with numbers) and what to do next.

    LocalLLMError
    ├── ConfigError                 a flag, a setting or a file of settings is wrong
    │   ├── PortInUse               another process listens on the address
    │   └── UnsupportedOption       a known option that this version does not support: refused, never ignored
    ├── ModelError
    │   ├── ModelNotFound           no such path, cache entry or served name
    │   ├── UnsupportedModel        the checkpoint is readable but cannot be run
    │   │   └── DrafterMismatch     the drafter does not belong to the model: vocabulary, sizes
    │   ├── CorruptModel            the checkpoint is not readable: truncated, wrong dtype, missing tensor
    │   └── HubError                a request to the hub failed
    │       ├── HubUnreachable      no connection, a timeout, or the hub asks to retry later
    │       ├── HubOffline          offline mode forbids requests to the hub
    │       ├── AccessDenied        a gated or private repository, and no token that grants access
    │       └── DownloadCancelled   the download was cancelled; the downloaded part is kept
    ├── NotWritable                 a file or folder cannot be written
    │   └── DiskFull                not enough free space on the disk
    ├── DoesNotFit                  the plan needs more memory than the machine has
    ├── RequestError                this request is invalid; the server is fine
    │   ├── InvalidParameter        a field has an invalid value or type
    │   ├── UnsupportedParameter    a known field or value that is not supported: refused by name, never ignored
    │   ├── ContextTooLong          the prompt, or prompt plus output, is longer than the served context
    │   ├── UnreadableMedia         a picture or a sound is damaged, or a picture has a format that is not read
    │   │   └── UnknownSound        a file is not sound, or of a format that is not read
    │   ├── MediaTooLarge           a picture has too many bytes or pixels, or a sound is too long
    │   └── MediaUnreachable        a picture could not be downloaded from its URL
    └── EngineError                 the engine failed
        ├── QueueFull               too many requests are waiting
        ├── EngineStopped           the engine is shutting down, or was not started
        ├── EngineCrashed           the engine's thread ended because of a bug
        ├── StepFailed              the step that carried this request raised
        │   └── DeviceLost          the GPU is unusable for the rest of this process
        │       ├── CheckStoppedDevice  a check of a kernel stopped the GPU; the next start does without it
        │       └── RanksLost       a process that holds a share of the model is lost; the server continues
        └── KVCacheExhausted        a request that runs alone needs more than the whole KV cache

Only two places show an error to a person: `cli` (three lines and an exit code) and `web/errors.py` (an API's error
body, or a page). The code that raises does not depend on either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LocalLLMError(Exception):
    """Base of all errors: `what` in one sentence, `why` with numbers, `hint` as the next command or setting to try.

    `status`, `code` and `type` are for an HTTP API, `exit_code` is for a shell; `param` names the wrong parameter.
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
    """A flag, an environment variable or a line of the config file is wrong."""

    status, code, type, exit_code = 400, "invalid_config", "invalid_request_error", 2


class PortInUse(ConfigError):
    """Another process listens on the address. No other port is tried, since configured clients would not find it."""

    code, exit_code = "port_in_use", 6


class UnsupportedOption(ConfigError):
    """The option is known from other servers, and this version does not support it."""

    code = "unsupported_option"


class ModelError(LocalLLMError):
    """A checkpoint cannot be found, downloaded, read or run."""

    status, code, type = 500, "model_error", "server_error"


class ModelNotFound(ModelError):
    """The name is not a path, not in the Hugging Face cache and not served here."""

    status, code, type, exit_code = 404, "model_not_found", "invalid_request_error", 5


class UnsupportedModel(ModelError):
    """The checkpoint is readable, but needs something that is not supported."""

    code, exit_code = "model_unsupported", 1


class DrafterMismatch(UnsupportedModel):
    """The drafter cannot guess tokens of this model: another vocabulary, hidden size or number of layers."""

    code = "drafter_mismatch"


class CorruptModel(ModelError):
    """The checkpoint's files are truncated or contradict each other."""

    code, exit_code = "model_corrupt", 5


class HubError(ModelError):
    """A request to the hub failed."""

    status, code, exit_code = 502, "hub_error", 5


class HubUnreachable(HubError):
    """The hub could not be reached, did not answer in time, or asked to retry later."""

    status, code = 503, "hub_unreachable"


class HubOffline(HubError):
    """A file is not on this machine, and --offline or HF_HUB_OFFLINE forbids downloading it."""

    status, code = 409, "hub_offline"


class AccessDenied(HubError):
    """The repository is gated or private, and the token (or its absence) does not grant access."""

    status, code, type = 403, "hub_access_denied", "invalid_request_error"


class DownloadCancelled(HubError):
    """A download was cancelled. The downloaded part is kept, and the next attempt resumes from there."""

    status, code, exit_code = 409, "download_cancelled", 130


class NotWritable(LocalLLMError):
    """A file or folder cannot be written: its mode, its owner or its disk forbids it."""

    code = "not_writable"


class DiskFull(NotWritable):
    """The disk does not have enough free space."""

    status, code, exit_code = 507, "disk_full", 5


class DoesNotFit(LocalLLMError):
    """The plan needs more memory than the hardware has."""

    status, code, exit_code = 503, "model_does_not_fit", 4
    plan: Any = None  # models.fit.MemoryPlan: the memory that would be needed
    options: Sequence[Any] = ()  # models.fit.FitOption: flags under which it would fit


class RequestError(LocalLLMError):
    """The request is invalid."""

    status, type = 400, "invalid_request_error"
    code: str | None = None


class InvalidParameter(RequestError):
    """A field has an invalid value or type; `param` names the field."""

    code = "invalid_value"


class UnsupportedParameter(RequestError):
    """This version knows the field but does not support it, so it is refused by name and not ignored."""

    code = "unsupported_parameter"


class ContextTooLong(RequestError):
    """The prompt, or the prompt plus the requested output, exceeds the context served here."""

    code = "context_length_exceeded"


class UnreadableMedia(RequestError):
    """A picture or a sound file is damaged, or a picture has a format that is not read."""

    code = "unreadable_media"


class UnknownSound(UnreadableMedia):
    """A file is not sound, or of a format that this installation does not read."""

    status = 415


class MediaTooLarge(RequestError):
    """A picture has more bytes or pixels than are read, or sound is longer."""

    status, code = 413, "media_too_large"


class MediaUnreachable(RequestError):
    """A picture could not be downloaded from its URL."""

    status, code = 422, "media_unreachable"


class EngineError(LocalLLMError):
    """The engine could not serve the request."""

    status, code = 503, "engine_error"
    retry_after_s = 2


class QueueFull(EngineError):
    """The queue is full: `max_num_queued_reqs` requests are waiting."""

    status, code, type = 503, "queue_full", "overloaded_error"


class EngineStopped(EngineError):
    """The engine is not running, or no longer running."""

    code = "engine_stopped"


class EngineCrashed(EngineError):
    """The engine's thread ended because it could not recover from an error. The model is loaded again."""

    code = "engine_crashed"


class StepFailed(EngineError):
    """The step that carried this request raised; the engine continues without the request."""

    status, code = 500, "step_failed"


class DeviceLost(StepFailed):
    """A GPU error after which every further CUDA call of this process fails. All streams end, and the process exits."""

    status, code, exit_code = 503, "device_lost", 7
    ends_process = True  # False: only the model's own processes are lost, and the model can be loaded again


class CheckStoppedDevice(DeviceLost):
    """A comparison of a kernel with PyTorch stopped the GPU. The next start does without that variant of the kernel."""

    code = "check_stopped_device"


class RanksLost(DeviceLost):
    """A rank of the model died or no longer answers. All its streams end, and the model is loaded again."""

    code = "ranks_lost"
    ends_process = False
    retry_after_s = 5


class KVCacheExhausted(EngineError):
    """A request that runs alone needs another KV block, and the pool has none left."""

    status, code = 500, "kv_cache_exhausted"
