"""Grammars for structured output, for every engine: limits on a client's grammar, and token masks.

A grammar is a program that a client sends. Before an engine compiles it, a separate process compiles it in a
trial and is killed if it exceeds limits. After the trial, llguidance's limits and a time budget per step bound
its cost.

=================== ====================================================================================
``library``         conversion of a request's grammar for llguidance, and its limits. No torch, no numpy
``trial_process``   the process that tries grammars: one fork each, with limits of time, memory and stack
``trial_client``    the client of that process: queues per tenant, cancellation, cached results. No torch
``cache``           grammars compiled with the model's vocabulary, in the process with the model
``structural_tags`` structural tags, compiled by xgrammar
``masks``           the state of a sequence in its grammar; the time budget for a step's token masks
=================== ====================================================================================

In the HF engine, the engine process runs trials and compiles grammars (``tonnage.server.engines.hf.grammars``).
With vLLM, the API process runs trials, and the engine core compiles grammars and computes masks
(``tonnage.server.engines.vllm.grammars``).
"""
