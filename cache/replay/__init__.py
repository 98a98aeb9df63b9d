"""Replay of request traces through the block manager and admission, as a discrete-event simulation.

============= =======================================================================
``trace``     Azure, Mooncake and the server's own request log -> `TraceRequest`
``step_time`` how long an engine step takes: a roofline of bytes and operations
``simulator`` the loop: arrivals, queue, admission, grants, decode, end
``search``    the smallest number of GPUs that meets a target of waiting time
``result``    what came out, as a value, a table and JSON
``page``      the same as one HTML file with plots
============= =======================================================================
"""
