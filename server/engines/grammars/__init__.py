"""Grammars of answers: what a client's text may cost, and the masks that come of it. For every engine.

A grammar is a program that a client sends. It is tried in a process that can be killed before an engine sees
it; what the engine then does with it is bounded by llguidance itself, and by a budget for each step.

============ ==========================================================================================
``library``  llguidance: a request's grammar in its words, its limits. No torch, no numpy
``trial``    the process that tries grammars, a fork for each, with limits of time, memory and stack
``trials``   the way to it: whose turn it is, who has hung up, what is known. No torch, no numpy
``kept``     what has passed, compiled with the model's own vocabulary where the model is
``tags``     structural tags, by xgrammar
``masks``    the way of one answer through its grammar; the masks of a step within their budget
============ ==========================================================================================

hf: trials and what is compiled are in the engine's process (``tonnage.server.engines.hf.grammars``). vLLM:
trials are the API process's, the rest is in its engine core (``tonnage.server.engines.vllm.grammars``).
"""
