"""A simulator of the router's core: the real scheduler, a pretended worker, virtual time, and all that goes wrong.

trace.py       lengths and gaps of production traffic
scenario.py    one run's settings, drawn from its seed
traffic.py     its requests, each with what it has to give and what its caller does
oracle.py      the pretended model, and what each request gives when it runs alone
worker.py      the worker: memory that remembers what was written to it
world.py       the run: time, network, sessions, losses
ledger.py      the callers: what was promised, what came, how it ended
invariants.py  what must hold after every call
run.py         many seeds, on every core
"""
