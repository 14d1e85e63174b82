"""Load models, keep them, and hand them out: from the name in a request to a running engine.

build.py      from a checkpoint to a model that serves      manager.py      which model is loaded and unloaded, and when
pooling.py    the same for models that embed or score       register.py     from the name in a request to a model
served.py     a model, its engine, names                    entry.py        one model's state and its leases
reopen.py     a new engine on weights that stay loaded;     transitions.py  one change of a model's state at a time
              sleep: weights to host memory and back        lending.py      weights lent to a tuning run
adapters.py   LoRA adapters of a model that runs            loading.py      loads in turn, each in a thread
profiles.py   tuned settings; hashes of checkpoints         eviction.py     which model makes room for another
phases.py     progress reports of a load                    compute.py      torch, its threads, free memory
answers/      from a conversation to events, counts and whole answers, and the calls of tools
"""
