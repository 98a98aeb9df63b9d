"""Requests of the API from arrival to outcome: their parameters, token counts, latencies and totals."""
