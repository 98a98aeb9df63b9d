"""The families of /metrics on a plain ``vllm serve``: a stat logger that vLLM finds by its entry point.

========== ==========================================================================
``logger`` what vLLM calls; nothing that goes wrong in here reaches it
``seen``   what vLLM has told of one engine
``page``   the families as prometheus_client collects them
========== ==========================================================================
"""
