"""The table over all causal language models of the installed transformers, and all models that answer about pictures
(their text part alone): what becomes of a small one of each.

    own              localllm's decoder computes it, and the logits agree with transformers' own forward
    transformers     its own code computes it over localllm's cache, and the logits agree
    refused          a `ModelError` names the class, or what is unsupported about it
    not buildable    transformers cannot build, save or run the small model

Anything else is a failure: an exception that is not a `ModelError`, a whole checkpoint called corrupt, other logits, a
time limit. Each class runs in its own process. `python -m tests.models.classes [TYPE ...]` prints the table and the
counts. Reference: the class's forward without a cache, fp32, over each whole sequence at once.
Does not know: which class should have which outcome (test_classes.py).
"""

import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.models.class_models import VOCAB_SIZE, class_names, composite_names, make_class_model

GOOD = ("own", "transformers", "refused", "not buildable")
LENGTHS = (52, 17, 33, 1)  # the first is longer than two windows; the last begins by decoding
TOLERANCE = 2e-3  # of the largest logit: several layers of rounding in fp32
LIMIT_S = 300


class Outcome(NamedTuple):
    kind: str
    detail: str = ""


def outcome_of(model_type: str, *, limit_s: int = LIMIT_S) -> Outcome:
    """Return what becomes of a small model of the type, tried in a process of its own."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        signal.alarm(limit_s)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(try_class(model_type)))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    _, status = os.waitpid(child, 0)
    if not answer:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        return Outcome("time limit", f"{limit_s} s") if late else Outcome("died", f"status {status}")
    return Outcome(*json.loads(answer))


def outcomes(model_types: Iterable[str], show: Callable[[str, Outcome], None] | None = None) -> dict[str, Outcome]:
    """Return the outcome of each type. show: called after each one."""
    _import_first()
    found = {}
    for model_type in model_types:
        found[model_type] = outcome_of(model_type)
        if show is not None:
            show(model_type, found[model_type])
    return found


def _import_first() -> None:
    """Import what every child needs, so that a child costs its model only."""
    import transformers

    from localllm.models import loader  # noqa: F401
    from localllm.models.transformers_backend import loading  # noqa: F401
    from tests.models import harness  # noqa: F401

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    list(transformers.AutoModelForCausalLM._model_mapping.keys())  # imports the configs of all types, once
    torch.set_num_threads(1)


def try_class(model_type: str, model_impl: str = "auto") -> Outcome:
    """Return what becomes of a small model of the type, tried in this process. model_impl: as `read_spec` takes it."""
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        try:
            make_class_model(path, model_type)
            prompts = [random.Random(length).choices(range(3, VOCAB_SIZE), k=length + 2) for length in LENGTHS]
            reference = class_logits(path, prompts)
        except Exception as error:
            return Outcome("not buildable", _place(error))
        try:
            return _through_localllm(path, model_impl, prompts, reference)
        except Exception as error:
            return Outcome("bare exception", _place(error))


def _through_localllm(path: Path, model_impl: str, prompts: list[list[int]], reference: list[Tensor]) -> Outcome:
    from localllm.errors import CorruptModel, ModelError
    from localllm.models.loader import load_model
    from localllm.models.read_spec import read_spec
    from tests.models.harness import CPU, ModelHarness

    try:
        spec = read_spec(path, model_impl=model_impl)
        model = load_model(path, spec, CPU, torch.float32)
    except CorruptModel as error:
        return Outcome("called corrupt", str(error))
    except ModelError as error:
        return Outcome("refused", str(error))
    with torch.inference_mode():
        within = [tokens[: spec.max_position] for tokens in prompts]  # some decoders of ours serve less than the class
        known = [logits[: spec.max_position] for logits in reference]
        difference = largest_difference(ModelHarness(model), within, known)
    if not difference <= TOLERANCE:
        return Outcome("disagrees", f"{difference:.1e} of the largest logit")
    return Outcome("own" if spec.implementation == "localllm" else "transformers", f"{difference:.1e}")


def largest_difference(harness: Any, prompts: list[list[int]], reference: list[Tensor]) -> float:
    """Return the largest difference of logits relative to the largest one. Sequences run in mixed batches: chunks of
    random lengths beside single tokens, and the last two tokens of each one by one. The last sequence begins later than
    the others, with a single token beside theirs."""
    from tests.models.harness import Sequence

    draw = random.Random(1)
    sequences = [Sequence(list(tokens)) for tokens in prompts]
    parts: list[list[Tensor]] = [[] for _ in prompts]
    late, step = len(sequences) - 1, 0
    while any(left := [len(each.token_ids) - each.computed for each in sequences]):
        chunks = [1 if step == 2 else min(draw.choice((1, 1, 5, 13, 16, 19)), max(n - 2, 1)) for n in left]
        ready = [i for i in range(len(sequences)) if left[i] and (i < late or step >= 2)]
        rows = [(i, chunks[i]) for i in ready if step == 2 or draw.random() < 0.8]
        step += 1
        if rows:
            logits = harness.step([(sequences[i], n) for i, n in rows], all_logits=True)
            for (i, _), part in zip(rows, logits, strict=True):
                parts[i].append(part)
    pairs = [(torch.cat(ours), theirs) for ours, theirs in zip(parts, reference, strict=True)]
    return float(torch.stack([(ours - theirs).abs().max() / theirs.abs().max() for ours, theirs in pairs]).max())


@torch.inference_mode()
def class_logits(path: Path, prompts: list[list[int]]) -> list[Tensor]:
    import transformers

    config = json.loads((path / "config.json").read_text())
    kind = getattr(transformers, config["architectures"][0])
    # Falcon with ALiBi: eager attention adds the slopes twice, once in the mask (transformers 5.23).
    attention = "sdpa" if config["model_type"] == "falcon" and config.get("alibi") else "eager"
    model = kind.from_pretrained(path, attn_implementation=attention, dtype=torch.float32).eval()
    logits = [model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0] for tokens in prompts]
    if not all(each.isfinite().all() for each in logits):
        raise ValueError("its own logits are not finite")
    return logits


def _place(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:200]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def main() -> int:
    """Print the outcome of every class, or of the types named as arguments, and the counts. Return 1 if one failed."""
    classes = class_names() | composite_names()

    def show(model_type: str, outcome: Outcome) -> None:
        print(f"{model_type:24} {classes[model_type]:36} {outcome.kind:15} {outcome.detail}", flush=True)

    found = outcomes(sys.argv[1:] or classes, show)
    counts = Counter(outcome.kind for outcome in found.values())
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(counts.items())))
    runs = counts["own"] + counts["transformers"]
    print(f"{runs} of {len(found) - counts['not buildable']} that can be built run and agree.")
    return int(any(outcome.kind not in GOOD for outcome in found.values()))


if __name__ == "__main__":
    sys.exit(main())
