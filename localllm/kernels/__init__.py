"""Operations on tensors. One operation a file: the public function, then its plain-torch twin.

A faster implementation for a device is added next to the twin, inside the public function, so no caller changes.
Does not know: models, requests, schedules.
"""
