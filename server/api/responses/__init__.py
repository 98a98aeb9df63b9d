"""/v1/responses: ``protocol`` (bodies), ``output`` (items, events), ``service`` (logic).

The server stores no response.
"""
