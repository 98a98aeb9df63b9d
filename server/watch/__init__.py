"""Watch a running server: what it says of itself, the plan for it, and the two side by side.

============== ===============================================================================
``client``     HTTP with a bound on bytes and on seconds; every failure says what to do next
``samples``    a page of metrics -> the numbers that are asked for
``records``    what a server tells once, and what one reading of it holds
``servers``    vLLM, SGLang, llama.cpp and our own: a file each
``planned``    what a server tells and the flags given -> the plan for it
``watcher``    one look after another: rates, restarts, headroom
``text``       a look for people, and as one JSON line; ``drawing``: tables of bytes
``status``     the same of our own server's /memory alone: ``tonnage status``
``screens``    where looks are shown; ``loop``: look, show, wait
``export``     a look for Prometheus, under the names of our own server
============== ===============================================================================
"""
