"""Replay of request traces through the block manager and admission, as a discrete-event simulation.

============= =======================================================================
``trace``     trace formats: Azure, Mooncake, the server's request log, own columns
``columns``   names of a trace's columns, as ``--columns`` gives them
``step_time`` the duration of an engine step: a roofline of bytes and operations
``simulator`` the loop: arrivals, queue, admission, grants, decode, end
``search``    the smallest number of engines that meets a target of waiting time
``result``    the figures of a replay, as values and JSON
``page``      the figures as one HTML file with plots
============= =======================================================================
"""
