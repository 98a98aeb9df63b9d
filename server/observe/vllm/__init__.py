"""Tonnage's metrics on the /metrics page of a plain `vllm serve`, through a stat logger that vLLM loads.

========== ==========================================================================
``logger`` the stat logger; its exceptions never reach vLLM
``engine_totals`` statistics of one engine, summed up from vLLM's messages
``page``   a page that keeps metric families as objects for prometheus_client
========== ==========================================================================
"""
