"""Grammars of answers: what a client's text may cost, and the masks that come of it.

A grammar is a program that a client sends. It is tried in a process that can be killed before the engine sees
it; what the engine then does with it is bounded by llguidance itself, and by a budget for each step.

============ ==========================================================================================
``library``  llguidance: a request's grammar in its words, its limits. No torch, no numpy
``trial``    the process that tries grammars, a fork for each, with limits of time, memory and stack
``compiler`` the engine's side of it: whose turn it is, who has hung up, what is kept
``tags``     structural tags, by xgrammar
``masks``    the way of one answer through its grammar; the masks of a step within their budget
============ ==========================================================================================
"""
