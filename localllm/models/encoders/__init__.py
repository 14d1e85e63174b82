"""Models that read a whole input at once: they embed, score, classify or transcribe, in batches.

    recipe.py        the task, how token states are pooled, and what follows, as the checkpoint says
    model.py         the model, computed by transformers' code, the pooling, and heads without a class in transformers
    transcriber.py   speech by an encoder with CTC or a transducer: Parakeet
    whisper.py       speech by an encoder and a decoder: Whisper
    moonshine.py     speech by an encoder of raw samples and a decoder: Moonshine
    speech_rows.py   the texts of such decoders, written side by side

Nothing is kept between batches but by speech_rows.py, so the others do not use the decoder's machinery.
"""
