"""Memory of requests: blocks of KV, slots of recurrent states, and the prefix cache over both. No tensors.

cache_manager.py      the face: what a request finds, is given, grows by, shares and gives back
ledger.py             block tables over the KV groups of a model
block_pool.py         the blocks of one group: reference counts, names, the order of eviction
block_names.py        names of full blocks: a hash chain over token ids
state_pool.py         the slots of states, and the checkpoints among them
state_checkpoints.py  which states are kept as checkpoints, and when
tiers.py              blocks outside of the cache: which are copied out, and which come back, for whom
swaps.py              preempted requests whose blocks stay in RAM until they run again
block_stores.py       blocks in RAM and in files, and the threads that read and write them

A *block* is `block_size` positions of one request in one KV group, a *slot* one state of a whole model. The scheduler
and the table of requests change memory through `CacheManager` alone; of the ledger they read counts.
"""
