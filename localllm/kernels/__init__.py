"""Tensors in, tensors out. One operation a file: the public function, then its plain-torch twin.

A faster way for a device slots in beside the twin, inside the public function, so no caller changes.
Does not know: models, requests, schedules.
"""
