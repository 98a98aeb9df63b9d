"""A page that plans: the same commands, run in a browser by Pyodide; written as files for any web host."""
