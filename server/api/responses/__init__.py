"""/v1/responses: ``protocol`` (bodies), ``output`` (items, events), ``service`` (logic). It stores nothing."""
