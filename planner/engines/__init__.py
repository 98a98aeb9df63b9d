"""How each engine divides the memory it is given: pool layouts and capacity, by engine and version."""
