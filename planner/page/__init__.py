"""`tonnage page`: a web page that runs `tonnage plan` and `tonnage train` in the browser with Pyodide."""
