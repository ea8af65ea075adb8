"""Facts, records, verdicts and the names they are published under.

This package needs neither vLLM nor a web framework: the connector writes
records with it inside the engine, the dashboard reads them with it anywhere.
"""

__version__ = "0.1.0"
