"""The dashboard: receives, stores, judges and shows what engines report."""
