"""Grammars for structured output, for every engine: limits on a client's grammar, and token masks.

A grammar is a program sent by a client. A process that can be killed tries it before an engine compiles it.
After that, llguidance's own limits and a budget per step bound its cost.

=================== ====================================================================================
``library``         conversion of a request's grammar for llguidance, and its limits. No torch, no numpy
``trial_process``   the process that tries grammars: one fork each, with limits of time, memory and stack
``trial_client``    its client: queues per tenant, cancellation, cached results. No torch, no numpy
``cache``           grammars compiled with the model's vocabulary, in the process with the model
``structural_tags`` structural tags, compiled by xgrammar
``masks``           the state of one answer in its grammar; the masks of a step within their budget
=================== ====================================================================================

hf: the engine process runs trials and compiles grammars (``tonnage.server.engines.hf.grammars``). vLLM: the API
process runs trials, and the engine core does the rest (``tonnage.server.engines.vllm.grammars``).
"""
