"""`tonnage fit-log`: comparison of a start-up log of vLLM, SGLang or llama.cpp with the plan's memory terms."""
