"""Replay of request traces through the KV block manager and admission, as a discrete-event simulation.

============= =======================================================================
``trace``     trace formats: Azure, Mooncake, the server's request log
``columns``   traces with other column names (``--columns``)
``step_time`` the duration of an engine step: a roofline of bytes and operations
``simulator`` the loop: arrivals, queue, admission, grants, decode, end
``search``    the smallest number of engines that meets a waiting-time target
``result``    the figures of a replay, as values and JSON
``page``      the figures as one HTML file with plots
``tiers``     KV tiers behind the pool: hits, loads and the bytes that move
``chunk_store`` the chunks of a tier, evicted as vLLM's LRU and ARC do
``tier_curve`` hit rates of all prefix cache sizes, in one pass
``tier_verdict`` whether tiers pay, and what limits them
============= =======================================================================
"""
