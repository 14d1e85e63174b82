"""The fleet: several servers or engines that answer behind one address.

routing     chooses the replica with the least expected cost
sse         reads the events of an answer that another server streams, within bounds
upstream    another server: its models, its health, requests to it
replicas    several engines of one model in place of one
upstreams   all other servers: which of them answers, and what happens when one fails
"""
