"""`localllm transcribe`: write the text of sound files, in the formats of the API, with a model in this process.

Does not know: how sound is decoded and recognised (llm.py), how a format is written (web/api/openai/audio.py).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from localllm.config.flags import ADAPTER_FLAGS, add_engine_flags, settings_from
from localllm.config.settings import SETTINGS
from localllm.errors import ConfigError, LocalLLMError
from localllm.text.transcript import FORMATS

THRESHOLDS = {
    "no_speech_threshold": "probability of no speech from which on an unlikely text is dropped; default: 0.6",
    "logprob_threshold": "mean log probability below which a window is written again; default: -1",
    "compression_ratio_threshold": "compression ratio above which a window is written again; default: 2.4",
}


def transcribe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE", help="a sound file")
    parser.add_argument("--model", required=True, metavar="MODEL", help=SETTINGS["model"].allowed)
    parser.add_argument("--format", choices=FORMATS, default="text", help="format of the text")
    parser.add_argument("--words", action="store_true", help="with verbose_json: also the times of words")
    help = "ISO 639-1 code or English name; default: the model finds it"
    parser.add_argument("--language", metavar="NAME", help=help)
    parser.add_argument("--prompt", default="", metavar="TEXT", help="a text before the sound: its names, its style")
    parser.add_argument("--hotwords", default="", metavar="TEXT", help="more of the prompt: words to spell")
    parser.add_argument("--translate", action="store_true", help="write the text in English")
    help = "of the first attempt at a window, 0 to 1; default: 0. --seed is the seed of attempts above 0"
    parser.add_argument("--temperature", type=float, default=0.0, metavar="X", help=help)
    help = "partial texts of a search at temperature 0"
    parser.add_argument("--beam-size", type=int, default=1, metavar="N", help=help)
    help = "write windows one after the other, each with the texts before as its prompt"
    parser.add_argument("--condition-on-previous-text", action="store_true", help=help)
    for name, text in THRESHOLDS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, metavar="X", help=text)
    parser.add_argument("--max-completion-tokens", type=int, metavar="N", help="most tokens of a window's text")
    parser.add_argument("--logprobs", action="store_true", help="with json: the log probability of each token")
    help = "write to this file, or into this folder a file for each sound; default: standard output"
    parser.add_argument("-o", "--output", type=Path, metavar="PATH", help=help)
    parser.add_argument("--chunking-strategy", metavar="JSON", help="how speech is found: auto, or as in the API")
    help = "read everything, instead of leaving out parts without speech"
    parser.add_argument("--no-vad-filter", dest="vad_filter", action="store_false", help=help)
    help = "transcribe a damaged file as far as it can be read"
    parser.add_argument("--allow-damaged", action="store_true", help=help)
    add_engine_flags(parser, leave_out=ADAPTER_FLAGS)


def transcribe(options: argparse.Namespace) -> int:
    """Transcribe every file. A file that cannot be read is reported, and the others are still transcribed."""
    from localllm.cli import report_error
    from localllm.cli.hub import fetch_if_missing
    from localllm.llm import LLM
    from localllm.serving.transcription import spelled
    from localllm.web.api.openai.audio import vad_options, written

    if options.words and options.format != "verbose_json":
        what, why = f"--words does not apply to {options.format}.", "Only verbose_json has the times of words."
        raise ConfigError(what, why, "--format verbose_json --words", param="words")
    if options.logprobs and options.format != "json":
        what, why = f"--logprobs does not apply to {options.format}.", "Only json has log probabilities."
        raise ConfigError(what, why, "--format json --logprobs", param="logprobs")
    vad = vad_options(options.chunking_strategy) if options.vad_filter else False
    prompt = " ".join(text for text in (options.prompt, options.hotwords) if text)
    targets = _targets(options.files, options.output, options.format)
    settings = settings_from(options)
    fetch_if_missing(settings.engine)
    code = 0
    with LLM(**asdict(settings.engine)) as llm:
        for name, target in targets:
            try:
                found = llm.transcribe(
                    name, language=options.language, prompt=prompt, translate=options.translate, words=options.words,
                    vad_filter=vad, allow_damaged=options.allow_damaged, temperature=options.temperature,
                    seed=settings.engine.seed or 0, beam_size=options.beam_size,
                    condition_on_previous_text=options.condition_on_previous_text,
                    max_completion_tokens=options.max_completion_tokens,
                    **{name: getattr(options, name) for name in THRESHOLDS},
                )  # fmt: skip
            except (LocalLLMError, OSError) as error:
                if len(targets) == 1:
                    raise
                code = report_error(error, debug=options.debug)
                continue
            for warning in found.warnings:
                print(f"{name}: {warning}", file=sys.stderr)
            granularities = ("segment", "word") if options.words else ("segment",)
            spell = partial(spelled, llm.get_tokenizer()) if options.logprobs else None
            data = written(found, options.format, granularities, spell)
            if target is None:
                sys.stdout.write(data.decode() if data.endswith(b"\n") else f"{data.decode()}\n")
                sys.stdout.flush()
            else:
                target.write_bytes(data)
    return code


def _targets(files: list[str], output: Path | None, kind: str) -> list[tuple[str, Path | None]]:
    """Return each file with the file to write; None: standard output. Raises `ConfigError` before a model is loaded."""
    for name in files:
        if not Path(name).is_file():
            raise ConfigError(f"{name} is not a file.", "", "localllm transcribe FILE --model MODEL", param="files")
    if output is None or not output.is_dir():
        if output is not None and len(files) > 1:
            raise ConfigError(f"{output} is not a folder.", f"{len(files)} files have a text each.", param="output")
        if output is not None and not output.absolute().parent.is_dir():
            raise ConfigError(f"{output} cannot be written.", f"There is no folder {output.parent}.", param="output")
        return [(name, output) for name in files]
    suffix = {"text": "txt", "verbose_json": "json"}.get(kind, kind)
    targets = [output / f"{Path(name).stem}.{suffix}" for name in files]
    if len(set(targets)) < len(files):
        why = "Two of the files have the same name without their suffix."
        raise ConfigError("One text would overwrite another.", why, "Transcribe them into two folders.", param="output")
    return list(zip(files, targets, strict=True))
