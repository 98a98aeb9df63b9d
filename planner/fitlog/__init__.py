"""``tonnage fit-log``: a start-up log of vLLM, SGLang or llama.cpp against the plan, term by term."""
