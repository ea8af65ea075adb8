"""How much of a tier's traffic a tier of any size would serve, from a trace of requests.

``reading`` opens traces, ``stack`` measures LRU stack distances, ``measure`` goes over a trace
once and ``curve`` says what follows. ``numbering`` gives the blocks of an engine's requests
numbers, so that recordings are traces as well. No vLLM, no web framework, no NumPy.
"""
