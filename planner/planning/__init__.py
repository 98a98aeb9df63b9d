"""Model and deployment -> Plan: flags completed, weights, stages, terms, whether it fits and what would."""
