"""Operations on tensors, one a file: the public function, then its twin, the same in plain torch.

A faster implementation for a device is added next to the twin, inside the public function, so no caller changes.
Does not know: models, requests, schedules.
"""
