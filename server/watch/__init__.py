"""Observation of a running inference server: its measured state is shown beside the plan for it.

============== ===============================================================================
``client``     HTTP requests with limits on bytes and seconds; each error says what to do next
``samples``    parsing of a metrics page
``records``    facts that stay the same until a restart, and one reading of the changing state
``servers``    vLLM, SGLang, llama.cpp and Tonnage, with a file for each
``planned``    the plan for a server, from its facts and the given flags
``watcher``    repeated observations: rates, restarts, headroom
``text``       an observation as text and as JSON; ``drawing``: tables of bytes
``status``     /memory of a Tonnage server as text and as JSON, for ``tonnage status``
``screens``    output on lines or on a terminal screen; ``loop``: the loop that observes and shows
``export``     an observation for Prometheus, under the names of our own server
============== ===============================================================================
"""
