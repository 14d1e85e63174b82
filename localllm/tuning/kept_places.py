"""Times of loads with the experts in other places, and how these compared, kept for later runs.

    $XDG_CACHE_HOME/localllm/placements.json     a record for each model and machine, as of a profile's key

A record says of each place how long its load took, and for each goal its score divided by the score where the experts
were loaded at first. Ratios, unlike scores, do not depend on the lengths of a run's requests. A file that cannot be
read or written is as none: the next run measures.
Does not know: which places a run tries (space.py), what it does with a record (run.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from localllm.config.settings import PLACEMENT
from localllm.errors import LocalLLMError
from localllm.files.folders import cache_folder, write_whole
from localllm.files.json_file import read_json_object
from localllm.serving.profiles import ProfileKey, now
from localllm.tuning.figures import flags_of

MOST_RECORDS = 50  # of models and machines; the oldest goes first


@dataclass(frozen=True, slots=True)
class KeptPlace:
    """The record of one place."""

    load_s: float
    ratio: float | None  # of the goal's score over its score at the first place; None: not measured for the goal
    date: str  # UTC, ISO 8601


def place_of(settings: Mapping[str, Any]) -> str:
    """Return the place that settings say, as flags."""
    return flags_of({name: settings[name] for name in PLACEMENT if name in settings}) or "auto"


@dataclass(slots=True)
class KeptPlaces:
    """The records of one model on one machine, for one goal and one first place."""

    key: str
    question: str  # the goal and the first place
    path: Path
    records: dict[str, Any] = field(default_factory=dict)  # of all models

    @classmethod
    def of(cls, key: ProfileKey, goal: str, first: Mapping[str, Any]) -> KeptPlaces:
        digest = hashlib.blake2b(json.dumps(asdict(key), sort_keys=True).encode(), digest_size=12).hexdigest()
        made = cls(digest, f"{goal} from {place_of(first)}", cache_folder() / "placements.json")
        with suppress(LocalLLMError):
            made.records = read_json_object(made.path)
        return made

    def get(self, settings: Mapping[str, Any]) -> KeptPlace | None:
        """Return the record of the place that these settings say; None: there is none."""
        try:
            found = self.records[self.key][place_of(settings)]
            ratio = found["ratios"].get(self.question)
            return KeptPlace(float(found["load_s"]), None if ratio is None else float(ratio), str(found["date"]))
        except (KeyError, TypeError, ValueError, AttributeError):
            return None

    def put(self, settings: Mapping[str, Any], load_s: float, ratio: float | None) -> None:
        """Keep the seconds of a load, and its ratio if it was measured."""
        known = self.records.get(self.key)
        own = dict(known) if isinstance(known, dict) else {}
        before = own.get(place_of(settings))
        ratios = dict(before["ratios"]) if isinstance(before, dict) and isinstance(before.get("ratios"), dict) else {}
        ratios |= {} if ratio is None else {self.question: round(ratio, 4)}
        own[place_of(settings)] = {"load_s": round(load_s, 3), "ratios": ratios, "date": now()}
        self.records = {**{key: each for key, each in self.records.items() if key != self.key}, self.key: own}
        self.records = dict(list(self.records.items())[-MOST_RECORDS:])
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self.path, json.dumps(self.records))
