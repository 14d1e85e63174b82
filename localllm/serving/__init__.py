"""Load models, keep them, and hand them out: from the name in a request to a running engine.

build.py      from a checkpoint to a model that serves      manager.py    one load, sleep or unload at a time
pooling.py    the same for models that embed or score       register.py   from the name in a request to a model
served.py     a model with its engine                       entry.py      one model's state and its leases
reopen.py     a new engine on weights that stay loaded      loading.py    the blocking calls, and the loading thread
sleep.py      weights to host memory and back               eviction.py   which model makes room for another
adapters.py   LoRA adapters of a model that runs            profiles.py   tuned settings, kept for the next start
phases.py     progress reports of a load                    names.py      the names of a served model
compute.py    torch, its threads, the free memory           fingerprints.py   hashes of a checkpoint
"""
