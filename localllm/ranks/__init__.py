"""Ranks: child processes that each hold a share of one model, and the runner that the server drives them with.

wire        records and their bytes          channel     records over a socket
progress    what each rank has done, in shared memory
rank        a rank's process                 group       collectives between ranks
supervisor  starts and watches the processes links       records to all ranks, answers from them
remote      the engine's `Runner`            executor    the owner of the weights, in the server
one_shot    sums of few rows by symmetric memory
peers       whether GPUs reach each other     peer_copy   one copy between two GPUs
"""
